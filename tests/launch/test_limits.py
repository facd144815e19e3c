"""Check that a test which hangs or fails is reported with its name, rank and stack."""

import os
import re

import pytest
from launcher import ROOT, assert_gone, mpirun

# Each process of the session creates a file named by its process ID in the folder of the tests.
HEAD = """
import ctypes, faulthandler, os, pathlib, time
import pytest

(pathlib.Path(__file__).parent / f"{os.getpid()}.pid").touch()
"""
HANGS = """
@pytest.mark.timeout(1)
def test_one_hangs(world):
    if world.rank == 1:
        time.sleep(1000)

@pytest.mark.timeout(1)
def test_the_other_waits(world):
    time.sleep(1000)
"""
FAILS = """
def test_one_fails(world):
    assert world.rank != 1, "an odd rank"
    world.barrier()
"""
SINGLE = """
@pytest.mark.timeout(0.2)
def test_sleeps():
    time.sleep(1000)

@pytest.mark.timeout(2)
def test_its_job_hangs():
    import launcher
    launcher.mpirun(2, "-c", "import time; print('up', flush=True); time.sleep(1000)")

@pytest.fixture
def never_done():
    yield
    time.sleep(1000)

@pytest.mark.timeout(0.2)
def test_hangs_behind(never_done):
    assert False

def test_the_next_one_runs():
    pass
"""
STAYS_IN_C = """
def test_stays_in_c(request):
    alarm = request.config.pluginmanager.get_plugin("limits").timer
    faulthandler.dump_traceback_later(1, exit=True, file=alarm.stderr)
    ctypes.PyDLL(None).sem_wait(ctypes.create_string_buffer(64))
"""


def session(folder, ranks, text):
    """Run tests in a pytest session with the plugins of this session, and return the Result.

    The session has no cache, because the plugins must work without it.
    """
    (folder / "test_made.py").write_text(HEAD + text)
    words = ["-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "conftest"]
    words += ["-p", "no:cacheprovider", "-p", "pytest_timeout", folder]
    paths = [ROOT, *(ROOT / "tests" / name for name in ("", "support", "launch"))]
    env = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins would double the time for imports
    result = mpirun(ranks, *words, env=env)
    assert result.returncode != 0
    assert_gone([path.stem for path in folder.glob("*.pid")])
    return result


def test_a_hang_of_one_rank_is_reported_with_all_stacks(tmp_path):
    head, *stacks = session(tmp_path, 2, HANGS).stderr.split("--- rank ")
    assert "test_made.py::test_one_hangs did not end within its limit of" in head
    assert "s on rank 1 of 2 ===" in head and len(stacks) == 2
    for rank, test in enumerate(["test_the_other_waits", "test_one_hangs"]):
        assert stacks[rank].startswith(f"{rank} of 2, in test_made.py::{test}:")
        assert re.search(rf'test_made.py", line \d+ in {test}\n', stacks[rank])


@pytest.mark.slow("jobs")
def test_a_failure_of_one_rank_ends_the_others(tmp_path):
    error = session(tmp_path, 2, FAILS).stderr
    assert "=== rank 1 of 2: test_made.py::test_one_fails (call) failed ===" in error
    assert "AssertionError: an odd rank" in error


@pytest.mark.slow("jobs")
def test_a_hang_in_one_process_fails_its_test_alone(tmp_path):
    output = re.sub(r"^E +", "", session(tmp_path, None, SINGLE).stdout, flags=re.M)
    assert "3 failed, 1 passed, 1 error" in output
    for name in ("sleeps (call)", "its_job_hangs (call)", "hangs_behind (teardown)"):
        assert f"FAILED test_made.py::test_{name}" in output
    assert output.count("did not end within its limit of") >= 3
    # The output contains the job's output and a line of the stack of each rank.
    assert "--- stdout\nup\nup\n" in output, output
    assert output.count('File "<string>", line 1 in <module>') == 2, output


@pytest.mark.slow("jobs")
def test_a_process_that_ignores_the_alarm_is_ended(tmp_path):
    result = session(tmp_path, None, STAYS_IN_C)
    assert "Timeout (0:00:01)!" in result.stderr
    assert re.search(r'test_made.py", line \d+ in test_stays_in_c\n', result.stderr)
