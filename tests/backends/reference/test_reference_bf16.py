"""Test that the reference and the CPU's kernels round to bfloat16 and add products alike.

Direct convolutions whose arguments are stored are compared in test_conformance.py.
"""

import numpy as np
import pytest
from cases import CASES, LARGE_CONVOLUTIONS, activation_back
from conformance import arguments, call, flat, host, numbers, results, share
from cpu_builds import FUSED_BUILDS, bytes_of, needs_kernels, on_all_builds

from mpidl.backends import CPU, REFERENCE, settings
from mpidl.backends.reference import bf16, direct
from mpidl.core.fold import Counter
from mpidl.core.values import BF16, as_type

pytestmark = needs_kernels

FUSED = [c for c in CASES if c.in_bf16 and c.function.startswith("conv2d") and not c.ordered]
FORWARD = [case for case in FUSED if case.function != "conv2d_backward"]
BACKWARD = [case for case in FUSED if case.function == "conv2d_backward"]


def all_numbers():
    """Return float32 numbers: each upper half with lower halves near a tie and near a number."""
    upper, lower = np.arange(1 << 16, dtype=np.uint32) << 16, (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    return (upper[:, None] | np.array(lower, np.uint32)).view(np.float32).reshape(-1)


def nearest(x):
    """Return the upper halves of the nearest numbers in bfloat16, found by their distances."""
    upper = (x.view(np.uint32) >> 16).astype(np.uint64)
    sign, size = upper & 0x8000, upper & 0x7FFF
    candidates = np.stack([size, size + 1])
    values = (candidates << 16).astype(np.uint32).view(np.float32).astype(np.float64)
    values[candidates == 0x7F80] = 2.0**128  # infinity is as far as the next number would be
    below, above = abs(values - abs(x).astype(np.float64))
    is_odd = size & 1 == 1
    size = np.where((above < below) | ((above == below) & is_odd), size + 1, size)
    return np.where(abs(x) < 2.0**-56, 0, sign | size).astype(np.uint16)


def halves(x, function):
    """Return the upper halves of the results of a conversion to bfloat16."""
    return function(x).view(np.uint16)


def test_every_build_rounds_to_the_nearest_number():
    """A NaN stays a NaN with its sign, infinities stay, and numbers below 2^-56 become zero."""
    x = all_numbers()
    finite = np.isfinite(x)
    expected = nearest(x[finite])
    builds = on_all_builds(lambda: as_type(x, BF16).view(np.uint16))
    for rounded in (*builds.values(), halves(x, bf16.narrowed)):
        assert np.array_equal(rounded[finite], expected)
        infinite, not_a_number = np.isinf(x), np.isnan(x)
        upper = (x.view(np.uint32) >> 16).astype(np.uint16)
        assert np.array_equal(rounded[infinite], upper[infinite])
        assert np.array_equal(rounded[not_a_number], upper[not_a_number] | 0x40)
    narrow = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    expected = (narrow.view(np.uint16).astype(np.uint32) << 16).tobytes()
    for wide in on_all_builds(lambda: as_type(narrow, np.dtype(np.float32))).values():
        assert wide.tobytes() == expected == bf16.widened(narrow).tobytes()


@pytest.mark.slow("ranks")
def test_rounding_is_that_of_pytorch():
    """The definition by distances agrees with PyTorch, except for small numbers."""
    torch = pytest.importorskip("torch", reason="no PyTorch to compare the rounding with")
    x = all_numbers()
    x = x[np.isfinite(x) & (abs(x) >= 2.0**-56)]
    rounded = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(rounded.view(np.uint16), nearest(x))


@pytest.fixture(autouse=True)
def direct_sums(monkeypatch):
    monkeypatch.setattr(settings, "winograd", "off")
    monkeypatch.setattr(settings, "precision", "bf16")


def activated(operand):
    """Return an activation in float32; a kernel computes it, as `conv2d` does."""
    if isinstance(operand, np.ndarray):
        return numbers(operand)
    return CPU.activation(operand._replace(x=numbers(operand.x)))


def forward(case, values):
    """Return the results of a fused forward pass from a direct sum in float32."""
    weight, bias, geometry = (values[name] for name in ("weight", "bias", "geometry"))
    if case.function == "conv2d_concat_relu":
        x = np.concatenate([numbers(values["first"]), numbers(values["second"])], axis=1)
    else:
        x = activated(values["x"])
    y = direct.conv2d(x, weight, bias, geometry)
    if case.function in ("conv2d_relu", "conv2d_concat_relu"):
        addend = values.get("addend")
        return bf16.narrowed(np.maximum(y if addend is None else y + numbers(addend), 0))
    y = bf16.narrowed(y)
    return y, CPU.moments(y, values["counts"], values["tree"])


def backward(case, values):
    """Return the results of a fused backward pass from direct sums in float32."""
    dy, y = numbers(values["dy"]), numbers(values["y"])
    if values["limits"]:
        dy = activation_back(CPU, dy, CPU.source(y, *values["after"], *values["limits"]))
    dy = CPU.batchnorm_dx(dy, y, values["after"][0], *values["factors"], values["counts"])
    weight, geometry, source = (values[name] for name in ("weight", "geometry", "x"))
    dx = bf16.narrowed(direct.conv2d_dx(dy, source.x.shape[1:-1], weight, geometry))
    leaves = direct.conv2d_dweight(dy, activated(source), weight, geometry)
    is_rounded = len(weight) // geometry.groups >= direct.FEW_OUTPUTS
    sums = direct.channel_sums(bf16.rounded(dy) if is_rounded else dy)
    folded = []
    for parts in (leaves, sums):
        counter = Counter(values["tree"])
        for part in parts:
            counter.push(part)
        folded.append(counter.partial(parts.shape[1:], np.float32))
    return dx, *folded, CPU.activation_sums(dx, source, values["tree"])


def parametrized(cases):
    large = tuple(f"{label}," for label in LARGE_CONVOLUTIONS)
    marks = [[pytest.mark.slow("ranks")] * case.label.startswith(large) for case in cases]
    rows = [pytest.param(c, id=str(c), marks=m) for c, m in zip(cases, marks, strict=True)]
    return pytest.mark.parametrize("case", rows)


def check(case, oracle):
    values = arguments(case, CPU, share(3))
    expected = bytes_of([host(value) for value in flat(oracle(case, values))])
    for actual in on_all_builds(lambda: call(case, CPU, values), FUSED_BUILDS).values():
        assert bytes_of([host(value) for value in flat(actual)]) == expected


@parametrized(FORWARD)
def test_fused_forward_passes(case):
    """The activation of x is rounded once, and the sum is rounded after the addend and ReLU."""
    check(case, forward)


@parametrized(BACKWARD)
def test_fused_backward_passes(case):
    """The gradient of y is rounded once, in products over channels and over images."""
    check(case, backward)


def test_negative_control_order_of_products(monkeypatch):
    """With the even product of each pair first, the reference has other bytes."""
    case = next(case for case in FORWARD if case.label == "odd channels, bf16")  # 280,000 sums
    taps = direct._taps
    monkeypatch.setattr(
        direct, "_taps", lambda channels, size: sorted(taps(channels, size), key=even_first)
    )
    with pytest.raises(AssertionError):
        check(case, forward)


def even_first(tap):
    channel, row, column = tap
    return channel // 2, row, column, channel


@pytest.mark.parametrize("label", ["digits 2", "1x1", "large 1x1", "(130,) to 17"])
def test_the_reference_accepts_ranks_without_images(label):
    cases = [c for c in CASES if c.in_bf16 and c.label == f"{label}, bf16"]
    assert cases
    for case in cases:
        alone, shared = (results(case, REFERENCE, 2, runs) for runs in (None, ((0, 2), (2, 2))))
        assert bytes_of(alone) == bytes_of(shared), str(case)


def test_as_type_converts_many_blocks():
    """The kernels that convert share large arrays among threads."""
    x = np.random.default_rng(0).normal(size=(7, 33, 20, 16)).astype(np.float32)
    expected = bf16.narrowed(x).tobytes()
    assert all(v.tobytes() == expected for v in on_all_builds(lambda: as_type(x, BF16)).values())
