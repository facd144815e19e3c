"""Test the message about ranks that keep the other ranks waiting all the time."""

import pytest

from mpidl.phases import Seconds
from mpidl.training.late_ranks import LateRanks

HOSTS = ["n1", "n1", "n2", "n2"]


def interval(*busy, length=2.0, other=0.0):
    """Return the ranks' times. Rank i computes for `busy[i]` seconds, and then waits."""
    return [Seconds(other, 0.0, work, length - work - other, 0.0) for work in busy]


def judge(*intervals, images=(32, 32, 32, 32)):
    late = LateRanks(HOSTS[: len(intervals[0])])
    for times in intervals:
        late.add(times, images[: len(times)])
    return late.message()


def test_a_slow_rank_is_named():
    text = judge(*[interval(1.2, 1.2, 1.9, 1.2)] * 6)
    assert text == (
        "warning: always late: rank 2 on host n2; in the last 12 s, the other ranks waited 40% of "
        "the time (--worker-load measured gives slow ranks less work)"
    )
    assert "rank 1 on host n1; in the last 12 s, the other" in judge(*[interval(1.0, 1.9)] * 6)


def test_reading_counts():
    slow = Seconds(other=0, input=1.5, compute=0.5, wait=0, sum=0)
    other_ranks = Seconds(other=0, input=0, compute=0.5, wait=1.5, sum=0)
    assert "rank 0 on host n1;" in judge(*[[slow, other_ranks, other_ranks]] * 6)


@pytest.mark.parametrize(
    "times",
    [
        interval(1.8, 1.8, 1.9, 1.8),  # rank 2 is slower by less than a tenth
        [*interval(1.0, 1.0, 1.0), Seconds(1.0, 0.0, 1.0, 0.0, 0.0)],  # the last rank writes files
        [Seconds(0.0, 0.0, 2.0, 0.0, 0.0)],  # a single rank
        [Seconds(0.0, 0.0, 0.0, 0.0, 0.0)] * 3,
    ],
)
def test_ranks_that_are_not_late(times):
    assert judge(*[times] * 6) is None


def test_a_rank_with_more_blocks_is_not_late():
    """Rank 0 computes twice as long as rank 1, because it has two of three blocks."""
    times = interval(1.9, 0.95)
    assert judge(*[times] * 6, images=(32, 16)) is None
    assert "rank 0" in judge(*[times] * 6, images=(32, 32))
    # A rank without images only waits.
    assert judge(*[interval(1.9, 0.0)] * 6, images=(16, 0)) is None


def test_a_rank_must_be_late_nearly_all_of_the_time():
    slow, even = interval(1.2, 1.9, 1.2), interval(1.2, 1.2, 1.2)
    assert judge(*[slow] * 19, even) is not None
    assert judge(*[slow] * 8, *[even] * 2) is None
    assert judge(*[slow] * 4) is None  # the period is too short


def test_intervals_of_short_epochs_add_up_and_a_line_is_not_repeated():
    late = LateRanks(HOSTS)
    texts = []
    for epoch in range(25):
        slow = 1 if epoch < 18 else 3
        late.add(interval(*(1.9 if r == slow else 1.0 for r in range(4))), [16] * 4)
        texts.append(late.message())
    named_ranks = [(epoch, text.partition(";")[0]) for epoch, text in enumerate(texts) if text]
    first, second = "always late: rank 1 on host n1", "always late: rank 3 on host n2"
    assert named_ranks[0] == (4, f"warning: {first}") and len(named_ranks) == 2
    assert named_ranks[1][1] == f"warning: {second}"


def test_many_late_ranks():
    late = LateRanks([f"n{rank}" for rank in range(12)])
    for _ in range(6):
        late.add(interval(*[1.9] * 5, *[1.0] * 7), [16] * 12)
    assert "rank 0 on host n0, rank 1 on host n1, rank 2 on host n2, 2 more;" in late.message()
