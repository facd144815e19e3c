"""Test the check for free space in /dev/shm, and the removal of segments of dead jobs."""

import mmap
import os
import subprocess
import sys
import time

import pytest

from mpidl.errors import UserError
from mpidl.ranks import shared_segments

HOLD = """
import mmap, os, sys
file = open(sys.argv[1], "r+b")
memory = mmap.mmap(file.fileno(), 0)
file.close()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder with a segment that is old enough to be removed in any PID namespace."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    old_segment(tmp_path / "mpich_shm_5f3a_0")
    return tmp_path


LAUNCHED = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def old_segment(path):
    path.write_bytes(bytes(mmap.PAGESIZE))
    os.utime(path, times=(time.time() - 3600,) * 2)
    return path


def test_a_dead_segment_is_removed(folder):
    old_segment(folder / "another_program")
    assert shared_segments.remove_dead(str(folder)) == ["mpich_shm_5f3a_0"]
    assert os.listdir(folder) == ["another_program"]


def test_the_segment_of_a_live_process_stays(folder):
    path = old_segment(folder / "mpich_shm_77_0")
    words = [sys.executable, "-S", "-c", HOLD, path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        assert shared_segments.remove_dead(str(folder)) == ["mpich_shm_5f3a_0"]
        assert path.exists()
        process.communicate()
    assert shared_segments.remove_dead(str(folder)) == ["mpich_shm_77_0"]


def test_a_young_segment_stays_in_a_container(folder, monkeypatch):
    """A young segment may belong to a process in another PID namespace that shares the folder."""
    path = old_segment(folder / "mpich_shm_77_0")
    os.utime(path, times=(time.time() - 30,) * 2)
    monkeypatch.setattr(shared_segments, "_sees_all_processes", lambda: False)
    assert shared_segments.remove_dead(str(folder)) == ["mpich_shm_5f3a_0"]
    monkeypatch.setattr(shared_segments, "_sees_all_processes", lambda: True)
    assert shared_segments.remove_dead(str(folder)) == ["mpich_shm_77_0"]


def test_dead_segments_of_ucx_are_removed_where_all_processes_are_seen(folder, monkeypatch):
    """In containers, UCX's segments are kept, because an unseen rank may open them at any time."""
    old_segment(folder / "ucx_shm_posix_3c7d16b0")
    monkeypatch.setattr(shared_segments, "_sees_all_processes", lambda: False)
    assert shared_segments.remove_dead(str(folder)) == ["mpich_shm_5f3a_0"]
    monkeypatch.setattr(shared_segments, "_sees_all_processes", lambda: True)
    assert shared_segments.remove_dead(str(folder)) == ["ucx_shm_posix_3c7d16b0"]


def test_only_the_first_rank_of_a_host_removes(folder, monkeypatch):
    monkeypatch.setenv("MPI_LOCALRANKID", "1")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    shared_segments.make_room("MPICH", str(folder))
    assert os.listdir(folder) == ["mpich_shm_5f3a_0"]
    monkeypatch.setenv("MPI_LOCALRANKID", "0")
    shared_segments.make_room("MPICH", str(folder))
    assert os.listdir(folder) == []


def test_too_little_room(folder, monkeypatch):
    monkeypatch.setenv("MPI_LOCALRANKID", "0")
    monkeypatch.setenv("MPI_LOCALNRANKS", "3")
    monkeypatch.setattr(shared_segments, "BYTES_PER_RANK", {"MPICH": 1 << 60})
    text = rf"^{folder} on host .*: expected \d+\.0 MB free .* between 3 rank\(s\), found \d+\.\d; "
    with pytest.raises(UserError, match=text):
        shared_segments.make_room("MPICH", str(folder))
    shared_segments.make_room("Open MPI", str(folder))
    shared_segments.make_room("MPICH", str(folder / "missing"))


def test_the_segments_of_this_start_count_as_room(folder, monkeypatch):
    """If a faster rank on this host has already allocated segments, they count as free space."""
    status = os.statvfs(folder)
    room = status.f_bavail * status.f_frsize
    (folder / "mpich_shm_77_0").write_bytes(bytes(8 << 20))
    old_segment(folder / "mpich_shm_78_0")
    now = time.time()
    assert shared_segments._bytes_since(now, str(folder)) == 8 << 20
    assert shared_segments._bytes_since(now + 60, str(folder)) == 0
    assert abs(shared_segments._start_time() - now) < 3600
    monkeypatch.setattr(shared_segments, "BYTES_PER_RANK", {"MPICH": room + (1 << 60)})
    monkeypatch.setattr(shared_segments, "_bytes_since", lambda *_: 1 << 61)
    shared_segments.make_room("MPICH", str(folder))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (0, 1)),
        ({"MPI_LOCALRANKID": 1, "MPI_LOCALNRANKS": 4}, (1, 4)),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 3}, (2, 3)),
        (
            {
                **{"SLURM_LOCALID": 0, "PMI_SIZE": 9, "SLURM_NODEID": 2},
                "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
            },
            (0, 1),
        ),
        (
            {
                **{"SLURM_LOCALID": 3, "PMI_SIZE": 9, "SLURM_NODEID": 1},
                "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
            },
            (3, 4),
        ),
        ({"SLURM_LOCALID": 0}, (0, 1)),  # in a job's batch script
    ],
)
def test_the_ranks_of_a_host(monkeypatch, variables, expected):
    for name in (*LAUNCHED, "PMI_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    assert shared_segments.local_ranks() == expected
