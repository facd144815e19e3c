"""Check that every backend computes the same results for a table of calls of the interface.

Results are compared with the reference backend in float64. The CPU backend runs with every build
and several numbers of threads. The GPU backend runs on the emulated device, or on a GPU with
`--device cuda`.
"""

import functools
import itertools

import cases
import numpy as np
import pytest
from cases import CASES
from conformance import (
    LAST,
    SPLIT,
    Draw,
    arguments,
    assert_bytes,
    assert_near,
    call,
    flat,
    host,
    parameters,
    results,
    share,
)
from cpu_builds import (
    BUILDS,
    FUSED_BUILDS,
    THREADS,
    VECTOR_BUILDS,
    bytes_of,
    needs_kernels,
    on_all_builds,
)

from mpidl.backends import CPU, REFERENCE, settings
from mpidl.backends.gather import FUNCTIONS
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.interface import HOST
from mpidl.backends.reference import activation, bf16
from mpidl.core.blocks import LANES
from mpidl.core.fold import Partial
from mpidl.core.values import BF16

BY_NAME = {str(case): case for case in CASES}


def first_cases(cases):
    """Return {function name: the first case of the function}."""
    return {case.function: case for case in reversed(cases)}


FIRST = first_cases(CASES)
IN_BF16 = [case for case in CASES if case.in_bf16]
FIRST_IN_BF16 = first_cases(IN_BF16)
MOMENTS_IN_BF16 = BY_NAME["moments, (20, 3, 5), bf16"]  # no mean of one image is almost 0


# One convolution by each kind of kernel
KINDS = ("3x3 by 2", "1x1", "two groups", "several tiles of odd sizes", "depthwise 3x3")
QUICK_ON_GPU = {
    f"{function}, {label}" for label in KINDS for function in ("conv2d", "conv2d_backward")
}


def on_cases(
    backend, cases=CASES, limit=None, each_function_once=False, each_case_once=True, quick=()
):
    """Parametrize a test by the cases of a backend and their settings, at most `limit` per case.

    By default, the test is slow for all settings of a case except the first. If `each_case_once` is
    False, all settings of the first case of a function are quick too. If `each_function_once` is
    True, all cases of a function except the first, and except the names in `quick`, are slow.
    """
    narrow, wide = ([case for case in cases if case.in_bf16 == is_narrow] for is_narrow in (1, 0))
    firsts = {str(case) for group in (narrow, wide) for case in first_cases(group).values()}
    firsts.update(quick)
    part = pytest.mark.slow({"cpu": "ranks", "gpu": "gpu"}[backend])

    def is_slow(case, setting):
        is_variant = str(case) not in firsts
        is_extra = case.in_bf16 and not case.ordered
        return (is_variant and (each_function_once or is_extra)) or (
            setting > 0 and (is_variant or each_case_once)
        )

    rows = [
        pytest.param(
            *(case, values),
            id=", ".join([str(case), *(f"{k}={v}" for k, v in values.items())]),
            marks=[part] * is_slow(case, i),
        )
        for case in cases
        if backend in case.backends
        for i, values in enumerate(case.settings.get(backend, ({},))[:limit])
    ]
    assert rows
    return pytest.mark.parametrize("case, values", rows)


def draws(case):
    lists = (v if isinstance(v, list) else [v] for v in case.arguments.values())
    return [draw for draw in itertools.chain(*lists) if isinstance(draw, Draw)]


@pytest.fixture(autouse=True)
def _settings(request, monkeypatch):
    """Apply the settings in the parameter `values`."""
    values = getattr(request.node, "callspec", None) and request.node.callspec.params.get("values")
    for name, value in (values or {}).items():
        monkeypatch.setattr(settings, name, value)


def check_on_gpu(device, *names, **values):
    """Check cases on the open device, for tests that change the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in values.items():
            patch.setattr(settings, key, value)
        for name in names:
            assert_near(BY_NAME[name], results(BY_NAME[name], GPU))


pytestmark = [  # NumPy warns about non-finite cases and cases without images
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Mean of empty slice:RuntimeWarning"),
]


# The generic build is slow, and the builds in the middle differ least.
NEWEST_AND_OLDEST = list(dict.fromkeys(VECTOR_BUILDS[:1] + VECTOR_BUILDS[-1:]))


@needs_kernels
@on_cases("cpu")
def test_the_cpu_computes_what_the_reference_does(case, values):
    """All builds run a function's first case. In the slow part `threads`, they run more cases."""
    is_first = case is FIRST[case.function] or len(THREADS) > 2
    names = BUILDS if is_first or case.ordered else NEWEST_AND_OLDEST
    for build, actual in on_all_builds(lambda: results(case, CPU), names).items():
        assert_near(case, actual)
        if is_direct(case, build):
            assert_bytes(case, actual)


def is_direct(case, build):
    """Return whether a build computes direct sums in the order of the reference.

    Without fused multiply-adds, a build rounds products of one channel, which are not exact.
    """
    if not case.ordered or settings.winograd != "off":
        return False
    is_dense = case.function.startswith("dense")
    return is_dense or case.arguments["weight"].shape[1] != 1 or build in FUSED_BUILDS


@on_cases("gpu", each_case_once=False, each_function_once=True, quick=QUICK_ON_GPU)
def test_a_gpu_computes_what_the_reference_does(device, case, values):
    assert_near(case, results(case, GPU))


FIRSTS = [*FIRST.values(), *(FIRST_IN_BF16 | {"moments": MOMENTS_IN_BF16}).values()]
COUNTED = [c for c in FIRSTS if {"counts", "labels", "pixels"} & parameters(c.function)]
COUNTED += [c for c in CASES if str(c).startswith("images, (3, 5, 7) to")]


@needs_kernels
@pytest.mark.parametrize("blocks, last", [(1, 1), (1, LANES), (2, 15), (3, LANES)])
@on_cases("cpu", COUNTED, limit=1)
def test_mini_batches_of_any_size(case, values, blocks, last):
    for actual in on_all_builds(lambda: results(case, CPU, blocks, last=last)).values():
        assert_near(case, actual, blocks, last)


BETWEEN = BY_NAME["conv2d_backward, 3x3, between activations"]
BETWEEN_IN_BF16 = BY_NAME["conv2d_backward, 3x3, between activations, bf16"]
PARTLY_USED = [case for case in COUNTED if case.function != "images"] + [BETWEEN]
PARTLY_USED += [BY_NAME["moments, (20, 3, 5)"], BY_NAME["batchnorm_dx, (4, 6, 6)"]]


@pytest.mark.parametrize(
    "blocks, last",
    [(1, 1), (3, -25), *(pytest.param(2, n, marks=pytest.mark.slow("gpu")) for n in (0, LANES))],
)
@on_cases("gpu", PARTLY_USED, limit=1)
def test_a_gpu_ignores_unused_images(device, case, values, blocks, last):
    assert_near(case, results(case, GPU, blocks, last=last), blocks, last)


def assert_shares(case, backend):
    """Check that three ranks, one of them without images, compute the bytes of one rank."""
    one_rank, three_ranks = (results(case, backend, 5, runs) for runs in (((0, 5),), SPLIT))
    assert bytes_of(one_rank) == bytes_of(three_ranks)


@needs_kernels
@on_cases("cpu", limit=1, each_function_once=True)
def test_any_shares_give_the_same_bytes_on_a_cpu(case, values):
    assert_shares(case, CPU)


SUMMED = [c for c in CASES if "tree" in parameters(c.function)]
SHARED = [c for c in CASES if c in SUMMED or c in FIRST.values()]  # other functions have no sums


@on_cases("gpu", [c for c in SHARED if not c.numbers_only], each_function_once=True)
def test_any_shares_give_the_same_bytes_on_a_gpu(device, case, values):
    assert_shares(case, GPU)


@functools.cache
def types_and_shapes(name):
    """Return (dtype, shape) of the reference's results for one block."""
    case = BY_NAME[name]
    outputs = flat(call(case, REFERENCE, arguments(case, REFERENCE, share(1))))
    return [(value.dtype, value.shape) for value in outputs]


def assert_empty(case, backend):
    """Check that a rank without images returns the same types and shapes, and no nodes of sums."""
    outputs = flat(call(case, backend, arguments(case, backend, share(5, SPLIT, 1))))
    for value, (dtype, shape) in zip(outputs, types_and_shapes(str(case)), strict=True):
        assert value.dtype == dtype
        if isinstance(value, Partial):
            assert value.shape == shape and host(value) == []
        elif shape[:1] in ((1,), (LAST,)):  # the first axis counts blocks or images
            assert value.shape == (0, *shape[1:])
        else:
            assert value.shape == shape


OF_IMAGES = [c for c in CASES if {"lanes", "deferred", "images"} & {d.kind for d in draws(c)}]


@needs_kernels
@on_cases("cpu", OF_IMAGES, limit=1, each_function_once=True)
def test_an_empty_share_on_a_cpu(case, values):
    assert_empty(case, CPU)


@on_cases("gpu", OF_IMAGES, limit=1, each_function_once=True)
def test_an_empty_share_on_a_gpu(device, case, values):
    assert_empty(case, GPU)


# In bfloat16, separate functions round the activations that a fused call computes in float32.
DEFERRED = [c for c in CASES if not c.in_bf16 and "deferred" in {draw.kind for draw in draws(c)}]


def assert_separate(case, backend):
    """Check that a call with deferred activations has the bytes of separate functions."""
    fused, separate = (
        flat(call(case, backend, arguments(case, backend, share(3), stored=stored), stored))
        for stored in (False, True)
    )
    assert bytes_of([host(v) for v in fused]) == bytes_of([host(v) for v in separate])


@needs_kernels
@on_cases("cpu", DEFERRED, each_function_once=True)
def test_fused_calls_have_the_bytes_of_separate_functions_on_a_cpu(case, values):
    on_all_builds(lambda: assert_separate(case, CPU))


# On GPUs, convolutions compute statistics tile by tile, and separate kernels image by image.
SEPARABLE = [case for case in DEFERRED if not case.function.startswith("conv2d_")]


@on_cases("gpu", SEPARABLE, each_function_once=True)
def test_fused_calls_have_the_bytes_of_separate_functions_on_a_gpu(device, case, values):
    assert_separate(case, GPU)


def assert_overwrite(case, backend):
    """Check that gradients have the same bytes with `overwrite`, and that dy is kept without it."""
    values = arguments(case, backend, share(2))
    dy, outputs = [bytes_of(host(values["dy"]))], []
    for overwrite in (False, True):
        gradients = flat(call(case, backend, values | {"overwrite": overwrite}))
        outputs.append(bytes_of([host(v) for v in gradients]))
        dy.append(bytes_of(host(values["dy"])))
    assert outputs[0] == outputs[1] and dy[0] == dy[1] != dy[2]


@needs_kernels
@on_cases("cpu", [BETWEEN, BETWEEN_IN_BF16])
def test_a_gradient_may_overwrite_its_cotangent_on_a_cpu(case, values):
    on_all_builds(lambda: assert_overwrite(case, CPU))


@on_cases("gpu", [BETWEEN])
def test_a_gradient_may_overwrite_its_cotangent_on_a_gpu(device, case, values):
    assert_overwrite(case, GPU)


SELECTIVE = [case for case in CASES if "needs" in case.arguments]


def assert_needs(case, backend):
    """Check that gradients that are not needed are None, and needed gradients do not change."""
    values = arguments(case, backend, share(2))
    gradients = call(case, backend, values)
    for needs in itertools.product((False, True), repeat=3):
        selected = call(case, backend, values | {"needs": needs})
        assert len(selected) == len(gradients)
        for value, full, is_needed in zip(selected, gradients, (*needs, needs[0]), strict=False):
            assert (value is not None) == (is_needed and full is not None)
            assert value is None or bytes_of(host(value)) == bytes_of(host(full))


@needs_kernels
@on_cases("cpu", SELECTIVE, limit=1)
def test_only_needed_gradients_are_computed_on_a_cpu(case, values):
    assert_needs(case, CPU)


@on_cases("gpu", [case for case in FIRST.values() if case in SELECTIVE])
def test_only_needed_gradients_are_computed_on_a_gpu(device, case, values):
    assert_needs(case, GPU)


@needs_kernels
@on_cases("cpu", [case for case in SELECTIVE if "weight" in case.arguments])
def test_bias_gradients_have_the_bytes_of_channel_sums(case, values):
    def check():
        values = arguments(case, CPU, share(3))
        dy, zero = values["dy"], np.float32([-0.0])
        dy[:, 0] = bf16.narrowed(zero) if dy.dtype == BF16 else zero  # the sum must be 0, not -0
        sums = CPU.channel_sums(values["dy"], values["tree"])
        assert bytes_of(call(case, CPU, values)[2]) == bytes_of(sums)

    on_all_builds(check)


def unaligned(value):
    numbers = np.empty(value.size + 1, value.dtype)
    numbers[1:] = value.ravel()
    return numbers[1:].reshape(value.shape)


@needs_kernels
@on_cases("cpu", [c for c in CASES if c.function != "planes"], limit=1, each_function_once=True)
def test_arrays_need_not_be_aligned_nor_c_ordered(case, values):
    def check():
        aligned = results(case, CPU)
        for change in (unaligned, np.asfortranarray):
            assert bytes_of(results(case, CPU, change=change)) == bytes_of(aligned)

    if "weights" in case.arguments:  # optimizer kernels read the arrays in place
        on_all_builds(check)
    else:
        check()


@on_cases("gpu", FIRST.values())
def test_any_schedule_of_threads_gives_the_same_bytes(emulated, case, values):
    schedules = []
    for order in (0, 1, 2):
        with emulated(order):
            schedules += [bytes_of(results(case, GPU)) for _ in range(2)]
    assert all(other == schedules[0] for other in schedules)


class Calls:
    """A backend that records which of its functions are called."""

    def __init__(self, backend):
        self.backend, self.names = backend, set()

    def __getattr__(self, name):
        self.names.add(name)
        return getattr(self.backend, name)


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_every_function_has_a_case(backend):
    calls = Calls(CPU)
    for case in CASES:
        if backend in case.backends and case.function not in calls.names:
            call(case, calls, arguments(case, calls, share(2)))
    assert calls.names == set(FUNCTIONS) - (HOST if backend == "gpu" else set())


def test_every_elementwise_function_has_cases():
    assert set(cases.FUNCTIONS) == set(activation.FUNCTIONS)


def test_names_of_cases_are_unique():
    assert len(BY_NAME) == len(CASES)


@on_cases("cpu", [BY_NAME["conv2d, digits 2"]])
def test_settings_of_a_case_are_applied(case, values):
    assert values and values == {name: getattr(settings, name) for name in values}


@needs_kernels
def test_settings_reach_the_cpu(monkeypatch):
    outputs = set()
    for winograd in ("fast", "off"):
        monkeypatch.setattr(settings, "winograd", winograd)
        outputs.add(bytes_of(results(BY_NAME["conv2d, digits 2"], CPU))[0])
    assert len(outputs) == 2


def test_settings_reach_a_gpu(device, monkeypatch):
    kernels = set()
    for direct in (False, True):
        monkeypatch.setattr(settings, "direct", direct)
        device.launched.clear()
        results(BY_NAME["conv2d, 3x3"], GPU)
        kernels.add(tuple(device.launched))
    assert len(kernels) == 2
