"""Every backend computes each function of the interface as the others do: one table of cases.

The reference in float64 is the oracle. The CPU backend runs on every build and on several numbers
of threads, the GPU backend on the emulated device (or on a GPU by `--device cuda`).
"""

import functools
import inspect
import itertools

import numpy as np
import pytest
from cases import CASES
from conformance import (
    LAST,
    SPLIT,
    arguments,
    call,
    flat,
    host,
    results,
    share,
)
from cpu_builds import bytes_of, needs_kernels, on_all_builds

from mpidl.backends import CPU, REFERENCE, settings
from mpidl.backends.gather import FUNCTIONS
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.interface import FUSED, Backend
from mpidl.blocks import LANES, DeferredInput
from mpidl.fold import Partial

BY_NAME = {str(case): case for case in CASES}
FIRST = {case.function: case for case in reversed(CASES)}  # the first case of each function


def each(backend, cases=CASES, most=None):
    """Parametrize a test by the cases of a backend, each with (at most so many of) its settings."""
    variants = [
        pytest.param(
            case, values, id=", ".join([str(case), *(f"{k}={v}" for k, v in values.items())])
        )
        for case in cases
        if backend in case.backends
        for values in case.settings.get(backend, ({},))[:most]
    ]
    return pytest.mark.parametrize("case, values", variants)


@pytest.fixture(autouse=True)
def _settings(request, monkeypatch):
    """Test with the settings that the parameter `values` has."""
    values = getattr(request.node, "callspec", None) and request.node.callspec.params.get("values")
    for name, value in (values or {}).items():
        monkeypatch.setattr(settings, name, value)


@functools.cache
def expected(name):
    """What the reference computes: in float32 (if it can), and in float64."""
    case = BY_NAME[name]
    single = None if case.oracle else results(case, REFERENCE)
    return single, results(case, REFERENCE, double=True)


def assert_near(case, actual):
    """Results have the types, the shapes and nearly the numbers of the reference."""
    single, double = expected(str(case))
    assert len(actual) >= len(double)  # beside the sums of an activation that is not stored
    for i, (value, exact) in enumerate(zip(actual, double, strict=False)):
        assert value.shape == exact.shape
        assert single is None or not case.typed or value.dtype == single[i].dtype
        if zeroes_unused(case) and value.ndim > 2 and value.shape[:: value.ndim - 1] == (2, LANES):
            assert not value[-1, ..., LAST:].any(), f"unused lanes of result {i}"
        if not case.tolerance:
            same = exact if single is None else single[i]
            assert np.array_equal(value, same, equal_nan=value.dtype.kind == "f"), f"result {i}"
        elif case.elementwise:
            rounding = 2**-53 * abs(exact).max(initial=0)
            np.testing.assert_allclose(value, exact, rtol=case.tolerance, atol=rounding)
        elif value.size:
            error = abs(value - exact).max() / max(abs(exact).max(), 1e-3)
            assert error <= case.tolerance, f"result {i}"


def zeroes_unused(case):
    """Whether the interface promises zeros in unused lanes of results."""
    parameters = inspect.signature(getattr(Backend, case.function)).parameters
    return case.function == "images" or "counts" in parameters and case.function not in FUSED


def check_on_gpu(device, *names, **values):
    """Cases on the device that is open, for tests that change its kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in values.items():
            patch.setattr(settings, key, value)
        for name in names:
            assert_near(BY_NAME[name], results(BY_NAME[name], GPU))


# NumPy's own sums of the cases that are not finite
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")


@needs_kernels
@each("cpu")
def test_the_cpu_computes_what_the_reference_does(case, values):
    for actual in on_all_builds(lambda: results(case, CPU)).values():
        assert_near(case, actual)


@each("gpu")
def test_a_gpu_computes_what_the_reference_does(device, case, values):
    assert_near(case, results(case, GPU))


def assert_shares(case, backend):
    """Three ranks, one without images, have the bytes of one rank."""
    alone, shared = (results(case, backend, 5, runs) for runs in (((0, 5),), SPLIT))
    assert bytes_of(alone) == bytes_of(shared)


@needs_kernels
@each("cpu", most=1)
def test_any_shares_give_the_same_bytes_on_a_cpu(case, values):
    assert_shares(case, CPU)


@each("gpu", [case for case in CASES if not case.numbers_only])
def test_any_shares_give_the_same_bytes_on_a_gpu(device, case, values):
    assert_shares(case, GPU)


def assert_empty(case, backend):
    """A rank without images has results of the same shapes, and no node of a sum."""
    values = call(case, backend, arguments(case, backend, share(5, SPLIT, 1), 5))
    full = call(case, REFERENCE, arguments(case, REFERENCE, share(5), 5))
    for value, like in zip(flat(values), flat(full), strict=False):
        if isinstance(value, Partial):
            assert value.shape == like.shape and host(value) == []
        elif like.shape[:1] in ((5,), (LANES * 4 + LAST,)):  # of blocks, of images
            assert value.shape == (0, *like.shape[1:])
        else:
            assert value.shape == like.shape


def of_images(cases):
    """Cases whose arguments belong to images."""
    kinds = {"lanes", "deferred", "images"}
    return [c for c in cases if kinds & {getattr(draw, "kind", "") for draw in draws(c)}]


def draws(case):
    return itertools.chain(*(v if isinstance(v, list) else [v] for v in case.arguments.values()))


@needs_kernels
@each("cpu", of_images(CASES), most=1)
def test_an_empty_share_on_a_cpu(case, values):
    assert_empty(case, CPU)


@each("gpu", of_images(CASES), most=1)
def test_an_empty_share_on_a_gpu(device, case, values):
    assert_empty(case, GPU)


DEFERRED = [c for c in CASES if c.oracle is None and "deferred" in str(c)]


def assert_stored(case, backend):
    """An activation that is not stored is read as its values; its sums come with a gradient."""
    owned = share(3)
    values = arguments(case, backend, owned, 3)
    fused = flat(call(case, backend, values))
    stored = flat(call(case, backend, arguments(case, backend, owned, 3, stored=True)))
    if len(fused) > len(stored):
        (source,) = (v for v in values.values() if isinstance(v, DeferredInput))
        dx = [value for value in fused if not isinstance(value, Partial)][-1]
        stored.append(backend.activation_sums(dx.reshape(source.x.shape), source, owned.tree))
    assert bytes_of([host(v) for v in fused]) == bytes_of([host(v) for v in stored])


@needs_kernels
@each("cpu", DEFERRED)
def test_an_activation_is_read_as_its_values_on_a_cpu(case, values):
    assert_stored(case, CPU)


@each("gpu", DEFERRED)
def test_an_activation_is_read_as_its_values_on_a_gpu(device, case, values):
    assert_stored(case, GPU)


SELECTIVE = [case for case in CASES if "needs" in case.arguments]


def assert_needs(case, backend):
    """Gradients that are not needed are None; the others have the same bytes."""
    values = arguments(case, backend, share(2), 2)
    every = call(case, backend, values)
    for needs in itertools.product((False, True), repeat=3):
        some = call(case, backend, values | {"needs": needs})
        for value, full, wanted in zip(some, every, (*needs, needs[0]), strict=False):
            assert (value is not None) == (wanted and full is not None)
            assert value is None or bytes_of(host(value)) == bytes_of(host(full))


@needs_kernels
@each("cpu", SELECTIVE, most=1)
def test_only_needed_gradients_are_computed_on_a_cpu(case, values):
    assert_needs(case, CPU)


@each("gpu", [case for case in FIRST.values() if case in SELECTIVE])
def test_only_needed_gradients_are_computed_on_a_gpu(device, case, values):
    assert_needs(case, GPU)


def unaligned(value):
    room = np.empty(value.size + 1, value.dtype)
    room[1:] = value.ravel()
    return room[1:].reshape(value.shape)


@needs_kernels
@each("cpu", [c for c in CASES if "weights" not in c.arguments and c.function != "planes"], most=1)
def test_arrays_need_not_be_aligned_nor_c_ordered(case, values):
    expected = bytes_of(results(case, CPU))
    for change in (unaligned, np.asfortranarray):
        assert bytes_of(results(case, CPU, change=change)) == expected


@each("gpu", FIRST.values())
def test_any_schedule_of_threads_gives_the_same_bytes(emulated, case, values):
    schedules = []
    for order in (0, 1, 2):
        with emulated(order):
            schedules += [bytes_of(results(case, GPU)) for _ in range(2)]
    assert all(other == schedules[0] for other in schedules)


class Calls:
    """A backend that notes which of its functions are called."""

    def __init__(self, backend):
        self.backend, self.names = backend, set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.backend, name)


def test_every_function_has_a_case():
    calls = Calls(CPU)
    for case in FIRST.values():
        call(case, calls, arguments(case, CPU, share(2), 2))
    assert calls.names == set(FUNCTIONS)
