"""Prepare the images of mini-batches: read and augment them, and apply the user's function."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np

from mpidl import backends
from mpidl.core.blocks import LANES
from mpidl.data.checks import advising, check_below, read_images, read_targets
from mpidl.data.datastore import Datastore
from mpidl.data.loading.bad_images import unreadable
from mpidl.data.loading.user_function import Data, Kind, UserFunction
from mpidl.data.transforms.draws import SampleKeys
from mpidl.data.transforms.image_targets import has_image_targets, moved_shape
from mpidl.data.transforms.normalize import Normalization
from mpidl.data.transforms.sizes import centred
from mpidl.errors import UserError

if TYPE_CHECKING:
    from mpidl.data.transforms.augment import Augmenter
    from mpidl.data.transforms.mixing import Mixing

AT_ONCE = 64 << 20  # bytes of images to read before they are cropped, unless one image has more
SPAN = 1 << 20  # minimum number of bytes that a task reads, unless the rank's share is smaller


class Preparation(TypedDict, total=False):
    """The keywords of a `Pipeline`."""

    augmenter: Augmenter | None
    normalization: Normalization | None
    crop: tuple[int, int] | None
    function: Callable[..., Any] | None
    classes: int | None
    ignore_label: int | None
    mixing: Mixing | None


class Pipeline:
    """The steps that read and prepare pixels and labels for mini-batches.

    `crop` is the size of a window cut from the centre of each image, unless there is an augmenter.
    `MinibatchQueue` documents the other arguments. Raises UserError if the arguments do not fit the
    images or each other.

    `image_shape` (C, P, Q) and `dtype` are those of the images before normalization, and `labels`
    is the kind of each image's label or target, or None.
    """

    def __init__(
        self,
        datastore: Datastore,
        *,
        augmenter: Augmenter | None = None,
        normalization: Normalization | None = None,
        crop: tuple[int, int] | None = None,
        function: Callable[..., Any] | None = None,
        classes: int | None = None,
        ignore_label: int | None = None,
        mixing: Mixing | None = None,
    ):
        self.datastore, self.augmenter, self.function = datastore, augmenter, function
        self.classes, self.ignore_label = classes, ignore_label
        self.mixing: Mixing | None = None  # set below, because `_label_kind` reads without it
        shape, self.dtype = tuple(datastore.image_shape), np.dtype(datastore.dtype)
        self.crop = crop if augmenter is None else None
        self.image_shape: tuple[int, ...] = shape
        if augmenter is not None:
            augmenter.check_images(shape, self.dtype)
            self.image_shape = augmenter.image_shape(shape)
        elif crop is not None:
            if crop[0] > shape[1] or crop[1] > shape[2]:
                raise UserError(
                    f"crop: expected images of at least {crop[0]}x{crop[1]} pixels, "
                    f"got {shape[1]}x{shape[2]} ({datastore.describe()})"
                )
            self.image_shape = (shape[0], *crop)
        self.labels: Kind | None = self._label_kind()
        self._call = None if function is None else UserFunction(function, datastore)
        if self._call is not None and len(datastore):
            images, labels = self.read(SampleKeys(np.arange(1), 0, 0))
            self.image_shape, self.dtype = images.shape[1:], images.dtype
            self.labels = None if labels is None else Kind(labels.shape[1:], labels.dtype)
        if mixing is not None:
            self.mixing, self.labels = mixing, self._mixed_kind()
        normalization = Normalization() if normalization is None else normalization
        if not isinstance(normalization, Normalization):
            raise TypeError(
                f"normalization: expected a Normalization, got {normalization!r}; "
                "dl.data.normalization(name, datastore, world) creates one by name"
            )
        self.normalization = normalization.window(self.image_shape[1:])
        self.normalization.check(self.image_shape, datastore.dtype)

    def _label_kind(self):
        """Return the kind of the labels or targets before the function and mixing."""
        store, shape = self.datastore, self.datastore.targets_shape
        if shape is None:
            return None if store.labels is None else Kind((), np.dtype(np.int32))
        if self.augmenter is not None and len(shape) > 1 and not has_image_targets(store):
            raise UserError(
                f"{store.describe()}: expected targets of the images' size "
                f"{store.image_shape[1:]}, which the augmentation moves with them, found shape "
                f"{tuple(shape)}; pass MinibatchQueue a function that transforms both"
            )
        return Kind(moved_shape(store, self.image_shape), store.targets_dtype)

    def _mixed_kind(self):
        """Return the kind of mixed labels; raise UserError if the labels cannot be mixed."""
        if self.classes is None:
            raise UserError("mixing: expected classes=, the number of classes of the labels")
        if self.labels != ((), np.int32):
            raise UserError(
                f"{self.datastore.describe()}: mixup and CutMix expect one label per image, found "
                f"{'none' if self.labels is None else 'targets'}"
            )
        return Kind((self.classes,), np.dtype(np.float32))

    @property
    def changes_pixels(self) -> bool:
        """Whether `read` computes the final pixels. If so, `moves` returns no operations."""
        if self.mixing is not None or self.function is not None:
            return True
        moves_targets = has_image_targets(self.datastore)
        if self.augmenter is None:
            return self.crop is not None and moves_targets
        return moves_targets or not self.augmenter.only_moves

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

    def moves(self, keys: SampleKeys) -> dict:
        """Return keyword arguments for `Backend.images` that crop, mirror and shift images: some of
        "size", "mirrored", "top", "left" and "fill". The dict is empty if there is nothing to crop
        or move, or if `changes_pixels` is True, because `read` then augments and crops the images.
        """
        if self.changes_pixels:
            return {}
        shape = self.datastore.image_shape
        if self.augmenter is not None:
            return self.augmenter.moves(keys, shape, self.dtype)
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

    def read(self, keys: SampleKeys) -> Data:
        """Read images (n, C, H, W) with their labels or targets, before the operations of `moves`
        and normalization. Sample number s refers to image s % n of the n images in the datastore.
        Raises UserError if the data have a wrong shape or type, a NaN or infinity, or a label that
        is not below the number of classes.
        """
        indices = self.image_indices(keys.indices)
        count = len(indices)
        if self.changes_pixels:
            count = max(1, AT_ONCE // max(1, self._block_bytes // LANES))
        if count >= len(indices):
            pixels, labels = self._read_and_move(keys)
        else:
            pixels, labels = self._read_in_parts(keys, count)
        if self._call is not None:
            pixels, labels = self._call(pixels, labels, keys)
        if self.classes is not None and labels is not None:
            check_below(self.classes, labels, self.datastore, indices, self.ignore_label)
            if self.mixing is not None:
                of_epoch = {"epoch": keys.epoch, "seed": keys.seed}
                return self.mixing.apply(pixels, labels, keys.indices, self.classes, **of_epoch)
        return pixels, labels

    def _read_and_move(self, keys):
        indices = self.image_indices(keys.indices)
        pixels, labels = read_images(self.datastore, indices), self._labels(indices)
        return self._moved(pixels, labels, keys) if self.changes_pixels else (pixels, labels)

    def _read_in_parts(self, keys, count):
        """Read and augment `count` images at a time, so that only crops of the others remain."""
        pixels: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        for first in range(0, len(keys.indices), count):
            part = keys._replace(indices=keys.indices[first : first + count])
            images, values = self._read_and_move(part)
            pixels.append(images.copy())  # a view would keep the whole images in memory
            labels += [] if values is None else [values.copy()]
            del images, values
        return np.concatenate(pixels), np.concatenate(labels) if labels else None

    def image_indices(self, samples: np.ndarray) -> np.ndarray:
        """Return each sample's image index in the datastore."""
        return np.asarray(samples) % max(len(self.datastore), 1)

    def read_or_find(
        self, keys: SampleKeys, unreadable_images: dict[int, str] | None
    ) -> Data | None:
        """Call `read`. If it fails and `unreadable_images` is a dict, add {index: error message} to
        it and return None.
        """
        if unreadable_images is None:
            with advising():
                return self.read(keys)
        data: list[Data] = []
        reasons = unreadable(
            lambda part: data.append(self.read(keys._replace(indices=part))), keys.indices
        )
        for sample, text in reasons.items():
            unreadable_images[int(self.image_indices(np.asarray(sample)))] = text
        return None if reasons else data[-1]  # the last call succeeded for all images

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
                fill = self._target_fill(self.augmenter)
                labels = self.augmenter.apply_to_targets(labels, indices, **of_epoch, fill=fill)
        elif self.crop is not None:
            (height, width), (top, left) = self.crop, centred(pixels.shape[1:], self.crop)
            rows, columns = slice(top, top + height), slice(left, left + width)
            pixels = pixels[:, :, rows, columns]
            labels = labels[..., rows, columns] if moves_targets else labels
        return pixels, labels

    def _target_fill(self, augmenter):
        """Return the fill value outside targets, for augmenters without `target_fill`."""
        if self.datastore.targets_dtype.kind in "iu":
            return 0 if self.ignore_label is None else self.ignore_label
        fill = np.asarray(augmenter.fill, np.float64).ravel()
        return float(fill[0]) / (255 if self.dtype == np.uint8 else 1)


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
