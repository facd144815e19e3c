"""Convolution and transposed convolution layers."""

from __future__ import annotations

import functools
import math
from dataclasses import field
from typing import Literal, get_args

from mpidl import ops
from mpidl.backends.shapes import conv2d_shape, transposed_conv2d_shape
from mpidl.nn.layers.base import (
    STORED,
    Built,
    LayerContext,
    LayerType,
    Shape,
    Value,
    Weighted,
    glorot_uniform,
    layer_class,
)
from mpidl.ops import check
from mpidl.ops.transposed import same_or_crops

__all__ = ["Conv2D", "TransposedConv2D"]

WeightInitializer = Literal["glorot", "whitening"]
INITIALIZERS = get_args(WeightInitializer)
LARGEST_USUAL_SIZE = 11  # of filters: AlexNet's first layer


def _size_first(kind: type[LayerType]) -> type[LayerType]:
    """Make a constructor explain arguments that look like (filters, size)."""
    create = kind.__init__

    @functools.wraps(create)
    def explained(self, *args, **keywords):
        if len(args) == 2 and _is_filters_first(*args, keywords.get("stride", 1)):
            name, (size, filters) = kind.__name__, args
            raise ValueError(
                f"{name}{args}: expected {name}(size, filters), and {size} looks like the number "
                f"of filters: write {name}({filters}, {size}), or size= and filters= if {size} is "
                "the size"
            )
        create(self, *args, **keywords)

    kind.__init__ = explained  # type: ignore[method-assign]
    return kind


def _is_filters_first(size, filters, stride):
    """Return whether the arguments are rare as (size, filters), but common as (filters, size).

    This is Keras' order. Large filters with a similar stride are common, as in upsampling.
    """
    if isinstance(filters, list | tuple):
        return isinstance(size, int)
    if not all(isinstance(value, int) for value in (size, filters, stride)) or size <= 2 * stride:
        return False
    if size > LARGEST_USUAL_SIZE:
        return filters <= 7
    return size in (6, 8, 10) and filters in (3, 5, 7)  # such as LeNet's 6 filters of size 5


@_size_first
@layer_class
class Conv2D(Weighted):
    """Convolution with Glorot uniform initial weights and zero bias.

    Parameters
    ----------
    size
        Size of the filters, an integer or (rows, columns).
    filters
        Number of filters.
    stride, padding, dilation, groups
        As in `ops.conv2d`.
    weight_initializer
        Initial weights: "glorot", or "whitening" for filters that `dl.train` computes from training
        images before the first step (see `whiten`). A whitening layer must read the images, and its
        number of filters may be at most twice the number of weights in a filter.

    Notes
    -----
    `Weighted` describes `bias` and the factors of the learning rate and of L2 regularization.
    """

    size: int | tuple[int, int]
    filters: int

    stride: int | tuple[int, int] = field(default=1, kw_only=True, metadata=STORED)
    padding: check.PaddingArgument = field(default=0, kw_only=True, metadata=STORED)
    dilation: int | tuple[int, int] = field(default=1, kw_only=True, metadata=STORED)
    groups: int = field(default=1, kw_only=True, metadata=STORED)
    weight_initializer: WeightInitializer = field(default="glorot", kw_only=True)

    def build(self, shape: Shape) -> Built:
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        r, s = check.pair("Conv2D", "size", self.size, 1)
        check.integer(self.name, "filters", self.filters)
        check.integer(self.name, "groups", self.groups)
        if shape[0] % self.groups or self.filters % self.groups:
            raise ValueError(
                f"{self.name}: {shape[0]} channels and {self.filters} filters do not divide into "
                f"{self.groups} groups"
            )
        weight = (self.filters, shape[0] // self.groups, r, s)
        self._check_initializer(math.prod(weight[1:]))
        stride = check.pair("Conv2D", "stride", self.stride, 1)
        dilation = check.pair("Conv2D", "dilation", self.dilation, 1)
        padding = check.same_or_pads("Conv2D", self.padding, shape[1:], (r, s), stride, dilation)
        output = conv2d_shape(shape, weight, stride, padding, dilation)
        if min(output) < 1:
            raise ValueError(f"{self.name}: filters {weight} leave no output for images {shape}")
        fans = weight[1] * r * s, self.filters // self.groups * r * s
        return Built(output, self.learnables(weight, glorot_uniform(*fans), self.filters))

    def _check_initializer(self, pixels):
        if self.weight_initializer not in INITIALIZERS:
            raise ValueError(
                f"{self.name}: weight_initializer must be one of {', '.join(INITIALIZERS)}, got "
                f"{self.weight_initializer!r}"
            )
        if self.weight_initializer != "whitening":
            return
        if self.groups != 1 or self.filters > 2 * pixels:
            raise ValueError(
                f"{self.name}: weight_initializer whitening: expected one group and at most "
                f"{2 * pixels} filters, two per weight of a filter, got {self.groups} group(s) and "
                f"{self.filters} filters"
            )

    def forward(self, x: Value, context: LayerContext) -> Value:
        return ops.conv2d(
            x,
            context["weight"],
            self.bias_of(context),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
        )

    def multiply_adds(self, shape: Shape, output_shape: Shape) -> int:
        r, s = check.pair("Conv2D", "size", self.size, 1)
        return math.prod(output_shape) * (shape[0] // self.groups) * r * s


@_size_first
@layer_class
class TransposedConv2D(Weighted):
    """Transposed convolution with Glorot uniform initial weights and zero bias.

    Parameters
    ----------
    size
        Size of the filters, an integer or (rows, columns).
    filters
        Number of filters.
    stride, cropping
        As in `ops.transposed_conv2d`.

    Notes
    -----
    `Weighted` describes `bias` and the factors of the learning rate and of L2 regularization.
    """

    size: int | tuple[int, int]
    filters: int

    stride: int | tuple[int, int] = field(default=1, kw_only=True, metadata=STORED)
    cropping: check.PaddingArgument = field(default=0, kw_only=True, metadata=STORED)

    def build(self, shape: Shape) -> Built:
        if len(shape) != 3:
            raise ValueError(f"{self.name}: expected images (C, H, W), got {shape}")
        r, s = check.pair("TransposedConv2D", "size", self.size, 1)
        check.integer(self.name, "filters", self.filters)
        stride = check.pair("TransposedConv2D", "stride", self.stride, 1)
        cropping = same_or_crops("TransposedConv2D", self.cropping, (r, s), stride)
        weight = (shape[0], self.filters, r, s)
        output = transposed_conv2d_shape(shape, weight, stride, cropping)
        if min(output) < 1:
            raise ValueError(
                f"{self.name}: cropping {cropping} leaves no output for images {shape}"
            )
        initial = glorot_uniform(shape[0] * r * s, self.filters * r * s)
        return Built(output, self.learnables(weight, initial, self.filters))

    def forward(self, x: Value, context: LayerContext) -> Value:
        weight, bias = context["weight"], self.bias_of(context)
        return ops.transposed_conv2d(x, weight, bias, stride=self.stride, cropping=self.cropping)

    def multiply_adds(self, shape: Shape, output_shape: Shape) -> int:
        r, s = check.pair("TransposedConv2D", "size", self.size, 1)
        return math.prod(shape) * self.filters * r * s
