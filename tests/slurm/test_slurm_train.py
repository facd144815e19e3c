"""Test run/train.slurm on a real Slurm: however a job ends, the weights equal one rank's."""

import os
import signal
import time
from pathlib import Path

import jobs
import pytest
import trainings
from limits import exceeded, wait_until

from mpidl.training.files import checkpoint

pytestmark = [pytest.mark.slow("slurm"), pytest.mark.timeout(240)]
SIZES = [pytest.param(2, 2, id="2 nodes"), pytest.param(3, 1, id="3 nodes")]


@pytest.fixture
def preempt(cluster, tmp_path):
    """Return a function that starts a job on all nodes, which preempts other jobs, and ends it."""
    urgent = []

    def start():
        words = ["--partition=urgent", "--nodes=3", "--exclusive", "--wrap=sleep 600"]
        urgent.append(cluster.submit(tmp_path, *words))

    def end():
        while urgent:
            urgent.pop().scancel()

    start.end = end
    yield start
    end()


@pytest.fixture(params=[True, False], ids=["with USR1", "with TERM"])
def has_user_signal(cluster, request):
    """Return whether Slurm sends the signal of --signal on preemption, or only TERM."""
    if not request.param:
        cluster.configure(parameters="")
    yield request.param
    cluster.configure()


@pytest.mark.parametrize(("nodes", "tasks"), SIZES)
def test_time_limit(submit, expected_hash, nodes, tasks):
    """The time limit stops the job, and the requeued job continues under a longer limit.

    Slurm may send the signal up to a minute early.
    """
    limit = ["--time=1", "--signal=B:USR1@20"]
    training = submit(*limit, nodes=nodes, tasks=tasks)
    training.wait_for_steps()
    training.job.wait_for_requeue()
    _, facts = checkpoint.load(training.out)
    assert facts["position"]["iteration"] == jobs.iterations(training.out)[-1]
    training.job.cluster.run("scontrol", "update", f"JobId={training.job.number}", "TimeLimit=30")
    assert training.finish() == expected_hash


def check_scancel(training):
    training.wait_for_steps()
    start_time = time.monotonic()
    training.job.scancel()
    training.job.wait("CANCELLED")
    assert not exceeded(start_time, 15)
    time.sleep(3)
    assert training.job.state() == "CANCELLED"
    assert training.job.facts()["Restarts"] == "0"
    _, facts = checkpoint.load(training.out)
    return facts["position"]["iteration"]


@pytest.mark.parametrize(("nodes", "tasks"), SIZES)
def test_scancel(submit, expected_hash, nodes, tasks):
    """The job must end with a checkpoint and not be requeued; another job resumes the run."""
    training = submit(nodes=nodes, tasks=tasks)
    assert check_scancel(training) >= 3
    resumed = submit(words=["--resume", training.out], nodes=2, tasks=1)
    assert resumed.finish() == expected_hash


def test_scancel_without_its_check(submit, tmp_path):
    """Negative control: a script that does not check the job's state requeues the job."""
    checkout = trainings.changed_checkout(tmp_path, "slurm.sh", "elif is_ending", "elif false")
    training = submit(checkout=checkout)
    with pytest.raises(AssertionError, match="PENDING"):
        check_scancel(training)


def check_preemption(training, preempt):
    preempt()
    training.job.wait_for_requeue()
    preempt.end()


def test_preemption_in_training(submit, preempt, has_user_signal, expected_hash):
    training = submit()
    training.wait_for_steps()
    check_preemption(training, preempt)
    _, facts = checkpoint.load(training.out)
    assert facts["position"]["iteration"] >= 3
    assert training.finish() == expected_hash


@pytest.mark.parametrize("seconds", [0, 1])
def test_preemption_at_the_start(submit, preempt, has_user_signal, expected_hash, seconds):
    training = submit(nodes=3)
    training.job.wait("RUNNING")
    time.sleep(seconds)
    check_preemption(training, preempt)
    assert training.finish() == expected_hash


def test_preemption_before_an_earlier_run_is_replaced(
    submit, cluster, preempt, shapes, tmp_path, expected_hash
):
    """The second start finds an earlier run's checkpoint, and must still replace that run."""
    jobs.train(1, shapes, tmp_path / "run", "--epochs", 1, "--seed", 5, network=trainings.NETWORK)
    wait = f'[ -e "{tmp_path}/called" ] || {{ touch "{tmp_path}/called"; exec sleep 600; }}'
    (tmp_path / "srun").write_text(
        f'#!/bin/sh\ncase $1 in -K) {wait} ;; esac\nexec /usr/bin/srun "$@"\n'
    )
    (tmp_path / "srun").chmod(0o755)
    path = f"{tmp_path}:{cluster.environment['PATH']}"
    training = submit(f"--export=ALL,PATH={path}", words=["--overwrite"])
    wait_until((tmp_path / "called").exists, 0.2)
    check_preemption(training, preempt)
    training.wait_for_steps(10)  # more steps than the earlier run has
    preempt()
    training.job.wait_for_requeue(2)
    preempt.end()
    assert training.finish() == expected_hash
    assert training.job.log().count(f"--overwrite --resume {training.out}\n") == 1
    assert not list(training.out.glob(".replaced-by-*"))


def test_preemption_without_the_traps(submit, preempt, tmp_path):
    """Negative control: the signal ends a script that does not catch the signal."""
    checkout = trainings.changed_checkout(tmp_path, "slurm.sh", "trap stop_step USR1 TERM", "")
    script = checkout / "run" / "train.slurm"
    script.write_text(script.read_text().replace("trap 'asked=yes' USR1 TERM", ""))
    training = submit(checkout=checkout)
    training.wait_for_steps()
    with pytest.raises(AssertionError, match="FAILED"):
        check_preemption(training, preempt)


def test_scontrol_requeue(submit, expected_hash):
    training = submit()
    training.wait_for_steps()
    training.job.cluster.run("scontrol", "requeue", training.job.number)
    training.job.wait_for_requeue()
    assert training.finish() == expected_hash


def test_the_controller_is_restarted_when_a_job_wants_back(submit, cluster, expected_hash):
    """The job is requeued although the controller is away for longer than scontrol waits."""
    training = submit(nodes=1)
    training.wait_for_steps()
    log = Path(training.job.facts()["StdOut"])
    (script,) = (pid for pid in cluster.pids("n1") if is_batch_script(pid))
    cluster.stop_controller()
    try:
        os.kill(script, signal.SIGUSR1)
        wait_until(lambda: "exit code 75" in log.read_text(), 0.2)
        for command in (["show", "job"], ["requeue"]):  # both wait in vain for some seconds
            assert cluster.finish("scontrol", *command, training.job.number).returncode == 1
    finally:
        cluster.start_controller()
    training.job.wait_for_requeue()
    assert training.finish() == expected_hash


def is_batch_script(pid):
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return any(word.endswith(b"/slurm_script") for word in words)


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["first", "second"])
def test_a_node_that_dies(submit, cluster, expected_hash, node):
    """Slurm requeues the job, which resumes on the other nodes from the last checkpoint.

    The job must immediately take over its lock, although no other node can see the process that
    held the lock.
    """
    training = submit(words=["--checkpoint-every", 4])
    training.wait_for_steps(12)
    cluster.kill_node(node)
    try:
        training.job.wait_for_requeue()
        if node == "n1":  # the node of rank 0
            assert (training.out / "run.lock").exists()
        assert training.finish() == expected_hash
        assert "is locked by" not in training.job.log()
        assert not (training.out / "run.lock").exists()
    finally:
        cluster.start_node(node)


def test_stop_file(submit, expected_hash):
    """A stop file is a person's request, so the job must not be requeued."""
    training = submit()
    training.wait_for_steps()
    (training.out / "stop").write_text("now\n")
    training.job.wait("FAILED")
    assert training.job.facts()["ExitCode"] == f"{jobs.STOPPED}:0"
    assert "stopped by a person: not requeued" in training.job.log()
    resumed = submit(words=["--resume", training.out])
    assert resumed.finish() == expected_hash


def test_two_jobs_in_one_folder(submit, expected_hash):
    """The second job must be rejected, and must not disturb the first job."""
    training = submit(nodes=1)
    training.wait_for_steps()
    second = submit(nodes=1, words=["--overwrite"])
    second.job.wait("FAILED")
    assert second.job.facts()["ExitCode"] == "2:0"
    holder = f"Slurm job {training.job.number} of cluster test, restart 0"
    lines = [line for line in second.job.log().splitlines() if ": in use by process " in line]
    assert len(lines) == 1 and holder in lines[0]
    assert training.finish() == expected_hash


def test_job_array(submit, shapes, tmp_path):
    """Each task must have its own folder and seed, and the hash of one rank with this seed."""
    short = ["--epochs", 2]
    words = [*short, "--seed", "%a", "--out", tmp_path / "seed-%a"]
    array = submit("--array=0-3", nodes=1, tasks=1, words=words)
    array.release()
    tasks = [array.job.task(i) for i in range(4)]
    for task in tasks:
        task.wait("COMPLETED")
    hashes = {seed: jobs.weights_hash(tmp_path / f"seed-{seed}") for seed in range(4)}
    options = [*short, "--batch-size", 50]
    for seed, weights_hash in hashes.items():
        out = tmp_path / f"one-rank-{seed}"
        jobs.train(1, shapes, out, *options, "--seed", seed, network=trainings.NETWORK)
        assert jobs.weights_hash(out) == weights_hash
    assert len(set(hashes.values())) == 4


def test_a_task_of_an_array_is_requeued_alone(submit, tmp_path):
    """The last task, whose job number is the array's, must be requeued without other tasks."""
    words = ["--out", tmp_path / "task-%a"]
    array = submit("--array=0-1", nodes=1, tasks=1, words=words)
    first, last = array.job.task(0), array.job.task(1)
    for task in (first, last):
        task.wait("RUNNING")
    wait_until(lambda: (tmp_path / "task-1" / "metrics.jsonl").exists())
    last.scancel("--batch", "--signal=USR1")
    last.wait_for_requeue()
    assert first.state() == "RUNNING"
    array.release()
    for task in (first, last):
        task.wait("COMPLETED")
    assert jobs.weights_hash(tmp_path / "task-0") == jobs.weights_hash(tmp_path / "task-1")


def test_fields_of_an_array_need_an_array(submit, tmp_path):
    training = submit(words=["--out", tmp_path / "seed-%a"])
    training.job.wait("FAILED")
    assert training.job.facts()["ExitCode"] == "2:0"
    assert "expected a job array for %A and %a" in training.job.log()


def test_an_unknown_mpi_type(submit):
    training = submit("--export=ALL,MPIDL_SRUN_MPI=pmi9")
    training.job.wait("FAILED")
    assert training.job.facts()["ExitCode"] == "2:0"
    (line,) = [line for line in training.job.log().splitlines() if "pmi9" in line]
    assert "srun has no MPI type pmi9 (srun --mpi=list: " in line and "pmi2" in line


@pytest.mark.parametrize("words", [["--epoch", "3"], ["--momentum", "2"]], ids=" ".join)
def test_an_unusable_option(submit, words):
    """An unusable option must end the job with one line and exit code 2, without a second start."""
    training = submit(words=words)
    training.job.wait("FAILED")
    assert training.job.facts()["ExitCode"] == "2:0"
    assert training.job.log().count("\nmpidl: ") == 1
    assert "once more" not in training.job.log()


def test_a_step_that_cannot_start(submit, cluster, tmp_path, expected_hash):
    """If a step cannot start, the script must start it once more, and only once."""
    for failures, state in ((1, "COMPLETED"), (2, "FAILED")):
        folder = tmp_path / str(failures)
        folder.mkdir()
        counted = f'case $1 in -K) echo x >>"{folder}/starts"; [ $(wc -l <"{folder}/starts") -gt'
        (folder / "srun").write_text(
            f'#!/bin/sh\n{counted} {failures} ] || exit 1 ;; esac\nexec /usr/bin/srun "$@"\n'
        )
        (folder / "srun").chmod(0o755)
        path = f"{folder}:{cluster.environment['PATH']}"
        training = submit(f"--export=ALL,PATH={path}", words=["--out", folder / "run"])
        training.release()
        training.job.wait(state)
        assert "starting once more" in training.job.log()
    assert jobs.weights_hash(tmp_path / "1" / "run") == expected_hash


def test_the_limit_of_a_partition_applies(submit):
    """Without --time, a job has its partition's limit. A longer --time would wait forever."""
    training = submit()
    assert training.job.facts()["TimeLimit"] == "01:00:00"
    longer = submit("--time=120", words=["--out", training.out / "longer"])
    wait_until(lambda: longer.job.facts()["Reason"].startswith("Partition"))  # TimeLimit or Config
