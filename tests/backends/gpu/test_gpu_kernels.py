"""Check that all kernels compile for all supported GPUs with the expected registers and memory."""

import functools
import json
import os

import pytest
import resources
import variants

from benchmarks.gpu import sass
from mpidl.backends.gpu import kernels, nvrtc

MARGIN = 4  # maximum difference in registers between a kernel and the table
NEW_TABLE = "PYTHONPATH=.:tests python tests/backends/gpu/resources.py updates the table"

# {precision: (largest number of instructions, number of products) of the main loop of conv_gemm}
MAIN_LOOP = {"fp32": (400, 96), "tf32": (230, 32), "bf16": (200, 32)}

SLOW = pytest.mark.slow("gpu")


def skip_without_nvrtc():
    if not nvrtc.installed():
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")


@functools.cache
def compiled(architecture):
    """Compile all units and return {unit: its resources, or an exception}."""
    return resources.compile_all(variants.units(architecture), architecture)


def architectures(*names):
    """Parametrize by architectures. All except the newest one are slow."""
    return [
        name if name == resources.ARCHITECTURES[-1] else pytest.param(name, marks=SLOW)
        for name in names
    ]


@pytest.fixture(params=architectures(*resources.ARCHITECTURES))
def architecture(request):
    skip_without_nvrtc()
    return request.param


def test_every_unit_compiles(architecture):
    resources_of_units = compiled(architecture)
    errors = [str(v) for v in resources_of_units.values() if isinstance(v, Exception)]
    assert errors == []
    for unit, entries in resources_of_units.items():
        missing = set(kernels.signatures(unit.text)) - set(entries)
        assert not missing, f"{resources.label(unit)}: {missing} is not in the compiler's log"


@pytest.mark.parametrize("architecture", architectures(*sass.ARCHITECTURES), indirect=True)
def test_no_kernel_spills_registers(architecture):
    assert spilling(compiled(architecture)) == []


@SLOW
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", sass.ARCHITECTURES, indirect=True)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_no_kernel_of_a_training_step_spills_registers(architecture, precision):
    steps = [("resnet50", 256), ("mobilenet_v2", 256), ("alexnet", 256), ("cifar", 1024)]
    units = variants.units_of_steps(architecture, precision, steps)
    assert spilling(resources.compile_all(units, architecture)) == []


def spilling(compiled_units):
    """Return the kernels of {unit: resources} that store registers in memory."""
    return [
        f"{resources.label(unit)}: {name}: {entry['spills']} bytes"
        for unit, entries in compiled_units.items()
        if not isinstance(entries, Exception)
        for name, entry in entries.items()
        if entry["spills"]
    ]


def test_registers_and_memory_match_the_table(architecture):
    with open(resources.TABLE) as file:
        table = json.load(file)
    version = "{}.{}".format(*nvrtc.find(architecture).version)
    if version != table["nvrtc"]:
        pytest.skip(f"the table was written with NVRTC {table['nvrtc']}, this is {version}")
    actual = {
        f"{resources.label(unit)}: {name}": entry
        for unit, entries in compiled(architecture).items()
        if not isinstance(entries, Exception)
        for name, entry in entries.items()
    }
    assert set(actual) == set(table[architecture]), NEW_TABLE
    changed = []
    for name, entry in actual.items():
        expected = table[architecture][name]
        difference = entry["registers"] - expected["registers"]
        if abs(difference) > MARGIN or entry | {"registers": 0} != expected | {"registers": 0}:
            changed.append(f"{name}: expected {expected}, found {entry}")
    assert changed == [], NEW_TABLE


SASS = """
.L_x_0:
        /*0000*/                   LDSM.16.M88.4 R8, [R2] ;
.L_x_1:
        /*0010*/                   HMMA.1688.F32.TF32 R4, R8, R2, R4 ;
                                   /* 0x000000 */
        /*0020*/              @P0 BRA `(.L_x_1) ;
        /*0030*/              @!P1 BRA P2, `(.L_x_0) ;
        /*0040*/               @P0 BRA `(.L_x_2) ;
.L_x_2:
        /*0050*/                   BRA `(.L_x_2);
"""


def test_loops_of_a_disassembly():
    assert sass.loops(SASS) == [(2, 1), (4, 1)]


@pytest.mark.parametrize("architecture", architectures(*sass.ARCHITECTURES), indirect=True)
@pytest.mark.parametrize("precision", sass.PRECISIONS)
def test_instructions_of_the_main_loop(architecture, precision):
    """A step multiplies 8 tiles of 16 x 8 per warp at 4 depths of 8, with 3 TF32 products or 1.

    In bfloat16, a depth is 16.
    """
    if sass.find() is None:
        pytest.skip("no nvdisasm: pip install nvidia-cuda-nvdisasm")
    loop = sass.main_loop(sass.conv_unit(precision), architecture)
    limit, products = MAIN_LOOP[precision]
    assert loop.instructions <= limit and loop.products == products


@functools.cache
def nvrtc_12():
    """Return an Nvrtc of CUDA 12, which supports sm_70, from MPIDL_NVRTC12 or pip, or None."""
    path = os.environ.get("MPIDL_NVRTC12")
    compilers = [nvrtc.Nvrtc(path)] if path else nvrtc.installed()
    return next((compiler for compiler in compilers if 70 in compiler.architectures), None)


@SLOW
def test_every_unit_compiles_for_volta():
    compiler = nvrtc_12()
    if compiler is None:
        pytest.skip("no NVRTC of CUDA 12: pip install nvidia-cuda-nvrtc-cu12, or MPIDL_NVRTC12")
    options = [*nvrtc.OPTIONS, "-arch=sm_70"]
    for unit in variants.units("sm_70"):
        words = [f"-D{name}={value}" for name, value in unit.defines]
        image, _ = compiler.compile(unit.text, [*options, *words], f"{unit.family}.cu")
        assert image.startswith(b"\x7fELF")


def test_kernel_sources_have_no_includes():
    """The cache identifies a unit by its text alone, and NVRTC runs without CUDA's headers."""
    for name in ["common.cuh", *(f"{family}.cu" for family in kernels.families())]:
        lines = [line for line in kernels.source(name).splitlines() if "#include" in line]
        assert lines == [], name


def test_kernels_add_no_numbers_by_atomics():
    """With atomics, the order of additions and therefore the sums would differ between runs.

    A ticket only says which block of threads arrives last.
    """
    for family in kernels.families():
        text = kernels.source(f"{family}.cu").replace("atomicAdd(tickets", "")
        assert "atomic" not in text, family


def test_families_with_a_minimum_architecture_exist():
    assert set(kernels.NEEDS) <= set(kernels.families())
