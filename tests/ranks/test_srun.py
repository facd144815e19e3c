"""Test parsing the output of `srun --mpi=list`, and the command that mpidl suggests."""

import pytest

import mpidl as dl
from mpidl.launcher import launcher
from mpidl.ranks import foreign_launcher

NEW = """MPI plugin types are...
\tnone
\tpmi2
\tcray_shasta
\tpmix
specific pmix plugin versions available: pmix_v3,pmix_v4
"""
OLD = "srun: MPI types are...\nsrun: openmpi\nsrun: none\nsrun: pmi2\n"


def test_parse_types():
    assert (
        foreign_launcher.parse_srun_types(NEW)
        == "none pmi2 cray_shasta pmix pmix_v3 pmix_v4".split()
    )
    assert foreign_launcher.parse_srun_types(OLD) == ["openmpi", "none", "pmi2"]
    assert foreign_launcher.parse_srun_types("") == []


@pytest.mark.parametrize(
    ("library", "offered", "command"),
    [
        ("MPICH Version:      5.0.2", ["none", "pmi2"], "srun --mpi=pmi2 (srun --mpi=list: none, "),
        ("MPICH Version:      5.0.2", [], "srun --mpi=pmi2"),
        ("Open MPI v5.0.11", ["pmi2", "pmix"], "srun --mpi=pmix (srun --mpi=list: pmi2, pmix)"),
        (
            "Open MPI v5.0.11",
            ["pmi2"],
            "srun with a value of --mpi that works with Open MPI v5.0.11 (",
        ),
        ("Vendor MPI 7", ["pmi2"], "srun with a value of --mpi that works with Vendor MPI 7 (srun"),
    ],
)
def test_advice(monkeypatch, library, offered, command):
    monkeypatch.setattr(foreign_launcher, "offered_srun_types", lambda: offered)
    assert foreign_launcher.srun_advice(library).startswith(command)


def test_a_machine_without_srun(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert foreign_launcher.offered_srun_types() == []
    assert foreign_launcher.srun_advice("MPICH Version: 5") == "srun --mpi=pmi2"


def test_srun_fills_nodes(monkeypatch, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text("")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("NTASKS_PER_NODE", "NTASKS", "NNODES", "CPUS_PER_TASK"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    monkeypatch.delenv("MPIDL_SRUN_MPI", raising=False)
    assert launcher(6, True)[1:] == ["-K", "--ntasks=6"]
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    monkeypatch.setenv("MPIDL_SRUN_MPI", "pmi2")
    assert launcher(6, True)[2:] == [
        *("--ntasks=6", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=3", "--mpi=pmi2")
    ]
    assert launcher(3, True)[3:5] == ["--nodes=1", "--ntasks-per-node=3"]
    srun.unlink()
    with pytest.raises(dl.UserError, match="--srun: expected srun on PATH"):
        launcher(2, True)
