"""Define the backend functions for losses, optimizers and the preparation of images.

The module `interface` defines the functions for layers, and explains the conventions for arguments
and results of all functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from mpidl.backends.shapes import Pair
from mpidl.core.fold import Partial, Tree

Array: TypeAlias = Any  # np.ndarray or gpu.array.Array
Lanes: TypeAlias = Any  # an Array (B, *image_shape, 16): B blocks of 16 images
Vector: TypeAlias = Any  # an Array (C,)


class LabelRule(NamedTuple):
    """Options of the cross-entropy of an image or pixel.

    Let p be the softmax of the K scores, w the class weights, and y the label. A label outside
    0..K-1 adds 0 to the loss. With any other label, the image or pixel adds

        -(1 - smoothing) w[y] (1 - p[y])**gamma log p[y] - smoothing / K sum_c w[c] log p[c]

    Attributes
    ----------
    class_weights : Vector or None
        Weights of the classes, (K,) float64; None if all weights are 1.
    smoothing : float
        Label smoothing, at least 0 and below 1; 0 if gamma is not 0.
    gamma : float
        Exponent of the focal loss, at least 0; 0 gives the cross-entropy.
    """

    class_weights: Any = None
    smoothing: float = 0.0
    gamma: float = 0.0


PLAIN = LabelRule()


class BinaryRule(NamedTuple):
    """Options of the binary cross-entropy of an element with a target t in 0..1.

    Let x be the logit of class c, p = 1 / (1 + exp(-x)), and w the positive weights. The element
    adds to the loss

        -t w[c] (1 - p)**gamma log p - (1 - t) p**gamma log(1 - p)

    An element with an integer target other than 0 and 1 adds 0.

    Attributes
    ----------
    positive_weights : Vector or None
        Weights of the positive targets of each class, (K,) float64; None if all weights are 1.
    gamma : float
        Exponent of the focal loss, at least 0; 0 gives the binary cross-entropy.
    """

    positive_weights: Any = None
    gamma: float = 0.0


PLAIN_BINARY = BinaryRule()


class OverlapRule(NamedTuple):
    """A similarity of probabilities and labels of an image, by the overlap of regions.

    For class k, let p be the probability of the class at a pixel, and g be 1 if the label of the
    pixel is k, else 0. Over the image's pixels, I[k] is the sum of p g, S[k] the sum of p**2 (or of
    p, unless `is_squared`), and n[k] the sum of g. Let A[k] = a I[k] and U[k] = b I[k] + c S[k] +
    d n[k]. The defaults 2, 0, 1, 1 of a, b, c and d give the Dice loss. With the class weights w
    and the smoothing s, the loss is

        sum_k w[k] (1 - (A[k] + s) / (U[k] + s)) / sum_k w[k]

    If `generalized` is True, let v[k] = w[k] / n[k]**2. The loss is then

        1 - (sum_k v[k] A[k] + s) / (sum_k v[k] U[k] + s)

    For a class without pixels, n[k] is the smallest n of the image's other classes, or 1 if no
    class has pixels. Sums leave out pixels with a label outside 0..K-1. If K is 1, the label 1
    stands for the class, and 0 for the background. A denominator of 0 gives a loss of 0. A p that
    is NaN, at a pixel that is not left out, gives a loss and slopes of NaN.

    Attributes
    ----------
    class_weights : Vector or None
        Weights of the classes, (K,) float64; None if all weights are 1.
    smooth : float
        The smoothing s, at least 0.
    generalized : bool
        Whether the weight of a class is divided by the square of the class's number of pixels.
    is_squared : bool
        Whether S is the sum of p**2.
    above, below, chances, labelled : float
        The factors a, b, c and d.
    """

    class_weights: Any = None
    smooth: float = 1.0
    generalized: bool = False
    is_squared: bool = True
    above: float = 2.0
    below: float = 0.0
    chances: float = 1.0
    labelled: float = 1.0


DICE = OverlapRule()


class TrainingFunctions(Protocol):
    """The functions of a `Backend` for losses, optimizers and images."""

    # loss

    def softmax(self, logits: Lanes) -> Lanes:
        """Return the softmax of logits (B, K, ..., 16) over the K classes, in float64."""

    def softmax_dx(self, dy: Lanes, p: Lanes) -> Lanes:
        """Return the gradient of the logits in the dtype of dy. p is the result of `softmax`."""

    def cross_entropy(
        self, logits: Lanes, labels: Lanes, counts: Array, tree: Tree, rule: LabelRule = PLAIN
    ) -> Partial:
        """Sum the terms of `LabelRule` over images and pixels: () float64."""

    def cross_entropy_dlogits(
        self, logits: Lanes, labels: Lanes, scale: Any, counts: Array, rule: LabelRule = PLAIN
    ) -> Lanes:
        """Return the gradient of the sum of `cross_entropy`, times scale.

        Unused lanes of the result are 0. `scale` is a scalar. On a GPU, `scale` may also be a
        `fold.Late`, a factor that the kernel reads when it runs.
        """

    def label_weight(
        self, labels: Lanes, counts: Array, tree: Tree, rule: LabelRule, classes: int
    ) -> Partial:
        """Sum the class weights of all labels in 0..K-1: () float64. K is `classes`."""

    def reciprocal(self, total: Any) -> Any:
        """Return 1 / total, or 0 if total is 0, for use as a `scale`.

        `total` is a scalar that has been summed over all ranks.
        """

    def correct_count(self, logits: Lanes, labels: Lanes, counts: Array, tree: Tree) -> Partial:
        """Count the images or pixels whose label is the class with the largest logit: () float64.

        If several classes have the largest logit, the first of these classes is the prediction. The
        result is NaN if a logit of an image or pixel is NaN, unless its label is outside 0..K-1.
        """

    def soft_cross_entropy(
        self, logits: Lanes, targets: Lanes, counts: Array, tree: Tree, smoothing: float = 0.0
    ) -> Partial:
        """Sum -q log p over the classes of all images and pixels: () float64.

        p is the softmax of the scores, q is (1 - smoothing) * targets + smoothing / K, and the
        targets (B, K, ..., 16) are float32.
        """

    def soft_cross_entropy_dlogits(
        self, logits: Lanes, targets: Lanes, scale: Any, counts: Array, smoothing: float = 0.0
    ) -> Lanes:
        """Return the gradient of the sum of `soft_cross_entropy`, times scale.

        Unused lanes of the result are 0. See `cross_entropy_dlogits` for `scale`.
        """

    def soft_correct_count(
        self, logits: Lanes, targets: Lanes, counts: Array, tree: Tree
    ) -> Partial:
        """Sum the targets of the predicted classes over images and pixels: () float64.

        `correct_count` defines the prediction. The result is NaN if a logit is NaN.
        """

    def binary_cross_entropy(
        self,
        logits: Lanes,
        targets: Lanes,
        counts: Array,
        tree: Tree,
        rule: BinaryRule = PLAIN_BINARY,
    ) -> Partial:
        """Sum the terms of `BinaryRule` over images and elements: () float64.

        logits has the shape (B, K, ..., 16). targets has the same shape and is float32 or int32.
        """

    def binary_cross_entropy_dlogits(
        self,
        logits: Lanes,
        targets: Lanes,
        scale: Any,
        counts: Array,
        rule: BinaryRule = PLAIN_BINARY,
    ) -> Lanes:
        """Return the gradient of the sum of `binary_cross_entropy`, times scale.

        Unused lanes of the result are 0. See `cross_entropy_dlogits` for `scale`.
        """

    def binary_correct_count(
        self, logits: Lanes, targets: Lanes, counts: Array, tree: Tree
    ) -> Partial:
        """Count the elements with logit > 0 and target 1, or logit <= 0 and target 0: () float64.

        A float target above 1/2 counts as 1, and any other float target as 0. Elements with an
        integer target other than 0 and 1 are not counted. The result is NaN if the logit of another
        element is NaN.
        """

    def errors(self, y: Lanes, target: Lanes, power: int, counts: Array, tree: Tree) -> Partial:
        """Sum |y - target|**power over images and elements: () float64. power is 1 or 2."""

    def errors_dy(self, y: Lanes, target: Lanes, power: int, scale: Any, counts: Array) -> Lanes:
        """Return (y - target) * scale for power 2, sign(y - target) * scale for power 1.

        Unused lanes are zero. See `cross_entropy_dlogits` for `scale`.
        """

    # overlap

    def overlap(
        self, p: Lanes, labels: Lanes, counts: Array, tree: Tree, rule: OverlapRule = DICE
    ) -> tuple[Partial, Array]:
        """Sum the losses of `OverlapRule` over the images: () float64. Return (sum, slopes).

        p (B, K, ..., 16) is float64. `slopes` is an argument of `overlap_dp`.
        """

    def overlap_dp(
        self,
        p: Lanes,
        labels: Lanes,
        slopes: Array,
        scale: Any,
        counts: Array,
        rule: OverlapRule = DICE,
    ) -> Lanes:
        """Return the gradient of the sum of `overlap` with respect to p, times scale.

        Unused lanes of the result are 0. The result is float32, or has the dtype of p in the
        reference backend. See `cross_entropy_dlogits` for `scale`.
        """

    def image_sums(self, x: Lanes, counts: Array, tree: Tree) -> Partial:
        """Sum x over the images: (*image_shape,) float64."""

    # optimizer: lists have one array per parameter; new weights are new arrays

    def step_number(self, name: str, value: float) -> Any:
        """Convert a scalar for the argument `numbers` of `optimizer_step`.

        If a training step is being recorded, each replay can set this scalar by its name.
        """

    def zeros_like(self, x: Array) -> Array:
        """Return zeros with the shape and dtype of x, in the memory order that optimizers use."""

    def from_numpy(self, value: Array, like: Array) -> Array:
        """Convert a NumPy array to an Array with the dtype and memory order of `like`."""

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
        """Apply one optimizer step, and return the new weights. `state` is updated in place.

        Parameters
        ----------
        formula : str
            Name of the function that defines the optimizer step, a key of
            `reference.optimizer.FORMULAS`.
        state : sequence of sequences
            The arrays that the formula keeps between steps, such as the velocity. Each inner
            sequence has one C-ordered array per parameter.
        numbers : sequence
            The learning rate, then the other scalars of the formula. Each number is a float or a
            result of `step_number`.
        decays : sequence of float
            The weight decay of each parameter. The formula adds decay * weight to the gradient, or
            to the direction of the step if the formula has a decoupled weight decay.
        factors : sequence of float, optional
            Factor by which the learning rate is multiplied, for each parameter; 1 by default.

        Notes
        -----
        Each parameter is updated in the precision of its weights. `numbers` are rounded to this
        precision.
        """

    def clip(
        self,
        weights: Sequence[Array],
        gradients: Sequence[Array],
        decays: Sequence[float],
        method: str,
        threshold: float,
    ) -> list[Array]:
        """Add decay * weight to each gradient, and return the sums, clipped at `threshold`.

        Parameters
        ----------
        method : {"l2norm", "global-l2norm", "absolute-value"}
            What `threshold` limits: the norm of each gradient, the norm of all gradients together,
            or the absolute value of each element.

        Notes
        -----
        On the host, norms are computed in float64 in a fixed order. Each chunk of 16384 elements
        has 16 partial sums, which are combined in a tree. The sums of the chunks are added one by
        one. A GPU adds in a different fixed order.
        """

    def trust(
        self,
        weights: Sequence[Array],
        updates: Sequence[Array],
        decays: Sequence[float],
        coefficients: Sequence[float],
        method: str,
    ) -> list[Array]:
        """Return (update + decay * weight) * ratio, with the trust ratio of each parameter.

        Parameters
        ----------
        coefficients : sequence of float
            Factor of the trust ratio of each parameter; 0 sets the ratio to 1.
        method : {"lars", "lamb"}
            For "lars", the ratio is coefficient * |weight| / (|update| + decay * |weight|). For
            "lamb", it is coefficient * |weight| / |update + decay * weight|. The ratio is 1 if its
            numerator or denominator is 0.

        Notes
        -----
        Norms are computed as in `clip`.
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
        """Convert pixels to normalized images in blocks of 16, (B, C, P, Q, 16) float32.

        Each element of the result is (pixel - centre) / divisor. By default, uint8 pixels are
        divided by 255 and float32 pixels are unchanged. Unused lanes are zero.

        Parameters
        ----------
        pixels : (n, C, H, W) uint8 or float32
        size : (P, Q), optional
            Size of the window that is cut from each image, in pixels; by default the whole image.
        mirrored : (n,) int, optional
            How to mirror each image before the window is cut: 0 not at all, 1 left to right, 2 top
            to bottom, 3 both.
        top, left : (n,) int, optional
            Row and column of the window's first pixel, which may be negative; 0 by default.
        fill : (C,) in the dtype of the pixels, optional
            Value of pixels outside the image; 0 by default.
        centre, divisor : (C,) or (C, P, Q) float32, optional
            Value to subtract and value to divide by, per channel or per pixel of the window.
        out : Lanes, optional
            Array to write the result to; by default a new array.
        """

    def warp(self, pixels: Array, maps: Array, size: Sequence[int], fill: Vector) -> Array:
        """Transform each image (C, H, W) by its affine map; return images (n, C, P, Q).

        Parameters
        ----------
        pixels : (n, C, H, W) uint8 or float32
        maps : (n, 6) float64
            Affine map (m0, ..., m5) of each image. Pixel (p, q) of the result is the value of the
            image at column m0 * q + m1 * p + m2 and row m3 * q + m4 * p + m5, interpolated
            bilinearly between the four nearest pixels.
        size : (P, Q)
            Size of the resulting images.
        fill : (C,)
            Value of pixels outside the image.

        Notes
        -----
        uint8 results are rounded half up. Each multiplication and each addition is rounded
        separately: coordinates to float64, pixel values to float32.
        """

    def mirror(self, x: Lanes, turn: int, total: Lanes | None = None, factor: float = 1.0) -> Lanes:
        """Mirror images (B, C, H, W, 16), add `total` if given, and multiply the sum by `factor`.

        `turn` is 1 to mirror left to right, 2 top to bottom, 3 both, and 0 not at all. `turn` must
        be 0 if x has another shape, such as scores (B, K, 16). `total` has the shape of x.
        """

    def planes(self, pixels: Array, out: Array | None = None) -> Array:
        """Convert pixels (H, W, stride) from an image decoder to planes (C, H, W) uint8.

        `stride` is the number of bytes per pixel: 1, 3 or 4. C is 1 or 3, and only the first C
        bytes of a pixel are used. There may be gaps between rows. If `out` is given, the result is
        written to `out`.
        """

    def keyed_words(self, seed: int, purpose: str, count: int, epoch: int, samples: Array) -> Array:
        """Return `count` random words per sample, (len(samples), count) uint64.

        `keyed.words` defines the words.
        """
