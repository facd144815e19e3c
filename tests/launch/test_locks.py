"""Test that the lock of a run's folder excludes other jobs."""

import os
import signal
import time

import jobs
import launcher
import pytest
import tomli_w
from launcher import finish
from limits import wait_until

from mpidl.training.files.lock_file import NAME, LockFile
from mpidl.training.files.lock_holder import Holder
from mpidl.training.files.run_folder import RECORD_LOOK_SECONDS

pytestmark = pytest.mark.slow("jobs")
OPTIONS = ["--epochs", 6, "--checkpoint-every", 2]


def content(folder):
    """Return {path: bytes} of all files in a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def hold():
    """Return a function with which this process takes the lock of a folder."""
    locks = []

    def take(folder):
        folder.mkdir(parents=True, exist_ok=True)
        locks.append(LockFile(folder, Holder.current({"SLURM_JOB_ID": "7"})))
        assert locks[-1].attempt() is None

    yield take
    for lock in locks:
        lock.release()


def in_use(option, folder):
    return f"{option} {folder}: in use by process {os.getpid()} on host "


@pytest.mark.parametrize("options", [["--overwrite"], [], ["--resume"]], ids=" ".join)
def test_the_second_of_two_jobs_is_refused(pictures, tmp_path, options):
    """The second job is rejected and does not disturb the first job."""
    out = tmp_path / "run"
    with jobs.start(2, pictures, out, *OPTIONS, "--epochs", 200) as job:
        words = [*options, *([out] if "--resume" in options else [])]
        refusal = jobs.refusal(jobs.train(2, pictures, out, *words, check=2))
        pid = job.rank_pids()[0]
        assert refusal.startswith(f"--out {out}: in use by process {pid} on host ")
        assert (
            refusal.endswith("or choose another folder") and f"write now to {out}/stop" in refusal
        )
        (out / "stop").write_text("now\n")
        assert finish(job).returncode == jobs.STOPPED
    assert not (out / NAME).exists()


def test_a_killed_run_is_resumed_at_once(pictures, tmp_path):
    """A killed run can be resumed immediately on its host, which knows that the process is dead."""
    expected = jobs.trained_hash(1, pictures, tmp_path / "expected", *OPTIONS)
    out = tmp_path / "run"
    jobs.start(2, pictures, out, *OPTIONS, "--epochs", 200).kill()
    for _ in range(3):
        words = ["--resume", out, *OPTIONS, "--epochs", 200]
        job = launcher.start(3, *jobs.command("train", *words), env=jobs.without_plots())
        with job:
            for line in job.stdout:
                if line.startswith("Epoch:"):
                    break
            os.kill(job.rank_pids()[0], signal.SIGKILL)
            finish(job)
        assert (out / NAME).exists()
    jobs.train(2, pictures, out, "--overwrite", *OPTIONS)
    assert jobs.weights_hash(out) == expected
    assert not (out / NAME).exists()


@pytest.mark.parametrize("is_taken_over", [True, False])
def test_a_suspended_run_notices_its_successor(pictures, tmp_path, is_taken_over):
    out = tmp_path / "run"
    with jobs.start(2, pictures, out, *OPTIONS, "--epochs", 200) as job:
        pid = job.rank_pids()[0]
        os.kill(pid, signal.SIGSTOP)
        with open(f"/proc/{pid}/stat") as file:
            wait_until(
                lambda: file.seek(0) == 0 and file.read().rpartition(")")[2].split()[0] == "T"
            )
        contents = [None]

        def has_settled():  # the process that writes checkpoints first completes its current file
            contents.append(content(out))
            return contents[-1] == contents[-2]

        time.sleep(RECORD_LOOK_SECONDS)  # a run is taken over only after a longer time
        wait_until(has_settled, 0.5)
        if is_taken_over:  # simulate a takeover by a job on another host, after STALE_SECONDS
            part = out / "part"
            part.write_bytes(Holder.current({"SLURM_JOB_ID": "8"}).content())
            os.replace(part, out / NAME)
        before = content(out)
        os.kill(pid, signal.SIGCONT)
        if not is_taken_over:  # negative control
            (out / "stop").write_text("now\n")
        result = finish(job)
    if is_taken_over:
        lines = jobs.error_lines(result)
        assert result.returncode == 1 and len(lines) == 1, result.stderr
        text = f"mpidl: {out / NAME}: this run has lost its lock: process {os.getpid()} on host "
        assert lines[0].startswith(text)
        assert content(out) == before
    else:
        assert result.returncode == jobs.STOPPED
        assert content(out) != before


def test_a_preview_and_readers_take_no_lock(pictures, tmp_path, hold):
    out = tmp_path / "run"
    jobs.train(1, pictures, out, *OPTIONS)
    hold(out)
    before = content(out)
    jobs.predict(out / "model.h5", pictures)
    launcher.mpirun(None, "-m", "mpidl.report", out, "--html", tmp_path / "a.html", check=0)
    jobs.train(1, pictures, out, "--preview", tmp_path / "a.png")
    assert content(out) == before
    refusal = jobs.refusal(jobs.resume(2, out, check=2))
    assert refusal.startswith(in_use("--resume", out))


@pytest.fixture
def sweep(pictures, tmp_path):
    """Return a function that runs a sweep of two trials, and returns the Result of the job."""
    train = {"network": jobs.SMALL, "data": str(pictures), "threads": 1, "epochs": 1}
    file = tmp_path / "seeds.toml"
    file.write_text(tomli_w.dumps({"train": train, "grid": {"seed": [0, 1]}}))

    def run(*options):
        words = [file, "--out", tmp_path / "sweep", *options]
        return launcher.mpirun(2, "-m", "mpidl.sweep", *words, env=jobs.without_plots())

    return run


def test_a_second_sweep_is_refused(sweep, tmp_path, hold):
    out = tmp_path / "sweep"
    hold(out)
    assert jobs.refusal(sweep()).startswith(in_use("--out", out))
    assert list(content(out)) == [out / NAME]
    assert sweep("--trial", 2).returncode == 0  # jobs with --trial may share a sweep's folder
    assert jobs.summary(out / "trial-002")["epochs"] == 1


def test_a_sweep_leaves_out_a_trial_that_another_job_trains(sweep, tmp_path, hold):
    trial = tmp_path / "sweep" / "trial-001"
    hold(trial)
    for options in ([], ["--trial", 1]):
        result = sweep(*options)
        assert result.returncode == 2, result.stderr
        text = f"trial-001 skipped: {trial}: in use by process {os.getpid()} on host "
        assert any(text in line for line in jobs.output_lines(result))
        assert list(content(trial)) == [trial / NAME]
    assert jobs.summary(trial.with_name("trial-002"))["epochs"] == 1
