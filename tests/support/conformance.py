"""Call every backend with the same arguments and compare the results.

A `Case` names a function of `backends.interface` and declares its arguments; the table is in
`tests/backends/cases.py` and `training_cases.py`. `results` calls a backend, folds each sum to its
root, and returns host arrays. Results for any division into shares, and from any backend, can be
compared.
"""

import functools
import inspect
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpidl.backends import CPU, REFERENCE, settings
from mpidl.backends.deferred import NormalizedInput
from mpidl.backends.gpu import array
from mpidl.backends.gpu.array import Array
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.interface import FUSED, Backend
from mpidl.backends.reference import bf16
from mpidl.core.blocks import LANES, DeferredInput
from mpidl.core.fold import Partial, Tree, fold_nodes, merge_moments
from mpidl.core.values import BF16

BACKENDS = {backend.name: backend for backend in (REFERENCE, CPU, GPU)}
LAST = 9  # number of images in the last block
# Bound of errors in bfloat16, relative to the largest number: 2^-9 for each number that is rounded.
# These are weights, images or their gradients before and after a convolution, and results.
BF16_BOUND = 4 * 2.0**-9
# with Winograd's tiles, which amplify the rounding of the factors of dx and dweight
WINOGRAD_BOUND = 4 * BF16_BOUND
BY_TILES = {"conv2d_backward", "transposed_conv2d", "transposed_conv2d_backward"}
# functions whose results, sums of bfloat16 numbers, are not rounded to bfloat16
SUMS = {"channel_sums", "moments", "batchnorm_sums", "activation_sums", "prelu_dslope"}
SUMS |= {"scale_channels_dfactor"}
# Cases that read a result that was rounded to bfloat16, such as maxima of windows or earlier steps.
# The reference in bfloat16 rounds it too. These are the first words of the cases' names.
OF_RESULTS = ("elementwise_dx, hard_sigmoid", "norm_max_pool_relu_dx", "recurrence")
SPLIT = ((0, 3), (3, 3), (3, 5))  # five blocks on three ranks; the second rank has none


class Draw(NamedTuple):
    """An argument that is drawn at random.

    kind: "lanes" (a value per image), "deferred" (lanes that are the input of an activation),
    "normalized" (the same without limits), "images" (an entry per image), "samples" (sample
    numbers), "filters" (weights of images) or "plain".
    """

    kind: str
    shape: tuple = ()
    low: float = -2.0  # the mean is not 0, so sums do not cancel
    high: float = 3.0
    dtype: Any = np.float32
    cotangent: bool = False  # zero in unused lanes
    image: tuple | None = None  # for dense weights: the shape of the images that they read
    flattened: bool = False  # image axes of lanes are flattened
    rounded: bool = False  # positive numbers are rounded to integers, so many are equal
    special: bool = False  # contains NaN and infinities
    limits: tuple = (0.0, math.inf)  # of the activation of deferred lanes


def lanes(*shape, **options):
    return Draw("lanes", shape, **options)


def cotangent(*shape):
    return Draw("lanes", shape, cotangent=True)


def deferred(*shape, **options):
    """Return an activation of lanes. A backend that fuses convolutions does not store it."""
    return Draw("deferred", shape, **options)


def normalized(*shape):
    """Return a normalization of lanes. A backend that fuses convolutions does not store it."""
    return Draw("normalized", shape)


def labels(classes, *pixels):
    return Draw("lanes", pixels, low=0, high=classes, dtype=np.int32)


def filters(*shape, image=None):
    return Draw("filters", shape, low=-1, high=1, image=image)


def vector(*shape, low=-1.0, high=1.0, dtype=np.float32):
    return Draw("plain", shape, low, high, dtype)


def images(*shape, low=0, high=256, dtype=np.uint8):
    return Draw("images", shape, low, high, dtype)


class Case(NamedTuple):
    """A call of a function of the interface.

    call: the callable; by default the function itself, with `counts` and `tree` if it takes them.
    oracle: callable that replaces `call` on the reference, for functions that the reference lacks.
    tolerance: relative to the largest number of the exact result or, if `elementwise`, to each
        number; 0 requires the reference's float32 numbers, including the signs of zeros.
    settings: for each backend, the values of `backends.settings` to test.
    typed: whether results have the reference's types.
    ordered: whether direct sums of products in bfloat16 have the reference's bytes.
    numbers_only: whether to skip the checks of shares on an emulated GPU, which would take too
    long.
    """

    function: str
    label: str
    arguments: dict[str, Any]
    tolerance: float = 3e-7
    elementwise: bool = False
    call: Callable | None = None
    oracle: Callable | None = None
    backends: tuple[str, ...] = ("cpu", "gpu")
    settings: dict[str, tuple[dict, ...]] = {}
    typed: bool = True
    numbers_only: bool = False
    ordered: bool = False

    @property
    def in_bf16(self):
        return all(values.get("precision") == "bf16" for values in self.settings.get("cpu", ({},)))

    def __str__(self):
        return f"{self.function}, {self.label}"


class Share(NamedTuple):
    """The blocks of a mini-batch that belong to a rank.

    The last of all blocks has `last` images. If `last` is not positive, the last block and some
    earlier blocks have no images, like blocks that a GPU reserves for the largest mini-batch.
    """

    first: int
    stop: int
    tree: Tree
    counts: np.ndarray
    blocks: int
    last: int


def share(blocks, runs=None, rank=0, last=LAST):
    """Return a rank's share of a mini-batch of `blocks` blocks."""
    tree = Tree(blocks, runs or ((0, blocks),), rank)
    first, stop = tree.run
    return Share(first, stop, tree, used_lanes(blocks, last)[first:stop], blocks, last)


def used_lanes(blocks, last):
    """Return the number of images of each block."""
    images = LANES * (blocks - 1) + last
    return np.array([min(max(images - LANES * b, 0), LANES) for b in range(blocks)], np.int32)


def fill_unused(lanes, counts, number):
    for of_block, count in zip(lanes, counts, strict=True):
        of_block[..., count:] = number


@functools.lru_cache(maxsize=64)
def drawn(name, draw, blocks, last):
    """Draw an argument for a whole mini-batch. `part` copies shares from it."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    images = max(LANES * blocks - LANES + last, 0)
    per_image = {"images": (images,), "samples": (LANES * blocks,)}
    shape = per_image.get(draw.kind, ()) + draw.shape
    if draw.kind in ("lanes", "deferred", "normalized"):
        shape = (blocks, *draw.shape, LANES)
    if draw.kind == "samples":
        return np.arange(LANES * blocks, dtype=np.int64) * 1234567
    if np.issubdtype(draw.dtype, np.integer):
        value = rng.integers(draw.low, draw.high, shape).astype(draw.dtype)
    else:
        dtype = np.float32 if draw.dtype == BF16 else draw.dtype
        value = rng.uniform(draw.low, draw.high, shape).astype(dtype)
    if draw.rounded:
        value = np.where(value > 0, np.round(value), value)
    if draw.special:
        for start, step, number in (0, 7, np.nan), (3, 5, -np.inf), (1, 11, np.inf):
            value.reshape(-1)[start::step] = number
    if draw.cotangent:
        fill_unused(value, used_lanes(blocks, last), 0)
    if draw.dtype == BF16:
        value = bf16.narrowed(value)
    if draw.kind in ("deferred", "normalized"):
        mean, scale, beta = rng.uniform((-0.5, 0.5, -1), (0.5, 2, 1), (draw.shape[0], 3)).T
        vectors = (np.ascontiguousarray(v, np.float32) for v in (mean, scale, beta))
        if draw.kind == "deferred":
            return DeferredInput(value, *vectors, *draw.limits)
        return NormalizedInput(value, *vectors)
    return value


def part(draw, value, owned):
    """Return a copy of the part of an argument that belongs to a share."""
    if isinstance(value, DeferredInput):
        return changed(np.copy, value._replace(x=value.x[owned.first : owned.stop]))
    if draw.kind == "lanes":
        return value[owned.first : owned.stop].copy()
    if draw.kind in ("images", "samples"):
        return value[LANES * owned.first : LANES * owned.stop].copy()
    return value.copy()


def placed(backend, draw, value, double):
    """Convert an argument for a backend, in float64 for the reference if `double`."""
    if draw.flattened and not isinstance(value, DeferredInput):
        return flattened(placed(backend, draw._replace(flattened=False), value, double))
    if isinstance(value, DeferredInput):
        parts = zip(("lanes", "plain", "plain", "plain"), value[:4], strict=True)
        arrays = [placed(backend, Draw(kind), v, double) for kind, v in parts]
        operand = backend.source(*arrays, value.low, value.high)
        return operand if draw.kind == "deferred" else NormalizedInput(*operand[:4])
    if backend is GPU:
        if draw.kind == "samples":
            value = value.astype(np.int32)
        upload = {"lanes": array.lanes, "filters": array.filters}.get(draw.kind, array.plain)
        return upload(value, draw.image) if draw.image else upload(value)
    if double and draw.kind != "images" and value.dtype in (np.float32, BF16):
        return numbers(value).astype(np.float64)
    return value


def stored_activation(backend, draw, source):
    """Return the activation of a DeferredInput as lanes, computed by separate functions."""
    active = backend.batchnorm(*source[:4])
    if source.high < math.inf:
        active = backend.elementwise("clip_range", active, source.low, source.high)
    elif not isinstance(source, NormalizedInput):
        active = backend.relu(active)
    return flattened(active) if draw.flattened else active


def flattened(value):
    return value.reshape(value.shape[0], math.prod(value.shape[1:-1]), LANES)


def changed(change, value):
    if isinstance(value, DeferredInput):
        return value._make((*map(change, value[:4]), value.low, value.high))
    return change(value)


def arguments(case, backend, owned, double=False, change=None, stored=False):
    """Return the arguments of a case by name.

    `change(array)` converts host arrays to another layout, except for state that the call changes
    in place. The reference, and any backend if `stored`, gets activations as lanes.
    `values["sources"]` contains the DeferredInput of each activation.
    """
    values, sources = {}, {}
    for name, argument in case.arguments.items():
        draws = argument if isinstance(argument, list) else [argument]
        places = []
        for i, draw in enumerate(draws):
            if not isinstance(draw, Draw):
                places.append(draw)
                continue
            array_of_batch = drawn(f"{case} {name} {i}", draw, owned.blocks, owned.last)
            value = part(draw, array_of_batch, owned)
            if backend is GPU and name == "labels":
                fill_unused(value, owned.counts, 1 << 30)  # invalid, so a kernel must not read it
            if change is not None and not name.startswith("state"):
                value = changed(change, value)
            value = placed(backend, draw, value, double)
            if isinstance(value, DeferredInput):
                sources[name] = value
                if stored or backend is REFERENCE:
                    value = stored_activation(backend, draw, value)
            places.append(value)
        values[name] = places if isinstance(argument, list) else places[0]
    values |= {"tree": owned.tree, "counts": owned.counts, "sources": sources}
    if backend is GPU:
        values["counts"] = array.plain(np.array([owned.counts.sum()], np.int32))
        if "epoch" in values:
            values["epoch"] = array.plain(np.array([values["epoch"]], np.int32))
    return values


@functools.cache
def parameters(function):
    """Return the names of the parameters of a function of the interface."""
    return set(inspect.signature(getattr(Backend, function)).parameters)


def call(case, backend, values, separately=False):
    """Call the function of a case, or its oracle (on the reference, or if `separately`)."""
    function = case.call
    if case.oracle and (separately or backend is REFERENCE):
        function = case.oracle
    if function is not None:
        return function(backend, values)
    accepted = parameters(case.function)
    unknown = set(case.arguments) - accepted
    assert not unknown, f"{case.function} takes no {unknown}"
    keywords = accepted & set(values)
    return getattr(backend, case.function)(**{name: values[name] for name in keywords})


def flat(value):
    """Return the results as a flat list without None."""
    if value is None:
        return []
    if isinstance(value, tuple | list):
        return [item for part in value for item in flat(part)]
    return [value]


def host(value):
    """Return an array, or the nodes of a sum, on the host."""
    if isinstance(value, Partial):
        (term,) = value.terms
        return [np.array(n.numpy() if isinstance(n, Array) else n) for n in term.nodes]
    return value.numpy() if isinstance(value, Array) else np.asarray(value)


def numbers(value):
    """Return an array whose numbers are not stored in bfloat16."""
    return bf16.widened(value) if value.dtype == BF16 else value


def results(case, backend, blocks=2, runs=None, last=LAST, double=False, change=None):
    """Return the results for a mini-batch that `runs` divides among ranks, as host arrays."""
    shares = []
    for rank in range(len(runs or [0])):
        owned = share(blocks, runs, rank, last)
        values = arguments(case, backend, owned, double, change)
        shares.append((owned, flat(call(case, backend, values))))
    return joined(shares)


def joined(shares):
    """Join the results of all shares: concatenate lanes, fold sums, and split moments in three."""
    tree = shares[0][0].tree
    edges = [node for of_rank in tree.nodes for node in of_rank]
    arrays = []
    for values in zip(*(values for _, values in shares), strict=True):
        parts = [host(value) for value in values]
        if isinstance(values[0], Partial):
            nodes = [node for of_rank in parts for node in of_rank]
            combine = values[0].terms[0].combine
            total = fold_nodes(tree, edges, nodes, combine) if nodes else np.zeros(values[0].shape)
            total = np.asarray(total).reshape(values[0].shape)
            # The three arrays differ in size, and errors are relative to the largest number.
            channels = total.size // 2 if combine is merge_moments else 0
            arrays += np.split(total, (1, 1 + channels)) if channels else [total]
        elif parts[0].ndim and len({len(part) for part in parts}) > 1:  # arrays of blocks or images
            arrays.append(np.concatenate(parts))
        else:
            assert len({part.tobytes() for part in parts}) == 1, "ranks differ"
            arrays.append(parts[0])
    return arrays


_expected: dict = {}  # {(case, blocks, last): results of the reference in float32 and float64}


def expected(case, blocks, last):
    """Return the results of the reference in float32 and in float64."""
    key = str(case), blocks, last
    if key not in _expected:
        _expected[key] = [
            results(case, REFERENCE, blocks, last=last, double=double) for double in (False, True)
        ]
    return _expected[key]


def assert_near(case, actual, blocks=2, last=LAST):
    """Compare types, shapes, zeros in unused lanes and numbers with the reference."""
    single, double = expected(case, blocks, last)
    rounds = case.in_bf16 and not case.elementwise and case.function not in SUMS
    has_tiles = settings.winograd != "off" and case.function in BY_TILES
    tolerance = case.tolerance
    if rounds and tolerance:
        tolerance = max(tolerance, WINOGRAD_BOUND if has_tiles else BF16_BOUND)
    assert len(actual) == len(single) == len(double) > 0
    for i, (stored, rounded, exact) in enumerate(zip(actual, single, double, strict=True)):
        assert stored.shape == exact.shape, f"result {i}"
        assert stored.dtype == rounded.dtype or not case.typed, f"result {i}"
        value, rounded = numbers(stored), numbers(rounded)
        if case.in_bf16 and str(case).startswith(OF_RESULTS):
            exact = rounded
        of_lanes = value.ndim > 2 and value.shape[:: value.ndim - 1] == (blocks, LANES)
        if of_lanes and zeroes_unused(case):
            cleared = value.copy()
            fill_unused(cleared, used_lanes(blocks, last), 0)
            assert np.array_equal(cleared, value), f"unused lanes of result {i}"
        if not tolerance:
            assert np.array_equal(value, rounded, equal_nan=value.dtype.kind == "f"), f"result {i}"
            signs = [np.signbit(v[~np.isnan(v)]) for v in (value, rounded) if v.dtype.kind == "f"]
            assert not signs or np.array_equal(*signs), f"signs of result {i}"
        elif case.elementwise:
            rounding = 2**-53 * abs(exact).max(initial=0)
            np.testing.assert_allclose(value, exact, rtol=tolerance, atol=rounding)
        elif value.size:
            error = abs(value - exact).max() / max(abs(exact).max(), 1e-3)
            assert error <= tolerance, f"result {i}: {error}"


def assert_bytes(case, actual, blocks=2, last=LAST):
    """Check that results have the bytes of the reference."""
    single, _ = expected(case, blocks, last)
    assert [v.tobytes() for v in actual] == [v.tobytes() for v in single]


def zeroes_unused(case):
    """Return whether the interface requires zeros in the unused lanes of results."""
    counted = "counts" in parameters(case.function) and case.function not in FUSED
    return counted or case.function == "images"
