"""Test that a launcher of another MPI library is refused, and the command that mpidl suggests."""

import os
import sys

import pytest

import mpidl as dl
from mpidl.errors import UserError
from mpidl.launcher import launcher
from mpidl.ranks import foreign_launcher

HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}
PRTE = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "a"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
PMI2 = {"PMI_FD": "5", "PMI_SIZE": "2", "PMI_RANK": "0"}
PMIX = {"PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "0"}


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Return a function that sets launcher variables and creates programs next to Python."""
    for name in [*os.environ]:
        if name.startswith(("PMI", "OMPI_", "SLURM_", "MPI_LOCAL")):
            monkeypatch.delenv(name)

    def launch(variables, programs=("mpiexec.hydra", "prterun")):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        for name in programs:
            (tmp_path / name).touch()
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    return launch


@pytest.mark.parametrize(
    ("vendor", "variables"),
    [
        ("MPICH", {}),
        ("MPICH", HYDRA),
        ("Open MPI", PRTE),
        ("MPICH", SRUN | PMI2),
        ("Open MPI", SRUN | PMIX),
        ("Intel MPI", SRUN),
        ("Intel MPI", PRTE),
        ("MPICH", HYDRA | SRUN),  # mpirun in a Slurm allocation
        ("Open MPI", PRTE | {"SLURM_STEP_NUM_TASKS": "1"}),
    ],
)
def test_launchers_that_fit(launched, vendor, variables):
    launched(variables)
    foreign_launcher.refuse(vendor)


def test_srun_of_a_cluster_that_has_its_own_mpi(launched):
    launched(SRUN, programs=())
    foreign_launcher.refuse("MPICH")


@pytest.mark.parametrize(
    ("vendor", "variables", "start"),
    [
        ("Open MPI", HYDRA, "the launcher started 2 tasks (PMI_SIZE=2) with mpirun of MPICH, but"),
        ("MPICH", PRTE, "the launcher started 2 tasks (OMPI_COMM_WORLD_SIZE=2) with mpirun of"),
    ],
)
def test_an_mpirun_of_another_mpi(launched, tmp_path, vendor, variables, start):
    launched(variables)
    with pytest.raises(UserError) as error:
        foreign_launcher.refuse(vendor)
    assert str(error.value).startswith(start)
    assert str(error.value).endswith(f"start the ranks with {tmp_path / 'mpirun'}")


def test_the_mpirun_of_a_cluster_is_named(launched):
    launched(HYDRA, programs=("mpiexec.hydra",))
    with pytest.raises(UserError, match="start the ranks with the mpirun of Open MPI$"):
        foreign_launcher.refuse("Open MPI")


@pytest.mark.parametrize(
    ("vendor", "variables", "kind"),
    [
        ("MPICH", SRUN, "pmi2"),  # srun --mpi=none
        ("MPICH", SRUN | PMIX, "pmi2"),
        ("Open MPI", SRUN | PMI2, "pmix"),
    ],
)
def test_srun_with_another_interface(launched, monkeypatch, vendor, variables, kind):
    launched(variables)
    monkeypatch.setattr(foreign_launcher, "offered_srun_types", lambda: ["none", "pmi2", "pmix"])
    text = rf"^the launcher started 2 tasks \(.*=2\): this srun cannot start {vendor}; "
    text += rf"expected srun --mpi={kind} \(srun --mpi=list: none, pmi2, pmix\)$"
    with pytest.raises(UserError, match=text):
        foreign_launcher.refuse(vendor)


def test_other_ranks_do_not_run_srun(launched, monkeypatch):
    launched(SRUN | {"SLURM_PROCID": "1"})
    monkeypatch.setattr(foreign_launcher, "offered_srun_types", lambda: pytest.fail("srun was run"))
    with pytest.raises(UserError, match="expected another --mpi$"):
        foreign_launcher.refuse("MPICH")


NEW_TYPES = """MPI plugin types are...
\tnone
\tpmi2
\tcray_shasta
\tpmix
specific pmix plugin versions available: pmix_v3,pmix_v4
"""
OLD_TYPES = "srun: MPI types are...\nsrun: openmpi\nsrun: none\nsrun: pmi2\n"


def test_parse_types():
    assert (
        foreign_launcher.parse_srun_types(NEW_TYPES)
        == "none pmi2 cray_shasta pmix pmix_v3 pmix_v4".split()
    )
    assert foreign_launcher.parse_srun_types(OLD_TYPES) == ["openmpi", "none", "pmi2"]
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
