"""Test that a task is repeated after each loss of ranks, until all remaining ranks complete it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from mpidl.ranks import survival, ulfm


class Lost(Exception):
    pass


class Ranks:
    """Simulated world that loses ranks and records calls."""

    outlives_ranks = True

    def __init__(self, size=4, votes=()):
        self.size, self.calls, self.votes = size, [], list(votes)
        self.transport = SimpleNamespace(comm=None, timeout=60, blocking=nullcontext)

    def gop(self, operation, value):
        return value

    def task(self, *errors):
        """Return a task that raises one error per call, in the given order, and then returns 7."""
        errors = list(errors)

        def run():
            self.calls.append("task")
            if errors and (error := errors.pop(0)) is not None:
                raise error
            return 7

        return run


@pytest.fixture
def ranks(monkeypatch):
    ranks = Ranks()

    def shrink(world, is_agreed=False):
        ranks.calls.append(f"shrink{' agreed' if is_agreed else ''}")
        ranks.size -= 1

    monkeypatch.setattr(survival, "shrink", shrink)
    monkeypatch.setattr(ulfm, "is_loss", lambda error, comm: isinstance(error, Lost))
    monkeypatch.setattr(ulfm, "agree", lambda comm, flag: not ranks.votes or ranks.votes.pop(0))
    return ranks


def attempt(ranks, task, *errors_of_recovery):
    errors = list(errors_of_recovery)

    def recover():
        ranks.calls.append("recover")
        if errors:
            raise errors.pop(0)

    return survival.attempt(ranks, task, recover)


def test_a_task_without_a_loss_runs_once(ranks):
    assert attempt(ranks, ranks.task()) == 7 and ranks.calls == ["task"]


def test_a_loss_is_met_in_the_task_or_in_the_agreement_behind_it(ranks):
    ranks.votes = [False, True]
    assert attempt(ranks, ranks.task(Lost())) == 7
    expected = ["task", "shrink", "recover", "task", "shrink agreed", "recover", "task"]
    assert ranks.calls == expected


def test_losses_while_the_ranks_recover(ranks):
    assert attempt(ranks, ranks.task(Lost()), Lost()) == 7
    assert ranks.calls == ["task", "shrink", "recover", "shrink", "recover", "task"]


def test_the_last_rank_completes_the_task_alone(ranks):
    assert attempt(ranks, ranks.task(Lost()), Lost(), Lost()) == 7
    assert ranks.size == 1 and ranks.calls[-2:] == ["recover", "task"]


@pytest.mark.parametrize("outlives_ranks", [True, False])
def test_other_errors_pass(ranks, outlives_ranks):
    ranks.outlives_ranks = outlives_ranks
    error = ValueError() if outlives_ranks else Lost()
    with pytest.raises(type(error)):
        attempt(ranks, ranks.task(error))
    assert ranks.calls == ["task"]
