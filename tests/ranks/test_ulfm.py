"""Test which MPI libraries and launchers let a job survive a loss of ranks.

Also test which MPI errors count as a loss of ranks.
"""

from types import SimpleNamespace

import pytest

from mpidl.ranks import ulfm

OPEN_MPI = "Open MPI", (5, 0, 11)


def mpi(vendor=OPEN_MPI, is_revoked=lambda: False):
    return SimpleNamespace(
        get_vendor=lambda: vendor, COMM_SELF=SimpleNamespace(Is_revoked=is_revoked)
    )


def lacking():
    """Raise the error that mpi4py raises for a function that the MPI library lacks."""
    raise NotImplementedError


@pytest.fixture
def enabled(monkeypatch):
    monkeypatch.setenv(ulfm.SWITCH, "1")
    monkeypatch.delenv("PMIX_NAMESPACE", raising=False)


@pytest.mark.parametrize(
    ("library", "environment", "cause"),
    [
        (mpi(), {}, None),
        (mpi(("MPICH", (4, 3, 0))), {}, "MPICH 4.3.0 (MPIDL_MPI=openmpi run/install)"),
        (mpi(("Open MPI", (4, 1, 6))), {}, "Open MPI 4.1.6 (MPIDL_MPI=openmpi run/install)"),
        (mpi(), {ulfm.SWITCH: "0"}, "mpirun without --with-ft ulfm"),
        (
            mpi(),
            {"PMIX_NAMESPACE": "slurm.pmix.12.0"},
            "srun, which ends the job when a rank ends",
        ),
        (mpi(is_revoked=lacking), {}, "an Open MPI that was compiled without ULFM"),
    ],
)
def test_the_refusal_names_the_command(monkeypatch, enabled, library, environment, cause):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refusal = ulfm.refusal(library, 4)
    if cause is None:
        assert refusal is None
        return
    command = "mpirun --with-ft ulfm -n 4 python -m mpidl.train ..."
    assert refusal == f"expected Open MPI 5 and {command}, found {cause}"
    assert ulfm.refusal(library, 1) is None  # a single rank cannot lose other ranks


def test_without_the_switch_nothing_is_a_loss(monkeypatch):
    monkeypatch.delenv(ulfm.SWITCH, raising=False)
    monkeypatch.delenv("OMPI_MCA_coll", raising=False)
    comm = SimpleNamespace()
    assert not ulfm.is_loss(SimpleNamespace(Get_error_class=lambda: 75), comm)
    assert ulfm.lost_ranks(comm) == []
    ulfm.prepare()
    assert "OMPI_MCA_coll" not in ulfm.os.environ


def test_collectives_that_survive_a_loss_are_chosen(monkeypatch, enabled):
    monkeypatch.setenv("OMPI_MCA_coll", "basic,libnbc")  # a value set by the user is kept
    ulfm.prepare()
    assert ulfm.os.environ["OMPI_MCA_coll"] == "basic,libnbc"
    monkeypatch.delenv("OMPI_MCA_coll")
    ulfm.prepare()
    assert ulfm.os.environ.pop("OMPI_MCA_coll") == "^han"


class MpiError(Exception):
    def __init__(self, number):
        self.number = number

    def Get_error_class(self):
        return self.number


def test_an_error_of_several_requests_is_a_loss_if_a_rank_has_ended(enabled):
    MPI = pytest.importorskip("mpi4py.MPI", reason="needs mpi4py")
    with_loss, without_loss = (
        SimpleNamespace(Is_revoked=lambda: False, Get_failed=lambda n=n: SimpleNamespace(size=n))
        for n in (1, 0)
    )
    assert ulfm.is_loss(MpiError(MPI.ERR_PROC_FAILED), without_loss)
    assert ulfm.is_loss(MpiError(MPI.ERR_REVOKED), without_loss)
    assert ulfm.is_loss(MpiError(MPI.ERR_IN_STATUS), with_loss)
    assert not ulfm.is_loss(MpiError(MPI.ERR_IN_STATUS), without_loss)
    assert not ulfm.is_loss(MpiError(MPI.ERR_TRUNCATE), with_loss)
    assert not ulfm.is_loss(ValueError(), with_loss)


@pytest.mark.parametrize(("answer", "expected"), [(1, True), (0, False), (None, False)])
def test_an_agreement_fails_on_all_ranks_if_one_is_lost(enabled, answer, expected):
    MPI = pytest.importorskip("mpi4py.MPI", reason="needs mpi4py")

    def vote(flag):
        if answer is None:
            raise MpiError(MPI.ERR_PROC_FAILED)
        return answer

    assert ulfm.agree(SimpleNamespace(Agree=vote), True) is expected
