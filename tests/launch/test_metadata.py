"""Test that ranks make few file-system calls, and that only rank 0 inspects data and results."""

import os
import re
import shutil
import subprocess

import jobs
import launcher
import pytest
from mpi4py import MPI

pytestmark = pytest.mark.slow("jobs")

# A shell command that runs strace and writes the calls of each rank to a separate file.
TRACE = """
exec strace -f -y -qq -e trace=%file,getdents64 -o "$0-${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" "$@"
"""
CALL = re.compile(r'\d+ +(\w+)\((?:AT_FDCWD\S*, )?(?:(\d+)<([^>]*)>|"([^"]*)")(.*)')
MOST_CALLS = 3000  # of a rank until it has opened its images, without the calls on images
NO_PLOTS = jobs.without_plots()["PYTHONPATH"].split(os.pathsep)[0]
# For each number of hosts, the number of ranks and options of mpirun. MPICH regards two names as
# two hosts. Rank 1 is not the first rank of its host, which also inspects the host's processes.
JOBS = {
    "one host": (2, ()),
    "two hosts": (3, ("-launcher", "fork", "-hosts", "left:2,right:1")),
}


@pytest.fixture(scope="module", params=JOBS)
def calls(request, pictures, tmp_path_factory):
    """Return the system calls of a training run on several ranks, and the folder of the run.

    The calls are {rank: [(name, path, rest of the line)]}.
    """
    if request.param == "two hosts" and MPI.get_vendor()[0] != "MPICH":
        pytest.skip("only MPICH's mpirun can start the ranks of two hosts on one machine")
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    if subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True).returncode:
        pytest.skip("strace may not trace processes here")
    folder = tmp_path_factory.mktemp("traced")
    words = ["--batch-size", 50, "--max-iterations", 1]
    words = jobs.command("train", *words, network="digits", data=pictures, out=folder / "run")
    wrapper = ("sh", "-c", TRACE, str(folder / "trace"))
    ranks, options = JOBS[request.param]
    for _ in range(2):  # ignore the first run, which compiles modules to bytecode
        shutil.rmtree(folder / "run", ignore_errors=True)
        env = jobs.without_plots() | {"PYTHONDONTWRITEBYTECODE": ""}
        with launcher.start(ranks, *words, env=env, wrapper=wrapper, options=options) as job:
            result = launcher.finish(job)
        assert result.returncode == 0, result.stderr
    traces = {}
    for rank in range(ranks):
        traces[rank] = []
        for line in (folder / f"trace-{rank}").read_text().splitlines():
            if match := CALL.match(line):
                name, _, of_descriptor, path, rest = match.groups()
                traces[rank].append((name, of_descriptor or path, rest))
    if MPI.get_vendor()[0] == "MPICH":  # its library UCX compares networks only between hosts
        compares_networks = bool(below("/proc/net/route", traces[1]))
        assert compares_networks == (request.param == "two hosts")
    return traces, str(folder / "run")


def below(folder, trace):
    return [call for call in trace if call[1] == folder or call[1].startswith(f"{folder}/")]


def looks(data, trace):
    """Return the calls that list a folder of images or get the status of a path."""
    # Skip fstat, which has an empty path. If another thread interrupts the call, no flags follow.
    calls = [call for call in below(data, trace) if not call[2].startswith(', "",')]
    return [call for call in calls if call[0] != "openat" or "O_DIRECTORY" in call[2]]


def test_only_rank_0_looks_at_the_images(calls, pictures):
    traces, _ = calls
    assert looks(str(pictures), traces[0])
    for rank in range(1, len(traces)):
        assert looks(str(pictures), traces[rank]) == []
        opened = {path for name, path, _ in below(str(pictures), traces[rank]) if name == "openat"}
        assert opened  # the rank reads the images of its share


def test_only_rank_0_touches_the_folder_of_the_run(calls):
    traces, out = calls
    assert len(below(out, traces[0])) > 10
    assert all(below(out, traces[rank]) == [] for rank in range(1, len(traces)))


def test_a_start_makes_few_calls(calls, pictures):
    traces, _ = calls
    networks = {path for _, path, _ in below("/sys/class/net", traces[1]) if path.count("/") == 4}
    if len(networks) > 2:
        pytest.skip(f"UCX makes about 350 calls per network device, and there are {len(networks)}")
    is_of_image = [call[1].startswith(f"{pictures}/") for call in traces[1]]
    last = max(i for i, of_image in enumerate(is_of_image) if of_image)
    of_tests = len(below(NO_PLOTS, traces[1]))  # imports also search this folder
    assert last + 1 - sum(is_of_image) - of_tests <= MOST_CALLS
