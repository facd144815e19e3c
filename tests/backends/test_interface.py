"""Check that backends define the functions of `backends.interface` with the same parameters."""

import inspect
import re
import subprocess
import sys

import numpy as np
import pytest

from mpidl import backends
from mpidl.backends import CPU, REFERENCE
from mpidl.backends.gather import FUNCTIONS, gather
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.interface import FUSED, HOST, Backend
from mpidl.backends.reference import activation

# The only function with additional parameters: on a GPU, it also gathers images of a dataset.
EXTENDED = {("gpu", "images"): ["indices", "counts", "blocks"]}
BACKENDS = pytest.mark.parametrize("backend", [REFERENCE, CPU, GPU], ids=lambda b: b.name)


def parameters(function):
    """Return (name, default, kind) of each parameter except self."""
    declared = inspect.signature(function).parameters.values()
    return [(p.name, p.default, p.kind) for p in declared if p.name != "self"]


@BACKENDS
@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_those_of_the_interface(backend, name):
    if name in missing(backend):
        assert not hasattr(backend, name)
        return
    expected = parameters(getattr(Backend, name))
    actual = parameters(getattr(backend, name))
    assert actual[: len(expected)] == expected
    extra = actual[len(expected) :]
    assert [name for name, *_ in extra] == EXTENDED.get((backend.name, name), [])
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for *_, kind in extra)


def missing(backend):
    """Return the functions that a backend may lack because of its capabilities."""
    return (set() if backend.fuses_convolutions else FUSED) | (
        HOST if backend.arrays_on_device else set()
    )


@BACKENDS
def test_a_backend_has_only_the_interface(backend):
    capabilities = {"name", "fuses_convolutions", "arrays_on_device"}
    assert set(vars(backend)) == set(FUNCTIONS) - missing(backend) | capabilities


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_documented_in_the_interface(name):
    first_line = (inspect.getdoc(getattr(Backend, name)) or "").partition("\n")[0]
    assert re.fullmatch(r"[A-Z][a-z]+ .*[.:]", first_line)  # a complete sentence with a verb first


def test_a_backend_without_a_function_is_refused():
    with pytest.raises(TypeError, match="backend partial: no module defines "):
        gather("partial", [activation])
    assert gather("partial", [activation], REFERENCE).relu is activation.relu


@pytest.mark.parametrize("backend", [REFERENCE, CPU], ids=lambda backend: backend.name)
def test_zeros_and_copies_of_host_arrays(backend):
    """Test zeros_like and from_numpy on the host; test_gpu_elementwise.py tests them on a GPU."""
    like = np.ones((3, 40), np.float32)
    zeros = backend.zeros_like(like)
    assert zeros.dtype == like.dtype and np.array_equal(zeros, 0 * like)
    copied = backend.from_numpy(np.arange(120.0).reshape(3, 40), like)
    assert copied.dtype == like.dtype and copied[2, 39] == 119


def test_backends_are_chosen_by_type():
    assert backends.of_type(np.float64) is REFERENCE
    assert backends.of_array(np.zeros(3)) is REFERENCE


def test_a_run_on_cpus_loads_no_kernels_of_gpus():
    """Without a GPU, a run loads only the modules that discover GPUs and compile kernels."""
    code = (
        "import sys, mpidl; from mpidl import training;"
        "print([m for m in sys.modules if m.startswith('mpidl.backends.gpu.')])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "gpu.conv" not in loaded and "gpu.backend" not in loaded
