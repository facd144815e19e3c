"""Prepare the images of mini-batches: read and augment them, and apply the user's function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import backends
from mpidl.core.blocks import LANES
from mpidl.data.checks import check_below, check_finite, read_images, read_targets
from mpidl.data.datastore import Datastore
from mpidl.data.loading.bad_images import unreadable
from mpidl.data.transforms.draws import SampleKeys
from mpidl.data.transforms.image_targets import has_image_targets, moved_shape
from mpidl.data.transforms.normalize import Normalization
from mpidl.data.transforms.sizes import centred
from mpidl.errors import UserError

if TYPE_CHECKING:
    from mpidl.data.transforms.augment import Augmenter
    from mpidl.data.transforms.mixing import Mixing

SPAN = 1 << 20  # minimum number of bytes that a task reads, unless the rank's share is smaller


class Pipeline:
    """The steps that read and prepare pixels and labels for mini-batches.

    `crop` is the size of a window cut from the centre of each image, unless there is an augmenter.
    The other arguments are those of `MinibatchQueue`. Images have the shape (C, P, Q) before
    normalization. Raises UserError if the crop is larger than the images, the statistics of the
    normalization do not match the images, the function returns an invalid result for image 0, or
    images are augmented whose targets are images or label maps of a different size.
    """

    def __init__(
        self,
        datastore: Datastore,
        augmenter: Augmenter | None = None,
        normalization: Normalization | None = None,
        crop: tuple[int, int] | None = None,
        function: Callable[..., Any] | None = None,
        classes: int | None = None,
        ignore_label: int | None = None,
        mixing: Mixing | None = None,
    ):
        self.mixing: Mixing | None = None
        self.datastore, self.augmenter, self.function = datastore, augmenter, function
        self.classes, self.ignore_label = classes, ignore_label
        shape, self.dtype = tuple(datastore.image_shape), np.dtype(datastore.dtype)
        # Shape (C, P, Q) and type of the images before normalization.
        self.image_shape: tuple[int, ...] = shape
        # Shape and type of each image's label or target. Both are None if there are no
        # labels or targets.
        self.labels_shape: tuple[int, ...] | None = None
        self.labels_dtype: np.dtype | None = None
        self.crop = crop if augmenter is None else None
        self.fill: np.ndarray | None = None
        if augmenter is not None:
            augmenter.check_images(shape, self.dtype)
            self.image_shape = augmenter.image_shape(shape)
            self.fill = augmenter.fill_values(shape, self.dtype)
        elif self.crop is not None:
            self._check_crop(shape)
            self.image_shape = (shape[0], *self.crop)
        if datastore.targets_shape is not None:
            self.labels_shape = moved_shape(datastore, self.image_shape)
            self.labels_dtype = datastore.targets_dtype
            if augmenter is not None:
                self._check_targets()
        elif datastore.labels is not None:
            self.labels_shape, self.labels_dtype = (), np.dtype(np.int32)
        if function is not None and len(datastore):
            self._try_function()
        if mixing is not None:
            self._set_mixing(mixing)
        normalization = Normalization() if normalization is None else normalization
        if not isinstance(normalization, Normalization):
            raise TypeError(
                f"normalization: expected a Normalization, got {normalization!r}; "
                "dl.data.normalization(name, datastore, world) creates one by name"
            )
        self.normalization = normalization.window(self.image_shape[1:])
        self.normalization.check(self.image_shape, datastore.dtype)

    def _set_mixing(self, mixing):
        """Make `read` mix images and labels, and set the new shape and type of the labels."""
        if self.classes is None:
            raise UserError("mixing: expected classes=, the number of classes of the labels")
        if self.labels_shape != () or self.labels_dtype != np.int32:
            raise UserError(
                f"{self.datastore.describe()}: mixup and CutMix expect one label per image, found "
                f"{'none' if self.labels_shape is None else 'targets'}"
            )
        self.mixing = mixing
        self.labels_shape, self.labels_dtype = (self.classes,), np.dtype(np.float32)

    def _check_targets(self):
        """Raise UserError if the targets are images but the augmentation cannot move them."""
        shape, size = self.datastore.targets_shape, self.datastore.image_shape[1:]
        if len(shape) > 1 and not has_image_targets(self.datastore):
            raise UserError(
                f"{self.datastore.describe()}: expected targets of the images' size {size}, which "
                f"the augmentation moves with them, found shape {tuple(shape)}; pass "
                "MinibatchQueue a function that transforms both"
            )

    @property
    def changes_pixels(self) -> bool:
        """Whether `read` computes the final pixels. If so, `moves` returns no operations."""
        augmenter = self.augmenter
        if self.mixing is not None:
            return True
        if augmenter is None:
            crops = self.crop is not None and has_image_targets(self.datastore)
            return crops or self.function is not None
        moves_targets = has_image_targets(self.datastore)
        return not augmenter.only_moves or moves_targets or self.function is not None

    @property
    def _block_bytes(self):
        return math.prod(self.datastore.image_shape) * self.dtype.itemsize * LANES

    def needs_threads(self, blocks: int) -> bool:
        """Return whether threads should prepare the mini-batches in advance, for this number of
        blocks in this rank's share. If the images are in memory and only a few are copied, the work
        of a thread would delay the kernels by more time than it saves.
        """
        is_copy = self.datastore.in_memory and not self.changes_pixels
        return not is_copy or blocks * self._block_bytes > SPAN

    @property
    def read_shape(self) -> tuple[int, ...]:
        """Shape (C, H, W) of each image that `read` returns."""
        return tuple(self.image_shape if self.changes_pixels else self.datastore.image_shape)

    def _check_crop(self, shape):
        if self.crop[0] > shape[1] or self.crop[1] > shape[2]:
            raise UserError(
                f"crop: expected images of at least {self.crop[0]}x{self.crop[1]} pixels, "
                f"got {shape[1]}x{shape[2]} ({self.datastore.describe()})"
            )

    def moves(self, keys: SampleKeys) -> dict:
        """Return keyword arguments for `Backend.images` that crop, mirror and shift images: some of
        "size", "mirrored", "top", "left" and "fill". The dict is empty if there is nothing to crop
        or move, or if `changes_pixels` is True, because `read` then augments and crops the images.
        """
        if self.changes_pixels:
            return {}
        shape = self.datastore.image_shape
        if self.augmenter is not None:
            moves = self.augmenter.moves(keys, shape)
            moves["fill"] = self.fill if self.fill.any() else None
            return {"size": self.image_shape[1:], **moves}
        if self.crop is None or self.crop == shape[1:]:
            return {}
        edges = centred(shape, self.crop)
        top, left = (np.full(len(keys.indices), edge, np.int32) for edge in edges)
        return {"size": self.crop, "top": top, "left": left}

    def tasks(
        self, read: Callable[[int, int], None], blocks: int, workers: int
    ) -> list[Callable[[], None]]:
        """Return tasks that together read all blocks of 16 images.

        Each task calls ``read(first, stop)`` for a range of blocks. `blocks` is the number of
        blocks, and `workers` is the number of threads that share the tasks.
        """
        span = blocks_per_task(self._block_bytes, blocks, workers)
        return [
            functools.partial(read, first, min(first + span, blocks))
            for first in range(0, blocks, span)
        ]

    def read(self, keys: SampleKeys) -> tuple[np.ndarray, np.ndarray | None]:
        """Read images (n, C, H, W) with their labels or targets, before the operations of `moves`
        and normalization. Sample number s refers to image s % n of the n images in the datastore.
        Raises UserError if the data have a wrong shape or type, a NaN or infinity, or a label that
        is not below the number of classes.
        """
        pixels, labels = self._read(keys)
        if self.classes is not None and labels is not None:
            indices = self.image_indices(keys.indices)
            check_below(self.classes, labels, self.datastore, indices, self.ignore_label)
        if self.mixing is not None:
            samples, epoch, seed = keys
            return self.mixing.apply(pixels, labels, samples, self.classes, epoch=epoch, seed=seed)
        return pixels, labels

    def image_indices(self, samples: np.ndarray) -> np.ndarray:
        """Return each sample's image index in the datastore."""
        return np.asarray(samples) % max(len(self.datastore), 1)

    def read_or_find(
        self, keys: SampleKeys, unreadable_images: dict[int, str] | None
    ) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Call `read`. If it fails and `unreadable_images` is a dict, add {index: error message} to
        it and return None.
        """
        if unreadable_images is None:
            return self.read(keys)
        data = []
        reasons = unreadable(
            lambda part: data.append(self.read(keys._replace(indices=part))), keys.indices
        )
        unreadable_images.update(
            {int(self.image_indices(np.asarray(sample))): text for sample, text in reasons.items()}
        )
        return None if reasons else data[-1]  # the last call succeeded for all images

    def _read(self, keys):
        indices = self.image_indices(keys.indices)
        pixels, labels = read_images(self.datastore, indices), self._labels(indices)
        if self.changes_pixels:
            pixels, labels = self._moved(pixels, labels, keys)
        if self.function is None:
            return pixels, labels
        outputs = []
        # Call the function once per block of 16 images, so that its input does not depend on the
        # tasks.
        for first in range(0, len(indices), LANES):
            block = slice(first, first + LANES)
            block_labels = None if labels is None else labels[block]
            block_keys = keys._replace(indices=keys.indices[block])
            block_pixels = np.ascontiguousarray(pixels[block])
            outputs.append(self._call_function(block_pixels, block_labels, block_keys))
        pixels = np.concatenate([p for p, _ in outputs])
        labels = None if outputs[0][1] is None else np.concatenate([v for _, v in outputs])
        return pixels, labels

    def _labels(self, indices):
        """Return the labels or targets of images, or None."""
        if self.datastore.targets_shape is not None:
            return read_targets(self.datastore, indices)
        if self.datastore.labels is not None:
            return self.datastore.labels[indices].astype(np.int32)
        return None

    def _moved(self, pixels, labels, keys):
        """Augment or crop pixels, together with targets that are images or label maps."""
        moves_targets = has_image_targets(self.datastore)
        if self.augmenter is not None:
            indices, of_epoch = keys.indices, {"epoch": keys.epoch, "seed": keys.seed}
            pixels = self.augmenter.apply(pixels, indices, **of_epoch)
            if moves_targets:
                fill = self._target_fill()
                labels = self.augmenter.apply_to_targets(labels, indices, **of_epoch, fill=fill)
        elif self.crop is not None:
            (height, width), (top, left) = self.crop, centred(pixels.shape[1:], self.crop)
            rows, columns = slice(top, top + height), slice(left, left + width)
            pixels = pixels[:, :, rows, columns]
            labels = labels[..., rows, columns] if moves_targets else labels
        return pixels, labels

    def _target_fill(self):
        """Return the fill value outside targets, for augmenters without `target_fill`."""
        if self.datastore.targets_dtype.kind in "iu":
            return 0 if self.ignore_label is None else self.ignore_label
        fill = np.asarray(self.augmenter.fill, np.float64).ravel()
        return float(fill[0]) / (255 if self.dtype == np.uint8 else 1)

    def _try_function(self):
        """Call the function on image 0 to determine the shapes and types that it returns."""
        self.output_kind = None
        images, labels = self.read(SampleKeys(np.arange(1), 0, 0))
        self.output_kind = images.shape[1:], images.dtype, _label_kind(labels)
        self.image_shape, self.dtype = images.shape[1:], images.dtype
        if labels is None:
            self.labels_shape = self.labels_dtype = None
        else:
            self.labels_shape, self.labels_dtype = labels.shape[1:], labels.dtype

    def _call_function(self, pixels, labels, keys):
        """Call the function, check its result and return (images, labels)."""
        n, indices = len(pixels), self.image_indices(keys.indices)
        output: Any = self.function(pixels, labels, keys)
        images, labels = output if isinstance(output, tuple) else (output, labels)
        images = np.asarray(images)
        if images.dtype != np.uint8:
            images = images.astype(np.float32) if images.dtype.kind == "f" else images
        if images.ndim != 4 or len(images) != n or images.dtype not in (np.uint8, np.float32):
            raise UserError(
                f"function: expected {n} images, uint8 or float, of shape ({n}, C, H, W), got "
                f"{images.dtype} of shape {images.shape}"
            )
        if labels is not None:
            labels = np.asarray(labels)
            if labels.shape[:1] != (n,) or labels.dtype.kind not in "biuf":
                raise UserError(
                    f"function: expected labels or targets of {n} images, got {labels.dtype} of "
                    f"shape {labels.shape}"
                )
            labels = labels.astype(np.float32 if labels.dtype.kind == "f" else np.int32)
            check_finite(labels, self.datastore, indices, "targets")
        check_finite(images, self.datastore, indices, "pixels")
        kind = images.shape[1:], images.dtype, _label_kind(labels)
        if self.output_kind is not None and kind != self.output_kind:
            raise UserError(
                "function: expected the same shapes and types as for image 0 "
                f"({_kind_text(self.output_kind)}), got {_kind_text(kind)} of "
                f"{self.datastore.located(int(indices[0]))}"
            )
        return images, labels


def blocks_per_task(block_bytes: int, blocks: int, workers: int) -> int:
    """Return the number of blocks that one task reads.

    A task reads at least `SPAN` bytes to amortize its overhead, but at most one worker's share.
    """
    share = blocks if workers == 1 else -(-blocks // workers)
    return max(1, min(share, -(-SPAN // max(block_bytes, 1))))


def fill_blocks(
    pixels: np.ndarray, moves: dict, statistics: dict[str, Any], lanes: np.ndarray
) -> None:
    """Move and normalize pixels (n, C, H, W), write them to `lanes`, and zero unused lanes.

    A lane is the slot of one image in a block of 16. `moves` is the result of `Pipeline.moves`, and
    `statistics` is the result of `Normalization.arrays`.
    """
    backends.of_type(np.float32).images(pixels, **moves, **statistics, out=lanes)


def _label_kind(labels):
    return None if labels is None else (labels.shape[1:], labels.dtype)


def _kind_text(kind):
    """Describe the shapes and types of the user function's results in words."""
    shape, dtype, labels = kind
    images = f"{dtype} images of {'x'.join(map(str, shape))}"
    if labels is None:
        return f"{images} without labels"
    return f"{images} with {labels[1]} labels of shape {labels[0]}"
