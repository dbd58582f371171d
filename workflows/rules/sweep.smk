# What happens around the jobs: before the first one, and after a failure.
import shutil
import subprocess


def preview():
    """Print what the sweep costs; a job that cannot fit stops it here, before anything is submitted."""
    wanted = {
        job.wildcards.get("experiment") or OWNERS.get(job.wildcards.get("run")) for job in workflow.dag.needrun_jobs()
    }
    hardware = ["--hardware", CLUSTER.name] if CLUSTER else []
    names = sorted(name for name in wanted if name in RUNS)
    if names:
        words = ["python", "-m", "impl", "cost", "--tier", TIER, "--experiments", EXPERIMENTS, "--results", RESULTS]
        try:
            shell(shlex.join([*words, *hardware, *names]))
        except subprocess.CalledProcessError:
            raise WorkflowError("the sweep was not started: the reason is above") from None


onstart:
    try:
        HELD = sweep_lock.hold(Path(RESULTS))  # until this process ends
    except ConfigError as error:
        raise WorkflowError(str(error)) from None
    preview()


onsuccess:
    shutil.rmtree(f"{RESULTS}/partial", ignore_errors=True)


# The tables of experiments of which some runs are missing, from those that are there.
onerror:
    shell(
        shlex.join(
            ["python", "-m", "paper_figures", "partial", "--experiments", EXPERIMENTS, "--tier", TIER]
            + ["--results", RESULTS, "--published", PUBLISHED]
        )
    )
