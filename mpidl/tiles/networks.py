"""Apply a network for pixels to tiles of another size than its own."""

from __future__ import annotations

import copy
import math
from typing import Any

from mpidl.errors import UserError
from mpidl.nn import Network, editing
from mpidl.nn.layers import Layer, Resize2D
from mpidl.nn.summary import times


def for_tiles(net: Network, size: tuple[int, int], name: str = "tile") -> Network:
    """Return a network for images of another size that shares the arrays of `net`.

    `Resize2D` layers to a fixed size resize to a size in proportion. Raises UserError if a layer
    forbids other sizes, as `Dense` does; `name` is that of the argument in messages.
    """
    try:
        layers = [_in_proportion(layer, net.input_shape[1:], size) for layer in net.layers]
        return editing.with_input_shape(net.with_layers(layers), (net.input_shape[0], *size))
    except ValueError as error:
        raise UserError(
            f"{name}: expected a network that accepts images of any size, such as "
            f"{times(size)}: {error}"
        ) from None


def _in_proportion(layer: Layer, old: tuple[int, ...], new: tuple[int, int]) -> Layer:
    """Return a copy of a layer that resizes to a fixed size, for images of size `new`; any other
    layer itself. Raises ValueError if the new size is not whole.
    """
    if not isinstance(layer, Resize2D) or layer.size is None:
        return layer
    fixed = (layer.size, layer.size) if isinstance(layer.size, int) else layer.size
    if any(n * b % a for n, a, b in zip(fixed, old, new, strict=True)):
        raise ValueError(f"{layer.name}: its size {times(fixed)} belongs to images of {times(old)}")
    resized: Any = copy.copy(layer)
    resized.size = tuple(n * b // a for n, a, b in zip(fixed, old, new, strict=True))
    return resized


def alignment_of(net: Network, name: str = "tile") -> int:
    """Return the number of pixels of which the origins of tiles must be multiples.

    It is the least common multiple of the factors by which the outputs of layers are smaller than
    the images. To tell layers that shrink images from layers with a fixed size, such as global
    pooling, the shapes are compared with those for images of twice the size. Raises UserError if
    the outputs are not one score, or several, per pixel, or if a layer forbids other sizes.
    """
    size = net.input_shape[1:]
    if len(net.output_shape) != 3 or net.output_shape[1:] != size:
        raise UserError(
            f"{name}: expected a network with outputs (K, {size[0]}, {size[1]}) for images "
            f"{times(net.input_shape)}, found outputs of shape {net.output_shape}"
        )
    doubled = for_tiles(net, (2 * size[0], 2 * size[1]), name).output_shapes
    if doubled[-1][1:] != (2 * size[0], 2 * size[1]):
        raise UserError(
            f"{name}: expected a network with one output per pixel of images of any size, found "
            f"outputs of shape {doubled[-1]} for images of {2 * size[0]}x{2 * size[1]}: the size "
            "of a layer is not in proportion"
        )
    factors = [1]
    for layer, shape, large in zip(net.layer_names, net.output_shapes, doubled, strict=True):
        if shape[1:] == large[1:]:  # the layer depends on the whole tile
            continue
        for n, m, twice in zip(size, shape[1:], large[1:], strict=True):
            if twice != 2 * m or (n % m and m % n):
                raise UserError(
                    f"{name}: expected layers that divide or multiply the size of images, found "
                    f"{layer}: {times(shape[1:])} for images of {times(size)}, {times(large[1:])} "
                    "for images of twice the size"
                )
            factors.append(max(1, n // m))
    return math.lcm(*factors)
