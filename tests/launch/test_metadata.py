"""Test that ranks make few file-system calls, and that only rank 0 inspects data and results."""

import os
import re
import shutil
import subprocess

import jobs
import launcher
import pytest

pytestmark = pytest.mark.slow("jobs")

# A shell command that runs strace and writes the calls of each rank to a separate file.
TRACE = """
exec strace -f -y -qq -e trace=%file,getdents64 -o "$0-${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" "$@"
"""
CALL = re.compile(r'\d+ +(\w+)\((?:AT_FDCWD\S*, )?(?:(\d+)<([^>]*)>|"([^"]*)")(.*)')
MOST_CALLS = 3000  # largest number of calls that a rank may make in one iteration, except on images


@pytest.fixture(scope="module")
def calls(pictures, tmp_path_factory):
    """Return the system calls of a training run on 2 ranks, and the folder of the run.

    The calls are {rank: [(name, path, rest of the line)]}.
    """
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode:
        pytest.skip("strace may not trace processes here")
    folder = tmp_path_factory.mktemp("traced")
    words = ["--batch-size", 50, "--max-iterations", 1]
    words = jobs.command("train", *words, network="digits", data=pictures, out=folder / "run")
    wrapper = ("sh", "-c", TRACE, str(folder / "trace"))
    for _ in range(2):  # ignore the first run, which compiles modules to bytecode
        shutil.rmtree(folder / "run", ignore_errors=True)
        with launcher.start(2, *words, env=jobs.without_plots(), wrapper=wrapper) as job:
            result = launcher.finish(job)
        assert result.returncode == 0, result.stderr
    traces = {}
    for rank in (0, 1):
        traces[rank] = []
        for line in (folder / f"trace-{rank}").read_text().splitlines():
            if match := CALL.match(line):
                name, _, of_descriptor, path, rest = match.groups()
                traces[rank].append((name, of_descriptor or path, rest))
    return traces, str(folder / "run")


def below(folder, trace):
    return [call for call in trace if call[1] == folder or call[1].startswith(f"{folder}/")]


def looks(data, trace):
    """Return the calls that list a folder of images or get the status of a path."""
    calls = [call for call in below(data, trace) if "AT_EMPTY_PATH" not in call[2]]  # skip fstat
    return [call for call in calls if call[0] != "openat" or "O_DIRECTORY" in call[2]]


def test_only_rank_0_looks_at_the_images(calls, pictures):
    traces, _ = calls
    assert looks(str(pictures), traces[0])
    assert looks(str(pictures), traces[1]) == []
    opened = {path for name, path, _ in below(str(pictures), traces[1]) if name == "openat"}
    assert opened  # rank 1 reads the images of its share


def test_only_rank_0_touches_the_folder_of_the_run(calls):
    traces, out = calls
    assert len(below(out, traces[0])) > 10
    assert below(out, traces[1]) == []


def test_a_start_makes_few_calls(calls, pictures):
    traces, _ = calls
    counted = [call for call in traces[1] if not call[1].startswith(str(pictures))]
    assert len(counted) <= MOST_CALLS
