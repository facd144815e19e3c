"""Test that `mpidl.launch` restarts a training that dies, with the same weights at the end."""

import os
import signal
import time

import jobs
import launcher
import pytest
from limits import wait_until

pytestmark = pytest.mark.slow("restarts")
ITERATIONS = 60
OPTIONS = ["--batch-size", 50, "--epochs", 15, "--checkpoint-every", 2, "--timeout", 4]


def words_of(out, data, *options, restarts=3, network=jobs.SMALL):
    """Return the arguments for a training of 60 iterations on two ranks under mpidl.launch."""
    words = jobs.command("train", *OPTIONS, *options, network=network, data=data, out=out)
    return ["-m", "mpidl.launch", "--restarts", restarts, "--", *launcher.command(2, *words)]


def start(*words, env=None):
    return launcher.start(None, *words, env=jobs.without_plots() | (env or {}))


def log(out):
    """Return the lines of restarts.log, without their times."""
    return [line.split(" ", 1)[1] for line in (out / "restarts.log").read_text().splitlines()]


def wait_for_iteration(out, number):
    path, text = out / "metrics.jsonl", '"kind": "iteration"'
    wait_until(lambda: path.exists() and path.read_text().count(text) >= number)


@pytest.fixture(scope="module")
def expected(pictures, tmp_path_factory):
    return jobs.trained_hash(1, pictures, tmp_path_factory.mktemp("expected") / "run", *OPTIONS[2:])


def processes_of(job):
    """Return {process name: PIDs} of all descendants of mpidl.launch, and {"ranks": PIDs}."""
    processes = {"ranks": list(job.rank_pids().values())}
    for pid in launcher._descendants(job.pid):
        with open(f"/proc/{pid}/comm") as file:
            processes.setdefault(file.read().strip(), []).append(pid)
    return processes


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("ranks", signal.SIGKILL),
        ("mpirun", signal.SIGKILL),
        ("hydra_pmi_proxy", signal.SIGKILL),
        ("ranks", signal.SIGSTOP),
    ],
)
def test_a_job_that_dies_is_started_again(pictures, tmp_path, expected, victim, number):
    out = tmp_path / "run"
    with start(*words_of(out, pictures)) as job:
        wait_for_iteration(out, 10)
        processes = processes_of(job)
        if victim not in processes:
            pytest.skip(f"this MPI has no process {victim}")
        pid = processes[victim][-1]
        os.kill(pid, number)
        result = launcher.finish(job)
    assert result.returncode == 0, result.stderr
    assert jobs.weights_hash(out) == expected
    assert jobs.iterations(out) == list(range(1, ITERATIONS + 1))
    end, pause, second_start = log(out)
    assert end.startswith("start 1 ended after ") and pause == "next start in 2 s"
    assert second_start.startswith("start 2: from the checkpoint of ")
    if number == signal.SIGSTOP:
        assert f"(process {pid}) does not answer: its process is stopped (SIGSTOP)" in end
    launcher.assert_gone(processes["ranks"])


def test_a_training_that_dies_each_time(pictures, tmp_path):
    out, network = tmp_path / "run", jobs.network("raises_on_rank_1")
    with start(*words_of(out, pictures, restarts=1, network=network)) as job:
        result = launcher.finish(job)
    assert result.returncode == 1
    assert result.stderr.count("\nArithmeticError: this network breaks on rank 1\n") == 2
    cause = "failed, epoch 1, iteration 1: ArithmeticError: this network breaks on rank 1"
    last = [line for line in result.stderr.splitlines() if line.startswith("mpidl: ")][-1]
    assert last.startswith(
        "mpidl: the training has died 2 time(s) (--restarts 1); the last cause: "
    )
    assert last.endswith(f"{cause}; {out / 'restarts.log'} has all causes")
    lines = log(out)
    assert [cause in line for line in lines] == [True, False, False, True]
    assert lines[2] == "start 2: from the beginning, because there is no checkpoint"


def test_what_ends_the_command(pictures, tmp_path):
    """A requested stop gives exit code 75 and invalid options give 2, both without a restart."""
    out = tmp_path / "run"
    with start(*words_of(out, pictures)) as job:
        wait_for_iteration(out, 4)
        job.send_signal(signal.SIGTERM)
        result = launcher.finish(job)
    assert result.returncode == jobs.STOPPED, result.stderr
    assert "SIGUSR1: stopped at iteration " in result.stdout
    assert not (out / "restarts.log").exists()
    line = jobs.refusal(launcher.mpirun(None, *words_of(out, pictures)))
    assert "it contains a run" in line
    line = jobs.refusal(launcher.mpirun(None, *words_of(out, pictures, "--epoch", 3)))
    assert line == "unknown option --epoch: did you mean --epochs?"


def test_a_run_that_is_replaced_is_not_resumed(pictures, tmp_path):
    """A restart does not resume an earlier run that the job should replace.

    The job dies before --overwrite has removed the earlier run's checkpoint.
    """
    out = tmp_path / "run"
    jobs.train(1, pictures, out, "--max-iterations", 2)
    network = jobs.network("exits")
    with start(*words_of(out, pictures, "--overwrite", restarts=1, network=network)) as job:
        result = launcher.finish(job)
    assert result.returncode == 1
    assert "from the beginning, because there is no checkpoint" in result.stderr


def test_a_host_that_is_lost_is_left_out(pictures, tmp_path, expected):
    """If one of two hosts is lost, the training continues on the other host.

    A script that replaces ssh simulates the hosts.
    """
    out, ssh, lost = tmp_path / "run", tmp_path / "ssh", tmp_path / "lost"
    ssh.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        f'host=$1; shift; [ -e {lost}-"$host" ] && exit 255\n'
        'exec sh -c "FAKE_HOST=$host; export FAKE_HOST; $*"\n'
    )
    ssh.chmod(0o755)
    env = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(ssh)}
    words = jobs.command("train", *OPTIONS, data=pictures, out=out)
    job = launcher.command(4, *words)
    job[1:1] = ["-hosts", "left:2,gone:2"]
    with start("-m", "mpidl.launch", "--", *job, env=env) as job:
        wait_for_iteration(out, 10)
        (tmp_path / "lost-gone").touch()
        victims = [pid for pid in launcher._descendants(job.pid) if is_on(pid, "gone")]
        assert len(victims) >= 3  # a proxy and two ranks
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        result = launcher.finish(job)
    assert result.returncode == 0, result.stderr
    assert jobs.weights_hash(out) == expected and jobs.summary(out)["ranks"] == 2
    assert log(out)[2] == "without gone, which cannot start a program"


def is_on(pid, host):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"FAKE_HOST={host}".encode() in file.read().split(b"\0")
    except OSError:
        return False


@pytest.mark.timeout(600)
def test_a_proxy_that_is_killed_while_the_job_starts(pictures, tmp_path):
    """The command restarts the job and never hangs, whenever the proxy is killed."""
    for turn in range(20):
        out = tmp_path / f"run-{turn}"
        words = words_of(out, pictures, "--max-iterations", 2, restarts=1)
        with start(*words) as job:
            wait_until(lambda job=job: "hydra_pmi_proxy" in processes_of(job), 0.001)
            time.sleep(0.05 * turn)
            for pid in processes_of(job).get("hydra_pmi_proxy", ()):
                os.kill(pid, signal.SIGKILL)
            result = launcher.finish(job)
        assert result.returncode == 0, result.stderr
        assert jobs.summary(out)["iterations"] == 2
