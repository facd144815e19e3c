"""The contract of the backends: every function, its arguments and what it returns.

`backends.reference`, `backends.cpu` and `backends.gpu` implement these functions in modules of the
same names, one for each family, and `gather` makes a Backend of them. Callers get it from
`backends.of`. A backend works on lanes and knows nothing of tapes or ranks.

Arrays
    NumPy arrays, or `gpu.array.Array` if `arrays_on_device`. `Lanes` are a value per image,
    (B, *image_shape, 16): B blocks of this rank, 16 images each. Lanes of images are
    (B, C, H, W, 16), of outputs (B, K, P, Q, 16), of features (B, F, 16). `Vector` is (C,), a
    number per channel. Results have the type of their lanes (float32; the reference takes float64
    too) unless stated otherwise, and belong to the caller.
Readable
    Lanes or, if `fuses_convolutions`, a DeferredInput: an activation that is not stored.
Unused lanes
    Lanes behind the last image. They are finite in values and zero in gradients. Functions that
    take `counts` leave them out of sums and set them to zero in results.
counts
    (B,) int32, valid images of each block; on a GPU (1,) int32, of the rank's whole share.
tree
    The `fold.Tree` of the mini-batch. A sum over images goes to it leaf by leaf, and the function
    returns a `fold.Partial`, which the caller adds up over the ranks.
stride, dilation, size
    (down, across), integers >= 1.
padding, cropping
    ((top, bottom), (left, right)), integers >= 0.
needs
    Booleans: which of (x, weight, bias) need a gradient. The others' gradients are None.
labels
    (B, ..., 16) int32 class numbers of scores (B, K, ..., 16), one a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from mpidl.backends.training_interface import Array, Lanes, TrainingFunctions, Vector
from mpidl.fold import Partial, Tree
from mpidl.shapes import Pads, Pair

Readable: TypeAlias = Any  # Lanes or a DeferredInput
Gradients: TypeAlias = tuple[Any, Partial | None, Partial | None, Partial | None]

# Functions that only a backend with `fuses_convolutions` has.
FUSED = frozenset({"activation", "activation_sums", "conv2d_moments"})
# Functions that only a backend without `arrays_on_device` has: the host prepares images.
HOST = frozenset({"image_sums", "keyed_words", "planes", "warp"})


class Backend(TrainingFunctions, Protocol):
    """The functions of a backend, as attributes, and its capabilities.

    Functions of losses, optimizers and images are in `TrainingFunctions`.

    Attributes
    ----------
    name : str
        "reference", "cpu" or "gpu".
    fuses_convolutions : bool
        Whether functions read activations that are not stored, and the functions FUSED exist.
    arrays_on_device : bool
        Whether arrays lie in device memory; the functions HOST are missing then.
    """

    name: str
    fuses_convolutions: bool
    arrays_on_device: bool

    # conv

    def conv2d(
        self,
        x: Readable,
        weight: Array,
        bias: Array,
        stride: Pair,
        padding: Pads,
        dilation: Pair,
        groups: int,
    ) -> Lanes:
        """Return the cross-correlation of x with weight (K, C/groups, R, S), + bias (K,)."""

    def conv2d_moments(
        self,
        x: Readable,
        weight: Array,
        bias: Array,
        stride: Pair,
        padding: Pads,
        dilation: Pair,
        groups: int,
        counts: Array,
        tree: Tree,
    ) -> tuple[Lanes, Partial]:
        """Return `conv2d` and the `moments` of its result, in one pass."""

    def conv2d_backward(
        self,
        dy: Lanes,
        x: Readable,
        weight: Array,
        stride: Pair,
        padding: Pads,
        dilation: Pair,
        groups: int,
        counts: Array,
        tree: Tree,
        needs: Sequence[bool],
        activation_after: tuple[Any, Vector, Vector, Vector] | None = None,
        sums: bool = False,
        overwrite: bool = False,
    ) -> Gradients:
        """Return the gradients of `conv2d`.

        Parameters
        ----------
        dy : Lanes
            Gradient of the output y, or of its activation if `activation_after` is given.
        activation_after : (DeferredInput of y, a, b, c), optional
            Go back through ReLU and batch normalization first: the gradient of y is
            a * dz + b * (y - mean) + c, with dz = dy where the activation is > 0, else 0.
        sums : bool
            Compute the `activation_sums` of dx too. x is a DeferredInput then.
        overwrite : bool
            The caller needs dy no more: its memory may hold a gradient.

        Returns
        -------
        dx, dweight, dbias, sums : Lanes, Partial, Partial, Partial
            Each None unless asked for.
        """

    # transposed

    def transposed_conv2d(
        self, x: Lanes, weight: Array, bias: Array, stride: Pair, cropping: Pads
    ) -> Lanes:
        """Return the transposed convolution of x (B, C, H, W, 16), + bias (K,).

        It is the gradient with respect to its images of the convolution by weight (C, K, R, S),
        for the gradient x of its output.
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

        dx is the convolution of dy by weight; dweight is the weight gradient of that convolution
        for the gradient x of its output.
        """

    # dense

    def dense(self, x: Readable, weight: Array, bias: Array) -> Lanes:
        """Return weight @ x + bias, (B, K, 16).

        x has F values per image, in whatever image shape; weight is (K, F), bias (K,).
        """

    def dense_dx(self, dy: Lanes, weight: Array) -> Lanes:
        """Return the gradient of `dense` with respect to x, (B, F, 16)."""

    def dense_dweight(self, dy: Lanes, x: Readable, tree: Tree) -> Partial:
        """Return the gradient of `dense` with respect to weight, (K, F)."""

    def dense_backward(
        self, dy: Lanes, x: Readable, weight: Array, tree: Tree, needs: Sequence[bool]
    ) -> Gradients:
        """Return (dx, dweight, dbias, sums) of `dense`.

        dx is (B, F, 16). `sums` is the `activation_sums` of dx if x is a DeferredInput and dx is
        needed.
        """

    # batchnorm

    def channel_sums(self, x: Lanes, tree: Tree) -> Partial:
        """Return the sum over images and pixels, (C,). Unused lanes of x must be zero."""

    def moments(self, x: Lanes, counts: Array, tree: Tree) -> Partial:
        """Return (count, mean, M2) by channel, packed for `fold.merge_moments`.

        The sum is (1 + 2C,) float64: the count, C means, C sums of squares about the mean.
        """

    def statistics(self, moments: Array, gamma: Vector, epsilon: float) -> tuple:
        """Return what batch normalization needs of folded `moments`.

        Returns
        -------
        count, mean, rstd, variance : float64
            rstd = 1 / sqrt(variance + epsilon); the variance is biased (divided by the count).
        shift, scale : Vector
            The mean, and gamma * rstd, in the type that `batchnorm` takes.
        """

    def batchnorm(self, x: Lanes, mean: Vector, scale: Vector, beta: Vector) -> Lanes:
        """Return (x - mean) * scale + beta, by channel."""

    def batchnorm_sums(self, dy: Lanes, x: Lanes, mean: Vector, tree: Tree) -> Partial:
        """Return [sum of dy, sum of dy * (x - mean)] by channel, (2C,) float64."""

    def batchnorm_factors(self, sums: Array, gamma: Vector, statistics: tuple) -> tuple:
        """Return (a, b, c, dgamma, dbeta) of folded `batchnorm_sums`, each (C,).

        dx = a * dy + b * (x - mean) + c; dgamma and dbeta have gamma's type.
        """

    def batchnorm_dx(
        self, dy: Lanes, x: Lanes, mean: Vector, a: Vector, b: Vector, c: Vector, counts: Array
    ) -> Lanes:
        """Return a * dy + b * (x - mean) + c by channel, zero in unused lanes."""

    def running(
        self, olds: Sequence[Vector], values: Sequence[Vector], decay: float
    ) -> list[Vector]:
        """Return new running values, old + decay * (value - old), in the olds' types."""

    def predict_scale(self, gamma: Vector, variance: Vector, epsilon: float) -> Vector:
        """Return gamma / sqrt(variance + epsilon), computed in float64."""

    def source(self, y: Lanes, mean: Vector, scale: Vector, beta: Vector) -> Any:
        """Return the DeferredInput of y's activation: max(0, batchnorm(y, mean, scale, beta))."""

    def activation(self, source: Any) -> Lanes:
        """Return the activation of a DeferredInput. The caller must not write to it."""

    def activation_sums(self, dy: Lanes, source: Any, tree: Tree) -> Partial:
        """Return the `batchnorm_sums` of source.x, with dy 0 where the activation is 0."""

    # activation

    def relu(self, x: Lanes) -> Lanes:
        """Return max(x, 0)."""

    def relu_dx(self, dy: Lanes, y: Lanes) -> Lanes:
        """Return dy where y > 0, else 0."""

    def leaky_relu(self, x: Lanes, scale: float) -> Lanes:
        """Return x where x > 0, else scale * x."""

    def leaky_relu_dx(self, dy: Lanes, y: Lanes, scale: float) -> Lanes:
        """Return dy where y > 0, else scale * dy. scale >= 0, so y has the sign of x."""

    def tanh(self, x: Lanes) -> Lanes:
        """Return the hyperbolic tangent."""

    def tanh_dx(self, dy: Lanes, y: Lanes) -> Lanes:
        """Return dy * (1 - y**2)."""

    def sigmoid(self, x: Lanes) -> Lanes:
        """Return 1 / (1 + exp(-x))."""

    def sigmoid_dx(self, dy: Lanes, y: Lanes) -> Lanes:
        """Return dy * y * (1 - y)."""

    def gelu(self, x: Lanes, approximate: str) -> Lanes:
        """Return x * Phi(x), Phi the normal distribution function; -inf gives -0.

        With `approximate` "tanh" instead of "none",
        x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2. Results that are not normal may
        be 0.
        """

    def gelu_dx(self, dy: Lanes, x: Lanes, approximate: str) -> Lanes:
        """Return dy times the derivative of `gelu` at x."""

    # pool

    def max_pool2d(
        self, x: Readable, size: Pair, stride: Pair, padding: Pads
    ) -> tuple[Lanes, Lanes]:
        """Return the largest pixel of each window, and its place there.

        The place counts row by row, uint8: of equal pixels the first, never padding. The value is
        NaN if a pixel is NaN.
        """

    def max_pool2d_dx(
        self,
        dy: Lanes,
        argmax: Lanes,
        x: Readable,
        size: Pair,
        stride: Pair,
        padding: Pads,
        tree: Tree,
    ) -> tuple[Lanes, Partial | None]:
        """Return the gradient with respect to x, and its `activation_sums` if x is a DeferredInput.

        Of lanes x only shape and type are used.
        """

    def average_pool2d(self, x: Readable, size: Pair, stride: Pair, padding: Pads) -> Lanes:
        """Return the mean of each window, in which padding counts as zeros."""

    def average_pool2d_dx(
        self, dy: Lanes, x: Readable, size: Pair, stride: Pair, padding: Pads, tree: Tree
    ) -> tuple[Lanes, Partial | None]:
        """Return the gradient with respect to x, as `max_pool2d_dx` does."""

    # lrn

    def cross_channel_norm(
        self, x: Lanes, window: int, alpha: float, beta: float, k: float
    ) -> Lanes:
        """Return x * d**-beta, d = k + alpha / window * (sum of x**2 over the window).

        The window of a channel is `shapes.channel_window(window)` of its neighbours and itself.
        """

    def cross_channel_norm_dx(
        self, dy: Lanes, x: Lanes, window: int, alpha: float, beta: float, k: float
    ) -> Lanes:
        """Return the gradient with respect to x; d is computed again.

        dx = dy * d**-beta - 2 * alpha * beta / window * x * S, S the sum of dy * x * d**(-beta - 1)
        over the channels whose window has this one.
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
    ) -> Lanes:
        """Return x * scale, and 0 for elements whose number is below `threshold`.

        The numbers, 0 .. 65535, are those of `reference.dropout.chances`: every backend drops the
        same elements. The gradient of x is `dropout` of the gradient of the result.

        Parameters
        ----------
        key : tuple of int
            Two 32-bit words.
        epoch, samples : int, (B * 16,) int64
            The sample number of each image; on a GPU int32 Arrays (1,) and (B * 16,), which a
            recorded step reads anew.
        """

    # join

    def add(self, a: Readable, b: Readable) -> Lanes:
        """Return a + b."""

    def concat(self, arrays: Sequence[Readable]) -> Lanes:
        """Return values (B, C1, ..., 16), (B, C2, ..., 16), ... as (B, C1 + C2 + ..., ..., 16)."""

    def split(self, x: Lanes, channels: Sequence[int]) -> list[Lanes]:
        """Return the parts of x with these numbers of channels: the inverse of `concat`."""
