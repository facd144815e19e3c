"""Test that mpidl.launch restarts a run that dies. A script replaces mpirun and the training."""

import threading

import pytest

from mpidl.errors import Fault, UserError
from mpidl.jobs import command as launch
from mpidl.jobs.job_words import JobCommand
from mpidl.ranks import failure

# Each start of this script writes its options to a file and ends with the next exit code in the
# file `codes`. The code "c1" means 1 after a checkpoint, and "r0" means 0 in the middle of a run.
# Before exit code 2, the script prints a message. "k" kills the script, and "w" lets it wait.
MPIRUN = """#!/bin/sh
shift 3
echo "$*" >> {folder}/starts
echo "$MPIDL_JOB_TOKEN $MPIDL_JOB_START" >> {folder}/numbers
code=$(sed -n "$(wc -l < {folder}/starts)p" {folder}/codes)
case $code in c*) mkdir -p {folder}/run; date +%N > {folder}/run/checkpoint.h5 ;; esac
case $code in r*) mkdir -p {folder}/run; echo '{{"state": "running"}}' > {folder}/run/status.json ;;
    *) rm -f {folder}/run/status.json ;; esac
case $code in 2) echo "mpidl: refused" >&2 ;; k) kill -9 $$ ;; w) sleep 600 ;; esac
exit ${{code#[cr]}}
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Return a function that runs the command. The script's starts end with the given codes."""
    monkeypatch.setattr(launch, "FIRST_PAUSE", 0.01)
    script = tmp_path / "mpirun"
    script.write_text(MPIRUN.format(folder=tmp_path))
    script.chmod(0o755)

    def run(codes, *options, restarts=3, signals=None):
        (tmp_path / "codes").write_text("\n".join(codes.split()) + "\n")
        words = [str(script), "python", "-m", "mpidl.train", *options]
        words += [] if "--resume" in options else ["--out", str(tmp_path / "run")]
        signals = signals or failure.Signals()
        return launch.Supervisor(JobCommand.parse(words), restarts, signals).run()

    run.folder = tmp_path
    return run


def starts(launched):
    """Return the options of each start, without --out and its folder."""
    text = (launched.folder / "starts").read_text().replace(f"{launched.folder}/", "")
    return [line.replace(" --out run", "") for line in text.splitlines()]


def log(launched):
    lines = (launched.folder / "run" / "restarts.log").read_text().splitlines()
    return [line.split(" ", 1)[1] for line in lines]


@pytest.mark.parametrize(("code", "expected"), [("0", 0), ("75", 75), ("2", 2)])
def test_ends_that_are_no_deaths(launched, code, expected):
    assert launched(code, "--epochs", "3") == expected
    assert starts(launched) == ["--epochs 3"]
    assert not (launched.folder / "run").exists()


def test_a_death_resumes_from_the_checkpoint(launched):
    assert launched("1 c1 k 0", "--epochs", "3") == 0
    resumed = "--epochs 3 --resume run"
    assert starts(launched) == ["--epochs 3", "--epochs 3", resumed, resumed]
    first, pause, begin, _, _, resume, killed, *_ = log(launched)
    assert first == "start 1 ended after 0 s: mpirun ended with exit code 1"
    assert pause.startswith("next start in ")
    assert begin == "start 2: from the beginning, because there is no checkpoint"
    assert resume.startswith("start 3: from the checkpoint of ")
    assert killed == "start 3 ended after 0 s: mpirun was killed by SIGKILL"


def test_an_exit_code_0_in_the_middle_of_a_run_is_a_death(launched):
    """Exit code 0 during a run is a death: mpirun --with-ft ulfm returns it after losing a host."""
    assert launched("r0 0", "--epochs", "3") == 0
    assert starts(launched) == ["--epochs 3"] * 2
    assert log(launched)[0] == "start 1 ended after 0 s: mpirun ended with exit code 0"


def test_the_starts_of_a_job_have_a_token_and_numbers(launched):
    """Each start gets the job's token and a number, to take over the lock of an earlier start."""
    assert launched("1 c1 0") == 0
    lines = [line.split() for line in (launched.folder / "numbers").read_text().splitlines()]
    assert len({token for token, _ in lines}) == 1
    assert [number for _, number in lines] == ["1", "2", "3"]


def test_pauses_grow_until_there_is_a_new_checkpoint(launched):
    assert launched("1 1 1 c1 1 0", restarts=5) == 0
    pauses = [line.split()[3] for line in log(launched) if line.startswith("next start")]
    assert pauses == ["0.01", "0.02", "0.04", "0.01", "0.02"]


def test_the_limit(launched):
    with pytest.raises(
        Fault, match=r"^the training has died 3 time\(s\) \(--restarts 2\); the last"
    ):
        launched("1 1 1 0", restarts=2)
    assert len(starts(launched)) == 3
    with pytest.raises(Fault, match=r"died 1 time\(s\) \(--restarts 0\)"):
        launched("1 1 1 1", restarts=0)


def test_an_exit_code_2_without_a_message_is_a_death(launched):
    """Exit code 2 without a message is a death, because MPICH's mpirun combines exit codes."""
    script = launched.folder / "mpirun"
    script.write_text(script.read_text().replace('echo "mpidl: refused" >&2', ":"))
    assert launched("2 0") == 0


def test_the_checkpoint_of_a_run_that_is_replaced(launched):
    """A job with --overwrite that dies early does not resume from the checkpoint of an old run."""
    (launched.folder / "run").mkdir()
    (launched.folder / "run" / "checkpoint.h5").write_text("of another run")
    assert launched("1 c1 0", "--overwrite") == 0
    assert starts(launched) == ["--overwrite", "--overwrite", "--out run --resume run"]


def test_a_run_that_is_resumed(launched):
    folder = str(launched.folder / "run")
    (launched.folder / "run").mkdir()
    (launched.folder / "run" / "checkpoint.h5").write_text("of the same run")
    assert launched("1 0", "--resume", folder) == 0
    assert all(line.endswith("--resume run") for line in starts(launched))


def test_a_stop(launched):
    """A signal ends a pause. A training that dies instead of stopping is not restarted."""
    signals = failure.Signals()
    signals.name = "SIGTERM"
    with pytest.raises(Fault, match="^SIGTERM: the training died instead of stopping: "):
        launched("w", signals=signals)
    signals = failure.Signals()
    threading.Timer(0.4, lambda: setattr(signals, "name", "SIGTERM")).start()
    launch.FIRST_PAUSE = 600.0  # the fixture restores it
    (launched.folder / "starts").unlink()
    assert launched("1", signals=signals) == 75


def test_invalid_words(launched):
    with pytest.raises(UserError, match="^unknown option --epoch: did you mean --epochs"):
        launched("0", "--epoch", "3")
    with pytest.raises(UserError, match="^launch: expected a training command after --"):
        launch.main(["--restarts", "3"])
    with pytest.raises(UserError, match="^--restarts must be at least 0, found -1"):
        launch.parse(["--restarts", "-1", "--", "mpirun"])
    parsed = launch.parse(["--restarts=5", "--", "mpirun", "-n", "4"])
    assert (parsed.restarts, parsed.words) == (5, ["mpirun", "-n", "4"])
    assert not (launched.folder / "starts").exists()
