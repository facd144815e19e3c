"""Test how `python -m benchmarks memory` judges the growth of memory.

tests/launch/test_benchmarks.py runs the command and really trains.
"""

import types

import pytest

from benchmarks import arguments, memory
from mpidl.errors import Fault
from mpidl.ranks.world import World


def test_samples_begin_after_the_warm_up():
    sampler = memory.MemorySampler(steps=3000, warm_up=1000)
    for iteration in range(1, 3001):
        sampler.step(types.SimpleNamespace(position=types.SimpleNamespace(iteration=iteration)))
    assert [step for step, _ in sampler.samples] == list(range(1000, 3001, 20))
    assert all(nbytes > 1 << 20 for _, nbytes in sampler.samples)


def test_growth_is_that_of_the_largest_sample():
    assert memory.growth_of([(1, 100), (2, 90), (3, 103), (4, 100)]) == pytest.approx(0.03)
    assert memory.growth_of([(1, 100), (2, 90)]) == 0


@pytest.mark.parametrize("last, is_flat", [(1005 << 10, True), (1011 << 10, False)])
def test_a_training_that_takes_more_and_more_memory_fails(monkeypatch, capsys, last, is_flat):
    samples = [(1000, 1000 << 10), (2000, last), (3000, 1000 << 10)]
    monkeypatch.setattr(memory, "train", lambda *arguments: samples)
    monkeypatch.setattr(memory, "World", lambda **options: World())
    options = arguments.parse(["memory", "--steps", "3000"])
    options.busy = 0.0
    if is_flat:
        assert memory.main(options)["growth"] == [pytest.approx(0.005)]
        assert "flat within 1 % after step 1000" in capsys.readouterr().out
    else:
        with pytest.raises(Fault, match="has grown by 1.10 % since step 1000, expected at most 1"):
            memory.main(options)
