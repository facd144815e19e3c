"""Test that a launcher of another MPI library is refused, with advice on the right command."""

import os
import sys

import pytest

from mpidl.errors import UserError
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
