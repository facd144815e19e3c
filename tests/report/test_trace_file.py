"""Test files and tables of timelines, from manually defined spans."""

import jsonschema
import numpy as np
import pytest
import trace_events

from mpidl.errors import UserError
from mpidl.phases import SPAN, Seconds
from mpidl.report import timeline_table, trace_file
from mpidl.report.trace_file import RankSpans

MS = 10**6
LABELS = [
    ("iterations", "iteration", "iteration"),
    ("main", "span", "forward"),
    ("main", "layer", "conv1"),
    ("main", "wait", "a sum over the ranks"),
    ("sums", "sum", "forward / conv1"),
    ("main", "compute", "training step"),
    ("reader 140", "read", "read images"),
    ("gpu", "gpu", "update"),
]
NUMBER = {name: i for i, (*_, name) in enumerate(LABELS)} | {"sum": 4, "wait": 3}


def rank_of(*spans, host="node1", wait=0.0, is_full=False):
    """Return RankSpans. Each of `spans` is (name, start in ms, end in ms, size)."""
    rows = [(round(a * MS), round(b * MS), NUMBER[name], size) for name, a, b, size in spans]
    seconds = Seconds(0.001, 0.002, 0.01, wait, 0.003)
    return RankSpans(
        host, "cpu, 1 thread", np.array(rows, SPAN), LABELS, seconds, 2, is_full=is_full
    )


def iterations(delay):
    """Return two iterations of 10 ms. In each, a wait begins after `delay` ms."""
    spans = []
    for i in (1, 2):
        start = 100 + 10 * i
        spans += [
            ("wait", start + delay, start + 8, 0),
            ("conv1", start, start + 9, 0),
            ("forward", start, start + 9.5, 0),
            ("training step", start, start + 10, 0),
            ("sum", start + 1, start + 8, 4096),
            ("iteration", start, start + 10, i),
        ]
    return spans


def test_a_file_has_the_spans_of_all_ranks(tmp_path):
    extra = [("read images", 100, 130, 0), ("update", 103, 104, 0)]
    ranks = [rank_of(*iterations(2), *extra), rank_of(*iterations(5), host="node2")]
    path = tmp_path / "timeline.json.gz"
    trace_file.write_timeline(path, ranks, {"cut": False})
    trace = trace_events.read(path)
    assert trace["otherData"] == {"cut": False}
    names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {0: "rank 0, node1, cpu, 1 thread", 1: "rank 1, node2, cpu, 1 thread"}
    waits = [trace_events.complete(trace, rank, "wait") for rank in (0, 1)]
    # The first span, which belongs to a reader, begins at 100 ms.
    assert [(e["ts"], e["dur"]) for e in waits[0]] == [(12e3, 6e3), (22e3, 6e3)]
    assert [(e["ts"], e["dur"]) for e in waits[1]] == [(15e3, 3e3), (25e3, 3e3)]
    steps = trace_events.complete(trace, 1, "iteration")
    assert [(e["name"], e["args"]["iteration"]) for e in steps] == [
        ("iteration 1", 1),
        ("iteration 2", 2),
    ]
    sums = [e for e in trace["traceEvents"] if e["ph"] == "b"]
    assert len(sums) == 4 and all(e["args"]["bytes"] == 4096 for e in sums)
    lines = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert {"main thread", "iterations", "pending sums", "GPU", "reader 1"} <= set(lines.values())


def test_the_check_of_files_finds_errors():
    event = {"ph": "X", "name": "a", "cat": "c", "pid": 0, "tid": 9, "ts": 0.0, "dur": 2.0}
    trace_events.check({"traceEvents": [event]})
    for change in ({"dur": -1}, {"ts": "0"}, {"ph": "Q"}, {"pid": None}, {"name": ""}):
        with pytest.raises(jsonschema.ValidationError):
            trace_events.check({"traceEvents": [event | change]})
    for change, message in (({"pid": 1}, "two processes"), ({"tid": 0}, "number of a process")):
        with pytest.raises(ValueError, match=message):
            trace_events.check({"traceEvents": [event, event | change]})
    with pytest.raises(ValueError, match="overlapping"):
        trace_events.check({"traceEvents": [event, event | {"ts": 1.0}]})
    with pytest.raises(ValueError, match="without an end"):
        trace_events.check({"traceEvents": [event | {"ph": "b", "id2": {"local": "1"}}]})


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(UserError, match="cannot be written"):
        trace_file.write_timeline(tmp_path / "missing" / "t.json.gz", [rank_of()], {})


def test_ranks_without_spans(tmp_path):
    path = tmp_path / "timeline.json.gz"
    trace_file.write_timeline(path, [rank_of(), rank_of()], {})
    assert not [e for e in trace_events.read(path)["traceEvents"] if e["ph"] == "X"]
    assert timeline_table.coverage(rank_of()) == 0
    assert timeline_table.largest_wait([rank_of(), rank_of()]) is None
    assert len(timeline_table.summary([rank_of(), rank_of()])) == 5


def test_a_full_memory_cuts_all_ranks_at_the_same_iteration():
    full = rank_of(*iterations(2)[:6], is_full=True)
    ranks, last = trace_file.cut_to_common([rank_of(*iterations(2)), full])
    assert last == 1
    for rank in ranks:
        assert rank.select("iterations")["size"].tolist() == [1]
        assert len(rank.select("main", "wait")) == 1
    ranks, last = trace_file.cut_to_common([rank_of(*iterations(2))])
    assert last is None and len(ranks[0].spans) == 12


def test_coverage_leaves_out_gaps_and_the_span_around_a_step():
    # "forward" and the spans in it cover 9.5 of 10 ms.
    assert timeline_table.coverage(rank_of(*iterations(2))) == pytest.approx(0.95)
    overlap = [("forward", 105, 115, 0), ("iteration", 110, 130, 1), ("conv1", 120, 140, 0)]
    assert timeline_table.coverage(rank_of(*overlap)) == pytest.approx(0.75)


def test_the_table_names_the_slowest_rank_and_the_largest_wait():
    late = [span if span[0] != "wait" else (*span[:2], span[1] + 0.5, 0) for span in iterations(7)]
    ranks = [
        rank_of(*iterations(2), wait=0.012),
        rank_of(*late),
        rank_of(*iterations(3), wait=0.01),
    ]
    assert timeline_table.slowest_rank(ranks) == 0  # the work is equal, so the first rank
    lines = timeline_table.summary(ranks)
    assert lines[0] == "Timeline of 2 iterations, milliseconds per iteration:"
    assert lines[2].split() == ["0", "node1", "1.00", "5.00", "6.00", "1.50", "0.50", "8.00"]
    assert lines[-1] == (
        "Largest wait: 6.00 ms on rank 0 in iteration 2, for a sum over the ranks in forward / "
        "conv1; rank 1 came last"
    )
    busy = ranks[1]._replace(seconds=ranks[1].seconds._replace(compute=0.02))
    lines = timeline_table.summary([ranks[0], busy])
    assert lines[-2] == ("Slowest rank: 1 on node1, with 24 % more work than the mean")


def test_waits_that_other_ranks_do_not_share_name_no_rank():
    gather = LABELS[:3] + [("main", "wait", "gather from rank 1")] + LABELS[4:]
    ranks = [rank_of(*iterations(2))._replace(labels=gather), rank_of(*iterations(5))]
    wait = timeline_table.largest_wait(ranks)
    assert (wait.rank, wait.operation, wait.last_rank) == (0, "gather from rank 1", None)
    both_early = [rank_of(*iterations(2)), rank_of(*iterations(2.0))]
    assert timeline_table.largest_wait(both_early).last_rank is None
