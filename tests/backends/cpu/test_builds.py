"""Test the choice of a build of the CPU kernels, and the errors if a build is unusable."""

import ctypes
import os
from pathlib import Path

import numpy as np
import pytest
from image_sets import refusal

from mpidl.backends import declarations
from mpidl.backends.cpu import builds
from mpidl.errors import UserError

needs_kernels = pytest.mark.skipif(
    not builds.built(), reason="no kernels: python kernels/build.py compiles them"
)
HEADER = os.path.join(builds.kernels_folder(), "cpu", "mpidl.h")
OLD = frozenset(["fpu", "sse2"])
CPUS = {"generic": OLD, "x86-64-v3": OLD | builds.AVX2, "x86-64-v4": OLD | builds.AVX512}
CPUS["x86-64-v4-bf16"] = CPUS["x86-64-v4"] | {"avx512_bf16"}
NAMES = ("x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "generic")  # of builds, the best first


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function machine(cpu, builds) that simulates a CPU and creates empty libraries."""
    monkeypatch.delenv("MPIDL_CPU", raising=False)
    monkeypatch.setenv("MPIDL_KERNELS", str(tmp_path))

    def pretend(cpu, names=NAMES):
        monkeypatch.setattr(builds, "cpu_features", lambda: CPUS[cpu])
        for build in names:
            Path(builds.path_of(build)).write_text("not a library")

    return pretend


@pytest.mark.parametrize("cpu", CPUS)
def test_a_cpu_is_offered_the_builds_that_it_can_run(machine, cpu):
    machine(cpu)
    assert builds.offered() == [*NAMES[NAMES.index(cpu) :], "numpy"]


def test_a_build_needs_all_of_its_features(monkeypatch, machine):
    machine("x86-64-v4")
    for feature in builds.AVX512:
        monkeypatch.setattr(builds, "cpu_features", lambda f=feature: CPUS["x86-64-v4"] - {f})
        assert builds.offered()[0] == ("generic" if feature in builds.AVX2 else "x86-64-v3")


def test_only_existing_builds_are_offered(machine):
    machine("x86-64-v4", ["generic", "x86-64-v3"])
    assert builds.offered() == ["x86-64-v3", "generic", "numpy"]


def test_numpy_is_used_without_libraries(machine):
    machine("x86-64-v4", [])
    assert builds.choose() == ["numpy"]
    assert builds.why_numpy().startswith("none are compiled: run python ")


def test_mpidl_cpu_chooses_the_build(monkeypatch, machine):
    machine("x86-64-v3", ["x86-64-v4", "x86-64-v3"])
    for build, expected in (
        ("", ["x86-64-v3", "numpy"]),
        ("x86-64-v3", ["x86-64-v3", "numpy"]),
        ("numpy", ["numpy"]),
    ):
        monkeypatch.setenv("MPIDL_CPU", build)
        assert builds.offered() == expected
    assert builds.why_numpy() is None  # MPIDL_CPU requests numpy
    for build, text in (
        (
            "avx2",
            "expected one of x86-64-v4-bf16, x86-64-v4, x86-64-v3, generic, numpy, found 'avx2'",
        ),
        ("x86-64-v4", "this CPU cannot run it; it lacks avx512bw avx512cd avx512dq avx512f"),
        ("generic", "libmpidl-generic.so: run python "),
    ):
        monkeypatch.setenv("MPIDL_CPU", build)
        line = refusal(builds.offered)
        assert line.startswith("MPIDL_CPU") and text in line


def test_a_library_that_cannot_be_loaded_is_skipped(monkeypatch, machine):
    """A library may fail to load because it was compiled on a system with a newer libc."""
    machine("x86-64-v4")
    assert builds.choose() == ["numpy"]
    assert "libmpidl-x86-64-v4.so: cannot be loaded: " in builds.why_numpy()
    monkeypatch.setenv("MPIDL_CPU", "x86-64-v3")
    assert "libmpidl-x86-64-v3.so: cannot be loaded: " in refusal(builds.choose)


def test_the_instruction_of_bf16_belongs_to_one_build():
    assert [name for name in NAMES if builds.has_native_bf16(name)] == ["x86-64-v4-bf16"]
    assert not builds.has_native_bf16("numpy")


def test_features_are_read_from_this_cpu():
    with open("/proc/cpuinfo") as file:
        words = set(file.read().replace("\n", " ").split(" "))
    assert builds.cpu_features() <= words
    if ctypes.sizeof(ctypes.c_void_p) == 8 and os.uname().machine == "x86_64":
        assert "sse2" in builds.cpu_features()


@pytest.mark.parametrize(
    "offers, expected",
    [
        (["v4 v3 generic numpy", "v4 v3 generic numpy"], "v4"),
        (["v4 v3 generic numpy", "v3 generic numpy"], "v3"),
        (["v4 generic numpy", "v3 generic numpy", "v4 v3 generic numpy"], "generic"),
        (["v4 numpy", "v3 numpy"], "numpy"),
        (["v4 v3 generic numpy", "numpy"], "numpy"),
    ],
)
def test_ranks_take_the_best_build_that_all_have(offers, expected):
    long = {"v4": "x86-64-v4", "v3": "x86-64-v3"}
    offers = [[long.get(name, name) for name in names.split()] for names in offers]
    assert builds.common(offers) == long.get(expected, expected)


class FakeWorld:
    """A world whose other ranks offer the given builds."""

    def __init__(self, *offers):
        self.offers = offers

    def gather(self, value):
        return [value, *self.offers]

    def broadcast(self, value):
        return value


@pytest.fixture
def unsettled(monkeypatch):
    """Reset the build that this process has chosen, until the end of the test."""
    monkeypatch.delenv("MPIDL_CPU", raising=False)
    monkeypatch.setattr(builds, "process", builds.Process())


def test_ranks_settle_on_the_lowest(unsettled):
    builds.settle(FakeWorld((None, ["generic", "numpy"])))
    assert builds.running() == ("generic" if "generic" in builds.built() else "numpy")
    builds.settle(FakeWorld((None, ["numpy"])))
    assert builds.running() == "numpy" and builds.kernels() is None
    builds.settle(FakeWorld((None, builds.ORDER)))  # another world does not change the build
    assert builds.running() == "numpy"


def test_an_error_of_one_rank_is_raised_on_all(unsettled):
    text = "MPIDL_CPU: expected"
    assert refusal(builds.settle, FakeWorld(("MPIDL_CPU: expected", []))) == text


def test_the_ranks_of_this_run_agree(world):
    running = world.broadcast(world.gather(builds.running()))
    assert len(set(running)) == 1


def test_declarations_of_a_header_are_parsed():
    header = """
    /* void mpidl_not(void); */
    void mpidl_nothing(void);
    int64_t mpidl_sum(const float *x, double *sums /* two */, int64_t count,
                      const int32_t *counts);
    const char *mpidl_text(void);
    void mpidl_hook(void (*function)(void)); /* or NULL */
    """
    declared = builds.ctypes_of(declarations.exported(header))
    assert set(declared) == {"nothing", "sum", "text", "hook"}
    assert declared["nothing"] == (None, []) and declared["text"] == (ctypes.c_char_p, [])
    result, (x, sums, count, counts) = declared["sum"]
    assert result is count is ctypes.c_int64
    assert declared["hook"] == (None, [ctypes.c_void_p])
    ones = np.ones((2, 2), np.float32)
    assert ctypes.addressof(x.from_param(ones)) == ones.ctypes.data
    assert x.from_param(None) is None
    ones.flags.writeable = False  # const arguments may be read-only
    assert x.from_param(ones).value == ones.ctypes.data
    for array in (ones.astype(np.float64), ones.T[1:], ones[:, ::2]):
        with pytest.raises(TypeError, match="expected a C-ordered array of float32, got"):
            x.from_param(array)
    fixed = np.ones(2)
    fixed.flags.writeable = False
    with pytest.raises(TypeError, match="expected a writable array, got a read-only one"):
        sums.from_param(fixed)
    assert counts.from_param(np.zeros(0, np.int32)) is not None


@needs_kernels
@pytest.mark.parametrize("build", builds.built())
def test_a_library_has_the_functions_of_the_header(build):
    """Check all libraries, including those that this CPU cannot run, without calling a kernel."""
    library = builds.load(build)
    with open(HEADER) as file:
        for name in declarations.exported(file.read()):
            getattr(library, name)
    with pytest.raises(AttributeError, match="declares no mpidl_nothing_such"):
        _ = library.nothing_such
    if builds.runs_here(build):
        assert library.provenance["build"] == build
        assert library.provenance["compiler"].split()[0] in ("gcc", "clang")
        assert len(library.provenance["sources"]) == 16


@needs_kernels
def test_a_library_of_other_sources_is_refused(tmp_path):
    """A function that is new or has other arguments raises an error; other functions work."""
    changed = tmp_path / "mpidl.h"
    text = Path(HEADER).read_text()
    arguments = "void mpidl_copy(const float *from"
    assert arguments in text
    text = text.replace(arguments, f"{arguments}, int64_t more")
    changed.write_text(text.replace("\n/* team.c */", "\nvoid mpidl_new(void);\n/* team.c */"))
    library = builds.Library(builds.path_of(builds.built()[-1]), changed, "changed")
    for name in ("new", "copy"):
        line = refusal(getattr, library, name)
        assert f"compiled from sources of another version (mpidl_{name} differs)" in line
    assert library.compiler()


@needs_kernels
def test_kernels_refuse_blocks_of_another_size(monkeypatch):
    """They would write beyond the arrays."""
    monkeypatch.setattr(builds, "LANES", 8)
    with pytest.raises(UserError, match="compiled for blocks of 16 images, found blocks of 8"):
        builds.load(builds.built()[0])
    assert builds.choose() == ["numpy"]
