"""List the passes of layers, with the minimum numbers of operations and bytes.

`kernels` compares the time of each pass with the peak of the core, and `roofline` compares it with
a lower bound.
"""

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from benchmarks import subject
from mpidl import backends
from mpidl.backends.cpu import arenas, conv
from mpidl.backends.shapes import ChannelNorm, Geometry, Windows
from mpidl.core.blocks import LANES, Blocked, DeferredInput, OneRank, share
from mpidl.nn import (
    Conv2D,
    CrossChannelNorm,
    GroupNorm,
    InstanceNorm,
    Layer,
    MaxPool2D,
    Network,
    graph,
)

# 3x3 convolutions for comparing machines and versions: (channels, height = width).
SHAPES = ((20, 24), (32, 32), (64, 16), (128, 8))
# AlexNet's first fully connected layer: inputs, outputs, images.
DENSE = (9216, 4096, 32)


class Case(NamedTuple):
    """One pass of one layer.

    Parameters
    ----------
    layer : str
        Name of the layer.
    name : str
        Name of the pass.
    shape : tuple
        Shape and options. Cases with the same pass and shape are measured only once.
    run : callable
        Runs the pass.
    flops : int
        Number of operations of the direct algorithm, two per product, or 0 if the pass only moves
        memory.
    bytes : int
        Bytes of the arrays that the pass must read or write, each counted once.
    products : int
        Number of operations of the algorithm in use. Winograd's convolutions need fewer than the
        direct algorithm; their transforms are not counted.
    sgemm : callable or None
        Computes the same product with BLAS, for comparison.
    """

    layer: str
    name: str
    shape: tuple
    run: Callable[[], object]
    flops: int
    bytes: int
    products: int = 0
    sgemm: Callable[[], object] | None = None


class Pass(NamedTuple):
    """Case without the layer; `products` is `flops` by default."""

    name: str
    run: Callable[[], object]
    flops: int
    bytes: int
    products: int | None = None


def cases(network: str, options: argparse.Namespace) -> Iterator[Case]:
    """Yield the Cases of a network's layers, of SHAPES ("shapes") or of DENSE ("dense")."""
    if network == "dense":
        yield from _large_dense(options.threads)
        return
    if network != "shapes":
        net = subject.network(network, options.image, options.seed)
        for layer in net.layers:
            yield from layer_cases(net, layer, f"{network}/{layer.name}", options.batch_size)
        return
    for channels, side in SHAPES:
        net = Network([Conv2D(3, channels, padding=1, name="conv")], (channels, side, side))
        name = f"{channels} at {side}x{side}"
        yield from _cases(name, net, net.layers[0], options.batch_size)


def reads_images(net: Network, layer: Layer) -> bool:
    """Return whether a layer reads the images; no step computes the images' gradient."""
    return graph.IMAGES in net.reads[net.layers.index(layer)]


def layer_cases(net: Network, layer: Layer, name: str, batch_size: int) -> Iterator[Case]:
    """Yield the Cases of a layer named `name`; a layer that reads the images has no dx pass."""
    for case in _cases(name, net, layer, batch_size):
        if not (case.name == "dx" and reads_images(net, layer)):
            yield case


def layer_shape(net: Network, layer: Layer, batch_size: int) -> tuple:
    """Return the shape of a layer's Cases: (C, H, W), the batch size, and the options."""
    options = {k: v for k, v in layer.spec().items() if k not in ("name", "inputs", "after")}
    return _input_shape(net, layer), batch_size, *map(str, options.items())


def _input_shape(net, layer):
    (first, *_) = net.reads[net.layers.index(layer)]
    if first == graph.IMAGES:
        return net.input_shape
    return net.output_shapes[net.layer_names.index(first)]


def _cases(name, net, layer, batch_size):
    """Yield a Case for each pass of a layer, on random values."""
    batch = share(batch_size, OneRank())
    numbers = np.random.default_rng(0)

    def random(*size):
        return numbers.standard_normal(size, np.float32)

    x = random(batch.blocks, *_input_shape(net, layer), LANES)
    dy = random(batch.blocks, *net.output_shapes[net.layers.index(layer)], LANES)
    backend = backends.of_value(Blocked(x, batch))
    prefix = f"{layer.name}."
    weights = {k.removeprefix(prefix): v for k, v in net.parameters.items() if k.startswith(prefix)}
    shape = layer_shape(net, layer, batch_size)
    family = FAMILIES.get(type(layer).__name__, _no_passes)
    parts = list(family(backend, layer, x, dy, weights, batch))
    (source, *_) = net.reads[net.layers.index(layer)]
    below = net.layers[net.layer_names.index(source)] if source != graph.IMAGES else None
    if type(layer) is MaxPool2D and type(below) is CrossChannelNorm:
        parts += _normalized_max_pool(backend, below, layer, x, dy)
    for part in parts:
        products = part.flops if part.products is None else part.products
        yield Case(name, part.name, shape, part.run, part.flops, part.bytes, products)


def _no_passes(*_):
    return ()


def _conv(backend, layer, x, dy, weights, batch):
    weight, bias = weights["weight"], weights.get("bias")
    if bias is None:
        bias = np.zeros(len(weight), np.float32)
    geometry = subject.conv_geometry(layer)
    counts, tree = batch.counts(), batch.tree
    flops = 2 * weight[0].size * dy.size
    products = winograd_products(backend, x, weight, geometry)
    forward, dx, dweight = (flops if tiles is None else tiles for tiles in products)
    arrays = x.nbytes + dy.nbytes + weight.nbytes

    def backward(*needs):
        return lambda: backend.conv2d_backward(dy, x, weight, geometry, counts, tree, needs)

    yield Pass("forward", lambda: backend.conv2d(x, weight, bias, geometry), flops, arrays, forward)
    yield Pass("dx", backward(True, False, False), flops, arrays, dx)
    yield Pass("dweight", backward(False, True, False), flops, arrays, dweight)
    if not backend.fuses_convolutions:
        return

    def source(values):
        channels = values.shape[1]
        mean, scale, beta = (np.full(channels, v, np.float32) for v in (0.1, 1.1, 0.2))
        return DeferredInput(values, mean, scale, beta)

    below, above = source(x), source(dy.copy())
    after = (above, *(np.ones(dy.shape[1], np.float32),) * 3)

    # fused as in training: normalization and ReLU, and the moments for the next layer
    def fused_forward():
        return backend.conv2d_moments(below, weight, bias, geometry, counts, tree)

    def fused_backward():
        needs = (True,) * 3
        return backend.conv2d_backward(
            dy, below, weight, geometry, counts, tree, needs, after, True
        )

    yield Pass("fused forward", fused_forward, flops, arrays, forward)
    moved = 2 * (x.nbytes + dy.nbytes + weight.nbytes)
    yield Pass("fused backward", fused_backward, 2 * flops, moved, dx + dweight)


def winograd_products(backend: Any, x: np.ndarray, weight: np.ndarray, geometry: Geometry) -> list:
    """Count the operations of a convolution's forward, dx and dweight passes with Winograd.

    Parameters
    ----------
    backend : Backend
        Backend that computes the passes.
    x : ndarray, shape (blocks, C, H, W, 16)
        Images.
    weight : ndarray, shape (K, C / groups, R, S)
        Filters.
    geometry : Geometry
        Stride, padding, dilation and groups.

    Returns
    -------
    list of int or None
        Two operations per product of transformed pixels, or None for the direct algorithm.
    """
    if not backend.fuses_convolutions:
        return [None] * 3
    _, (filters, *output), tiles = conv.plan(x, weight, geometry)
    (stride, _), padding, _, groups = geometry
    taps = weight.shape[2]
    pairs = groups * (filters // groups) * weight.shape[1]
    phase = [-(-n // stride) for n in x.shape[2:4]]  # pixels of a phase of dx
    befores = padding[0][0], padding[1][0]
    sides = [conv.winograd_side(taps, stride, before) for before in (0, *befores)]
    forward, dx = (sides[0], output, (None, None)), (max(sides[1:]), phase, befores)
    counts = []
    for size, (side, *lines), partial in zip(
        tiles, (forward, dx, forward), (True, True, False), strict=True
    ):
        products = 2 * pairs * len(x) * LANES
        for tile, pixels, before in zip(divmod(size, 10), *lines, strict=True):
            if size:
                products *= conv.winograd_products(
                    taps, stride, side, tile, pixels, before=before, partial=partial
                )
        counts.append(products if size else None)
    return counts


def _batchnorm(backend, layer, x, dy, weights, batch):
    counts, tree = batch.counts(), batch.tree
    vector = np.linspace(0.5, 1.5, x.shape[1])
    vectors = (vector,) * 4
    yield Pass("statistics", lambda: backend.moments(x, counts, tree), 0, x.nbytes)
    yield Pass("forward", lambda: backend.batchnorm(x, *vectors[:3]), 0, 2 * x.nbytes)
    yield Pass("sums", lambda: backend.batchnorm_sums(dy, x, vector, tree), 0, 2 * x.nbytes)
    yield Pass("dx", lambda: backend.batchnorm_dx(dy, x, *vectors, counts), 0, 3 * x.nbytes)


def _relu(backend, layer, x, dy, weights, batch):
    yield Pass("forward", lambda: backend.relu(x), 0, 2 * x.nbytes)
    yield Pass("dx", lambda: backend.relu_dx(dy, x), 0, 3 * x.nbytes)


def _add(backend, layer, x, dy, weights, batch):
    other = x.copy()  # its dx pass returns the gradient unchanged
    yield Pass("forward", lambda: backend.add(x, other), 0, 3 * x.nbytes)


def _cross_channel_norm(backend, layer, x, dy, weights, batch):
    norm = ChannelNorm(layer.window, layer.alpha, layer.beta, layer.k)
    yield Pass("forward", lambda: backend.cross_channel_norm(x, norm), 0, 2 * x.nbytes)
    yield Pass("dx", lambda: backend.cross_channel_norm_dx(dy, x, norm), 0, 3 * x.nbytes)


def _group_norm(backend, layer, x, dy, weights, batch):
    if isinstance(layer, InstanceNorm):
        groups = x.shape[1]
    else:
        groups = (
            layer.groups if isinstance(layer, GroupNorm) else int(layer.over == "image") or None
        )
    gamma, beta = weights.get("gamma"), weights.get("beta")
    y, statistics = backend.group_norm(x, gamma, beta, groups, layer.epsilon)
    args = dy, x, gamma, statistics, groups, batch.tree, (True,) * 3
    moved = x.nbytes + y.nbytes
    yield Pass(
        "forward", lambda: backend.group_norm(x, gamma, beta, groups, layer.epsilon), 0, moved
    )
    yield Pass("backward", lambda: backend.group_norm_backward(*args), 0, moved + dy.nbytes)


def _max_pool(backend, layer, x, dy, weights, batch):
    windows = subject.pool_windows(layer, x.shape[1:4])
    _, argmax = backend.max_pool2d(x, windows)
    moved = x.nbytes + dy.nbytes + argmax.nbytes
    yield Pass("forward", lambda: backend.max_pool2d(x, windows), 0, moved)
    yield Pass("dx", lambda: backend.max_pool2d_dx(dy, argmax, x, windows, batch.tree), 0, moved)


def _normalized_max_pool(backend, norm, layer, x, dy):
    """Yield the passes of a step that fuses a normalization, max pooling and a ReLU before both."""
    if not backend.fuses_convolutions:
        return
    numbers = ChannelNorm(norm.window, norm.alpha, norm.beta, norm.k)
    args = numbers, subject.pool_windows(layer, x.shape[1:4])
    x = np.maximum(x, 0)
    _, argmax = backend.norm_max_pool(x, *args)
    moved = x.nbytes + dy.nbytes + argmax.nbytes
    yield Pass("fused forward", lambda: backend.norm_max_pool(x, *args), 0, moved)
    run = functools.partial(backend.norm_max_pool_relu_dx, dy, argmax, x, *args)
    yield Pass("fused dx", run, 0, moved + x.nbytes)


def _average_pool(backend, layer, x, dy, weights, batch):
    args = subject.pool_windows(layer, x.shape[1:4]), layer.count_padding
    yield from _mean(backend, x, dy, args, batch)


def _global_average_pool(backend, layer, x, dy, weights, batch):
    size = x.shape[2:4]
    yield from _mean(backend, x, dy, (Windows(size, size, ((0, 0), (0, 0))), True), batch)


def _mean(backend, x, dy, args, batch):
    moved = x.nbytes + dy.nbytes
    yield Pass("forward", lambda: backend.average_pool2d(x, *args), 0, moved)
    yield Pass("dx", lambda: backend.average_pool2d_dx(dy, x, *args, batch.tree), 0, moved)


def _dense(backend, layer, x, dy, weights, batch):
    x = x.reshape(len(x), -1, LANES)
    weight, bias = weights["weight"], weights["bias"]
    flops = 2 * weight.size * LANES * len(x)
    moved = weight.nbytes + x.nbytes + dy.nbytes
    yield Pass("forward", lambda: backend.dense(x, weight, bias), flops, moved)
    yield Pass("dx", lambda: backend.dense_dx(dy, weight), flops, moved)
    yield Pass("dweight", lambda: backend.dense_dweight(dy, x, batch.tree), flops, moved)
    args = (dy, x, weight, batch.tree, (True,) * 3)
    moved += weight.nbytes + x.nbytes
    yield Pass("backward", lambda: backend.dense_backward(*args), 2 * flops, moved)


def _large_dense(threads):
    """Yield the passes of DENSE. On one thread, each pass has an sgemm of all images."""
    features, outputs, images = DENSE
    batch = share(images, OneRank())
    numbers = np.random.default_rng(0)

    def random(*size):  # at a multiple of 64 bytes, as in a training step
        return numbers.standard_normal(out=arenas.empty(size), dtype=np.float32)

    weight, x = random(outputs, features), random(batch.blocks, features, LANES)
    dy = random(batch.blocks, outputs, LANES)
    backend = backends.of_value(Blocked(x, batch))
    # one image per column, because no other layout is faster in BLAS
    flat, dflat = (v.swapaxes(0, 1).reshape(v.shape[1], images) for v in (x, dy))
    products = {"forward": (weight, flat), "dx": (weight.T, dflat), "dweight": (dflat, flat.T)}

    def sgemm(a, b):
        y = np.empty((len(a), b.shape[1]), np.float32)
        return lambda: np.matmul(a, b, out=y)

    weights = {"weight": weight, "bias": np.zeros(outputs, np.float32)}
    for name, run, flops, moved, _ in _dense(backend, None, x, dy, weights, batch):
        if name in products:
            product = sgemm(*products[name]) if threads == 1 else None
            layer = f"{features} to {outputs}"
            yield Case(layer, name, DENSE, run, flops, moved, flops, product)


FAMILIES = {
    "Conv2D": _conv,
    "BatchNorm": _batchnorm,
    "ReLU": _relu,
    "Add": _add,
    "CrossChannelNorm": _cross_channel_norm,
    "GroupNorm": _group_norm,
    "InstanceNorm": _group_norm,
    "LayerNorm": _group_norm,
    "MaxPool2D": _max_pool,
    "AveragePool2D": _average_pool,
    "GlobalAveragePool2D": _global_average_pool,
    "Dense": _dense,
}
