"""Test the number of threads of each rank, and the warnings about too few cores."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import limits
import pytest

from mpidl import backends, startup
from mpidl.backends import settings
from mpidl.ranks import thread_budget
from mpidl.ranks.thread_budget import (
    Cores,
    OtherLoad,
    assign_threads,
    available_cores,
    busy_share,
    ignored_variable,
)


def bound(*ranks, quota=None):
    """Return (host, Cores) of ranks on one host. `quota` is the host's CPU quota in cores."""
    return [("node0", Cores(tuple(cores), quota)) for cores in ranks]


# The quota also applies if the ranks are bound to separate cores.
HALVES_OF_64 = bound(range(32), range(32, 64), quota=4)


@pytest.mark.parametrize(
    "ranks, threads, expected, warning",
    [
        (bound(range(8)), 0, [8], ""),
        (bound(range(8), range(8)), 0, [4, 4], ""),
        (bound(range(8), range(8)), 3, [3, 3], ""),
        (bound(range(8), range(8)), 5, [5, 5], "2 rank(s) x 5 thread(s) on node0 share 8 core(s)"),
        (bound(range(8), range(8), range(8)), 0, [2, 2, 2], ""),
        (bound(range(4), range(4, 8)), 0, [4, 4], ""),
        (bound(range(4), range(4, 8)), 4, [4, 4], ""),
        (bound([0], [1], [2, 3]), 0, [1, 1, 2], ""),
        (
            bound([0], [1, 2, 3]),
            2,
            [2, 2],
            "rank 0 on node0 runs 2 threads but may use only 1 core(s)",
        ),
        (bound(*[range(2)] * 3), 0, [1] * 3, "3 rank(s) x 1 thread(s) on node0 share 2 core(s)"),
        (bound(range(64), quota=4), 0, [4], ""),
        (bound(range(64), quota=4), 8, [8], "1 rank(s) x 8 thread(s) on node0 share 4 core(s)"),
        (bound(range(64), range(64), quota=4), 0, [2, 2], ""),
        (HALVES_OF_64, 0, [2, 2], ""),
        (HALVES_OF_64, 32, [32, 32], "2 rank(s) x 32 thread(s) on node0 share 4 core(s)"),
        ([("node0", Cores(range(4))), ("node1", Cores(range(8)))], 0, [4, 8], ""),
    ],
)
def test_ranks_divide_their_cores_and_warn_once(ranks, threads, expected, warning):
    """With 0 threads, ranks divide their common cores. Too many threads cause one warning."""
    counts, lines = assign_threads(ranks, threads)
    assert counts == expected
    assert len(lines) == bool(warning) and warning in "".join(lines)
    assert all(line.startswith("warning: ") for line in lines)


def test_cores_of_this_process():
    allowed, quota = available_cores()
    assert len(allowed) >= 1 and (quota is None or quota >= 1)


@pytest.mark.parametrize(
    "files, quota",
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "20000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_control_groups_of_both_versions(files, quota, tmp_path):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    cores = available_cores(tmp_path)
    assert cores == (tuple(sorted(os.sched_getaffinity(0))), quota)
    common = Path(__file__).resolve().parents[2] / "run" / "common.sh"
    script = 'set -eu; . "$1"; count_cores "$2"'
    command = ["bash", "-c", script, "bash", common, tmp_path]
    count = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(count) == min(len(cores.allowed), quota or len(cores.allowed))


@pytest.mark.parametrize("name, setting", [("threads", 0), ("winograd", "on")])
def test_settings_that_cannot_be(name, setting):
    before = settings.threads, settings.winograd
    with pytest.raises(ValueError, match=f"{name} must be"):
        backends.configure(**{name: setting})
    assert (settings.threads, settings.winograd) == before


@pytest.mark.parametrize("value", ["", "1", "0", "2", "2,1", "many"])
def test_a_variable_that_asks_for_nothing_else(monkeypatch, value):
    monkeypatch.setattr(startup, "omp_num_threads", value)
    assert ignored_variable(threads=2) == []


def test_an_ignored_variable_is_named(monkeypatch):
    """The message names the user's value, although the package sets the variable to 1."""
    program = "import mpidl; print(mpidl.startup.omp_num_threads, os.environ['OMP_NUM_THREADS'])"
    result = subprocess.run(
        [sys.executable, "-c", f"import os; {program}"],
        env=os.environ | {"OMP_NUM_THREADS": "4"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "4 1\n"
    monkeypatch.setattr(startup, "omp_num_threads", "4")
    (line,) = ignored_variable(threads=2)
    assert line.startswith(
        "note: OMP_NUM_THREADS=4 has no effect, each rank computes on 2 thread(s)"
    )


@pytest.fixture
def times_of_cores(monkeypatch, tmp_path):
    """Return a function that writes the kernel's file and changes it during the measurement.

    The process may use cores 1 and 3 of 4. Its arguments are the ticks in which each of the two
    cores was busy, idle and waiting for a disk. Cores 0 and 2 are always busy.
    """
    path, changes = tmp_path / "stat", []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 3})
    monkeypatch.setattr(thread_budget.time, "sleep", lambda seconds: path.write_text(changes[0]))

    def write(first, second):
        texts = []
        for elapsed in (0, 1):
            lines = ["cpu  9 9 9 9 9 9 9 9 9 9"]
            for core in range(4):
                busy, idle, waiting = {1: first, 3: second}.get(core, (100, 0, 0))
                ticks = [50 + elapsed * count for count in (busy, 0, 0, idle, waiting, 0, 0, 0)]
                lines.append(f"cpu{core} {' '.join(map(str, ticks))} 7 7")
            texts.append("\n".join([*lines, "intr 5 0 0", "ctxt 77", ""]))
        path.write_text(texts[0])
        changes[:] = texts[1:]
        return path

    return write


@pytest.mark.parametrize(
    "first, second, expected",
    [
        ((0, 100, 0), (0, 60, 40), 0.0),
        ((100, 0, 0), (100, 0, 0), 1.0),
        ((30, 70, 0), (0, 100, 0), 0.15),
        ((0, 0, 0), (0, 0, 0), 0.0),
    ],
)
def test_the_load_of_this_processs_cores(times_of_cores, first, second, expected):
    share = busy_share(statistics=times_of_cores(first, second))
    assert share == pytest.approx(expected, abs=1e-12)


def test_the_time_of_children_is_not_the_load_of_other_programs(times_of_cores, monkeypatch):
    """Of 200 ticks on two cores, 110 are busy, and the children used 30 of them."""
    seconds = [5.0, 5.0 + 30 / os.sysconf("SC_CLK_TCK")]
    used = SimpleNamespace(ru_utime=seconds[0], ru_stime=1.0)
    monkeypatch.setattr(thread_budget.resource, "getrusage", lambda processes: used)
    load = OtherLoad(times_of_cores((80, 20, 0), (30, 40, 30)))
    assert load.share() == 0.0  # no time has passed
    thread_budget.time.sleep(0)  # writes the later times
    assert load.share() == pytest.approx(110 / 200)
    used.ru_utime = seconds[1]
    assert load.share() == pytest.approx(80 / 200)
    assert OtherLoad("absent").share() == 0.0


def test_an_unknown_load_is_none_at_all(tmp_path):
    assert busy_share(0, tmp_path / "absent") == 0.0
    (tmp_path / "stat").write_text("cpu0 a b c\n" * 2)
    assert busy_share(0, tmp_path / "stat") == 0.0


def test_a_busy_process_is_seen():
    """A process that computes all the time is measured with the kernel's own file."""
    words = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(words) for _ in os.sched_getaffinity(0)]
    try:
        limits.wait_until(lambda: busy_share(0.2) > thread_budget.BUSY_SHARE)
    finally:
        for process in processes:
            process.kill()
            process.wait()
