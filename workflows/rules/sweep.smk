# What happens around the jobs: before the first one, and after a failure.
import shutil
import subprocess


def preview():
    """Print what the sweep costs; a job that cannot fit stops it here, before anything is submitted."""
    device = SETTINGS.hardware or (CLUSTER.name if CLUSTER else None)
    options = (["--hardware", device] if device else []) + ([] if SETTINGS.fit else ["--no-fit"])
    names = sorted({job.wildcards.experiment for job in workflow.dag.needrun_jobs() if job.rule.name == "tidy"})
    if names:
        words = ["python", "-m", "impl", "cost", "--tier", TIER, "--experiments", EXPERIMENTS, "--results", RESULTS]
        try:
            shell(shlex.join([*words, *options, *names]))
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
