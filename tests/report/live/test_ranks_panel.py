"""Test the columns of the ranks panel."""

import numpy as np
import pytest

pytest.importorskip("bokeh", reason="Bokeh is not installed: pip install 'mpidl[monitor]'")
PHASES = ("compute", "input", "sum", "wait", "other")
RECORD = {
    "kind": "ranks",
    "compute": [1.0, 1.5],
    "input": [0.25, 0.0],
    "sum": [0.25, 0.1],
    "wait": [0.25, 0.2],
    "other": [0.25, 0.2],
    "memory": [100e6, 200e6],
    "device": ["cpu, 2 threads", "cpu, 1 thread"],
}


def columns_of(record):
    from mpidl.report.live import ranks_panel

    return ranks_panel.columns_of(record)


def test_shares_of_a_rank_add_up():
    data = columns_of(RECORD)
    np.testing.assert_allclose(data["compute"], [50, 75])
    np.testing.assert_allclose(data["other"], [12.5, 10])
    np.testing.assert_allclose(sum(data[name] for name in PHASES), [100, 100])
    assert data["device"] == RECORD["device"] and list(data["memory"]) == [100, 200]
    end = np.zeros(2)
    for name in PHASES:  # each bar begins at the end of the previous bar
        np.testing.assert_allclose(data[f"{name}_start"], end)
        end = data[f"{name}_end"]
        np.testing.assert_allclose(end - data[f"{name}_start"], data[name])


@pytest.mark.parametrize(
    "record",
    [{}, RECORD | {"compute": []}, RECORD | {"compute": None}, RECORD | {"compute": "x"}],
)
def test_a_record_without_ranks_has_no_rows(record):
    assert all(len(column) == 0 for column in columns_of(record).values())


def test_lists_of_other_lengths_are_filled():
    data = columns_of(RECORD | {"wait": [None], "memory": [], "device": None, "sum": [1, 2, 3]})
    assert {len(column) for column in data.values()} == {2}
    assert list(data["wait"]) == [0, 0] and np.isnan(data["memory"]).all()


def test_the_panel_shows_the_last_record():
    """The panel shows the last record. Device names are text, not HTML."""
    from mpidl.report.live.ranks_panel import RanksPanel
    from mpidl.report.live.run import LiveRun

    run = LiveRun("run", "run")
    panel = RanksPanel([run])
    panel.update()
    assert panel.note.visible and not panel.table.visible
    for compute, share in ((0.5, "40.0"), (2.25, "75.0")):
        run.ranks = RECORD | {"compute": [compute, 1.0], "device": ["<b>", "cpu"]}
        run.ranks |= {"other": [0.0, 0.0]}
        panel.update()
        assert panel.table.visible and not panel.note.visible
        assert f"<td>{share}</td>" in panel.table.text
        assert "<td>&lt;b&gt;</td>" in panel.table.text
