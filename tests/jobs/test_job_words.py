"""Test the parsing of a job's command line, and the command that restarts it on fewer hosts."""

import shutil

import pytest

from mpidl.errors import UserError
from mpidl.jobs.job_words import JobCommand

TRAIN = ["python", "-m", "mpidl.train"]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Simulate a Slurm allocation of three nodes with four tasks each."""
    script = tmp_path / "scontrol"
    script.write_text('#!/bin/sh\necho "${3%%[*}1"; echo "${3%%[*}2"; echo "${3%%[*}3"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    values = {"JOB_NODELIST": "n[1-3]", "NTASKS_PER_NODE": "4", "NTASKS": "12"}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


def parse(*words):
    return JobCommand.parse([str(word) for word in words])


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (["mpirun", "-n", "4", *TRAIN, "--epochs", "3"], ["mpirun", "-n", "4", *TRAIN]),
        (["/opt/bin/mpidl", "train", "--epochs", "3"], ["/opt/bin/mpidl", "train"]),
        (["./run/train", "--epochs", "3"], ["./run/train"]),
    ],
)
def test_the_options_of_the_training(words, start):
    command = parse(*words)
    assert command.start == tuple(start) and command.options == ("--epochs", "3")
    assert command.hosts == {}


@pytest.mark.parametrize("words", [[], ["mpirun", "-n", "4", "python", "-m", "mpidl.sweep"]])
def test_a_command_without_a_training(words):
    with pytest.raises(UserError, match="^launch: expected a training command after --"):
        parse(*words)


@pytest.mark.parametrize(
    ("words", "ranks", "hosts"),
    [
        (["mpirun", "-n", 4], 4, {}),
        (["mpiexec", "-np", 4, "-hosts", "a,b"], 4, {"a": 0, "b": 0}),
        (["mpirun", "--host", "a:2,b:2"], None, {"a": 2, "b": 2}),
        (["nice", "-n", 9, "/opt/mpirun", "-n", 6, "-H", "a:4,b:2"], 6, {"a": 4, "b": 2}),
    ],
)
def test_ranks_and_hosts(words, ranks, hosts, monkeypatch):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    command = parse(*words, *TRAIN)
    assert command.ranks == ranks and command.hosts == hosts


def test_a_file_of_hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# the cluster\nn1:4\n\nn2 slots=2  # old\nn3\nn3\n")
    command = parse("mpirun", "-n", 8, "-f", path, *TRAIN)
    assert command.hosts == {"n1": 4, "n2": 2, "n3": 0}
    with pytest.raises(UserError, match=r"none: the hostfile cannot be read: No such file"):
        parse("mpirun", "--hostfile", tmp_path / "none", *TRAIN)


def launcher_of(folder, version):
    path = folder / "mpirun"
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("version", "words", "expected"),
    [
        ("HYDRA build", ["-n", 8, "-hosts", "a,b,c,d"], ["-hosts", "a,c,d", "-n", "6"]),
        ("HYDRA build", ["-hosts=a:2,b:2", "-np=3", "-ppn", 2], ["-hosts", "a:2", "-n", "2"]),
        ("Open MPI 5", ["-n", 5, "--host", "a:4,b:4"], ["--host", "a:4", "-n", "4"]),
    ],
)
def test_fewer_hosts(tmp_path, monkeypatch, version, words, expected):
    monkeypatch.delenv("SLURM_NTASKS", raising=False)
    mpirun = launcher_of(tmp_path, version)
    command = parse(mpirun, *words, *TRAIN, "--epochs", 2)
    fewer = command.without_hosts({"b"})
    rest = ["-ppn", "2"] if "-ppn" in words else []
    assert list(fewer.start) == [str(mpirun), *expected, *rest, *TRAIN]
    assert fewer.options == ("--epochs", "2") and "b" not in fewer.hosts


def test_fewer_nodes_of_slurm(slurm):
    command = parse("srun", "-K", "-N3", "--mpi=pmi2", *TRAIN)
    assert command.uses_srun and command.ranks == 12
    assert command.hosts == {"n1": 4, "n2": 4, "n3": 4}
    start = list(command.without_hosts({"n2"}).start)
    added = ["--ntasks=8", "--nodes=2", "--nodelist=n1,n3"]
    assert start == ["srun", *added, "-K", "--mpi=pmi2", *TRAIN]


def test_hosts_that_cannot_start_a_program(tmp_path):
    """A host counts as lost if the launcher cannot start `true` on it.

    This launcher fails on hosts with names that begin with x.
    """
    path = tmp_path / "mpirun"
    path.write_text('#!/bin/sh\ncase "$2" in x*) exit 255 ;; *) exec $5 ;; esac\n')
    path.chmod(0o755)
    environment = {"PATH": shutil.os.environ["PATH"]}
    command = parse(path, "-n", 4, "-hosts", "a,x1,b,x2", *TRAIN)
    assert command.lost_hosts(environment) == {"x1", "x2"}
    assert parse(path, "-n", 4, "-hosts", "x1", *TRAIN).lost_hosts(environment) == set()
