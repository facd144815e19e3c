"""Convert ONNX operators that resize images."""

from __future__ import annotations

import numpy as np

from mpidl.interchange.onnx_builder import operator
from mpidl.interchange.onnx_file import BATCH
from mpidl.interchange.onnx_values import Unsupported
from mpidl.nn import layers as nn

MODES = {"nearest": "nearest", "linear": "bilinear", "bilinear": "bilinear"}
ROUNDINGS = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")


@operator("Resize", "Upsample")
def _resize(node, builder):
    node.require(antialias=0, keep_aspect_ratio_policy="stretch")
    x = node.value()
    if len(x.shape) != 3:
        raise Unsupported("only images (N, C, H, W) are supported")
    size, scale = _size(node, builder, x), _scale(node, builder)
    if size is None and scale is None:
        raise Unsupported("it has neither scales nor sizes")
    if size == x.shape[1:] or scale == (1, 1):
        return x
    factors = scale if size is None else [m / n for n, m in zip(x.shape[1:], size, strict=True)]
    rule = _rule(node, builder, x, factors)
    return builder.add(node, nn.Resize2D(size, scale=None if size else scale, **rule), [x])


def _rule(node, builder, x, factors):
    """Return the arguments of Resize2D that say which pixels it reads."""
    mode = MODES.get(node.get("mode", "nearest"))
    if mode is None:
        raise Unsupported(f"mode is {node.get('mode', '')}, expected nearest or linear")
    if node.type == "Upsample" or builder.opset < 11:
        if mode == "nearest" and any(factor < 1 and (1 / factor) % 1 for factor in factors):
            raise Unsupported("before opset 11, the pixels of smaller images are not defined")
        return {"mode": mode, "coordinates": "asymmetric"}
    coordinates = node.get("coordinate_transformation_mode", "half_pixel")
    rounding = node.get("nearest_mode", "round_prefer_floor")
    has_whole_sizes = all(
        abs(n * f - round(n * f)) < 1e-5 for n, f in zip(x.shape[1:], factors, strict=True)
    )
    if coordinates == "half_pixel_symmetric" and has_whole_sizes:
        coordinates = "half_pixel"
    if (coordinates, mode, rounding) == ("tf_half_pixel_for_nn", "nearest", "floor"):
        coordinates, rounding = "half_pixel", "round_prefer_ceil"
    if coordinates not in COORDINATES:
        raise Unsupported(f"coordinate_transformation_mode is {coordinates}")
    if rounding not in ROUNDINGS:
        raise Unsupported(f"nearest_mode is {rounding}")
    rounding = rounding if mode == "nearest" else "floor"
    return {"mode": mode, "coordinates": coordinates, "rounding": rounding}


def _size(node, builder, x):
    """Return the size (H, W) in the node's input `sizes`, or None if it has none."""
    values = _values(node, 3) if builder.opset >= 11 else None
    if values is None:
        return None
    batch, channels, *size = _by_axis(node, values, (BATCH, x.shape[0], *x.shape[1:]))
    if batch not in (BATCH, builder.batch) or channels != x.shape[0] or min(size) < 1:
        raise Unsupported(f"sizes are {values.tolist()}, expected other rows and columns")
    return tuple(int(n) for n in size)


def _scale(node, builder):
    """Return the scales (down, across), or None if the node has none."""
    values = node.attributes.get("scales") or _values(node, 2 if builder.opset >= 11 else 1)
    if values is None:
        return None
    images, channels, *scale = _by_axis(node, values, (1, 1, 1, 1))
    if images != 1 or channels != 1:
        raise Unsupported(f"scales are {list(values)}, expected scales of rows and columns")
    down, across = (float(str(np.float32(s))) for s in scale)  # 0.7, not 0.699999988
    return down, across


def _values(node, i):
    """Return the numbers of input i, or None if it is omitted or empty."""
    if node.input(i) is None or node.constant(i).size == 0:
        return None
    return node.constant(i).ravel()


def _by_axis(node, values, defaults):
    """Return one number per axis of (N, C, H, W), given the numbers of the node's axes."""
    axes = [int(axis) % 4 for axis in node.get("axes", range(4))]
    if len(axes) != len(values) or len(set(axes)) < len(axes):
        raise Unsupported(f"it has {len(values)} numbers for the axes {axes}")
    numbers = dict(zip(axes, values, strict=True))
    return [numbers.get(axis, default) for axis, default in enumerate(defaults)]
