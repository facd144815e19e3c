"""Run pytest under mpirun: every rank runs every test, rank 0 reports, a failure ends the job.

`python -m pytest` runs all tests on one rank. `mpirun -n 3 python -m pytest tests` runs the tests
with the fixture `world` on three ranks. If a rank failed without ending the job, the other ranks
would hang in a collective call. Therefore the first rank that fails prints its failure and aborts
all ranks.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import limits
import progress
import pytest

from mpidl.backends import settings  # before NumPy: mpidl limits the BLAS to one thread
from mpidl.backends.cpu import builds
from mpidl.ranks import serial
from mpidl.report import plots

# Read before MPI is initialized: Open MPI also sets these variables in a process without mpirun.
LAUNCHED_RANKS = os.environ.get("PMI_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE")

# With this variable, Python writes line ends separately, and mpirun mixes the ranks' lines.
os.environ.pop("PYTHONUNBUFFERED", None)

MPI = serial.load()  # initializes MPI
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
# Tests that run on one rank only: tests that start mpirun, tests of kernels on an emulated GPU,
# and test files without the word `world`.
TESTS = Path(__file__).resolve().parent
SINGLE_RANK = {TESTS / "backends" / "gpu", TESTS / "launch", TESTS / "soak"}
SINGLE_RANK |= {path for path in TESTS.rglob("test_*.py") if "world" not in path.read_text()}


@pytest.fixture(scope="session")
def world():
    """A world of the ranks that run this session."""
    from mpidl.ranks.world import World

    return World()


@pytest.fixture(autouse=True)
def _settings_are_restored():
    """Restore the backends' settings after each test."""
    before = dict(vars(settings))
    yield
    if settings.threads != before["threads"] and builds.kernels() is not None:
        builds.kernels().set_threads(before["threads"])
    vars(settings).update(before)


@pytest.fixture
def without_plots(monkeypatch):
    """Do not draw progress.png, because drawing takes longer than most tests' training runs."""
    monkeypatch.setattr(plots, "progress", lambda *paths: False)


def pytest_addoption(parser):
    parser.addoption(
        "--slow",
        metavar="PART",
        help="run the slow cross-checks of this part instead of the other tests; `all`: all tests",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest's plugins create the folders and the reporter
def pytest_configure(config):
    config.addinivalue_line("markers", "slow(part): a cross-check that --slow PART selects")
    config.addinivalue_line("markers", "slow_on_ranks: under mpirun, slow(ranks)")
    config.addinivalue_line("markers", "timeout(seconds): time limit for one test, see limits.py")
    if LAUNCHED_RANKS and int(LAUNCHED_RANKS) != SIZE:
        raise pytest.UsageError(
            f"mpirun started {LAUNCHED_RANKS} ranks, {MPI.get_vendor()[0]} counts {SIZE}: "
            "use the mpirun of mpi4py's MPI library"
        )
    if SIZE > 1:
        base = config.option.basetemp
        if RANK == 0 and base is None:
            base = tempfile.mkdtemp(prefix="mpidl-tests-")
        base = Path(MPI.COMM_WORLD.bcast(base))
        base.mkdir(parents=True, exist_ok=True)
        config.option.basetemp = str(base / f"rank-{RANK}")
        timer = limits.Watch(base, RANK, SIZE, MPI.COMM_WORLD.barrier)
    else:
        timer = limits.Alarm()
    config.pluginmanager.register(limits.Limits(timer), "limits")
    if RANK > 0:
        config.pluginmanager.set_blocked("terminalreporter")


@pytest.hookimpl(trylast=True)  # after the terminal reporter has been created
def pytest_sessionstart(session):
    config = session.config
    if RANK > 0:
        # Only rank 0 writes pytest's cache. All ranks read the cache, so they select the same
        # tests. With `-p no:cacheprovider`, the configuration has no cache.
        if hasattr(config, "cache"):
            config.cache.set = lambda key, value: None
    elif not hasattr(config, "workerinput"):
        config.pluginmanager.register(progress.Progress(config), "progress")


def pytest_report_header(config):
    library = " ".join(map(str, MPI.get_vendor()))
    lines = [f"MPI: {library}, {SIZE} rank(s)"]
    if LAUNCHED_RANKS:
        lines.append("not run under mpirun: tests without the fixture `world`")
    return lines


def pytest_ignore_collect(collection_path, config):
    path = collection_path.resolve()
    if LAUNCHED_RANKS and not SINGLE_RANK.isdisjoint([path, *path.parents]):
        return True


def pytest_collection_modifyitems(config, items):
    """Select the tests that `--slow` names, and sort them: the longest files come first."""
    part = config.getoption("--slow")
    selected = [item for item in items if _is_selected(item, part)]
    deselected = set(items).difference(selected)
    if deselected:
        config.hook.pytest_deselected(items=list(deselected))
    durations = progress.table().get(progress.Facts.of_environment().name, {})

    def seconds(item):
        return durations.get(progress.file_of(item.nodeid), [0])[0]

    items[:] = sorted(selected, key=seconds, reverse=True)


def _is_selected(item, part):
    if LAUNCHED_RANKS and "world" not in item.fixturenames:
        return False  # all ranks would repeat the same test
    marks = [mark.args[0] for mark in item.iter_markers("slow")]
    if LAUNCHED_RANKS and item.get_closest_marker("slow_on_ranks"):
        # This test checks one rank. Another test compares several ranks' bytes with one rank's.
        marks.append("ranks")
    if part is None:
        return not marks
    return part == "all" or part in marks


def pytest_collection_finish(session):
    """Check that all ranks run the same tests. Otherwise, ranks would wait forever."""
    os.environ.pop(progress.VARIABLE, None)  # it is not for sessions that a test starts
    if SIZE > 1:
        names = "\n".join(item.nodeid for item in session.items)
        digests = MPI.COMM_WORLD.allgather(hashlib.sha256(names.encode()).hexdigest())
        if len(set(digests)) > 1:
            raise pytest.UsageError("the ranks collected different tests")
        session.config.pluginmanager.get_plugin("limits").timer.number(session.items)


def pytest_runtest_logreport(report):
    if report.failed:
        _end_the_job(f"{report.nodeid} ({report.when})", report)


def pytest_collectreport(report):
    if report.failed:
        _end_the_job(f"{report.nodeid} (collection)", report)


def pytest_internalerror(excrepr):
    _end_the_job("pytest's own error", excrepr)


def _end_the_job(title, report):
    """Print a failure of this rank and abort all ranks. A session on one rank continues."""
    if SIZE == 1:
        return
    text = getattr(report, "longreprtext", None) or str(report)
    for heading, content in getattr(report, "sections", ()):
        text += f"\n--- {heading} ---\n{content}"
    sys.stdout.flush()
    sys.stderr.write(f"\n=== rank {RANK} of {SIZE}: {title} failed ===\n{text}\n")
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    if SIZE > 1 and exitstatus == pytest.ExitCode.OK:
        session.config.pluginmanager.get_plugin("limits").timer.enter_last()
        MPI.COMM_WORLD.barrier()  # other ranks may use a folder of this rank
        folder = Path(session.config.option.basetemp)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # fails while the folder has files of other ranks
            folder.parent.rmdir()
