# What happens around the jobs: before the first one, and after a failure.
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


def half_made():
    """Make the tables of experiments of which some runs are missing, from those that are there; say if that fails."""
    words = ["python", "-m", "paper_figures", "partial", "--experiments", EXPERIMENTS, "--tier", TIER]
    try:
        shell(shlex.join([*words, "--results", RESULTS, "--published", PUBLISHED]))
        if os.path.exists(f"{RESULTS}/partial"):  # the ledger in front would be of an earlier sweep
            for path in LEDGER:
                Path(path).unlink(missing_ok=True)
    except subprocess.CalledProcessError:
        print("the tables of half-made experiments could not be made: the reason is above", file=sys.stderr)


onsuccess:
    if os.path.exists(f"{RESULTS}/partial"):
        half_made()


onerror:
    half_made()
