"""kernels/build.py: every source by every compiler without a warning, and under sanitizers."""

import errno
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import small
from building import kernels, needs_compiler
from launcher import ROOT, environment, mpirun

from mpidl.backends.cpu import builds

KERNEL_TESTS = sorted(
    path for path in (ROOT / "tests").rglob("test_*.py") if "on_all_builds(" in path.read_text()
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(compiler): the folder of its builds, and {build: what failed} at -Werror."""

    @functools.cache
    def compile_all(compiler):
        if not shutil.which(compiler):
            pytest.skip(f"no {compiler}")
        folder = tmp_path_factory.mktemp(compiler)
        failed = kernels.compile_builds(kernels.builds(), folder, [compiler], ["-Werror"])
        return folder, {name: error.output for name, error in failed.items()}

    return compile_all


@needs_compiler
def test_this_checkout_has_its_kernels():
    """Where they can be compiled: else the tests of the kernels would be skipped, and none fail."""
    assert builds.built() == kernels.builds()


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.slow("compilers")
def test_no_warnings(compiled, compiler):
    assert compiled(compiler)[1] == {}


@pytest.mark.parametrize("build", [name for name in kernels.builds() if builds.runs_here(name)])
@pytest.mark.slow("compilers")
def test_clang_has_the_bytes_of_gcc(compiled, build, pictures, tmp_path):
    found = {}
    for compiler in ("gcc", "clang"):
        env = small.without_plots() | {"MPIDL_KERNELS": compiled(compiler)[0], "MPIDL_CPU": build}
        words = ["--max-iterations", 2, "--batch-size", 50, "--threads", 2]
        out = tmp_path / compiler
        words = small.command("train", *words, network=small.of("varied"), data=pictures, out=out)
        mpirun(1, *words, env=env, check=0)
        found[compiler] = small.summary(out)["weights_sha256"]
    assert found["gcc"] == found["clang"]


@pytest.fixture
def two(monkeypatch, tmp_path):
    """Sources of a library of two files, one with a header, compiled into tmp_path/lib."""
    sources = tmp_path / "cpu"
    sources.mkdir()
    shutil.copy(ROOT / "kernels" / "cpu" / "about.c", sources)
    (sources / "mpidl.h").write_text(
        "const char *mpidl_compiler(void);\nconst char *mpidl_sources(void);\n"
        "const char *mpidl_declarations(void);\n"
    )
    (sources / "two.h").write_text("#define TWO 2\n")
    (sources / "two.c").write_text('#include "two.h"\nextern int two;\nint two = TWO;\n')
    monkeypatch.setattr(kernels, "SOURCES", str(sources))
    monkeypatch.setattr(kernels, "OBJECTS", str(tmp_path / "objects"))
    return sources


def objects(folder):
    return {path.name for path in (folder / "objects").iterdir()}


@needs_compiler
def test_only_what_changed_is_compiled(two, tmp_path):
    lib = str(tmp_path / "lib")

    def compile_it():
        assert kernels.compile_builds(["generic"], lib, kernels.find_compiler()) == {}
        assert kernels.is_current("generic", lib)
        return objects(tmp_path)

    assert not kernels.is_current("generic", lib)
    first = compile_it()
    assert {name.split("-")[0] for name in first} == {"about", "two"} and len(first) == 2
    assert compile_it() == first
    (two / "two.h").write_text("#define TWO 3\n")
    assert not kernels.is_current("generic", lib)
    again = compile_it() - first  # about.o holds a hash of all sources
    assert {name.split("-")[0] for name in again} == {"about", "two"} and len(again) == 2
    for name in first:
        os.utime(tmp_path / "objects" / name, (0, 0))
    assert compile_it() == again, "objects of long ago are removed"


@needs_compiler
def test_a_library_that_does_not_compile_leaves_the_old_one(two, tmp_path):
    lib, compiler = tmp_path / "lib", kernels.find_compiler()
    assert kernels.compile_builds(["generic"], str(lib), compiler) == {}
    before = (lib / "libmpidl-generic.so").read_bytes()
    for broken in (
        "int two = nothing;",
        "int one(void);\nint two(void);\nint two(void) { one(); }",
    ):
        (two / "two.c").write_text(broken)
        failed = kernels.compile_builds(["generic"], str(lib), compiler)
        assert "ended with exit code 1" in str(failed["generic"])
        assert [path.name for path in lib.iterdir()] == ["libmpidl-generic.so"]
        assert (lib / "libmpidl-generic.so").read_bytes() == before


@needs_compiler
def test_a_disk_that_is_full_leaves_the_old_one(two, tmp_path, monkeypatch):
    lib, compiler = tmp_path / "lib", kernels.find_compiler()
    assert kernels.compile_builds(["generic"], str(lib), compiler) == {}
    before = (lib / "libmpidl-generic.so").read_bytes()
    first = objects(tmp_path)

    def replace(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    monkeypatch.setattr(os, "replace", replace)
    for text in (None, "int two = 3;"):  # while the library is written, and an object
        if text:
            (two / "two.c").write_text(text)
        failed = kernels.compile_builds(["generic"], str(lib), compiler)
        assert "No space left" in str(failed["generic"])
        assert [path.name for path in lib.iterdir()] == ["libmpidl-generic.so"]
        assert objects(tmp_path) == first
        assert (lib / "libmpidl-generic.so").read_bytes() == before


def build(*words, **env):
    return subprocess.run(
        [sys.executable, ROOT / "kernels" / "build.py", *words],
        env=environment(env),
        capture_output=True,
        text=True,
    )


def test_the_command_line(tmp_path):
    """What it says in a line, and with which exit code, where there is nothing to do or no way."""
    hidden = {"PATH": tmp_path, "CC": ""}
    there = ["--out", tmp_path / "lib"]
    done = build(*there, **hidden)
    assert done.returncode == 1
    assert done.stderr == ("kernels/build.py: no C compiler: cc, gcc or clang is not on PATH\n")
    done = build(*there, "--if-needed", **hidden)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = build(*there, "--cc", "/bin/false")
    assert done.returncode == 1 and "/bin/false ended with exit code 1" in done.stderr
    no_program = tmp_path / "cc"
    no_program.write_bytes(b"\0")
    no_program.chmod(0o755)
    done = build(*there, "--cc", no_program)
    assert done.returncode == 1
    assert done.stderr == f"kernels/build.py: {no_program} cannot be run: Exec format error\n"
    assert build("x86-64-v9").returncode == 2
    assert not (tmp_path / "lib").exists()


def runtime():
    """Path of gcc's AddressSanitizer, or None where there is none."""
    if not shutil.which("gcc"):
        return None
    command = ["gcc", "-print-file-name=libasan.so"]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else None


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Environment of a Python that runs the best build, compiled with gcc's sanitizers."""
    if runtime() is None:
        pytest.skip("gcc's libasan is not installed")
    best = next(name for name in kernels.builds() if builds.runs_here(name))
    folder = tmp_path_factory.mktemp("sanitized")
    done = build("--sanitize", "--cc", "gcc", "--out", folder, best)
    assert done.returncode == 0, done.stderr
    return {
        "LD_PRELOAD": runtime(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "MPIDL_KERNELS": folder,
        "MPIDL_CPU": best,
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }


@pytest.mark.slow("sanitizers")
def test_the_kernels_under_sanitizers(sanitized):
    """Their tests, in two processes side by side."""
    halves = [KERNEL_TESTS[0::2], KERNEL_TESTS[1::2]]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "sanitized", *half],
            cwd=ROOT,
            env=environment(sanitized),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for half in halves
    ]
    said = [job.communicate()[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], "\n".join(said)


@pytest.mark.slow("sanitizers")
def test_the_sanitizers_see(sanitized):
    """The negative control: a copy of one float too many."""
    text = (
        "import numpy as np; from mpidl.backends.cpu import builds;"
        "x = np.zeros(1000, np.float32); builds.kernels().copy(x, x.copy(), {})"
    )
    for floats, expected in ((1000, False), (1001, True)):
        done = subprocess.run(
            [sys.executable, "-c", text.format(floats)],
            env=environment(sanitized),
            capture_output=True,
            text=True,
        )
        assert ("heap-buffer-overflow" in done.stderr) == expected == (done.returncode != 0)
