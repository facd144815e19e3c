"""Compare every op on the GPU with NumPy in float64, at the sizes of a network's layers.

Errors are |a - b| / |b| in the Euclidean norm over the images of the mini-batch. Both sides get the
same float32 numbers as arguments.
"""

import contextlib
import math
from typing import Any, NamedTuple

import numpy as np

from benchmarks import subject
from mpidl import keyed
from mpidl.backends import REFERENCE as reference
from mpidl.backends import settings
from mpidl.blocks import LANES, OneRank, share
from mpidl.comm.reducer import is_on_host
from mpidl.fold import Partial, merge_moments

COUNT = 40  # images, so that the last of three blocks is half full
# Largest allowed errors. Products in float32, or as three TF32 products, differ only by rounding.
EXACT, TF32 = 1e-6, 1e-3
# Ways to compute products: (name, precision, True to avoid tensor cores, largest error).
KINDS = (
    ("fp32", "fp32", False, EXACT),
    ("tf32", "tf32", False, TF32),
    ("direct", "fp32", True, EXACT),
)


class Lanes(NamedTuple):
    """Values (blocks, ..., 16), one lane per image. `image_shape` is set for flattened images."""

    array: np.ndarray
    image_shape: tuple = ()


class Weights(NamedTuple):
    """Filters, or the weights (K, F) of a dense layer for images of `image_shape`."""

    array: np.ndarray
    image_shape: tuple = ()


class Plain(NamedTuple):
    """An array in C order, of any type."""

    array: np.ndarray


class Images(NamedTuple):
    """A number of images. NumPy gets one number per block, the GPU one for the whole share."""

    batch: Any


class Case(NamedTuple):
    """The name of a backend function, with its arguments for `count` images.

    `products` says whether the function computes products that tensor cores could compute.
    """

    layer: str
    function: str
    count: int
    arguments: tuple
    products: bool = False


def check_all(report, networks, kinds=KINDS, count=COUNT):
    """Compare all functions at the sizes of the layers of some networks.

    Parameters
    ----------
    report : Report
        Receives a check for each network and kind, and a table of the largest errors.
    networks : dict of str to Network
        Networks by name.
    kinds : tuple
        Ways to compute products, in the form of KINDS.
    count : int
        Number of images in the mini-batch.
    """
    rows = []
    for title, net in networks.items():
        for kind, precision, direct, tolerance in kinds:
            errors = {}
            with arithmetic(precision, direct):
                for case in cases(net, count):
                    if kind != "fp32" and not case.products:
                        continue  # other functions do not depend on the kind
                    error = compare(case)
                    limit = tolerance if case.products else EXACT
                    errors.setdefault(case.function, []).append((error / limit, error, case.layer))
            largest = {name: max(entries) for name, entries in errors.items()}
            failed = [name for name, (over_limit, *_) in largest.items() if not over_limit <= 1]
            rows += [
                [title, kind, name, f"{error:.1e}", layer]
                for name, (_, error, layer) in largest.items()
            ]
            report.check(
                f"ops of {title}, {kind}",
                not failed,
                f"{len(errors)} functions, errors at most "
                f"{max(error for _, error, _ in largest.values()):.1e}"
                + (f"; too large: {', '.join(failed)}" if failed else ""),
            )
    report.table(
        "Largest errors relative to float64 NumPy",
        ["network", "products", "function", "error", "in"],
        rows,
    )


@contextlib.contextmanager
def arithmetic(precision, direct):
    """Inside the `with` block, compute products with this precision, or with direct kernels."""
    original = settings.precision, settings.direct
    settings.precision, settings.direct = precision, direct
    try:
        yield
    finally:
        settings.precision, settings.direct = original


def cases(net, count=COUNT):
    """Yield the Cases for the layers of a Network, its loss and its optimizer."""
    batch = share(count, OneRank())
    shape = net.input_shape
    pixels = numbers("pixels", count, *shape)
    pixels = ((pixels + 1) * 127).astype(np.uint8)
    yield Case("images", "images", batch.count, (Plain(pixels),))
    for layer, output in zip(net.layers, net.output_shapes, strict=True):
        layer_cases = {
            "Conv2D": _convolution,
            "BatchNorm": _batchnorm,
            "ReLU": _relu,
            "MaxPool2D": _pool,
            "AveragePool2D": _pool,
            "Dense": _dense,
        }.get(type(layer).__name__)
        if layer_cases is not None:
            yield from layer_cases(layer, net, shape, output, batch)
        shape = output
    yield from _loss_and_optimizer(net, batch)


def numbers(name, *shape):
    """Return uniform float32 numbers in [-1, 1); the same name gives the same numbers."""
    uniform = keyed.uniform(0, f"parity {name}", int(np.prod(shape)))
    return (2 * uniform - 1).astype(np.float32).reshape(shape)


def _lanes(name, shape, batch, zero=False):
    """Return random Lanes; `zero` sets unused lanes to 0, as in a cotangent."""
    array = numbers(name, batch.blocks, *shape, LANES)
    if zero:
        array[-1, ..., batch.valid(batch.blocks - 1) :] = 0
    return Lanes(array)


def _convolution(layer, net, shape, output, batch):
    weight, bias = (net.parameters[f"{layer.name}.{name}"] for name in ("weight", "bias"))
    args = subject.conv_args(layer)
    x, dy = _lanes("x", shape, batch), _lanes("dy", output, batch, zero=True)
    bias = Plain(numbers("bias", *bias.shape))
    yield Case(layer.name, "conv2d", batch.count, (x, Weights(weight), bias, *args), True)
    arguments = dy, x, Weights(weight), *args, Images(batch), batch.tree, (True, True, True)
    yield Case(layer.name, "conv2d_backward", batch.count, arguments, True)


def _batchnorm(layer, net, shape, output, batch):
    x, dy = _lanes("x", shape, batch), _lanes("dy", shape, batch, zero=True)
    vectors = {name: Plain(numbers(name, shape[0])) for name in ("mean", "a", "b", "c", "beta")}
    mean = vectors["mean"]
    yield Case(layer.name, "moments", batch.count, (x, Images(batch), batch.tree))
    yield Case(layer.name, "batchnorm", batch.count, (x, mean, vectors["a"], vectors["beta"]))
    yield Case(layer.name, "batchnorm_sums", batch.count, (dy, x, mean, batch.tree))
    factors = [vectors[name] for name in ("a", "b", "c")]
    yield Case(layer.name, "batchnorm_dx", batch.count, (dy, x, mean, *factors, Images(batch)))
    yield Case(layer.name, "channel_sums", batch.count, (dy, batch.tree))


def _relu(layer, net, shape, output, batch):
    x = _lanes("x", shape, batch)
    yield Case(layer.name, "relu", batch.count, (x,))
    yield Case(layer.name, "relu_dx", batch.count, (_lanes("dy", shape, batch, zero=True), x))


def _pool(layer, net, shape, output, batch):
    args = subject.pool_args(layer, shape)
    x, dy = _lanes("x", shape, batch), _lanes("dy", output, batch, zero=True)
    if type(layer).__name__ == "MaxPool2D":
        yield Case(layer.name, "max_pool2d", batch.count, (x, *args))
        _, positions = reference.max_pool2d(x.array, *args)
        yield Case(
            layer.name, "max_pool2d_dx", batch.count, (dy, Lanes(positions), x, *args, batch.tree)
        )
    else:
        args = *args, layer.count_padding
        yield Case(layer.name, "average_pool2d", batch.count, (x, *args))
        yield Case(layer.name, "average_pool2d_dx", batch.count, (dy, x, *args, batch.tree))


def _dense(layer, net, shape, output, batch):
    weight = Weights(net.parameters[f"{layer.name}.weight"], shape)
    x = Lanes(_lanes("x", (int(np.prod(shape)),), batch).array, shape)
    dy = _lanes("dy", output, batch, zero=True)
    yield Case(layer.name, "dense", batch.count, (x, weight, Plain(numbers("bias", *output))), True)
    arguments = dy, x, weight, batch.tree, (True, True, True)
    yield Case(layer.name, "dense_backward", batch.count, arguments, True)


def _loss_and_optimizer(net, batch):
    """Yield the Cases for the loss and for the optimizer step."""
    (classes,) = net.output_shape
    yield from _losses("loss", (classes,), batch)
    yield from _losses("loss of pixels", (classes, 9, 31), batch)
    weights = list(net.parameters.values())
    tables = [
        [Weights(numbers(f"{kind} {i}", *w.shape)) for i, w in enumerate(weights)]
        for kind in ("weight", "gradient", "velocity")
    ]
    decays = [1e-3 * (i % 2) for i in range(len(weights))]
    weights, gradients, velocities = tables
    arguments = weights, gradients, [velocities], [subject.RATE, subject.MOMENTUM], decays
    yield Case("optimizer", "optimizer_step", batch.count, ("sgdm", *arguments))


def _losses(layer, shape, batch):
    """Yield the Cases for losses whose scores are (K,) or (K, H, W) per image."""
    logits = Lanes(4 * _lanes("logits", shape, batch).array)
    labels = np.arange(batch.blocks * LANES * math.prod(shape[1:]), dtype=np.int32) % shape[0]
    labels = Lanes(labels.reshape(batch.blocks, *shape[1:], LANES))
    counts, target, mean = Images(batch), _lanes("target", shape, batch), 1 / batch.count
    scored, errors = (logits, labels, counts, batch.tree), (counts, batch.tree)
    for function, arguments in (
        ("softmax", (logits,)),
        ("cross_entropy", scored),
        ("cross_entropy_dlogits", (logits, labels, mean, counts)),
        ("correct_count", scored),
        ("errors", (logits, target, 2, *errors)),
        ("errors_dy", (logits, target, 2, mean, counts)),
    ):
        yield Case(layer, function, batch.count, arguments)


def compare(case):
    """Run a Case on both sides and return the largest relative error."""
    from mpidl.backends.gpu.backend import GPU

    exact = getattr(reference, case.function)(*_convert(case.arguments, _for_numpy))
    value = getattr(GPU, case.function)(*_convert(case.arguments, _for_gpu))
    return max(_errors(value, exact, case.count))


def _convert(arguments, convert):
    return [
        _convert(value, convert) if isinstance(value, list) else convert(value)
        for value in arguments
    ]


def _for_numpy(value):
    """Return an argument in float64. Bytes and integers are unchanged."""
    if isinstance(value, Images):
        return value.batch.counts()
    if not isinstance(value, (Lanes, Weights, Plain)):
        return value
    array = value.array
    return array.astype(np.float64) if array.dtype == np.float32 else array


def _for_gpu(value):
    """Return the same argument as an array on the GPU, in the layout used there."""
    from mpidl.backends.gpu import array

    if isinstance(value, Images):
        return array.plain(np.array([value.batch.count], np.int32))
    if isinstance(value, Weights):
        return array.filters(value.array, value.image_shape or None)
    if isinstance(value, Plain):
        return array.plain(value.array)
    if not isinstance(value, Lanes):
        return value
    shape = value.array.shape
    images = value.array.reshape(shape[0], *(value.image_shape or shape[1:-1]), LANES)
    return array.lanes(images).reshape(*shape)


def _errors(value, exact, count):
    """Return the relative errors of all results of a function."""
    if isinstance(exact, (list, tuple)):
        pairs = zip(value, exact, strict=True)
        return [e for a, b in pairs if b is not None for e in _errors(a, b, count)]
    if isinstance(exact, Partial) and exact.terms[0].combine is merge_moments:
        return _errors_of_moments(_root(value), _root(exact))
    value, exact = (_root(v) if isinstance(v, Partial) else np.asarray(v) for v in (value, exact))
    if exact.ndim > 1 and exact.shape[-1] == LANES and len(exact) == -(-count // LANES):
        value, exact = (
            np.moveaxis(a, -1, 1).reshape(-1, *a.shape[1:-1])[:count] for a in (value, exact)
        )
    if value.shape != exact.shape:
        raise ValueError(f"expected shape {exact.shape}, found {value.shape}")
    return [relative(value, exact)]


def relative(value, exact):
    """Return |value - exact| / |exact|, or infinity if a number is not finite."""
    size = float(np.linalg.norm(exact))
    error = float(np.linalg.norm(value.astype(np.float64) - exact)) / (size or 1.0)
    return error if np.isfinite(error) else np.inf


def _errors_of_moments(value, exact):
    """Return the errors of the count, the means (in standard deviations) and M2."""
    channels = exact.size // 2
    deviation = np.sqrt(exact[1 + channels :] / exact[0])
    means = (value - exact)[1 : 1 + channels] / deviation
    return [
        abs(value[0] - exact[0]),
        float(abs(means).max()),
        relative(value[1 + channels :], exact[1 + channels :]),
    ]


def _root(partial):
    """Return the sum of a Partial of one rank as a NumPy array."""
    from mpidl.backends.gpu import sums

    if not is_on_host(partial):
        total = sums.gplus({"": partial}, OneRank())[""]
        return np.asarray(float(total) if partial.shape == () else total)
    return np.asarray(OneRank().gplus(partial))
