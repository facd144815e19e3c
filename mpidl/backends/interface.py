"""Define the interface that every backend implements: functions, arguments and results.

`backends.reference`, `backends.cpu` and `backends.gpu` implement these functions. Each package has
one module per family of functions, and `gather` collects the modules into a Backend. Callers
get the backend of a value from `backends.of_value`. A backend computes on arrays whose last axis is
the 16 lanes of a block; a lane is the slot of one image. A backend does not handle tapes or
communicate between ranks.

Arrays
    NumPy arrays, or `gpu.array.Array` if `arrays_on_device`. `Lanes` are arrays of shape
    (B, *image_shape, 16) for the B blocks of 16 images on this rank. Images have the shape
    (B, C, H, W, 16), outputs of convolutions (B, K, P, Q, 16), features (B, F, 16). A `Vector` (C,)
    holds one scalar per channel. Unless stated otherwise, results have the dtype of the lanes:
    float32, or float64 in the reference backend. The caller owns the results.
Readable
    Lanes or, if `fuses_convolutions`, a DeferredInput: an activation that is not stored.
Unused lanes
    The lanes after the last image. Their elements are finite, and are zero in gradients. Functions
    with an argument `counts` leave unused lanes out of sums and set them to zero in results.
counts
    Number of valid images in each block, (B,) int32. On a GPU, `counts` is instead the number of
    valid images on this rank, (1,) int32.
tree
    The `fold.Tree` of the mini-batch: the binary tree that fixes the order in which blocks are
    summed. A function that sums over images computes one leaf of this tree per block. The function
    returns a `fold.Partial`, which the caller sums over the ranks.
geometry, windows, norm
    The `shapes.Geometry` of a convolution, the `shapes.Windows` of a pooling function, and the
    `shapes.ChannelNorm` of a cross-channel normalization.
rows, columns
    The `taps.Taps` of a resampling along the two axes of an image.
stride, dilation, size
    (down, across), integers >= 1.
padding, cropping
    ((top, bottom), (left, right)), integers >= 0.
needs
    Three booleans: whether x, weight and bias need a gradient. The function returns None for a
    gradient that is not needed.
labels
    Class indices (B, ..., 16) int32, one per pixel of scores (B, K, ..., 16).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from mpidl.backends.shapes import ChannelNorm, Geometry, Pads, Pair, Windows
from mpidl.backends.taps import Taps
from mpidl.backends.training_interface import Array, Lanes, TrainingFunctions, Vector
from mpidl.core.fold import Partial, Tree

Readable: TypeAlias = Any  # Lanes or a DeferredInput
Gradients: TypeAlias = tuple[Any, Partial | None, Partial | None, Partial | None]

# Functions that exist only in backends with `fuses_convolutions`.
FUSED = frozenset({"activation", "activation_sums", "conv2d_moments", "conv2d_relu"})
FUSED |= {"conv2d_concat_relu", "add_relu", "add_relu_dx", "norm_max_pool", "norm_max_pool_relu_dx"}
# Functions that exist only in backends without `arrays_on_device`: the host prepares images.
HOST = frozenset({"image_sums", "keyed_words", "planes", "warp"})


class Backend(TrainingFunctions, Protocol):
    """The functions of a backend, as attributes, and its capabilities.

    `TrainingFunctions` declares the functions for losses, optimizers and images.

    Attributes
    ----------
    name : str
        "reference", "cpu" or "gpu".
    fuses_convolutions : bool
        Whether the backend has the functions in FUSED, and `Readable` arguments may be a
        DeferredInput.
    arrays_on_device : bool
        Whether arrays are in device memory. If so, the backend lacks the functions in HOST.
    """

    name: str
    fuses_convolutions: bool
    arrays_on_device: bool

    # conv

    def conv2d(self, x: Readable, weight: Array, bias: Array | None, geometry: Geometry) -> Lanes:
        """Return the cross-correlation of x with weight (K, C/groups, R, S).

        If bias (K,) is given, it is added to the result.
        """

    def conv2d_relu(
        self,
        x: Readable,
        weight: Array,
        bias: Array | None,
        geometry: Geometry,
        addend: Lanes | None,
    ) -> Lanes:
        """Return max(0, conv2d(x, weight, bias) + addend).

        In float32, the bytes are the same as if separate functions computed the convolution, sum
        and ReLU. `addend` has the shape of the result, or is None.
        """

    def conv2d_concat_relu(
        self,
        first: Readable,
        second: Readable,
        weight: Array,
        bias: Array | None,
        geometry: Geometry,
    ) -> Lanes:
        """Return max(0, conv2d(concat([first, second]), weight, bias)), with the same bytes."""

    def conv2d_moments(
        self,
        x: Readable,
        weight: Array,
        bias: Array | None,
        geometry: Geometry,
        counts: Array,
        tree: Tree,
    ) -> tuple[Lanes, Partial]:
        """Return the result of `conv2d` and its `moments`, computed in one pass."""

    def conv2d_backward(
        self,
        dy: Lanes,
        x: Readable,
        weight: Array,
        geometry: Geometry,
        counts: Array,
        tree: Tree,
        needs: Sequence[bool],
        activation_after: tuple[Any, ...] | None = None,
        sums: bool = False,
        overwrite: bool = False,
    ) -> Gradients:
        """Return the gradients of `conv2d`.

        Parameters
        ----------
        dy : Lanes
            Gradient with respect to the output y or, if `activation_after` is given, with respect
            to the activation of y.
        activation_after : (DeferredInput of y, a, b, c) or (z,), optional
            Backpropagate dy through ReLU and batch normalization first. The gradient of y is then
            a * dz + b * (y - mean) + c, where dz is dy if the activation is > 0, else 0. For a
            NormalizedInput, which has no limits, dz is dy.
            With (z,), only a ReLU follows, whose output is z: the gradient of y is dy if z > 0,
            else 0.
        sums : bool
            Whether to compute the `activation_sums` of dx too. x must then be a DeferredInput.
        overwrite : bool
            Whether the function may write a gradient to the memory of dy.

        Returns
        -------
        dx, dweight, dbias, sums : Lanes, Partial, Partial, Partial
            Each value is None unless `needs` or `sums` requests it.
        """

    # transposed

    def transposed_conv2d(
        self, x: Lanes, weight: Array, bias: Array | None, stride: Pair, cropping: Pads
    ) -> Lanes:
        """Return the transposed convolution of x (B, C, H, W, 16), plus bias (K,) if given.

        A convolution with weight (C, K, R, S) maps K channels to C channels. The transposed
        convolution maps a gradient of this convolution's output to the gradient of its input.
        """

    def transposed_conv2d_backward(
        self,
        dy: Lanes,
        x: Lanes,
        weight: Array,
        stride: Pair,
        cropping: Pads,
        counts: Array,
        tree: Tree,
        needs: Sequence[bool],
    ) -> tuple[Lanes | None, Partial | None, Partial | None]:
        """Return (dx, dweight, dbias) of `transposed_conv2d`.

        dx is the convolution of dy with weight. dweight is the gradient of this convolution with
        respect to its weight, if x is the gradient of the convolution's output.
        """

    # dense

    def dense(self, x: Readable, weight: Array, bias: Array | None) -> Lanes:
        """Return weight @ x + bias, (B, K, 16).

        x has F elements per image, in any image shape. weight is (K, F), and bias is (K,) or None.
        """

    def dense_dx(self, dy: Lanes, weight: Array) -> Lanes:
        """Return the gradient of `dense` with respect to x, (B, F, 16)."""

    def dense_dweight(self, dy: Lanes, x: Readable, tree: Tree) -> Partial:
        """Return the gradient of `dense` with respect to weight, (K, F)."""

    def dense_backward(
        self, dy: Lanes, x: Readable, weight: Array, tree: Tree, needs: Sequence[bool]
    ) -> Gradients:
        """Return (dx, dweight, dbias, sums) of `dense`.

        dx has the shape (B, F, 16). If x is a DeferredInput and dx is needed, `sums` is the
        `activation_sums` of dx, else None.
        """

    # recurrent

    def recurrence(
        self,
        kind: str,
        x: Lanes,
        weight: Array,
        bias: Vector | None,
        state: Sequence[Lanes],
        is_reversed: bool,
    ) -> tuple[Lanes, Any, Sequence[Lanes]]:
        """Run the steps of a recurrent layer of U units.

        With h = c = 0 before the first step, a step of an LSTM computes

            i, f, o = sigmoid(x + weight h), g = tanh(x + weight h)
            c = f c + i g, h = o tanh(c)

        and a step of a GRU computes, with p = weight h + bias,

            r, z = sigmoid(x + p), n = tanh(x + r p), h = n + z (h - n)

        Parameters
        ----------
        kind : str
            "lstm" or "gru".
        x : Lanes
            The products of the input, (B, 4U, T, 1, 16) for the gates i, f, g, o of T steps, or
            (B, 3U, T, 1, 16) for the gates r, z, n.
        weight : Array
            The recurrent weights of these gates, (4U, U, 1, 1) or (3U, U, 1, 1).
        bias : Vector or None
            (3U,), of a GRU only.
        state : sequence of Lanes
            Empty, or the state before the first step: h and, of an LSTM, c, (B, U, 16) float32
            each.
        is_reversed : bool
            Whether the last row of x is the first step.

        Returns
        -------
        y : Lanes
            The h of all steps, (B, U, T, 1, 16), in the order of the rows of x.
        record
            What `recurrence_backward` needs, in a form of the backend.
        last : sequence of Lanes
            The state after the last step: h and, of an LSTM, c, (B, U, 16) float32 each.
        """

    def recurrence_backward(
        self,
        kind: str,
        dy: Lanes,
        record: Any,
        weight: Array,
        bias: Vector | None,
        state: Sequence[Lanes],
        is_reversed: bool,
        truncate: int,
        counts: Array,
        tree: Tree,
        needs: Sequence[bool],
    ) -> tuple[Any, ...]:
        """Return (dx, dweight, dbias, *dstate) of `recurrence`.

        `needs` is as long as the result, and values that are not needed are None. After each
        `truncate` steps, no gradient passes to the steps before. dy must be zero in unused lanes.
        """

    # batchnorm

    def channel_sums(self, x: Lanes, tree: Tree) -> Partial:
        """Sum each channel over images and pixels: (C,). Unused lanes of x must be zero."""

    def moments(self, x: Lanes, counts: Array, tree: Tree) -> Partial:
        """Return the count, means and M2 of the channels, packed for `fold.merge_moments`.

        The result has the shape (1 + 2C,) and dtype float64. It contains the number of elements per
        channel, the C means, and the C sums of squared deviations from the mean (M2).
        """

    def statistics(self, moments: Array, gamma: Vector, epsilon: float) -> tuple:
        """Convert `moments`, folded over all blocks, to the statistics of batch normalization.

        Returns
        -------
        count, mean, rstd, variance : float64
            Number of elements per channel, and three Vectors. rstd is
            1 / sqrt(variance + epsilon), and the variance is biased (divided by the count).
        shift, scale : Vector
            The mean and gamma * rstd, in the dtype that `batchnorm` accepts.
        """

    def batchnorm(self, x: Lanes, mean: Vector, scale: Vector, beta: Vector) -> Lanes:
        """Return (x - mean) * scale + beta, per channel."""

    def batchnorm_sums(self, dy: Lanes, x: Lanes, mean: Vector, tree: Tree) -> Partial:
        """Return the C sums of dy followed by the C sums of dy * (x - mean), (2C,) float64."""

    def batchnorm_factors(self, sums: Array, gamma: Vector, statistics: tuple) -> tuple:
        """Compute (a, b, c, dgamma, dbeta), each (C,), from `batchnorm_sums` folded over blocks.

        The gradient of x is a * dy + b * (x - mean) + c. dgamma and dbeta have the dtype of gamma.
        """

    def batchnorm_dx(
        self, dy: Lanes, x: Lanes, mean: Vector, a: Vector, b: Vector, c: Vector, counts: Array
    ) -> Lanes:
        """Return a * dy + b * (x - mean) + c per channel, and zero in unused lanes."""

    def running(
        self, olds: Sequence[Vector], values: Sequence[Vector], decay: float
    ) -> list[Vector]:
        """Return the new running values, old + decay * (value - old), in the dtypes of `olds`."""

    def predict_scale(self, gamma: Vector, variance: Vector, epsilon: float) -> Vector:
        """Return gamma / sqrt(variance + epsilon), computed in float64."""

    def source(
        self,
        y: Lanes,
        mean: Vector,
        scale: Vector,
        beta: Vector,
        low: float = 0.0,
        high: float = math.inf,
    ) -> Any:
        """Return a DeferredInput for batchnorm(y, mean, scale, beta), limited to [low, high]."""

    def activation(self, source: Any) -> Lanes:
        """Compute the activation of a DeferredInput. The caller must not write to the result."""

    def activation_sums(self, dy: Lanes, source: Any, tree: Tree) -> Partial:
        """Return the `batchnorm_sums` of source.x, with dy set to 0 outside the limits.

        The limits themselves are outside.
        """

    # group_norm

    def group_norm(
        self, x: Lanes, gamma: Array | None, beta: Array | None, groups: int | None, epsilon: float
    ) -> tuple[Lanes, Any]:
        """Normalize each image: y = (x - mean) * rstd * gamma + beta.

        Parameters
        ----------
        x : Lanes
            Images or features.
        gamma, beta : Array
            Factor and offset per channel, (C,), or per element of an image, (C, H, W). None stands
            for 1 and 0.
        groups : int or None
            The number of groups of adjacent channels. Each group has its own mean and biased
            variance over its channels and pixels. If None, each pixel has them, over all channels;
            gamma and beta are then per channel.
        epsilon : float
            Constant added to the variance: rstd = 1 / sqrt(variance + epsilon).

        Returns
        -------
        y : Lanes
        statistics
            The means and rstd for `group_norm_backward`, in a form of the backend.
        """

    def group_norm_backward(
        self,
        dy: Lanes,
        x: Lanes,
        gamma: Array | None,
        statistics: Any,
        groups: int | None,
        tree: Tree,
        needs: Sequence[bool],
    ) -> tuple[Lanes | None, Partial | None, Partial | None]:
        """Return (dx, dgamma, dbeta) of `group_norm`.

        With n = (x - mean) * rstd and dz = gamma * dy, dx = rstd * (dz - a - n * b). Here, a and b
        are the means of dz and of dz * n over the numbers that are normalized together. dgamma and
        dbeta are the sums of dy * n and of dy. dy must be zero in unused lanes.
        """

    # activation

    def relu(self, x: Lanes) -> Lanes:
        """Return max(x, 0)."""

    def relu_dx(self, dy: Lanes, y: Lanes) -> Lanes:
        """Return dy where y > 0, else 0."""

    def elementwise(self, function: str, x: Readable, *numbers: float) -> Lanes:
        """Return a function of each element, by its name in `reference.activation.FUNCTIONS`.

        x is an array or a NormalizedInput. `numbers` are the function's arguments after x, at most
        two.
        """

    def elementwise_dx(self, function: str, dy: Lanes, value: Readable, *numbers: float) -> Lanes:
        """Return the gradient of `elementwise` with respect to x.

        `value` is x or the result y. The name of the gradient's second argument in
        `reference.activation` tells which.
        """

    def prelu(self, x: Lanes, slope: Vector) -> Lanes:
        """Return x where x > 0, else slope * x.

        `slope` is (C,), or (1,) for one slope shared by all channels.
        """

    def prelu_dx(self, dy: Lanes, x: Lanes, slope: Vector) -> Lanes:
        """Return dy where x > 0, else slope * dy."""

    def prelu_dslope(self, dy: Lanes, x: Lanes, slopes: int, tree: Tree) -> Partial:
        """Sum dy * min(x, 0) over images and pixels: (C,), or (1,) if `slopes` is 1.

        dy must be zero in unused lanes.
        """

    # pool

    def max_pool2d(self, x: Readable, windows: Windows) -> tuple[Lanes, Lanes]:
        """Return the largest pixel of each window, and the index of this pixel in the window.

        An index is a uint8 that counts the pixels of a window row by row. If several pixels are
        equally large, the first of these pixels is chosen. Padding is never chosen. The maximum is
        NaN if a pixel of the window is NaN.
        """

    def max_pool2d_dx(
        self, dy: Lanes, argmax: Lanes, x: Readable, windows: Windows, tree: Tree
    ) -> tuple[Lanes, Partial | None]:
        """Return the gradient with respect to x, and its `activation_sums` if x is a DeferredInput.

        If x is an array of lanes, only its shape and dtype are used.
        """

    def average_pool2d(self, x: Readable, windows: Windows, count_padding: bool) -> Lanes:
        """Return the mean of each window.

        If `count_padding` is True, padding counts as zeros. Otherwise, the mean leaves padding out.
        """

    def average_pool2d_dx(
        self, dy: Lanes, x: Readable, windows: Windows, count_padding: bool, tree: Tree
    ) -> tuple[Lanes, Partial | None]:
        """Return the gradient with respect to x, and its `activation_sums` or None.

        See `max_pool2d_dx`.
        """

    # resample

    def resample(self, x: Readable, rows: Taps, columns: Taps) -> Lanes:
        """Return weighted sums of the pixels of images (C, H, W): the images (C, P, Q).

        Each row is a sum of the rows that `rows` lists for it; then each column is a sum of the
        columns that `columns` lists for it. The products are added in the order of the tables.
        Applied to the gradient of the result, `resample` with the transposed tables returns the
        gradient of x.
        """

    def take_channels(self, x: Lanes, channels: Sequence[int]) -> Lanes:
        """Return lanes with channel channels[c] of x as channel c, or zeros if this index is -1."""

    # pad

    def pad2d(self, x: Lanes, padding: Pads, value: float) -> Lanes:
        """Surround images (C, H, W) with pixels of this value. Negative padding removes pixels."""

    # lrn

    def cross_channel_norm(self, x: Lanes, norm: ChannelNorm) -> Lanes:
        """Return x * d**-beta, where d = k + alpha / window * (sum of x**2 over the window).

        The window of a channel consists of the channel and its neighbours;
        `shapes.channel_window(window)` returns how many neighbours come before and after it.
        """

    def cross_channel_norm_dx(self, dy: Lanes, x: Lanes, norm: ChannelNorm) -> Lanes:
        """Return the gradient with respect to x, recomputing d.

        dx = dy * d**-beta - 2 * alpha * beta / window * x * S, where S is the sum of
        dy * x * d**(-beta - 1) over the channels whose window contains this channel.
        """

    def norm_max_pool(self, x: Lanes, norm: ChannelNorm, windows: Windows) -> tuple[Lanes, Array]:
        """Return `max_pool2d` of the `cross_channel_norm` of x, with the same bytes."""

    def norm_max_pool_relu_dx(
        self, dy: Lanes, argmax: Array, x: Lanes, norm: ChannelNorm, windows: Windows
    ) -> Lanes:
        """Return the gradient of `norm_max_pool` before the ReLU that computed x.

        The bytes are the same as if `max_pool2d_dx`, `cross_channel_norm_dx` and `relu_dx` computed
        the gradient. `argmax` is the second result of `norm_max_pool`.
        """

    # dropout

    def dropout(
        self,
        x: Lanes,
        threshold: int,
        scale: float,
        key: tuple[int, ...],
        epoch: Any,
        samples: Array,
        whole_images: bool,
    ) -> Lanes:
        """Multiply x by scale, and set elements to 0 if their random number is below `threshold`.

        `reference.dropout.chances` defines the random numbers, which are from 0 to 65535. Every
        backend therefore drops the same elements. Applied to the gradient of the result, `dropout`
        returns the gradient of x.

        Parameters
        ----------
        key : tuple of int
            Key of the random numbers, two 32-bit words.
        epoch, samples : int, (B * 16,) int64
            The epoch, and the sample index of each lane. On a GPU, `epoch` is an int32 Array (1,)
            and `samples` an int32 Array (B * 16,). Every replay of a recorded training step reads
            these Arrays again.
        whole_images : bool
            Whether all elements of an image have the random number of its first element.
        """

    # gates

    def multiply(self, a: Lanes, b: Lanes) -> Lanes:
        """Return a * b.

        The shapes of the images are equal, or broadcast as in NumPy. Features (C,) have one number
        per channel, like (C, 1, 1).
        """

    def multiply_dx(self, dy: Lanes, other: Lanes, x: Lanes) -> Lanes:
        """Return the gradient of `multiply` with respect to one of its operands.

        This is the product of dy and the other operand, summed over the axes along which x was
        broadcast. Only the shape of x and its order in memory are used.
        """

    def scale_channels(self, x: Lanes, factor: Vector) -> Lanes:
        """Return x * factor, per channel."""

    def scale_channels_dfactor(self, dy: Lanes, x: Lanes, tree: Tree) -> Partial:
        """Sum dy * x over images and pixels: (C,). dy must be zero in unused lanes."""

    # join

    def add(self, a: Readable, b: Readable) -> Lanes:
        """Return a + b. Each operand may also be a NormalizedInput."""

    def add_relu(self, a: Readable, b: Readable) -> Lanes:
        """Return max(0, a + b). Each operand may also be a NormalizedInput."""

    def add_relu_dx(
        self,
        dy: Sequence[Lanes],
        y: Lanes,
        normalizations: Sequence[Any],
        tree: Tree,
    ) -> tuple[Lanes, list[Partial | None]]:
        """Return the gradient of `add_relu` (the same for a and b), and sums over this gradient.

        Parameters
        ----------
        dy : list of Lanes
            The gradient with respect to y: one array, or two arrays to add up.
        y : Lanes
            The result of `add_relu`.
        normalizations : list of (NormalizedInput or None)
            For each of a and b, the operand if its sums are needed, else None.

        Returns
        -------
        dz : Lanes
            The sum of dy where y > 0, else 0.
        sums : list of (Partial or None)
            The `batchnorm_sums` of dz for each of `normalizations`; None for each None.
        """

    def concat(self, arrays: Sequence[Readable]) -> Lanes:
        """Concatenate lanes (B, C1, ..., 16), (B, C2, ..., 16), ... along the channels."""

    def split(self, x: Lanes, channels: Sequence[int]) -> list[Lanes]:
        """Split x into parts with the given numbers of channels: the inverse of `concat`."""
