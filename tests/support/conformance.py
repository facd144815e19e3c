"""Calls of the backends' interface, made by every backend on the same numbers.

A `Case` names a function of `backends.interface` and declares its arguments; the table of them is
`tests/backends/cases.py`. `results` calls a backend and returns host arrays, with every sum folded
to its root, so that results of one rank, of several ranks and of other backends can be compared.
"""

import inspect
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpidl.backends import CPU, REFERENCE
from mpidl.backends.gpu import array
from mpidl.backends.gpu.array import Array
from mpidl.backends.gpu.backend import GPU
from mpidl.backends.interface import Backend
from mpidl.blocks import LANES, DeferredInput
from mpidl.fold import Partial, Tree, fold_nodes

BACKENDS = {backend.name: backend for backend in (REFERENCE, CPU, GPU)}
LAST = 9  # images of the last block
SPLIT = ((0, 3), (3, 3), (3, 5))  # five blocks on three ranks, of which one has none


class Draw(NamedTuple):
    """An argument that is drawn at random.

    kind is where the argument belongs: "lanes" (a value per image), "deferred" (lanes that are the
    input of an activation), "images" (an array with an entry per image), "samples" (their numbers),
    "filters" (weights of images), "plain" (anything else) or "epoch".
    """

    kind: str
    shape: tuple = ()
    low: float = -2.0  # not about 0, so that sums do not cancel
    high: float = 3.0
    dtype: Any = np.float32
    cotangent: bool = False  # zero in unused lanes
    image: tuple | None = None  # of dense weights: the shape of the images they read
    flattened: bool = False  # images, one behind the other
    rounded: bool = False  # positive numbers are whole, so that many are equal
    special: bool = False  # with NaN and infinities


def lanes(*shape, **options):
    return Draw("lanes", shape, **options)


def cotangent(*shape):
    return Draw("lanes", shape, cotangent=True)


def deferred(*shape, **options):
    """The activation of lanes, which a backend that fuses convolutions need not have stored."""
    return Draw("deferred", shape, **options)


def labels(classes, *pixels):
    return Draw("lanes", pixels, low=0, high=classes, dtype=np.int32)


def filters(*shape, image=None):
    return Draw("filters", shape, low=-1, high=1, image=image)


def vector(*shape, low=-1.0, high=1.0, dtype=np.float32):
    return Draw("plain", shape, low, high, dtype)


def images(*shape, low=0, high=256, dtype=np.uint8):
    return Draw("images", shape, low, high, dtype)


class Case(NamedTuple):
    """A call of the interface.

    Without `call` it is function(**arguments), `counts` and `tree` added. `oracle` replaces it on
    the reference, for functions that the reference lacks. Errors are relative to the largest number
    of the exact result, or each to its own number if `elementwise`; `tolerance` 0 asks for the
    bytes that the reference has in float32. `settings` are those of `backends.settings` to be
    tested, by backend; `typed` is whether results have the same types on every backend;
    `numbers_only` leaves out what takes long on an emulated GPU, the checks of several ranks.
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

    def __str__(self):
        return f"{self.function}, {self.label}"


class Share(NamedTuple):
    """Some blocks of a mini-batch: those of a rank."""

    first: int
    stop: int
    tree: Tree
    counts: np.ndarray


def share(blocks, runs=None, rank=0):
    """The share of a rank. The last block of the mini-batch has LAST images."""
    tree = Tree(blocks, runs or ((0, blocks),), rank)
    counts = np.full(blocks, LANES, np.int32)
    counts[-1:] = LAST
    first, stop = tree.run
    return Share(first, stop, tree, counts[first:stop])


def drawn(case, name, draw, blocks):
    """The values of an argument for a mini-batch of so many blocks."""
    rng = np.random.default_rng(zlib.crc32(f"{case} {name}".encode()))
    used = max(LANES * blocks - LANES + LAST, 0)
    per_image = {"images": (used,), "samples": (LANES * blocks,)}
    shape = per_image.get(draw.kind, ()) + draw.shape
    if draw.kind in ("lanes", "deferred"):
        shape = (blocks, *draw.shape, LANES)
    if draw.kind == "samples":
        return np.arange(LANES * blocks, dtype=np.int64) * 1234567
    if np.issubdtype(draw.dtype, np.integer):
        value = rng.integers(draw.low, draw.high, shape).astype(draw.dtype)
    else:
        value = rng.uniform(draw.low, draw.high, shape).astype(draw.dtype)
    if draw.rounded:
        value = np.where(value > 0, np.round(value), value)
    if draw.special:
        for start, step, number in (0, 7, np.nan), (3, 5, -np.inf), (1, 11, np.inf):
            value.reshape(-1)[start::step] = number
    if draw.cotangent:
        value[-1:, ..., LAST:] = 0
    if draw.kind == "deferred":
        mean, scale, beta = rng.uniform((-0.5, 0.5, -1), (0.5, 2, 1), (draw.shape[0], 3)).T
        vectors = (np.ascontiguousarray(v, np.float32) for v in (mean, scale, beta))
        return DeferredInput(value, *vectors)
    return value


def part(draw, value, owned):
    """What a rank has of an argument."""
    if isinstance(value, DeferredInput):
        return value._replace(x=value.x[owned.first : owned.stop])
    if draw.kind == "lanes":
        return value[owned.first : owned.stop]
    if draw.kind in ("images", "samples"):
        return value[LANES * owned.first : LANES * owned.stop]
    return value


def placed(backend, draw, value, double, stored):
    """An argument as a backend takes it; in float64 if `double`, activations stored if `stored`."""
    if isinstance(value, DeferredInput):
        if backend is REFERENCE:
            value = [v.astype(np.float64) if double else v for v in value]
            active = backend.relu(backend.batchnorm(*value))
            return flattened(active) if draw.flattened else active
        if backend is GPU:
            value = [array.lanes(value.x), *map(array.plain, value[1:])]
        source = backend.source(*value)
        if not stored:
            return source
        active = backend.activation(source)
        return flattened(active) if draw.flattened else active
    if draw.flattened:
        return flattened(placed(backend, draw._replace(flattened=False), value, double, stored))
    if backend is GPU:
        if draw.kind == "samples":
            value = value.astype(np.int32)
        upload = {"lanes": array.lanes, "filters": array.filters}.get(draw.kind, array.plain)
        return upload(value, draw.image) if draw.image else upload(value)
    if double and draw.kind != "images" and value.dtype == np.float32:
        return value.astype(np.float64)
    return value


def flattened(value):
    return value.reshape(value.shape[0], math.prod(value.shape[1:-1]), LANES)


def arguments(case, backend, owned, blocks, double=False, change=None, stored=False):
    """The arguments of a case by name. `change(array)` gives the host's arrays another layout."""
    values = {}
    for name, argument in case.arguments.items():
        draws = argument if isinstance(argument, list) else [argument]
        places = []
        for i, draw in enumerate(draws):
            if not isinstance(draw, Draw):
                places.append(draw)
                continue
            value = drawn(case, f"{name} {i}", draw, blocks)
            if backend is GPU and name == "labels":
                value[-1:, ..., LAST:] = 1 << 30  # no class: a kernel must not look at it
            value = part(draw, value, owned)
            if change is not None:
                value = (
                    value._make(map(change, value)) if draw.kind == "deferred" else change(value)
                )
            places.append(placed(backend, draw, value, double, stored))
        values[name] = places if isinstance(argument, list) else places[0]
    values["tree"] = owned.tree
    values["counts"] = owned.counts
    if backend is GPU:
        values["counts"] = array.plain(np.array([owned.counts.sum()], np.int32))
        if "epoch" in values:
            values["epoch"] = array.plain(np.array([values["epoch"]], np.int32))
    return values


def call(case, backend, values):
    """The call itself; a case's `call` gets the backend and the arguments."""
    function = case.oracle if backend is REFERENCE and case.oracle else case.call
    if function is not None:
        return function(backend, values)
    accepted = inspect.signature(getattr(Backend, case.function)).parameters
    return getattr(backend, case.function)(**{k: v for k, v in values.items() if k in accepted})


def flat(value):
    """Results as a flat list, without those that were not asked for."""
    if value is None:
        return []
    if isinstance(value, tuple | list):
        return [item for part in value for item in flat(part)]
    return [value]


def host(value):
    """An array, or the nodes of a sum, on the host."""
    if isinstance(value, Partial):
        (term,) = value.terms
        return [np.array(n.numpy() if isinstance(n, Array) else n) for n in term.nodes]
    return value.numpy() if isinstance(value, Array) else np.asarray(value)


def results(case, backend, blocks=2, runs=None, double=False, change=None):
    """The results of a mini-batch, shared by ranks as `runs` says, as a list of host arrays."""
    shares = []
    for rank in range(len(runs or [0])):
        owned = share(blocks, runs, rank)
        values = arguments(case, backend, owned, blocks, double, change)
        shares.append((owned, flat(call(case, backend, values))))
    return joined(shares)


def joined(shares):
    """Lanes of all ranks one behind the other, and sums folded; of (Share, results) of each."""
    tree = shares[0][0].tree
    edges = [node for of_rank in tree.nodes for node in of_rank]
    arrays = []
    for values in zip(*(values for _, values in shares), strict=True):
        parts = [host(value) for value in values]
        if isinstance(values[0], Partial):
            nodes = [node for of_rank in parts for node in of_rank]
            combine = values[0].terms[0].combine
            total = fold_nodes(tree, edges, nodes, combine) if nodes else np.zeros(values[0].shape)
            arrays.append(np.asarray(total).reshape(values[0].shape))
        else:  # of the ranks' blocks or images; or the same on every rank
            shared = parts[0].ndim and len({len(part) for part in parts}) > 1
            arrays.append(np.concatenate(parts) if shared else parts[0])
    return arrays
