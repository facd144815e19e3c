"""Every kernel compiles for every GPU that mpidl supports, and takes no more of it than before."""

import functools
import json
import os

import pytest
import resources
import variants

from mpidl.backends.gpu import kernels, nvrtc

MARGIN = 4  # registers more than the table's, or fewer, say nothing
NEW_TABLE = "PYTHONPATH=.:tests python tests/backends/gpu/resources.py writes the table anew"

MORE = pytest.mark.slow("gpu")


def skip_without_nvrtc():
    if not nvrtc.installed():
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")


@functools.cache
def compiled(architecture):
    """{unit: its resources, or an exception}."""
    return resources.compile_all(variants.units(architecture), architecture)


def architectures(*names):
    """The newest is compiled for in every run, the others in the slow part."""
    return [
        name if name == resources.ARCHITECTURES[-1] else pytest.param(name, marks=MORE)
        for name in names
    ]


@pytest.fixture(params=architectures(*resources.ARCHITECTURES))
def architecture(request):
    skip_without_nvrtc()
    return request.param


def test_every_unit_compiles(architecture):
    found = compiled(architecture)
    assert [str(v) for v in found.values() if isinstance(v, Exception)] == []
    for unit, entries in found.items():
        missing = set(kernels.signatures(unit.text)) - set(entries)
        assert not missing, f"{resources.label(unit)}: {missing} is not in the compiler's log"


@pytest.mark.parametrize("architecture", architectures("sm_80", "sm_90"), indirect=True)
def test_nothing_spills(architecture):
    spilled = [
        f"{resources.label(unit)}: {name}: {entry['spills']} bytes"
        for unit, entries in compiled(architecture).items()
        if not isinstance(entries, Exception)
        for name, entry in entries.items()
        if entry["spills"]
    ]
    assert spilled == []


def test_registers_are_those_of_the_table(architecture):
    with open(resources.TABLE) as file:
        table = json.load(file)
    version = "{}.{}".format(*nvrtc.find(architecture).version)
    if version != table["nvrtc"]:
        pytest.skip(f"the table was made by NVRTC {table['nvrtc']}, this is {version}")
    found = {
        f"{resources.label(unit)}: {name}": entry
        for unit, entries in compiled(architecture).items()
        if not isinstance(entries, Exception)
        for name, entry in entries.items()
    }
    assert set(found) == set(table[architecture]), NEW_TABLE
    changed = []
    for name, entry in found.items():
        expected = table[architecture][name]
        more = entry["registers"] - expected["registers"]
        if abs(more) > MARGIN or entry | {"registers": 0} != expected | {"registers": 0}:
            changed.append(f"{name}: expected {expected}, found {entry}")
    assert changed == [], NEW_TABLE


@functools.cache
def nvrtc_12():
    """The Nvrtc of CUDA 12, which compiles for sm_70: MPIDL_NVRTC12, or pip's. None without."""
    named = os.environ.get("MPIDL_NVRTC12")
    found = [nvrtc.Nvrtc(named)] if named else nvrtc.installed()
    return next((one for one in found if 70 in one.architectures), None)


@MORE
def test_every_unit_compiles_for_volta():
    compiler = nvrtc_12()
    if compiler is None:
        pytest.skip("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12, or MPIDL_NVRTC12")
    options = [*nvrtc.OPTIONS, "-arch=sm_70"]
    for unit in variants.units("sm_70"):
        words = [f"-D{name}={value}" for name, value in unit.defines]
        image, _ = compiler.compile(unit.text, [*options, *words], f"{unit.family}.cu")
        assert image.startswith(b"\x7fELF")


def test_no_text_includes_another():
    """The cache knows a unit by its text, and no headers are needed where NVRTC is."""
    for name in ["common.cuh", *(f"{family}.cu" for family in kernels.families())]:
        lines = [line for line in kernels.source(name).splitlines() if "#include" in line]
        assert lines == [], name


def test_no_atomics():
    """A sum that depends on which block comes first would not be the same bytes twice."""
    for family in kernels.families():
        assert "atomic" not in kernels.source(f"{family}.cu"), family


def test_the_families_that_need_more_are_there():
    assert set(kernels.NEEDS) <= set(kernels.families())
