"""Launchers of another MPI are refused before MPI starts, with the right command."""

import os
import re
import sys

import pytest

from mpidl.comm import failure, foreign_launcher
from mpidl.errors import UserError

HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}
PRTE = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_NAMESPACE": "a"}
SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
PMI2 = {"PMI_FD": "5", "PMI_SIZE": "2", "PMI_RANK": "0"}
PMIX = {"PMIX_NAMESPACE": "slurm.pmix.7.0", "PMIX_RANK": "0"}
# What srun of Slurm 22.05 and of Slurm 20.02 prints.
LISTS = {
    22: "MPI plugin types are...\\n\\tcray_shasta\\n\\tpmi2\\n\\tnone",
    20: "srun: MPI types are...\\nsrun: none\\nsrun: pmix_v3\\nsrun: pmix",
}


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Return a function that sets a launcher's variables, and the programs beside this Python."""
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
        ("MPICH", HYDRA | SRUN),  # mpirun in an allocation
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
        ("Open MPI", HYDRA, "the launcher started 2 tasks (PMI_SIZE=2): mpirun of MPICH, but"),
        ("MPICH", PRTE, "the launcher started 2 tasks (OMPI_COMM_WORLD_SIZE=2): mpirun of Open"),
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
    ("vendor", "variables", "version", "end"),
    [
        ("MPICH", SRUN, 22, "start the ranks with srun --mpi=pmi2"),
        ("Open MPI", SRUN | PMI2, 20, "start the ranks with srun --mpi=pmix"),
        ("Open MPI", SRUN, None, "start the ranks with srun --mpi=pmix"),  # srun cannot be run
        (
            *("Open MPI", SRUN | PMI2, 22),
            "this Slurm offers no pmix (srun --mpi=list: cray_shasta, none, pmi2): start the ranks "
            "with {mpirun} inside the allocation",
        ),
    ],
)
def test_srun_with_another_interface(
    launched, monkeypatch, tmp_path, vendor, variables, version, end
):
    launched(variables)
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    if version is not None:
        (bin_folder / "srun").write_text(f"#!/bin/sh\nprintf '{LISTS[version]}\\n' >&2\n")
        (bin_folder / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_folder}:/usr/bin:/bin")
    with pytest.raises(UserError) as error:
        foreign_launcher.refuse(vendor)
    text = str(error.value)
    assert text.endswith(end.format(mpirun=tmp_path / "mpirun"))
    assert re.match(r"the launcher started 2 tasks \(\w+=2\): srun without the interface", text)


def test_other_ranks_do_not_run_srun(launched, monkeypatch):
    launched(SRUN | {"SLURM_PROCID": "1"})
    assert failure.launched_rank() == 1
    monkeypatch.setattr(foreign_launcher, "slurm_plugins", lambda: pytest.fail("srun was run"))
    with pytest.raises(UserError, match="srun --mpi=pmi2$"):
        foreign_launcher.refuse("MPICH")
