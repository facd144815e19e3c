"""The part of the backends' contract that serves training: losses, optimizers, images.

The conventions stand in `interface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from mpidl.fold import Partial, Tree
from mpidl.shapes import Pair

Array: TypeAlias = Any  # np.ndarray or gpu.array.Array
Lanes: TypeAlias = Any  # an Array (B, *image_shape, 16)
Vector: TypeAlias = Any  # an Array (C,)


class TrainingFunctions(Protocol):
    """The functions of a `Backend` that are no layers."""

    # loss

    def softmax(self, logits: Lanes) -> Lanes:
        """Return exp(logits) / (sum over classes), float64; logits (B, K, ..., 16)."""

    def softmax_dx(self, dy: Lanes, p: Lanes) -> Lanes:
        """Return the gradient of `softmax`, whose result is p, in dy's type."""

    def cross_entropy(self, logits: Lanes, labels: Lanes, counts: Array, tree: Tree) -> Partial:
        """Return the sum over images and pixels of -log softmax(logits)[label], () float64."""

    def cross_entropy_dlogits(
        self, logits: Lanes, labels: Lanes, scale: Any, counts: Array
    ) -> Lanes:
        """Return (softmax(logits) - one_hot(label)) * scale, zero in unused lanes.

        scale is a number; on a GPU it may be a `fold.Late`, read when the kernel runs.
        """

    def correct_count(self, logits: Lanes, labels: Lanes, counts: Array, tree: Tree) -> Partial:
        """Return how many images or pixels have their largest logit at their label, () float64.

        Of equal logits the first class counts.
        """

    def errors(self, y: Lanes, target: Lanes, power: int, counts: Array, tree: Tree) -> Partial:
        """Return the sum over images and elements of |y - target|**power, () float64.

        power is 1 or 2.
        """

    def errors_dy(self, y: Lanes, target: Lanes, power: int, scale: Any, counts: Array) -> Lanes:
        """Return (y - target) * scale for power 2, sign(y - target) * scale for power 1.

        Unused lanes are zero. scale is as for `cross_entropy_dlogits`.
        """

    def image_sums(self, x: Lanes, counts: Array, tree: Tree) -> Partial:
        """Return the sum over images, (*image_shape,) float64."""

    # optimizer: lists of arrays, one a parameter; new weights are new arrays

    def step_number(self, name: str, value: float) -> Any:
        """Return a number of a step as the optimizers take it.

        Replays of a recorded step on a GPU may change it by its name.
        """

    def zeros_like(self, x: Array) -> Array:
        """Return zeros of x's shape and type, laid out for the steps of optimizers."""

    def from_numpy(self, value: Array, like: Array) -> Array:
        """Return a NumPy array as an Array of the type and memory order of `like`."""

    def optimizer_step(
        self,
        formula: str,
        weights: Sequence[Array],
        gradients: Sequence[Array],
        state: Sequence[Sequence[Array]],
        numbers: Sequence[Any],
        decays: Sequence[float],
        factors: Sequence[float] | None = None,
    ) -> list[Array]:
        """Return the weights after a step by a formula; the state changes in place.

        Parameters
        ----------
        formula : str
            A name in `reference.optimizer.FORMULAS`, whose functions are the contract of each.
        state : sequence of sequences
            For each array that the formula keeps, a sequence with one of each parameter, C-ordered.
        numbers : sequence
            The learning rate, then the other numbers of the formula: floats, or `step_number`s.
        decays : sequence of float
            For each parameter, the factor of the weight that the formula adds to the gradient or,
            if it decouples the decay, to the direction.
        factors : sequence of float, optional
            For each parameter, the factor of the learning rate; 1 by default.

        Notes
        -----
        The arithmetic has the weight's precision, and numbers are rounded to it.
        """

    def clip(
        self,
        weights: Sequence[Array],
        gradients: Sequence[Array],
        decays: Sequence[float],
        method: str,
        threshold: float,
    ) -> list[Array]:
        """Return the gradients + decay * weight, made no larger than `threshold`.

        Parameters
        ----------
        method : {"l2norm", "global-l2norm", "absolute-value"}
            Limit the norm of each gradient, of all together, or each number. On the host, norms
            are float64 sums in one order: 16 sums side by side over each 16384 numbers, those by a
            tree, then one after the other. A GPU adds in an order that is fixed as well.
        """

    # images

    def images(
        self,
        pixels: Array,
        size: Pair | None = None,
        mirrored: Array | None = None,
        top: Array | None = None,
        left: Array | None = None,
        fill: Vector | None = None,
        centre: Array | None = None,
        divisor: Array | None = None,
        out: Lanes | None = None,
    ) -> Lanes:
        """Return normalized lanes (B, C, P, Q, 16) float32 of pixels.

        A value is (pixel - centre) / divisor; by default uint8 pixels are divided by 255 and
        float32 pixels stay as they are. Unused lanes are zero.

        Parameters
        ----------
        pixels : (n, C, H, W) uint8 or float32
        size : (P, Q), optional
            Of the window that is cut from each image; by default the whole image.
        mirrored : (n,) int, optional
            Mirror first: 1 left to right, 2 top to bottom, 3 both.
        top, left : (n,) int, optional
            First pixel of the window; it may be negative.
        fill : (C,) of the pixels' type, optional
            Value of pixels outside the image; 0 by default.
        centre, divisor : (C,) or (C, P, Q) float32, optional
        out : Lanes, optional
            Lanes to write to.
        """

    def warp(self, pixels: Array, maps: Array, size: Sequence[int], fill: Vector) -> Array:
        """Return images (n, C, P, Q) of pixels (n, C, H, W), each by its affine map.

        Parameters
        ----------
        pixels : (n, C, H, W) uint8 or float32
        maps : (n, 6) float64
            Pixel (p, q) of the result shows the image at column m0 * q + m1 * p + m2 and row
            m3 * q + m4 * p + m5, bilinearly between the four pixels around.
        fill : (C,)
            Continues the image beyond its edges.

        Notes
        -----
        uint8 results are rounded half up. Products and sums are rounded one by one: coordinates
        in float64, pixels in float32.
        """

    def planes(self, pixels: Array, out: Array | None = None) -> Array:
        """Return (C, H, W) uint8 of a decoder's rows (H, W, stride), written to `out` if given.

        The stride is 1, 3 or 4 bytes, of which C = 1 or 3 count. Rows may lie apart.
        """

    def keyed_words(self, seed: int, purpose: str, count: int, epoch: int, samples: Array) -> Array:
        """Return the `keyed.words` of each sample, (len(samples), count) uint64."""
