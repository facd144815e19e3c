"""NVRTC and the files that keep what it compiled: once a node, whatever dies or is cut short."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from mpidl.backends.gpu import cubins, kernels, nvrtc
from mpidl.errors import UserError

ROOT = Path(__file__).parents[3]
needs_nvrtc = pytest.mark.skipif(
    not nvrtc.installed(), reason="no NVRTC: pip install nvidia-cuda-nvrtc"
)
# One of several processes at once: it notes that it compiles, which takes a while.
PROCESS = """
import os, sys, time
from mpidl.backends.gpu import cubins

def make():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(float(sys.argv[2]))
    return b"cubin" * 1000, "log"

assert cubins.cached("some.cubin", make) == (b"cubin" * 1000, "log")
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """The folder of the cubins, which nobody else uses."""
    monkeypatch.setenv("MPIDL_CACHE", str(tmp_path))
    monkeypatch.setattr(cubins, "_warned", False)
    return Path(cubins.folder())


def start(counter, seconds):
    command = [sys.executable, "-c", PROCESS, str(counter), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT)


def wait_for(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def made(value=b"abc"):
    return lambda: (value, "log")


def refused():
    raise AssertionError("this should have been kept")


def test_processes_at_once_compile_it_once(tmp_path, place):
    counter = tmp_path / "counter"
    processes = [start(counter, 0.5) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert len(counter.read_text().split()) == 1
    assert [path.name for path in place.iterdir()] == ["some.cubin"]
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_compiler_that_is_killed_holds_nobody_up(tmp_path):
    counter = tmp_path / "counter"
    first = start(counter, 100)
    wait_for(lambda: counter.exists() and counter.read_text())
    others = [start(counter, 0.1) for _ in range(2)]
    time.sleep(0.3)
    assert all(process.poll() is None for process in others)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert [process.wait(60) for process in others] == [0] * 2
    assert len(counter.read_text().split()) == 2


@pytest.mark.parametrize("size", [0, 1, 40, 90, -1])
def test_a_file_that_was_cut_short_is_made_anew(place, size):
    value = bytes(range(100))
    cubins.cached("a.cubin", made(value))
    assert cubins.cached("a.cubin", refused) == (value, "log")
    whole = (place / "a.cubin").read_bytes()
    (place / "a.cubin").write_bytes(whole[:size])
    assert cubins.cached("a.cubin", made(value)) == (value, "log")
    assert (place / "a.cubin").read_bytes() == whole


def test_a_file_that_was_changed_is_made_anew(place):
    cubins.cached("a.cubin", made())
    whole = bytearray((place / "a.cubin").read_bytes())
    whole[1] ^= 1
    (place / "a.cubin").write_bytes(whole)
    assert cubins.cached("a.cubin", made()) == (b"abc", "log")
    assert cubins.cached("a.cubin", refused) == (b"abc", "log")


def test_what_does_not_compile_leaves_nothing_behind(place):
    def fails():
        raise UserError("no")

    with pytest.raises(UserError):
        cubins.cached("a.cubin", fails)
    assert list(place.iterdir()) == []


def test_old_files_go(place):
    cubins.cached("old.cubin", made())
    os.utime(place / "old.cubin", (1, 1))
    cubins.cached("new.cubin", made())
    assert [path.name for path in place.iterdir()] == ["new.cubin"]


def no_folder(place):
    place.write_text("a file where the folder should be")


def open_to_others(place):
    place.mkdir()
    place.chmod(0o777)


def linked(place):
    (place.parent / "elsewhere").mkdir(mode=0o700)
    place.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [no_folder, open_to_others, linked])
def test_a_folder_that_cannot_be_used_is_told_once(place, spoil):
    spoil(place)
    with pytest.warns(RuntimeWarning, match="compiled anew by every process"):
        assert cubins.cached("a.cubin", made()) == (b"abc", "log")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubins.cached("a.cubin", made()) == (b"abc", "log")
    assert not place.is_dir() or list(place.iterdir()) == []


def test_a_folder_of_somebody_else_is_not_used(place, monkeypatch):
    cubins.cached("a.cubin", made(b"theirs"))
    theirs = place.rename(place.with_name("theirs"))
    monkeypatch.setattr(cubins, "folder", lambda: str(theirs))
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="this user alone"):
        assert cubins.cached("a.cubin", made(b"mine")) == (b"mine", "log")


@pytest.mark.parametrize("name", ["mkstemp", "fsync"])
def test_a_full_disk_is_told_once(place, monkeypatch, name):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cubins.tempfile if name == "mkstemp" else os, name, full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert cubins.cached("a.cubin", made()) == (b"abc", "log")
    assert list(place.iterdir()) == []


def test_without_locks_each_compiles(monkeypatch):
    def none(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cubins.fcntl, "flock", none)
    with pytest.warns(RuntimeWarning, match="No locks available"):
        assert cubins.cached("a.cubin", made()) == (b"abc", "log")
    assert cubins.cached("a.cubin", refused) == (b"abc", "log")


def test_without_mpidl_cache_it_is_the_temporary_folder(monkeypatch):
    monkeypatch.delenv("MPIDL_CACHE")
    monkeypatch.setattr(cubins.tempfile, "gettempdir", lambda: "/scratch")
    assert cubins.folder() == f"/scratch/mpidl-cubins-{os.getuid()}"


@needs_nvrtc
def test_a_cubin_is_kept_under_all_that_it_is_made_of(place, monkeypatch):
    unit = kernels.Unit("program")
    image = nvrtc.cubin(unit, "sm_80")
    assert image.startswith(b"\x7fELF")
    called = []
    compiler = nvrtc.compile
    monkeypatch.setattr(nvrtc, "compile", lambda *args: called.append(args) or compiler(*args))
    assert nvrtc.cubin(unit, "sm_80") == image and not called
    assert nvrtc.cubin(unit, "sm_90") != image and len(called) == 1
    nvrtc.cubin(unit._replace(defines=(("SOMETHING", 1),)), "sm_80")
    assert len(called) == 2
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-lineinfo"))
    nvrtc.cubin(unit, "sm_80")
    assert len(called) == 3 and len(list(place.iterdir())) == 4


@needs_nvrtc
def test_what_the_compiler_says_is_told_in_a_line():
    text = 'extern "C" __global__ void f(float* x) {\n#line 7 "pool.cu"\n *x = nothing; }'
    with pytest.raises(UserError) as raised:
        nvrtc.compile(text, "sm_80")
    said = str(raised.value)
    assert 'pool.cu(7): error: identifier "nothing" is undefined' in said and "\n" not in said


@needs_nvrtc
def test_definitions_reach_the_compiler():
    text = 'extern "C" __global__ void f(float* x) { static_assert(N == 3, "N"); }'
    nvrtc.compile(text, "sm_80", (("N", 3),))
    with pytest.raises(UserError):
        nvrtc.compile(text, "sm_80", (("N", 4),))


@needs_nvrtc
def test_an_architecture_that_nobody_knows():
    with pytest.raises(UserError, match="no NVRTC compiles for sm_35; found "):
        nvrtc.find("sm_35")


class Pretended:
    def __init__(self, version, architectures):
        self.version, self.architectures, self.path = version, architectures, "libnvrtc.so"


@pytest.mark.parametrize(
    "architecture, driver, expected",
    [("sm_90", 0, 13), ("sm_70", 0, 12), ("sm_90", 13, 13), ("sm_90", 14, 13), ("sm_90", 12, 12)],
)
def test_the_newest_that_the_driver_can_run(monkeypatch, architecture, driver, expected):
    both = Pretended((12, 9), (70, 80, 90)), Pretended((13, 0), (80, 90))
    monkeypatch.setattr(nvrtc, "installed", lambda: both)
    monkeypatch.setattr(nvrtc.discovery, "driver_version", lambda: 1000 * driver)
    nvrtc._find.cache_clear()
    try:
        assert nvrtc.find(architecture).version[0] == expected
    finally:
        nvrtc._find.cache_clear()


def test_a_driver_that_is_older_than_nvrtc(monkeypatch):
    monkeypatch.setattr(nvrtc, "installed", lambda: (Pretended((13, 0), (90,)),))
    monkeypatch.setattr(nvrtc.discovery, "driver_version", lambda: 12040)
    nvrtc._find.cache_clear()
    try:
        with pytest.raises(UserError, match="the driver runs CUDA 12, and NVRTC is newer"):
            nvrtc.find("sm_90")
    finally:
        nvrtc._find.cache_clear()


@pytest.mark.parametrize("named, expected", [("", "pip install nvidia-cuda-nvrtc"), ("/no", "/no")])
def test_no_nvrtc_is_told_with_what_to_do(tmp_path, named, expected):
    env = os.environ | {"MPIDL_NVRTC": named, "CUDA_PATH": "", "CUDA_HOME": ""}
    text = "from mpidl.backends.gpu import nvrtc\n"
    if not named:
        text += "nvrtc._paths = lambda: []\n"
    text += "from mpidl.errors import UserError\ntry: nvrtc.find('sm_90')\n"
    text += "except UserError as error: print(error)"
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert expected in done.stdout, done.stderr
