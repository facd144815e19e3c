"""Test NVRTC and the cache of cubins, with concurrent processes and with damaged files."""

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
# A program that several processes run at the same time. `make` replaces the compiler: it appends a
# line to the file argv[1], and then waits argv[2] seconds.
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
def folder(tmp_path, monkeypatch):
    """Return the path of an empty cache folder."""
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
    raise AssertionError("the condition never became true")


def compiler_of(image=b"abc"):
    return lambda: (image, "log")


def must_not_compile():
    raise AssertionError("the cubin should be in the cache")


@pytest.mark.slow("gpu")
def test_concurrent_processes_compile_once(tmp_path, folder):
    counter = tmp_path / "counter"
    processes = [start(counter, 0.5) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert len(counter.read_text().split()) == 1
    assert [path.name for path in folder.iterdir()] == ["some.cubin"]
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.slow("gpu")
def test_other_processes_go_on_after_a_compiler_is_killed(tmp_path):
    counter = tmp_path / "counter"
    first = start(counter, 100)
    wait_for(lambda: counter.exists() and counter.read_text())
    waiting = [start(counter, 0.1) for _ in range(2)]
    time.sleep(0.3)
    assert all(process.poll() is None for process in waiting)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert [process.wait(60) for process in waiting] == [0] * 2
    assert len(counter.read_text().split()) == 2


@pytest.mark.parametrize("size", [0, 1, 40, 90, -1])
def test_a_truncated_file_is_compiled_again(folder, size):
    value = bytes(range(100))
    cubins.cached("a.cubin", compiler_of(value))
    assert cubins.cached("a.cubin", must_not_compile) == (value, "log")
    content = (folder / "a.cubin").read_bytes()
    (folder / "a.cubin").write_bytes(content[:size])
    assert cubins.cached("a.cubin", compiler_of(value)) == (value, "log")
    assert (folder / "a.cubin").read_bytes() == content


def test_a_corrupt_file_is_compiled_again(folder):
    cubins.cached("a.cubin", compiler_of())
    content = bytearray((folder / "a.cubin").read_bytes())
    content[1] ^= 1
    (folder / "a.cubin").write_bytes(content)
    assert cubins.cached("a.cubin", compiler_of()) == (b"abc", "log")
    assert cubins.cached("a.cubin", must_not_compile) == (b"abc", "log")


def test_a_failed_compilation_leaves_no_file(folder):
    def fails():
        raise UserError("no")

    with pytest.raises(UserError):
        cubins.cached("a.cubin", fails)
    assert list(folder.iterdir()) == []


def test_old_files_are_deleted(folder):
    cubins.cached("old.cubin", compiler_of())
    os.utime(folder / "old.cubin", (1, 1))
    cubins.cached("new.cubin", compiler_of())
    assert [path.name for path in folder.iterdir()] == ["new.cubin"]


def no_folder(folder):
    folder.write_text("a file where the folder should be")


def open_to_others(folder):
    folder.mkdir()
    folder.chmod(0o777)


def linked(folder):
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [no_folder, open_to_others, linked])
def test_an_unusable_folder_gives_one_warning(folder, spoil):
    spoil(folder)
    with pytest.warns(RuntimeWarning, match="every process compiles the kernels again"):
        assert cubins.cached("a.cubin", compiler_of()) == (b"abc", "log")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cubins.cached("a.cubin", compiler_of()) == (b"abc", "log")
    assert not folder.is_dir() or list(folder.iterdir()) == []


def test_a_folder_of_another_user_is_not_used(folder, monkeypatch):
    cubins.cached("a.cubin", compiler_of(b"foreign"))
    foreign = folder.rename(folder.with_name("foreign"))
    monkeypatch.setattr(cubins, "folder", lambda: str(foreign))
    monkeypatch.setattr(os, "getuid", lambda: foreign.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match="not a folder that only this user can write to"):
        assert cubins.cached("a.cubin", compiler_of(b"new")) == (b"new", "log")


@pytest.mark.parametrize("name", ["mkstemp", "fsync"])
def test_a_full_disk_gives_a_warning(folder, monkeypatch, name):
    def fail(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cubins.tempfile if name == "mkstemp" else os, name, fail)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        assert cubins.cached("a.cubin", compiler_of()) == (b"abc", "log")
    assert list(folder.iterdir()) == []


def test_without_file_locks_every_process_compiles(monkeypatch):
    def fail(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(cubins.fcntl, "flock", fail)
    with pytest.warns(RuntimeWarning, match="No locks available"):
        assert cubins.cached("a.cubin", compiler_of()) == (b"abc", "log")
    assert cubins.cached("a.cubin", must_not_compile) == (b"abc", "log")


def test_the_cache_defaults_to_the_temporary_folder(monkeypatch):
    monkeypatch.delenv("MPIDL_CACHE")
    monkeypatch.setattr(cubins.tempfile, "gettempdir", lambda: "/scratch")
    assert cubins.folder() == f"/scratch/mpidl-cubins-{os.getuid()}"


@needs_nvrtc
def test_the_cache_distinguishes_architecture_definitions_and_options(folder, monkeypatch):
    unit = kernels.Unit("program")
    image = nvrtc.cubin(unit, "sm_80")
    assert image.startswith(b"\x7fELF")
    calls, compiler = [], nvrtc.compile
    monkeypatch.setattr(nvrtc, "compile", lambda *args: calls.append(args) or compiler(*args))
    assert nvrtc.cubin(unit, "sm_80") == image and not calls
    assert nvrtc.cubin(unit, "sm_90") != image and len(calls) == 1
    nvrtc.cubin(unit._replace(defines=(("SOMETHING", 1),)), "sm_80")
    assert len(calls) == 2
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "-lineinfo"))
    nvrtc.cubin(unit, "sm_80")
    assert len(calls) == 3 and len(list(folder.iterdir())) == 4


@needs_nvrtc
def test_errors_of_the_compiler_are_one_line():
    text = 'extern "C" __global__ void f(float* x) {\n#line 7 "pool.cu"\n *x = nothing; }'
    with pytest.raises(UserError) as raised:
        nvrtc.compile(text, "sm_80")
    message = str(raised.value)
    assert 'pool.cu(7): error: identifier "nothing" is undefined' in message
    assert "\n" not in message


@needs_nvrtc
def test_definitions_reach_the_compiler():
    text = 'extern "C" __global__ void f(float* x) { static_assert(N == 3, "N"); }'
    nvrtc.compile(text, "sm_80", (("N", 3),))
    with pytest.raises(UserError):
        nvrtc.compile(text, "sm_80", (("N", 4),))


@needs_nvrtc
def test_an_unknown_architecture_is_refused():
    with pytest.raises(UserError, match="no installed NVRTC supports sm_35; found "):
        nvrtc.find("sm_35")


class FakeNvrtc:
    def __init__(self, version, architectures):
        self.version, self.architectures, self.path = version, architectures, "libnvrtc.so"


@pytest.mark.parametrize(
    "architecture, driver, expected",
    [("sm_90", 0, 13), ("sm_70", 0, 12), ("sm_90", 13, 13), ("sm_90", 14, 13), ("sm_90", 12, 12)],
)
def test_the_newest_nvrtc_that_the_driver_supports_is_used(
    monkeypatch, architecture, driver, expected
):
    both = FakeNvrtc((12, 9), (70, 80, 90)), FakeNvrtc((13, 0), (80, 90))
    monkeypatch.setattr(nvrtc, "installed", lambda: both)
    monkeypatch.setattr(nvrtc.discovery, "driver_version", lambda: 1000 * driver)
    nvrtc._find.cache_clear()
    try:
        assert nvrtc.find(architecture).version[0] == expected
    finally:
        nvrtc._find.cache_clear()


def test_a_driver_older_than_nvrtc_is_refused(monkeypatch):
    monkeypatch.setattr(nvrtc, "installed", lambda: (FakeNvrtc((13, 0), (90,)),))
    monkeypatch.setattr(nvrtc.discovery, "driver_version", lambda: 12040)
    nvrtc._find.cache_clear()
    try:
        with pytest.raises(UserError, match="the driver supports CUDA 12, but NVRTC is newer"):
            nvrtc.find("sm_90")
    finally:
        nvrtc._find.cache_clear()


@pytest.mark.parametrize("path, expected", [("", "pip install nvidia-cuda-nvrtc"), ("/no", "/no")])
def test_a_missing_nvrtc_is_reported_with_its_remedy(path, expected):
    env = os.environ | {"MPIDL_NVRTC": path, "CUDA_PATH": "", "CUDA_HOME": ""}
    text = "from mpidl.backends.gpu import nvrtc\n"
    if not path:
        text += "nvrtc._paths = lambda: []\n"
    text += "from mpidl.errors import UserError\ntry: nvrtc.find('sm_90')\n"
    text += "except UserError as error: print(error)"
    process = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert expected in process.stdout, process.stderr
