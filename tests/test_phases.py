"""Test phases and spans with a clock that the tests control."""

import threading

import pytest

from mpidl import phases
from mpidl.core import spans


@pytest.fixture
def clock(monkeypatch):
    """A function that advances the clock of the phases by a number of milliseconds."""
    time = [phases.now()]
    for module in (phases, spans):
        monkeypatch.setattr(module, "now", lambda: time[0])

    def advance(milliseconds):
        time[0] += round(milliseconds * 1e6)

    with phases.Phase(phases.OTHER, "test"):  # time before the test is not added to its phases
        yield advance


@pytest.fixture
def stored():
    phases.store_spans(100)
    yield phases.spans()
    phases.take_spans()


def names(spans):
    labels = list(spans.labels)
    array = spans.array()
    duration = (array["end"] - array["start"]) / 1e6
    return [(*labels[i], ms) for i, ms in zip(array["label"], duration, strict=True)]


def differences(before):
    return {
        kind: round(1e3 * (new - old), 6)
        for kind, new, old in zip(phases.KINDS, phases.seconds(), before, strict=True)
    }


def test_nested_phases_take_their_time_out_of_the_outer_one(clock):
    before = phases.seconds()
    clock(1)
    with phases.Phase(phases.COMPUTE, "step"):
        clock(10)
        with phases.Phase(phases.WAIT, "sum"):
            clock(4)
            with phases.Phase(phases.SUM, "fold"):
                clock(2)
            clock(1)
        with pytest.raises(ValueError), phases.Phase(phases.INPUT, "input"):
            clock(3)
            raise ValueError
        clock(5)
        expected = {"other": 1, "input": 3, "compute": 15, "wait": 5, "sum": 2}
        assert differences(before) == expected  # also while a phase is open


def test_spans_are_stored_with_their_place(clock, stored):
    with phases.span("forward"):
        clock(1)
        with phases.layer("conv1"):
            assert phases.current_layer() == "conv1" and phases.place() == "forward / conv1"
            with phases.Phase(phases.WAIT, "sum over the ranks"):
                clock(2)
    assert phases.place() == "" and phases.current_layer() is None
    phases.iteration_ends()
    clock(4)
    phases.iteration_ends(7)
    with phases.Phase(phases.SUM, "progress", shortest=phases.BRIEF):
        clock(0.001)
    assert names(stored) == [
        ("main", "wait", "sum over the ranks", 2.0),
        ("main", "layer", "conv1", 2.0),
        ("main", "span", "forward", 3.0),
        ("iterations", "iteration", "iteration", 4.0),
    ]


def test_nothing_is_stored_when_recording_is_off():
    assert phases.spans() is None
    with phases.span("forward"), phases.layer("conv1"), phases.Phase(phases.WAIT, "sum"):
        assert phases.place() == "" and phases.current_layer() is None


def test_spans_may_be_open_when_recording_begins_and_ends():
    phases.store_spans(10)
    with phases.span("old"):
        phases.take_spans()
    with phases.span("old"):
        phases.store_spans(10)
        with phases.span("new"):
            assert phases.place() == "new"
    assert [name for _, _, name, _ in names(phases.take_spans())] == ["new"]


def test_places_are_named_without_a_recording(stored):
    with phases.named_places():
        assert phases.spans() is stored  # the recording continues
    phases.take_spans()
    with phases.named_places(), phases.layer("conv1"):
        assert phases.place() == "conv1"
    assert phases.spans() is None


def test_memory_for_spans_is_bounded():
    spans = phases.Spans(3)
    for i in range(3):
        spans.add("main", "span", "x", i, i + 1)
    assert not spans.is_full
    spans.add("main", "span", "x", 3, 4)
    assert spans.is_full and spans.array()["end"].tolist() == [1, 2, 3]
    spans.add("main", "span", "x", 4, 5)  # a late thread may still add a span


def test_threads_store_spans_at_the_same_time():
    spans, count = phases.Spans(10_000), 2000

    def add(number):
        for i in range(count):
            spans.add(f"thread {number}", "read", f"image {i % 10}", number + 1, number + 2, i)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    array, labels = spans.array(), list(spans.labels)
    assert len(array) == 4 * count and len(labels) == 40
    assert sorted(spans.labels.values()) == list(range(40))
    for span in array.tolist():
        start, end, label, i = span
        assert labels[label] == (f"thread {start - 1}", "read", f"image {i % 10}")
        assert end == start + 1
