"""Test kernels/build.py, and that all sources compile without warnings and pass sanitizers."""

import errno
import functools
import os
import shutil
import subprocess
from pathlib import Path

import building
import jobs
import pytest
from building import kernels, needs_compiler
from launcher import ROOT, mpirun, start

from mpidl.backends.cpu import builds

KERNEL_TESTS = sorted(
    path
    for path in (ROOT / "tests").rglob("test_*.py")
    if "on_all_builds(" in path.read_text() and path != Path(__file__)
)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Return a function that compiles all builds with a compiler and -Werror.

    The function returns the folder of the builds, and {build: error}.
    """

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
    """All builds exist. Without builds, the tests of the kernels would be skipped."""
    assert builds.built() == kernels.builds()


@needs_compiler
def test_an_old_compiler_builds_without_bfloat16_instructions(tmp_path):
    old = tmp_path / "cc"
    old.write_text('#!/bin/sh\ncase "$*" in *avx512bf16*) exit 1; esac\nexec cc "$@"\n')
    old.chmod(0o755)
    assert kernels.builds([str(old)]) == [n for n in kernels.builds() if n != kernels.NATIVE]
    assert kernels.builds(["cc"]) == kernels.builds()


def test_a_cross_compiler_builds_for_its_machine(tmp_path):
    compiler = building.cross_compiler(tmp_path)
    assert kernels.machine([compiler]) == "aarch64" and kernels.builds([compiler]) == ["generic"]


@needs_compiler
def test_another_command_may_link(two, tmp_path, monkeypatch):
    """run/wheel --release links for an old C library with a command other than the compiler."""
    linker = tmp_path / "ld"
    linker.write_text('#!/bin/sh\necho "$@" >"$0.arguments"\nexec cc "$@"\n')
    linker.chmod(0o755)
    monkeypatch.setenv("LDSHARED", f"{linker} -shared -s")
    lib = str(tmp_path / "lib")
    assert kernels.compile_builds(["generic"], lib, kernels.find_compiler()) == {}
    assert kernels.is_current("generic", lib)
    arguments = linker.with_name("ld.arguments").read_text()
    assert arguments.startswith("-shared -s ") and " -c " not in arguments


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
@pytest.mark.slow("compilers")
@pytest.mark.timeout(300)  # it compiles all builds
def test_no_warnings(compiled, compiler):
    assert compiled(compiler)[1] == {}


@pytest.mark.parametrize("build", [name for name in kernels.builds() if builds.runs_here(name)])
@pytest.mark.slow("compilers")
def test_clang_has_the_bytes_of_gcc(compiled, build, pictures, tmp_path):
    words = ["--max-iterations", 2, "--threads", 2]
    keywords = {"network": jobs.network("varied")}
    hashes = set()
    for compiler in ("gcc", "clang"):
        env = {"MPIDL_KERNELS": compiled(compiler)[0], "MPIDL_CPU": build}
        hashes.add(jobs.trained_hash(1, pictures, tmp_path / compiler, *words, env=env, **keywords))
    assert len(hashes) == 1


@pytest.fixture
def two(monkeypatch, tmp_path):
    """Return the source folder of a library with two source files and a header."""
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
    recompiled = compile_it() - first  # includes about.o, which contains a hash of all sources
    assert {name.split("-")[0] for name in recompiled} == {"about", "two"} and len(recompiled) == 2
    for name in first:
        os.utime(tmp_path / "objects" / name, (0, 0))
    assert compile_it() == recompiled, "old objects are removed"


@pytest.fixture
def old_library(two, tmp_path):
    """Return the folder of a compiled library; at the end, check that the folder is unchanged."""
    lib = tmp_path / "lib"
    assert kernels.compile_builds(["generic"], str(lib), kernels.find_compiler()) == {}
    before = (lib / "libmpidl-generic.so").read_bytes()
    yield lib
    assert [path.name for path in lib.iterdir()] == ["libmpidl-generic.so"]
    assert (lib / "libmpidl-generic.so").read_bytes() == before


def failure_of(lib):
    failed = kernels.compile_builds(["generic"], str(lib), kernels.find_compiler())
    return str(failed["generic"])


@needs_compiler
@pytest.mark.parametrize(
    "broken", ["int two = nothing;", "int one(void);\nint two(void);\nint two(void) { one(); }"]
)
def test_sources_that_do_not_compile_leave_the_old_library(broken, two, old_library):
    (two / "two.c").write_text(broken)
    assert "ended with exit code 1" in failure_of(old_library)


@needs_compiler
@pytest.mark.parametrize("source", [None, "int two = 3;"], ids=["the library", "an object"])
def test_a_full_disk_leaves_the_old_library(source, two, old_library, tmp_path, monkeypatch):
    """If the disk fills up while the library or an object is written, the old library is kept."""
    before = objects(tmp_path)

    def replace(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    monkeypatch.setattr(os, "replace", replace)
    if source:
        (two / "two.c").write_text(source)
    assert "No space left" in failure_of(old_library)
    assert objects(tmp_path) == before


def build(*words, env=None):
    return mpirun(None, ROOT / "kernels" / "build.py", *words, env=env)


def test_the_command_line(tmp_path):
    """Without a working compiler, the program prints one line and exits with the right code."""
    no_compiler = {"PATH": tmp_path, "CC": ""}
    out = ["--out", tmp_path / "lib"]
    text = "kernels/build.py: no C compiler: cc, gcc or clang is not on PATH\n"
    assert build(*out, env=no_compiler) == (1, "", text)
    assert build(*out, "--if-needed", env=no_compiler) == (0, "", "")
    result = build(*out, "--cc", "/bin/false")
    assert result.returncode == 1 and "/bin/false ended with exit code 1" in result.stderr
    no_program = tmp_path / "cc"
    no_program.write_bytes(b"\0")
    no_program.chmod(0o755)
    result = build(*out, "--cc", no_program)
    assert result.returncode == 1
    assert result.stderr == f"kernels/build.py: {no_program} cannot be run: Exec format error\n"
    assert build("x86-64-v9").returncode == 2
    assert not (tmp_path / "lib").exists()


def sanitizer_library():
    """Return the path of gcc's AddressSanitizer, or None."""
    if not shutil.which("gcc"):
        return None
    command = ["gcc", "-print-file-name=libasan.so"]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return path if os.path.isabs(path) else None


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """Return environment variables for Python with the best build, compiled with sanitizers."""
    if sanitizer_library() is None:
        pytest.skip("gcc's libasan is not installed")
    best = next(name for name in kernels.builds() if builds.runs_here(name))
    folder = tmp_path_factory.mktemp("sanitized")
    result = build("--sanitize", "--cc", "gcc", "--out", folder, best)
    assert result.returncode == 0, result.stderr
    return {
        "LD_PRELOAD": sanitizer_library(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "MPIDL_KERNELS": folder,
        "MPIDL_CPU": best,
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }


@pytest.mark.slow("sanitizers")
@pytest.mark.timeout(480)
def test_the_kernels_under_sanitizers(sanitized):
    """The tests of the kernels pass under sanitizers. The tests run in two concurrent processes."""
    words = ["-m", "pytest", "-q", "-x", "-p", "sanitized", "-k", "not gpu"]
    processes = [
        start(None, *words, *tests, cwd=ROOT, env=sanitized, stderr=subprocess.STDOUT)
        for tests in (KERNEL_TESTS[0::2], KERNEL_TESTS[1::2])
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)


@pytest.mark.slow("sanitizers")
def test_the_sanitizers_find_an_overflow(sanitized):
    """Negative control: a copy of one float too many is reported."""
    text = (
        "import numpy as np; from mpidl.backends.cpu import builds;"
        "x = np.zeros(1000, np.float32); builds.kernels().copy(x, x.copy(), {})"
    )
    for floats, expected in ((1000, False), (1001, True)):
        result = mpirun(None, "-c", text.format(floats), env=sanitized)
        assert ("heap-buffer-overflow" in result.stderr) == expected == (result.returncode != 0)
