"""Values of an ONNX graph, whose axes may differ from those of a layer's output.

In the graph of a recurrent network, the mini-batch is often the second axis, and an axis may be a
product of two axes of images. The layout of a value names the axes of the layer's output that each
axis in the graph consists of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidl.interchange.onnx_file import BATCH


class Unsupported(Exception):
    """Raised for a node that mpidl has no layers for. The message states the reason."""


class Value(NamedTuple):
    """A value in the graph that depends on the images."""

    layer: str  # name of the layer that computes the value, and shape of the layer's output
    shape: tuple[int, ...]
    # Order of the axes in the graph, if it differs from the layer's order: (1, 2, 0) if the
    # graph's value has axes (H, W, C) and the layer's output has axes (C, H, W). Empty if the
    # orders agree.
    order: tuple[int, ...] = ()
    # Shape (C, H, W) before flattening, if the value is a vector and `order` is not empty.
    image: tuple[int, ...] = ()
    # Whether the value is (C, 1, 1) in the graph, and the layer's output has the shape (C,). Only
    # products accept this, as gates of channels.
    is_unsqueezed: bool = False
    # (groups, channels per group) if the channels are two axes in the graph, or (groups, numbers
    # per group) if these two axes are all axes of an image.
    groups: tuple[int, ...] = ()
    # Letters of the axes of the layer's output, for each axis in the graph, such as ("H", "N",
    # "CW") for steps, images and the numbers of a row. C, H and W of size 1 are omitted. D and U
    # stand for the two axes of `groups`. Empty if the other fields describe the axes.
    layout: tuple[str, ...] = ()

    def graph_shape(self) -> tuple[int, ...]:
        """Return the shape of the value with the graph's order of axes, without the mini-batch."""
        if self.layout:
            return tuple(self.size(axis) for axis in self.layout if axis != "N")
        if self.groups:
            pixels = self.shape[1:] if math.prod(self.groups) == self.shape[0] else ()
            return *self.groups, *pixels
        return tuple(self.shape[i] for i in self.order) if self.is_permuted() else self.shape

    def full_shape(self, batch: int) -> tuple[int, ...]:
        """Return the shape of the value in the graph for `batch` images."""
        shape = self.graph_shape()
        position = self.layout.index("N") if self.layout else 0
        return *shape[:position], batch, *shape[position:]

    def text(self) -> str:
        """Describe the shape of the value in the graph, such as (N, 3, 32, 32)."""
        return f"({', '.join('N' if n == BATCH else str(n) for n in self.full_shape(BATCH))})"

    def size(self, letters: str) -> int:
        """Return the product of the sizes of axes, without the mini-batch."""
        sizes = dict(zip("CHW", self.shape, strict=False)) | dict(
            zip("DU", self.groups, strict=False)
        )
        return math.prod(sizes[letter] for letter in letters if letter != "N")

    def letters(self) -> tuple[str, ...]:
        """Return the layout of a value, also if other fields describe its axes.

        Raise Unsupported if letters cannot describe the axes.
        """
        if self.layout:
            return self.layout
        if self.image:
            raise Unsupported("its input is a transposed image, flattened")
        if self.is_unsqueezed:
            return ("N", "C", "", "")
        letters = "CHW"[: len(self.shape)]
        if self.groups and math.prod(self.groups) == self.shape[0]:
            return ("N", "D", "U", *letters[1:])
        if self.groups and self.groups[0] == self.shape[0]:
            return ("N", "C", letters[1:])
        if self.groups:
            raise Unsupported("its input has two axes of channels")
        return ("N", *(letters[i] for i in self.order or range(len(letters))))

    def is_permuted(self) -> bool:
        """Return whether the value is an image with another order of axes in the graph."""
        return bool(self.order) and not self.image

    def axes(self, numbers: Sequence[int]) -> list[int]:
        """Map axes in the graph, where 0 is the mini-batch, to axes of the layer's output, from 0.

        Raise Unsupported for the mini-batch axis, and for a product of axes.
        """
        count = 1 + len(self.graph_shape())
        letters = self.layout or ("N", *"CHW"[: count - 1])
        axes = [letters[n] for n in numbers if -count <= n < count]
        if len(axes) < len(numbers) or any(a not in ("C", "H", "W") for a in axes):
            raise Unsupported(f"axes are {list(numbers)} of {self.text()}")
        indices = ["CHW".index(letter) for letter in axes]
        return [self.order[i] for i in indices] if self.is_permuted() else indices

    def to_layer(self, values: np.ndarray) -> np.ndarray:
        """Reorder the last axes of an array from the graph's order to the layer's order."""
        if self.layout:
            raise Unsupported(f"it computes with each number of {self.text()}")
        if not self.order:
            return values
        inverse = [self.order.index(i) for i in range(3)]
        if self.is_permuted():
            lead = values.ndim - 3
            return values.transpose(*range(lead), *(lead + i for i in inverse))
        lead_shape = values.shape[:-1]
        lead = len(lead_shape)
        images = values.reshape(*lead_shape, *(self.image[i] for i in self.order))
        images = images.transpose(*range(lead), *(lead + i for i in inverse))
        return images.reshape(values.shape)


def with_layout(x: Value, layout: Sequence[str]) -> Value:
    """Return x with other axes in the graph, and without a layout if other fields describe them."""
    layout = [axis.replace("DU", "C") for axis in layout]
    groups = x.groups if any(letter in axis for axis in layout for letter in "DU") else ()
    shape = x.shape[:1] if x.is_unsqueezed else x.shape
    x = Value(x.layer, shape, groups=groups)
    layout = ["".join(a for a in axis if a not in "CHW" or x.size(a) > 1) for axis in layout]
    if len(shape) == 1 and layout in (["N", "C", "", ""], ["N", "", "", ""]):
        return x._replace(shape=(*shape, 1, 1), is_unsqueezed=True)
    is_by_axis = len(layout) == 1 + len(shape) and all(len(axis) <= 1 for axis in layout)
    if not is_by_axis or layout[0] != "N" or groups:
        return x._replace(layout=tuple(layout))
    ones = iter([letter for letter in "CHW"[: len(shape)] if x.size(letter) == 1])
    order = tuple("CHW".index(axis or next(ones)) for axis in layout[1:])
    return x._replace(order=() if order == tuple(range(len(shape))) else order)


def regrouped(x: Value, sizes: Sequence[int], batch: int) -> list[str]:
    """Return the layout of x after it is reshaped to `sizes`.

    One size may be -1, and BATCH stands for the number of images, which is `batch` unless that is
    0. Raise Unsupported if an axis of the layer's output would be divided.
    """
    problem = Unsupported(f"it reshapes {x.text()} to {list(sizes)}")
    axes, numbers = x.letters(), x.size("".join(x.letters()))
    if sizes.count(-1) == 1:
        rest = math.prod(n for n in sizes if n not in (-1, BATCH))
        if BATCH not in sizes and not batch:
            missing = BATCH if rest == numbers else 0
        else:
            missing = (numbers if BATCH in sizes else numbers * batch) // max(rest, 1)
        sizes = [missing if n == -1 else n for n in sizes]
    letters = "".join(a for a in "".join(axes) if a not in "CHW" or x.size(a) > 1)
    layout = []
    for size in sizes:
        is_batch = letters.startswith("N") and size in (BATCH, batch)
        axis = "N" if is_batch else _leading(x, letters, size)
        if not is_batch and x.size(axis) != size:
            raise problem
        layout.append(axis)
        letters = letters[len(axis) :]
    if letters:
        raise problem
    return layout


def _leading(x, letters, size):
    """Return the longest beginning of the letters whose product of sizes is at most `size`."""
    count = 0
    while count < len(letters) and letters[count] != "N" and x.size(letters[: count + 1]) <= size:
        count += 1
    return letters[:count]


def row_filters(x: Value, letters: str, weight: np.ndarray) -> np.ndarray:
    """Return the weight (K, F) of the numbers of a row as filters (K, C, 1, W).

    The letters are the axes of x that the F numbers consist of, C and W in any order.
    """
    if weight.ndim != 2 or weight.shape[1] != x.size(letters):
        raise Unsupported(f"it multiplies {x.text()} by {weight.shape[::-1]}")
    filters = weight.reshape(-1, *(x.size(letter) for letter in letters))
    filters = filters.transpose(0, *(1 + letters.index(a) for a in "CW" if a in letters))
    columns = x.size("W") if "W" in letters else 1
    return np.ascontiguousarray(filters.reshape(len(weight), -1, 1, columns))
