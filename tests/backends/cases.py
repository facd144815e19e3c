"""The table of calls for which all backends must return the same results (see conformance.py).

Most shapes are small enough for the emulated GPU. Larger shapes are only for the CPU, whose kernels
choose some algorithms by size.
"""

import functools
import math

import numpy as np
from conformance import (
    Case,
    Draw,
    cotangent,
    deferred,
    filters,
    lanes,
    normalized,
    vector,
)
from training_cases import training_table

from mpidl.backends import shapes
from mpidl.backends.deferred import NormalizedInput
from mpidl.backends.taps import Taps
from mpidl.core.blocks import DeferredInput
from mpidl.core.values import BF16

CPU = ("cpu",)
NO_PADDING, PADDING_1, UNIT = ((0, 0), (0, 0)), ((1, 1), (1, 1)), (1, 1)
ALL = (True, True, True)

# ---- conv ----

# (C, H, W), (K, R, S), stride, padding, dilation, groups
CONVOLUTIONS = {
    "5x5 of one channel": ((1, 6, 7), (20, 5, 5), UNIT, NO_PADDING, UNIT, 1),
    "3x3": ((20, 4, 3), (20, 3, 3), UNIT, PADDING_1, UNIT, 1),
    "3x3 of three channels": ((3, 4, 5), (32, 3, 3), UNIT, PADDING_1, UNIT, 1),
    "64 channels": ((64, 2, 2), (64, 3, 3), UNIT, PADDING_1, UNIT, 1),
    "11x11 by 4": ((3, 15, 11), (4, 11, 11), (4, 4), ((2, 2), (2, 2)), UNIT, 1),
    "two groups": ((8, 5, 4), (40, 3, 3), UNIT, PADDING_1, UNIT, 2),
    "a 7x7 filter a channel": ((4, 5, 6), (4, 7, 7), UNIT, ((3, 3), (2, 4)), UNIT, 4),
    "a group a channel": ((4, 5, 5), (8, 3, 3), UNIT, PADDING_1, UNIT, 4),
    "1x1": ((5, 3, 4), (20, 1, 1), UNIT, NO_PADDING, UNIT, 1),
    "1x1 by 2": ((20, 6, 5), (24, 1, 1), (2, 2), NO_PADDING, UNIT, 1),
    "1x1 that reads padding": ((6, 3, 3), (12, 1, 1), (2, 2), PADDING_1, UNIT, 1),
    "3x3 by 2": ((3, 7, 6), (20, 3, 3), (2, 2), PADDING_1, UNIT, 1),
    "even filters": ((20, 4, 5), (24, 2, 4), UNIT, ((0, 1), (2, 1)), UNIT, 1),
    "unequal in both directions": ((8, 6, 6), (40, 3, 2), (2, 3), ((2, 1), (0, 3)), (1, 2), 2),
    "wide padding": ((20, 3, 4), (20, 3, 3), UNIT, ((3, 3), (4, 3)), (2, 2), 1),
    "gaps between filters that padding fills": (
        *((3, 4, 4), (21, 2, 2), (3, 3), ((4, 4), (4, 4))),
        *(UNIT, 1),
    ),
    "gaps between filters": ((2, 7, 6), (3, 2, 2), (3, 3), NO_PADDING, UNIT, 1),
    "one output pixel": ((7, 3, 3), (5, 3, 3), UNIT, NO_PADDING, UNIT, 1),
    "many steps": ((36, 5, 3), (20, 3, 3), UNIT, PADDING_1, UNIT, 1),
    "few rows": ((10, 6, 7), (12, 3, 2), (2, 3), ((1, 0), (0, 2)), (1, 2), 2),
    "several tiles": ((36, 2, 2), (72, 3, 3), UNIT, PADDING_1, UNIT, 1),
    "several tiles of odd sizes": ((17, 3, 2), (65, 3, 2), UNIT, ((0, 1), (1, 0)), UNIT, 1),
}
LARGE_CONVOLUTIONS = {
    "digits 1": ((1, 28, 28), (20, 5, 5), UNIT, NO_PADDING, UNIT, 1),
    "digits 2": ((20, 24, 24), (20, 3, 3), UNIT, PADDING_1, UNIT, 1),
    "cifar 1": ((3, 32, 32), (32, 3, 3), UNIT, PADDING_1, UNIT, 1),
    "cifar 9": ((64, 8, 8), (128, 3, 3), UNIT, PADDING_1, UNIT, 1),
    "alexnet 1": ((3, 35, 35), (5, 11, 11), (4, 4), NO_PADDING, UNIT, 1),
    "alexnet 2": ((6, 13, 13), (8, 5, 5), UNIT, ((2, 2), (2, 2)), UNIT, 2),
    "odd channels": ((33, 13, 13), (35, 3, 3), UNIT, PADDING_1, UNIT, 1),
    "16 channels a group": ((32, 9, 9), (32, 3, 3), UNIT, PADDING_1, UNIT, 2),
    "not padded": ((16, 10, 10), (16, 3, 3), UNIT, NO_PADDING, UNIT, 1),
    "padded by 2": ((16, 9, 9), (16, 3, 3), UNIT, ((2, 2), (2, 1)), UNIT, 1),
    "large 1x1": ((5, 6, 7), (9, 1, 1), UNIT, NO_PADDING, UNIT, 1),
    "1x1 of several bands": ((300, 5, 9), (48, 1, 1), UNIT, NO_PADDING, UNIT, 1),
    "1x1 of 16 outputs": ((70, 15, 14), (16, 1, 1), UNIT, NO_PADDING, UNIT, 1),
    "large 1x1 by 2": ((37, 25, 24), (64, 1, 1), (2, 2), NO_PADDING, UNIT, 1),
    "large 3x3 by 2": ((3, 15, 13), (7, 3, 3), (2, 2), PADDING_1, UNIT, 1),
    "large 5x5": ((33, 7, 9), (35, 5, 5), UNIT, ((4, 1), (2, 3)), UNIT, 1),
    "large 5x5 of two groups": ((18, 9, 6), (32, 5, 5), UNIT, ((2, 2), (2, 2)), UNIT, 2),
    "large 5x5 by 2": ((18, 13, 12), (64, 5, 5), (2, 2), ((2, 2), (1, 3)), UNIT, 2),
    "large 11x11 by 4": ((3, 35, 29), (33, 11, 11), (4, 4), ((2, 1), (0, 3)), UNIT, 1),
    "many 3x3 by 2": ((32, 15, 13), (33, 3, 3), (2, 2), PADDING_1, UNIT, 1),
    "many 3x3 by 2 of two groups": ((58, 17, 15), (64, 3, 3), (2, 2), ((0, 1), (2, 0)), UNIT, 2),
    "many 4x4 by 2": ((18, 15, 16), (24, 4, 4), (2, 2), PADDING_1, UNIT, 1),
    "large 7x7 by 2": ((3, 23, 30), (20, 7, 7), (2, 2), ((3, 3), (2, 3)), UNIT, 1),
    "large 8x8 by 2": ((5, 20, 17), (16, 8, 8), (2, 2), ((3, 2), (3, 4)), UNIT, 1),
    "large 5x5 by 3": ((11, 31, 29), (33, 5, 5), (3, 3), ((2, 1), (1, 2)), UNIT, 1),
    "spread 5x5": ((20, 12, 11), (32, 5, 5), UNIT, ((4, 4), (4, 4)), (2, 2), 1),
    "depthwise 3x3": ((5, 13, 17), (5, 3, 3), UNIT, PADDING_1, UNIT, 5),
    "depthwise 3x3 by 2": ((3, 20, 21), (3, 3, 3), (2, 2), PADDING_1, UNIT, 3),
    "depthwise 5x5": ((4, 9, 10), (4, 5, 5), UNIT, ((2, 2), (1, 4)), UNIT, 4),
    "depthwise 5x5 by 2": ((3, 12, 15), (3, 5, 5), (2, 2), ((3, 0), (2, 1)), UNIT, 3),
    "depthwise 7x7": ((4, 15, 19), (4, 7, 7), UNIT, ((3, 3), (2, 4)), UNIT, 4),
    "depthwise 7x7 by 2": ((3, 16, 13), (3, 7, 7), (2, 2), ((3, 2), (4, 1)), UNIT, 3),
    "depthwise 7x7 of several bands": ((2, 30, 75), (2, 7, 7), UNIT, ((3, 3), (3, 3)), UNIT, 2),
    "depthwise of several bands": ((2, 25, 70), (2, 3, 3), UNIT, ((0, 14), (2, 0)), UNIT, 2),
    "depthwise by 3 and 2": ((2, 11, 9), (2, 3, 3), (3, 2), ((3, 4), (4, 5)), UNIT, 2),
    "spread depthwise": ((3, 9, 8), (3, 3, 3), UNIT, ((2, 2), (2, 2)), (2, 2), 3),
}
DEPTHWISE = tuple(label for label in LARGE_CONVOLUTIONS if "depthwise" in label)
# other cases than 3x3 filters at stride 1 that Winograd's algorithm computes
BY_WINOGRAD = ("large 5x5", "large 5x5 of two groups", "large 5x5 by 2", "large 11x11 by 4")
BY_WINOGRAD += ("many 3x3 by 2", "many 3x3 by 2 of two groups", "many 4x4 by 2", "large 7x7 by 2")
BY_WINOGRAD += ("large 8x8 by 2", "large 5x5 by 3")
FUSED_ON_CPU = ("digits 2", "cifar 1", "cifar 9", "odd channels", "16 channels a group")
FUSED_ON_CPU += ("large 1x1", "1x1 of several bands", "large 1x1 by 2", "large 3x3 by 2")
FUSED_ON_CPU += BY_WINOGRAD + DEPTHWISE
RELU, CLIP = (0.0, math.inf), (-0.25, 0.75)  # limits of activations before and after a convolution
CLIPPED = (
    "3x3 by 2",
    "cifar 9",
    "large 1x1",
    "1x1 of several bands",
    "large 3x3 by 2",
    *DEPTHWISE[:3],
)
WINOGRAD = ({"winograd": "fast"}, {"winograd": "auto"}, {"winograd": "off"})
ON_GPU = ({"precision": "fp32", "direct": False}, {"precision": "fp32", "direct": True})


def algorithms(label, filter_size, stride, dilation):
    """Return the settings that select an algorithm, for each backend."""
    has_winograd = (filter_size, stride, dilation) == ((3, 3), UNIT, UNIT) or label in BY_WINOGRAD
    return {"cpu": WINOGRAD if has_winograd else WINOGRAD[1:2], "gpu": ON_GPU}


def bounds_of(label):
    """Return bounds of the errors, (forward, backward).

    Tiles of 7x7 and 8x8 inputs have larger errors. The generic build has the largest errors,
    because it has no fused multiply-add.
    """
    large = label in ("large 5x5", "large 5x5 of two groups", "large 8x8 by 2")
    return (5e-6, 8e-6) if large else (2e-6, 3e-6)


def convolution(label, shape, backends=("cpu", "gpu")):
    """Yield the forward and backward cases of a convolution."""
    image, (k, r, s), stride, padding, dilation, groups = shape
    weight = filters(k, image[0] // groups, r, s)
    y = shapes.conv2d_shape(image, weight.shape, stride, padding, dilation)
    shared = {"weight": weight, "geometry": shapes.Geometry(stride, padding, dilation, groups)}
    forward = {"x": lanes(*image), "bias": vector(k)} | shared
    backward = {"dy": cotangent(*y), "x": lanes(*image)} | shared
    settings = algorithms(label, (r, s), stride, dilation)
    options = {"backends": backends, "settings": settings}
    options["numbers_only"] = label not in ("3x3", "3x3 by 2", "unequal in both directions")
    bound, backward_bound = bounds_of(label)
    yield Case("conv2d", label, forward, bound, **options)
    yield Case("conv2d_backward", label, backward | {"needs": ALL}, backward_bound, **options)


def with_sums(backend, outputs, a):
    """Return (dx, ..., sums) of a call. If x is not deferred, a separate call computes the sums."""
    dx, *gradients, sums = outputs
    source = a["sources"].get("x")
    if source is not None and dx is not None and not isinstance(a["x"], DeferredInput):
        assert sums is None
        dy = dx.reshape(source.x.shape)
        sums = separate_activation_sums(backend, dy, source, a["tree"])
    return dx, *gradients, sums


def separate_activation_sums(backend, dy, source, tree):
    dz = activation_back(backend, dy, source)
    return backend.batchnorm_sums(dz, *source[:2], tree)


def activation_back(backend, dy, source):
    """Return the gradient of a DeferredInput's activation, computed by separate functions."""
    value = backend.batchnorm(*source[:4])
    if source.high == math.inf:
        return backend.relu_dx(dy, backend.relu(value))
    clipped = backend.elementwise("clip_range", value, source.low, source.high)
    return backend.elementwise_dx("clip_range", dy, clipped, source.low, source.high)


def moments_after(backend, a):
    """Compute the result of conv2d_moments by separate functions."""
    y = backend.conv2d(*(a[name] for name in ("x", "weight", "bias", "geometry")))
    return y, backend.moments(y, a["counts"], a["tree"])


def relu_after(backend, a):
    """Compute the result of conv2d_relu by separate functions."""
    y = backend.conv2d(*(a[name] for name in ("x", "weight", "bias", "geometry")))
    return backend.relu(y if a["addend"] is None else backend.add(y, a["addend"]))


def concat_relu_after(backend, a):
    """Compute the result of conv2d_concat_relu by separate functions."""
    x = backend.concat([a["first"], a["second"]])
    return backend.relu(backend.conv2d(x, *(a[name] for name in ("weight", "bias", "geometry"))))


BETWEEN = ("x", "weight", "geometry", "counts", "tree")


def through_activations(backend, a):
    """Call conv2d_backward with an activation after it, a deferred input, and the sums of dx."""
    source = backend.source(a["y"], *a["after"], *(a["limits"] or RELU))
    if not a["limits"]:
        source = NormalizedInput(*source[:4])
    return backend.conv2d_backward(
        *(a["dy"], *(a[name] for name in BETWEEN), a.get("needs", ALL)),
        activation_after=(source, *a["factors"]),
        sums=a.get("needs", ALL)[0],
        overwrite=a.get("overwrite", False),
    )


def through_activations_separately(backend, a):
    dz = a["dy"]
    if a["limits"]:
        dz = activation_back(backend, dz, backend.source(a["y"], *a["after"], *a["limits"]))
    dy = backend.batchnorm_dx(dz, a["y"], a["after"][0], *a["factors"], a["counts"])
    gradients = backend.conv2d_backward(dy, *(a[name] for name in BETWEEN), ALL)
    return with_sums(backend, gradients, a)


# convolutions of two concatenated values: copied in parts, by Winograd, or concatenated first
CONCATENATED = ("3x3", "3x3 by 2", "1x1", "odd channels", "large 5x5", "16 channels a group")


def fused_convolution(label, shape, backends=("cpu", "gpu")):
    """Yield the cases of a convolution fused with the activations before and after it."""
    image, (k, r, s), *geometry = shape
    weight = filters(k, image[0] // geometry[3], r, s)
    y = shapes.conv2d_shape(image, weight.shape, *geometry[:3])
    shared = {"weight": weight, "geometry": shapes.Geometry(*geometry)}
    limits = CLIP if label in CLIPPED else RELU
    forward = {"x": deferred(*image, limits=limits), "bias": vector(k)} | shared
    backward = shared | {
        "dy": cotangent(*y),
        "x": deferred(*image, limits=limits),
        "y": lanes(*y),
        "limits": limits,
        "after": [vector(k, low=-0.5, high=0.5)] * 3,
        "factors": [vector(k, low=-0.5, high=0.5)] * 3,
    }
    settings = algorithms(label, (r, s), geometry[0], geometry[2])
    options = {"backends": backends, "settings": settings}
    options["numbers_only"] = label not in ("3x3", "1x1")
    bound, backward_bound = bounds_of(label)
    yield Case("conv2d_moments", label, forward, bound, oracle=moments_after, **options)
    stored = forward | {"x": lanes(*image), "addend": None}
    yield Case("conv2d_relu", label, stored, bound, oracle=relu_after, **options)
    joined = forward | {"addend": lanes(*y)}
    yield Case("conv2d_relu", f"{label}, added", joined, bound, oracle=relu_after, **options)
    if label in CONCATENATED:
        count = max(image[0] // 4 * 2, 1)
        parts = {"first": lanes(count, *image[1:]), "second": lanes(image[0] - count, *image[1:])}
        both = parts | {name: forward[name] for name in ("weight", "bias", "geometry")}
        oracle = concat_relu_after
        yield Case("conv2d_concat_relu", label, both, bound, oracle=oracle, **options)
    yield Case(
        *("conv2d_backward", f"{label}, between activations", backward, backward_bound),
        call=through_activations,
        oracle=through_activations_separately,
        **options,
    )
    yield Case(
        "conv2d_backward",
        f"{label}, before a normalization",
        backward | {"limits": None},
        backward_bound,
        call=through_activations,
        oracle=through_activations_separately,
        **options,
    )


# (C, H, W), (C, K, R, S), stride, cropping
TRANSPOSED = {
    "2x2 by 2": ((3, 4, 5), (3, 2, 2, 2), (2, 2), NO_PADDING),
    "4x4 by 2, same": ((4, 3, 4), (4, 8, 4, 4), (2, 2), PADDING_1),
    "3x3, same": ((9, 4, 5), (9, 10, 3, 3), UNIT, PADDING_1),
    "odd cropping": ((2, 5, 4), (2, 3, 3, 3), (2, 2), ((0, 1), (0, 1))),
    "gaps": ((2, 3, 3), (2, 3, 2, 1), (3, 2), NO_PADDING),
    "1x1": ((5, 3, 3), (5, 4, 1, 1), UNIT, NO_PADDING),
    "asymmetric": ((2, 4, 3), (2, 3, 5, 3), (2, 1), ((3, 1), (0, 2))),
}


def transposed(label, image, size, stride, cropping):
    spatial = [
        (n - 1) * step + width - sum(cut)
        for n, step, width, cut in zip(image[1:], stride, size[2:], cropping, strict=True)
    ]
    shared = {"x": lanes(*image), "weight": filters(*size), "stride": stride, "cropping": cropping}
    options = {"settings": {"gpu": ON_GPU}, "numbers_only": label not in list(TRANSPOSED)[:2]}
    forward = shared | {"bias": vector(size[1])}
    yield Case("transposed_conv2d", label, forward, 1e-5, **options)
    backward = shared | {"dy": cotangent(size[1], *spatial), "needs": ALL}
    yield Case("transposed_conv2d_backward", label, backward, 1e-5, **options)


# ---- dense: (outputs, image) ----

DENSE = [(20, (4, 2, 2)), (1, (1,)), (10, (37,)), (3, (2, 3, 5)), (16, (64,)), (7, (400,))]
DENSE += [(17, (130,)), (68, (5, 3, 3)), (130, (68,))]
LARGE_DENSE = [(k, (1000,)) for k in (1, 2, 10, 16, 100)] + [(17, (31,)), (10, (11520,))]


def dense_backward(backend, a):
    names = ("dy", "x", "weight", "tree", "needs")
    return with_sums(backend, backend.dense_backward(*(a[name] for name in names)), a)


def fully_connected(outputs, image, backends=("cpu", "gpu"), draw=lanes):
    features, label = int(np.prod(image)), f"{image} to {outputs}"
    weight, dy = filters(outputs, features, image=image), cotangent(outputs)
    label += ", deferred" if draw is deferred else ""
    x = draw(*image, flattened=True)
    options = {"tolerance": 2e-6, "backends": backends}
    yield Case("dense", label, {"x": x, "weight": weight, "bias": vector(outputs)}, **options)
    backward = {"dy": dy, "x": x, "weight": weight, "needs": ALL}
    yield Case("dense_backward", label, backward, call=dense_backward, **options)
    if draw is lanes and features < 100:
        yield Case("dense_dx", label, {"dy": dy, "weight": weight}, **options)
        yield Case("dense_dweight", label, {"dy": dy, "x": x}, **options)


# ---- batchnorm, activation ----

CHANNELS = [(1, 5, 7), (3, 1, 1), (4, 6, 6), (20, 3, 5), (132, 2, 3), (129, 1, 2), (6,), (260,)]
CHANNELS += [(1, 60, 60), (128, 4, 4)]


def positive(*shape, **options):
    return vector(*shape, low=0.5, high=2.0, **options)


def batch_normalization(shape):
    c, label = shape[0], str(shape)
    x, dy, vectors = lanes(*shape), cotangent(*shape), {"mean": positive(c)}
    affine = vectors | {"scale": positive(c), "beta": positive(c)}
    yield Case("channel_sums", label, {"x": dy}, 1e-6)
    yield Case("moments", label, {"x": x}, 1e-6)
    distant = lanes(*shape, low=98, high=103)  # E[x^2] - E[x]^2 would lose digits
    yield Case("moments", f"{label}, far from 0", {"x": distant}, 1e-5)
    yield Case("batchnorm", label, {"x": x} | affine, 1e-6)
    yield Case("batchnorm_sums", label, {"dy": dy, "x": x} | vectors, 1e-6)
    factors = {name: positive(c) for name in "abc"}
    yield Case("batchnorm_dx", label, {"dy": dy, "x": x} | vectors | factors, 1e-6)
    yield Case(
        *("activation", label, {"source": deferred(*shape)}, 1e-6),
        oracle=lambda backend, a: a["source"],
    )
    for limits in (RELU, CLIP):
        source = deferred(*shape, limits=limits)
        name = label if limits is RELU else f"{label}, clip"
        yield Case(
            *("activation_sums", name, {"dy": dy, "source": source}, 1e-6),
            oracle=lambda backend, a: separate_activation_sums(
                backend, a["dy"], a["sources"]["source"], a["tree"]
            ),
        )
    yield Case("relu", label, {"x": x}, 0)
    # All numbers are equal, but the signs of zeros may differ.
    yield Case("relu_dx", label, {"dy": dy, "y": x}, 1e-9, elementwise=True)


def factors(backend, a):
    """Compute batchnorm_factors from the statistics of the same backend."""
    statistics = backend.statistics(a["moments"], a["gamma"], 1e-5)
    return backend.batchnorm_factors(a["sums"], a["gamma"], statistics)


def per_channel(c):
    gamma, double = positive(c), {"dtype": np.float64}
    moments = positive(1 + 2 * c, **double)
    folded = {"moments": moments, "gamma": gamma}
    yield Case(
        *("statistics", str(c), folded, 1e-7),
        call=lambda b, a: b.statistics(a["moments"], a["gamma"], 1e-5)[1:],  # without the count
        typed=False,
    )
    yield Case(
        *("batchnorm_factors", str(c)),
        folded | {"sums": vector(2 * c, **double)},
        1e-6,
        call=factors,
        typed=False,
    )
    predict = {"gamma": gamma, "variance": positive(c), "epsilon": 1e-5}
    yield Case("predict_scale", str(c), predict, 1e-7, typed=False)


LARGE = {"low": -5, "high": 5}  # x that covers all branches
# {function: (its numbers, the argument that its gradient reads, x, tolerance of the gradient)}
FUNCTIONS = {
    "leaky_relu": ((0.2,), "y", {}, 3e-7),
    "tanh": ((), "y", {}, 3e-7),
    "sigmoid": ((), "y", {}, 3e-7),
    "gelu": ((), "x", {}, 3e-7),
    "gelu_tanh": ((), "x", {}, 3e-7),
    "swish": ((), "x", LARGE, 5e-7),
    "clip_range": ((-0.3, 0.5), "y", {}, 3e-7),
    "hard_sigmoid": ((0.7, 0.4), "y", {}, 3e-7),
    "hard_swish": ((), "x", LARGE, 5e-7),
}
IMAGES = {
    "pixels": (5, 3, 7),
    "four channels at once": (8, 4, 4),
    "features": (21,),
    "more pixels": (3, 40, 30),
}


def elementwise(name, numbers, reads, draw, tolerance):
    """Yield the cases of a function, and of its gradient, which reads x or the backend's result."""
    for label, shape in IMAGES.items():
        x = {"x": lanes(*shape, **draw)}

        def result(b, a):
            return b.elementwise(name, a["x"], *numbers)

        def gradient(b, a):
            value = a["x"] if reads == "x" else result(b, a)
            return b.elementwise_dx(name, a["dy"], value, *numbers)

        yield Case("elementwise", f"{name}, {label}", x, call=result)
        dy = {"dy": cotangent(*shape)}
        yield Case("elementwise_dx", f"{name}, {label}", dy | x, tolerance, call=gradient)
        if name in ("swish", "tanh"):  # also of a normalization
            x = {"x": normalized(*shape)}
            yield Case("elementwise", f"{name}, {label}, normalized", x, 1e-6, call=result)
            of_both = f"{name}, {label}, normalized", dy | x, 1e-6
            yield Case("elementwise_dx", *of_both, call=gradient)


def learnable_slopes(shape):
    """Yield the cases of PReLU."""
    label = str(shape)
    for slopes in dict.fromkeys((shape[0], 1)):
        arguments = {"x": lanes(*shape), "slope": vector(slopes)}
        yield Case("prelu", f"{label}, {slopes}", arguments, 1e-7)
        yield Case("prelu_dx", f"{label}, {slopes}", {"dy": cotangent(*shape)} | arguments, 1e-7)
        sums = {"dy": cotangent(*shape), "x": lanes(*shape), "slopes": slopes}
        yield Case("prelu_dslope", f"{label}, {slopes}", sums, 1e-6)


# ---- group_norm: (C, H, W), groups, whether gamma and beta are per element ----

IMAGE_NORMS = {
    "pixels": ((5, 3, 7), None, False),
    "pixels, four channels at once": ((8, 4, 4), None, False),
    "pixels, several runs of channels": ((132, 2, 3), None, False),
    "pixels, features": ((21,), None, False),
    "groups": ((12, 3, 5), 3, False),
    "groups of features": ((24,), 4, False),
    "groups of one channel": ((5, 3, 7), 5, False),
    "groups, several tiles of channels": ((264, 2, 2), 2, False),
    "image": ((8, 4, 4), 1, True),
    "image, odd channels": ((5, 3, 7), 1, True),
}
LARGE_IMAGE_NORMS = {
    "pixels, several tiles": ((96, 7, 8), None, False),
    "pixels, streamed": ((64, 45, 46), None, False),
    "groups, several runs of pixels": ((6, 9, 31), 2, False),
    "image, several tiles": ((3, 17, 19), 1, True),
}


def image_normalization(label, shape, groups, of_elements, backends=("cpu", "gpu")):
    """Yield the cases of a normalization within an image."""
    factors = shape if of_elements else shape[:1]
    options = {"backends": backends, "numbers_only": label not in ("pixels", "groups", "image")}

    def forward(b, a):
        return b.group_norm(a["x"], a["gamma"], a["beta"], groups, 1e-5)

    def backward(b, a):
        _, statistics = b.group_norm(a["x"], a["gamma"], None, groups, 1e-5)
        arguments = a["dy"], a["x"], a["gamma"], statistics, groups, a["tree"]
        return b.group_norm_backward(*arguments, a.get("needs", ALL))

    for suffix, x in (("", lanes(*shape)), (", far from 0", lanes(*shape, low=98, high=103))):
        for name, gamma in ((suffix, positive(*factors)), (f"{suffix}, no factors", None)):
            of_x = {"x": x, "gamma": gamma, "beta": None if gamma is None else vector(*factors)}
            bound = 1e-4 if suffix else 1e-6  # E[x^2] - E[x]^2 would have errors of 1e-3
            yield Case(
                *("group_norm", label + name, of_x, bound),
                call=lambda b, a: forward(b, a)[0],
                **options,
            )
            dy = {"dy": cotangent(*shape), "needs": ALL}
            yield Case(
                *("group_norm_backward", label + name, of_x | dy, bound), call=backward, **options
            )
            if suffix or of_elements or backends is CPU:
                break
        if backends is CPU:
            break


# ---- recurrent: gates, units, steps, whether in reverse, steps of a chunk ----

RECURRENCES = {
    "lstm": (4, 5, 4, False, 4),
    "lstm of several tiles": (4, 37, 3, False, 3),
    "lstm in reverse, truncated": (4, 17, 5, True, 2),
    "gru": (3, 5, 4, False, 4),
    "gru of several tiles": (3, 37, 3, False, 3),
    "gru in reverse, truncated": (3, 17, 5, True, 2),
}
LARGE_RECURRENCES = {
    "lstm of several segments": (4, 301, 3, False, 3),
    "gru of several segments": (3, 259, 3, True, 3),
}


def recurrent(label, gates, units, steps, is_reversed, truncate, backends=("cpu", "gpu")):
    """Yield the cases of a recurrent layer."""
    bound, tolerance = min(1, 4 / math.sqrt(units)), 1e-6 if units < 100 else 3e-6
    kind, parts = ("lstm", 2) if gates == 4 else ("gru", 1)
    arguments = {
        "x": lanes(gates * units, steps, 1),
        "weight": Draw("filters", (gates * units, units, 1, 1), -bound, bound),
        "bias": vector(gates * units) if gates == 3 else None,
        "state": [lanes(units, low=-1, high=1) for _ in range(parts)],
    }
    options = {"backends": backends, "numbers_only": " " in label}

    def forward(b, a, state):
        y, record, last = b.recurrence(kind, a["x"], a["weight"], a["bias"], state, is_reversed)
        return y, record, last

    def backward(b, a, state):
        _, record, _ = forward(b, a, state)
        needs = (
            (True,) * (3 + len(state)) if gates == 3 else (True, True, False, *(True,) * len(state))
        )
        arguments = kind, a["dy"], record, a["weight"], a["bias"], state, is_reversed, truncate
        return b.recurrence_backward(*arguments, a["counts"], a["tree"], needs)

    for suffix, has_state in (("", True), (", from zeros", False)):
        yield Case(
            *("recurrence", label + suffix, arguments, tolerance),
            call=lambda b, a, has=has_state: forward(b, a, a["state"] if has else [])[::2],
            **options,
        )
        yield Case(
            *("recurrence_backward", label + suffix),
            arguments | {"dy": cotangent(units, steps, 1)},
            tolerance=2 * tolerance,
            call=lambda b, a, has=has_state: backward(b, a, a["state"] if has else []),
            **options,
        )
        if " " in label:
            break


# ---- pool: (C, H, W), size, stride, padding ----

POOLS = {
    "2x2": ((3, 6, 8), (2, 2), (2, 2), NO_PADDING),
    "2x2, four channels at once": ((8, 4, 6), (2, 2), (2, 2), NO_PADDING),
    "2x2, pixels left over": ((2, 5, 7), (2, 2), (2, 2), NO_PADDING),
    "2x2, padding": ((2, 4, 7), (2, 2), (2, 2), ((1, 0), (1, 1))),
    "2x2, gaps that padding hides": ((1, 4, 4), (2, 2), (3, 3), ((1, 0), (1, 0))),
    "3x3 by 2": ((4, 9, 7), (3, 3), (2, 2), NO_PADDING),
    "3x3 by 2, padding": ((5, 8, 6), (3, 3), (2, 2), PADDING_1),
    "3x3 by 2, padding at the end": ((4, 8, 6), (3, 3), (2, 2), ((0, 1), (0, 1))),
    "3x3 by 3": ((2, 6, 7), (3, 3), (3, 3), NO_PADDING),
    "overlapping": ((4, 6, 9), (3, 4), (1, 2), ((2, 1), (0, 3))),
    "overlapping rows": ((2, 7, 6), (3, 2), (2, 2), NO_PADDING),
    "windows end before the image": ((2, 9, 8), (2, 3), (4, 5), NO_PADDING),
    "one row": ((2, 1, 9), (1, 2), (1, 3), ((0, 0), (1, 0))),
    "global": ((4, 8, 8), (8, 8), (8, 8), NO_PADDING),
    "a row of many threads": ((132, 2, 3), (2, 2), UNIT, NO_PADDING),
    "256 places": ((1, 17, 16), (16, 16), UNIT, NO_PADDING),
}


def pooling(label, shape, size, stride, padding):
    """Yield the cases of pooling. Results have equal bits: all backends add in the same order."""
    windows = shapes.Windows(size, stride, padding)
    dy = cotangent(*shapes.pool2d_shape(shape, *windows))

    def maximum(backend, a):
        y, argmax = backend.max_pool2d(a["x"], windows)
        outputs = backend.max_pool2d_dx(a["dy"], argmax, a["x"], windows, a["tree"])
        return y, argmax, *with_sums(backend, outputs, a)

    def average(backend, a):
        counting = windows, a["count_padding"]
        y = backend.average_pool2d(a["x"], *counting)
        outputs = backend.average_pool2d_dx(a["dy"], a["x"], *counting, a["tree"])
        return y, *with_sums(backend, outputs, a)

    limits = CLIP if label.endswith("padding") else RELU
    values = {"": lanes(*shape, rounded=True), ", deferred": deferred(*shape, limits=limits)}
    values[", not finite"] = lanes(*shape, rounded=True, special=True)
    for suffix, x in values.items():
        arguments, adds_up = {"x": x, "dy": dy}, x.kind == "deferred"
        options = {"tolerance": 1e-6 if adds_up else 0, "numbers_only": not adds_up}
        yield Case("max_pool2d_dx", label + suffix, arguments, call=maximum, **options)
        is_padded = padding != NO_PADDING and suffix != ", not finite"
        for count_padding in (True, False) if is_padded else (True,):
            counting = arguments | {"count_padding": count_padding}
            name = label + suffix + (not count_padding) * ", pixels of the image"
            yield Case("average_pool2d_dx", name, counting, call=average, **options)


# ---- resample ----

COPIES = Taps(5, [[(4, 1.0)], [(0, 1.0)], [(0, 1.0)]])  # three pixels of five are not read
HALVES = Taps(3, [[(0, 1.0)], [(0, 0.75), (1, 0.25)], [(0, 0.25), (1, 0.75)], [(1, 0.5), (2, 0.5)]])
WINDOWS = Taps(7, [[(i + k, 1 / 3) for k in range(3)] for i in (0, 2, 4)])
DENSE_TAPS = Taps(9, [[(i, 0.1 * (i - j)) for i in range(9)] for j in range(6)])
WIDE = Taps(40, [[(min(39, i // 2 + k), 0.5) for k in (0, 1)] for i in range(80)])
# (C, rows, columns, whether pixels are only copied)
RESAMPLINGS = {
    "copies": (3, COPIES, COPIES, True),
    "halves": (8, HALVES, HALVES, False),
    "copied rows": (4, COPIES, HALVES, False),
    "copied columns": (5, WINDOWS, COPIES, False),
    "windows": (12, WINDOWS, WINDOWS, False),
    "many taps": (2, DENSE_TAPS, WINDOWS, False),
    "a row of many threads": (132, HALVES, WINDOWS, False),
    "several bands": (1, WIDE, WIDE, False),
}


def resampling(label, channels, rows, columns, copies):
    """Yield the cases of a resampling and its gradient."""
    shape = channels, rows.pixels, columns.pixels

    def both(backend, a):
        back = rows.transposed, columns.transposed
        return backend.resample(a["x"], rows, columns), backend.resample(a["dy"], *back)

    dy = cotangent(channels, len(rows.outputs), len(columns.outputs))
    for suffix, x in (("", lanes(*shape)), (", deferred", deferred(*shape, limits=CLIP))):
        tolerance = 0 if copies and not suffix else 1e-6
        yield Case("resample", label + suffix, {"x": x, "dy": dy}, tolerance, call=both)


# number of channels, and the channels to take; -1 for zeros
SELECTIONS = {
    "another order": (6, (0, 3, 1, 4, 2, 5)),
    "a part": (5, (1, 2, 3)),
    "a part, back": (3, (-1, 0, 1, 2, -1)),
    "twice": (2, (1, 1, -1, 0)),
}


# (C, H, W), padding, value; negative padding removes pixels
PADDINGS = {
    "a border": ((3, 4, 5), ((1, 2), (0, 3)), 0.0),
    "four channels at once": ((8, 3, 2), PADDING_1, -1.5),
    "nothing": ((2, 3, 4), NO_PADDING, 1.0),
    "one row": ((1, 1, 7), ((0, 0), (2, 0)), 0.25),
    "cropped": ((5, 6, 7), ((-1, -2), (0, -3)), 0.0),
    "cropped, four channels at once": ((4, 4, 4), ((-1, -1), (-2, 0)), 0.0),
    "cropped and padded": ((2, 5, 4), ((-2, 1), (3, -1)), 2.0),
}


# ---- lrn, dropout, join ----

NORMS = {
    "AlexNet's": (5, 1e-4, 0.75, 2.0),
    "strong": (5, 2.0, 0.75, 1.0),
    "even": (4, 1.5, 0.75, 0.5),
    "one channel": (1, 3.0, 0.75, 1.0),
    "wider than the image": (30, 1.0, 0.75, 2.0),
    "another power": (3, 1.0, 0.6, 1.5),
    "no power": (3, 1.0, 0.0, 1.5),
    "square root": (3, 20.0, 0.5, 1e-3),
}


# (C, H, W), size, stride, padding of max pooling after a cross-channel normalization
NORMALIZED_POOLS = {
    "overlapping": ((6, 9, 11), (3, 3), (2, 2), NO_PADDING),
    "padded": ((5, 6, 7), (3, 2), (2, 1), ((1, 1), (0, 1))),
    "apart": ((8, 5, 6), (2, 2), (2, 3), NO_PADDING),
    "several bands": ((7, 41, 37), (3, 3), (2, 2), NO_PADDING),
    "wide": ((3, 6, 300), (2, 2), (2, 2), NO_PADDING),
    "high windows": ((2, 40, 3), (30, 2), (1, 1), NO_PADDING),
}


def cross_channel(label, numbers, shape):
    name, arguments = (
        f"{label}, {shape}",
        {"x": lanes(*shape), "norm": shapes.ChannelNorm(*numbers)},
    )
    yield Case("cross_channel_norm", name, arguments, 1e-6)
    yield Case("cross_channel_norm_dx", name, {"dy": cotangent(*shape)} | arguments, 4e-6)


def normalized_pools(label, numbers, shape, size, stride, padding):
    """Return a case of cross-channel normalization, max pooling, and the gradient before a ReLU."""
    norm, windows = shapes.ChannelNorm(*NORMS[numbers]), shapes.Windows(size, stride, padding)

    def fused(backend, a):
        y, argmax = backend.norm_max_pool(a["x"], norm, windows)
        return y, backend.norm_max_pool_relu_dx(a["dy"], argmax, a["x"], norm, windows)

    def separate(backend, a):
        y, argmax = backend.max_pool2d(backend.cross_channel_norm(a["x"], norm), windows)
        dnorm, _ = backend.max_pool2d_dx(a["dy"], argmax, a["x"], windows, a["tree"])
        return y, backend.relu_dx(backend.cross_channel_norm_dx(dnorm, a["x"], norm), a["x"])

    dy = cotangent(*shapes.pool2d_shape(shape, *windows))
    name, values = f"{label}, {numbers}", {"x": lanes(*shape), "dy": dy}
    return Case("norm_max_pool_relu_dx", name, values, 4e-6, call=fused, oracle=separate)


def dropped(shape, probability, flattened=False, whole_images=False):
    """Return a case of dropout. Every backend must drop the same elements."""
    threshold = round(probability * 65536)
    arguments = {
        "x": lanes(*shape, flattened=flattened),
        "threshold": threshold,
        "scale": 65536 / (65536 - threshold),
        "key": (0x89ABCDEF, 0xFEDCBA98),
        "epoch": 7,
        "samples": Draw("samples"),
        "whole_images": whole_images,
    }
    label = f"{shape}, {probability}" + flattened * ", flattened"
    label += whole_images * ", whole images"
    return Case("dropout", label, arguments, 0)


# shapes of two factors of a product
PRODUCTS = {
    "equal": ((5, 3, 7), (5, 3, 7)),
    "equal, four channels at once": ((8, 4, 4), (8, 4, 4)),
    "equal features": ((21,), (21,)),
    "channels": ((5, 3, 7), (5, 1, 1)),
    "channels, four at once": ((8, 4, 4), (8, 1, 1)),
    "features": ((132, 5, 4), (132,)),
    "many pixels": ((3, 40, 30), (3, 1, 1)),
    "one pixel": ((6, 1, 1), (6,)),
    "pixels": ((40, 3, 7), (1, 3, 7)),
    "pixels, first": ((1, 4, 4), (8, 4, 4)),
    "rows": ((5, 3, 7), (5, 3, 1)),
    "columns": ((4, 3, 70), (4, 1, 70)),
    "one column": ((5, 3, 7), (1, 1, 7)),
    "one row": ((4, 3, 8), (1, 3, 1)),
    "a number": ((3, 4, 5), (1, 1, 1)),
    "channels and pixels": ((8, 1, 1), (1, 3, 4)),
    "rows and columns": ((5, 3, 1), (5, 1, 7)),
    "across": ((8, 1, 6), (1, 5, 6)),
    "two axes": ((5, 3), (5, 1)),
}


def products(label, a, b):
    """Yield the cases of a product and of the gradients of its factors."""
    y = np.broadcast_shapes(*(s + (1,) * (max(len(a), len(b)) - len(s)) for s in (a, b)))
    factors = {"a": lanes(*a), "b": lanes(*b)}
    yield Case("multiply", label, factors, 0)
    for name, x, other in ("a", a, b), ("b", b, a):
        values = {"dy": cotangent(*y), "other": lanes(*other), "x": lanes(*x)}
        yield Case("multiply_dx", f"{label}, {name}", values, 1e-6)


def scaled_channels(shape):
    """Yield the cases of a learnable factor for each channel."""
    factor = {"x": lanes(*shape), "factor": vector(shape[0])}
    yield Case("scale_channels", str(shape), factor, 0)
    sums = {"dy": cotangent(*shape), "x": lanes(*shape)}
    yield Case("scale_channels_dfactor", str(shape), sums, 1e-6)


def relu_of_sum(backend, a):
    return backend.relu(backend.add(a["a"], a["b"]))


def add_relu_dx(backend, a):
    operands = [a["sources"].get(name) for name in "ab"]
    return backend.add_relu_dx(a["dy"], a["y"], operands, a["tree"])


def add_relu_dx_separately(backend, a):
    dz = backend.relu_dx(functools.reduce(backend.add, a["dy"]), a["y"])
    operands = (a["sources"].get(name) for name in "ab")
    return dz, [n and backend.batchnorm_sums(dz, n.x, n.mean, a["tree"]) for n in operands]


def residual_ends(shape):
    """Yield the cases of sums of normalizations, with ReLU, and of their gradients."""
    clipped = functools.partial(deferred, limits=CLIP)
    kinds = {"lanes": lanes, "deferred": clipped, "normalized": normalized}
    pairs = ("normalized", "lanes"), ("deferred", "normalized"), ("normalized", "normalized")
    for a, b in (*pairs, ("lanes", "lanes")):
        values, label = {"a": kinds[a](*shape), "b": kinds[b](*shape)}, f"{shape}, {a} and {b}"
        yield Case("add_relu", label, values, 1e-6, oracle=relu_of_sum)
        if (a, b) in pairs:
            yield Case("add", label, values, 1e-6)
    for parts, names in ((1, "a"), (2, "b"), (2, "ab"), (1, "")):
        values = {"dy": [cotangent(*shape)] * parts, "y": lanes(*shape)}
        values |= {name: normalized(*shape) for name in names}
        label = f"{shape}, {parts} cotangents, {len(names)} sums {names}".rstrip()
        options = {"call": add_relu_dx, "oracle": add_relu_dx_separately}
        yield Case("add_relu_dx", label, values, 1e-6, **options)


def joins(shape):
    (a, *rest), b, c = shape, 3, 4
    yield Case("add", f"{shape}", {"a": lanes(*shape), "b": lanes(*shape)}, 0)
    yield Case("add", f"{shape}, deferred", {"a": deferred(*shape), "b": lanes(*shape)}, 1e-6)
    yield Case(
        "add", f"{shape}, both deferred", {"a": deferred(*shape), "b": deferred(*shape)}, 1e-6
    )
    parts = [lanes(*shape), lanes(b, *rest), lanes(*shape), lanes(c, *rest)]
    yield Case("concat", f"{shape}", {"arrays": parts}, 0)
    yield Case("concat", f"{shape}, deferred", {"arrays": [deferred(*shape), *parts]}, 1e-6)
    channels = (a, b, a, c)
    yield Case("split", f"{shape}", {"x": lanes(sum(channels), *rest), "channels": channels}, 0)


WITH_BIAS = {
    "conv2d": ("3x3", "digits 2", "digits 1"),
    "conv2d_moments": ("3x3",),
    "conv2d_relu": ("3x3",),
    "transposed_conv2d": ("3x3, same",),
    "dense": ("(37,) to 10", "(130,) to 17", "(1000,) to 100", "(5, 3, 3) to 68"),
}


def without_bias(cases):
    for case in cases:
        if case.label in WITH_BIAS.get(case.function, ()):
            arguments = case.arguments | {"bias": None}
            yield case._replace(label=f"{case.label}, no bias", arguments=arguments)


# functions whose direct sums in bfloat16 have a defined order
ORDERED = {"conv2d", "conv2d_backward", "transposed_conv2d", "transposed_conv2d_backward"}
ORDERED |= {"dense", "dense_dweight", "dense_backward"}


def in_bf16(case):
    """Return a case with the activations and their gradients in bfloat16, or None without any.

    Scores of dense layers, and their gradients, are float32.
    """

    def narrowed(name, draw):
        if isinstance(draw, list):
            return [narrowed(name, part) for part in draw]
        is_score = name == "dy" and case.function.startswith("dense")
        is_stored = isinstance(draw, Draw) and draw.kind in ("lanes", "deferred", "normalized")
        return draw._replace(dtype=BF16) if is_stored and not is_score else draw

    arguments = {name: narrowed(name, draw) for name, draw in case.arguments.items()}
    if "cpu" not in case.backends or arguments == case.arguments:
        return None
    policies = case.settings.get("cpu", ({},))
    is_fused = case.call is through_activations
    is_ordered = case.function in ORDERED and not is_fused and arguments["x"].kind == "lanes"
    if is_ordered:  # with "auto", the same algorithm unless the case has several
        policies = ({"winograd": "off"}, *({"winograd": "auto"},) * (policies != WINOGRAD[1:2]))
    settings = {"cpu": policies, "gpu": case.settings.get("gpu", ({},))}
    return case._replace(
        label=f"{case.label}, bf16",
        arguments=arguments,
        settings={
            backend: tuple(values | {"precision": "bf16"} for values in variants)
            for backend, variants in settings.items()
        },
        ordered=is_ordered,
    )


def table():
    """Yield all cases. Expensive checks use only the first case of each function."""
    cases = list(activation_table())
    cases += without_bias(cases)
    yield from cases
    yield from training_table()
    yield from filter(None, map(in_bf16, cases))


def activation_table():
    """Yield the cases of functions of activations."""
    for label, shape in CONVOLUTIONS.items():
        yield from convolution(label, shape)
    for label, shape in LARGE_CONVOLUTIONS.items():
        yield from convolution(label, shape, CPU)
    for label in ("3x3", "1x1", "1x1 that reads padding", "3x3 by 2", "several tiles"):
        yield from fused_convolution(label, CONVOLUTIONS[label])
    for label in FUSED_ON_CPU:
        yield from fused_convolution(label, LARGE_CONVOLUTIONS[label], CPU)
    for label, shape in TRANSPOSED.items():
        yield from transposed(label, *shape)
    for outputs, image in DENSE:
        yield from fully_connected(outputs, image)
    for outputs, image in LARGE_DENSE:
        yield from fully_connected(outputs, image, CPU)
    for outputs, image in ((10, (3, 4, 5)), (70, (36, 1, 1)), (3, (7, 5, 1))):
        yield from fully_connected(outputs, image, draw=deferred)
    for shape in CHANNELS:
        yield from batch_normalization(shape)
    for channels in (1, 20, 300):
        yield from per_channel(channels)
    running = {"olds": [vector(n) for n in (3, 3, 200, 1)], "decay": 0.1}
    running["values"] = [draw._replace(dtype=np.float64) for draw in running["olds"]]
    yield Case("running", "several", running, 1e-6)
    for label, norm in IMAGE_NORMS.items():
        yield from image_normalization(label, *norm)
    for label, norm in LARGE_IMAGE_NORMS.items():
        yield from image_normalization(label, *norm, CPU)
    for label, sizes in RECURRENCES.items():
        yield from recurrent(label, *sizes)
    for label, sizes in LARGE_RECURRENCES.items():
        yield from recurrent(label, *sizes, CPU)
    for name, options in FUNCTIONS.items():
        yield from elementwise(name, *options)
    for shape in IMAGES.values():
        yield from learnable_slopes(shape)
    for label, shape in POOLS.items():
        yield from pooling(label, *shape)
    for label, (shape, padding, value) in PADDINGS.items():
        yield Case("pad2d", label, {"x": lanes(*shape), "padding": padding, "value": value}, 0)
    for label, resampled in RESAMPLINGS.items():
        yield from resampling(label, *resampled)
    for label, (count, channels) in SELECTIONS.items():
        for pixels in ((4, 3), ()):
            values = {"x": lanes(count, *pixels), "channels": channels}
            yield Case("take_channels", f"{label}, {pixels}", values, 0)
    for label, numbers in NORMS.items():
        yield from cross_channel(label, numbers, IMAGES["pixels"])
    for shape in (IMAGES["four channels at once"], IMAGES["features"], (1100,), (1, 2, 2)):
        yield from cross_channel("strong", NORMS["strong"], shape)
    for label, numbers in (("overlapping", "strong"), ("padded", "even"), ("apart", "one channel")):
        yield normalized_pools(label, numbers, *NORMALIZED_POOLS[label])
    for probability in (0.0, 0.1, 0.5, 0.99):
        yield dropped((5, 3, 7), probability)
    for shape in ((21,), (8, 4, 4), (3, 40, 30), (3, 9, 1), (6, 7, 7), (11, 1, 1)):
        yield dropped(shape, 0.5)
        yield dropped(shape, 0.5, flattened=True)
    for shape in ((21,), (8, 4, 4), (3, 40, 30)):
        yield dropped(shape, 0.5, whole_images=True)
    for label, factors in PRODUCTS.items():
        yield from products(label, *factors)
    for shape in CHANNELS:
        yield from scaled_channels(shape)
    for shape in list(IMAGES.values())[:3]:
        yield from joins(shape)
        yield from residual_ends(shape)


CASES = list(table())
