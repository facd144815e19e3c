"""What happens to images between a datastore and a network: augmentation, normalization, blocks."""

from typing import Any, NamedTuple

import numpy as np

from mpidl import backends
from mpidl.blocks import LANES
from mpidl.data.datastore import check_below, check_finite, read_images, read_targets
from mpidl.data.transforms.augment import centred
from mpidl.data.transforms.normalize import Normalization
from mpidl.errors import UserError

SPAN = 1 << 20  # bytes of pixels that one task reads, at least, where there are as many


class At(NamedTuple):
    """Which images a user's function gets: their sample indices in the datastore, by which random
    numbers are to be keyed, with the epoch and the seed (see `mpidl.keyed`)."""

    indices: np.ndarray
    epoch: int
    seed: int


class Pipeline:
    """From sample indices to what a mini-batch is made of.

    augmenter: an `Augmenter`, or None. crop: (P, Q), cut from the centre of images that are not
    augmented. normalization: a `Normalization`, "rescale-zero-one" where None. function: see
    `MinibatchQueue`. image_shape, dtype: of the images that reach the normalization; labels_shape,
    labels_dtype: of what goes with an image, None where that is nothing. classes: see
    `MinibatchQueue`.
    """

    def __init__(
        self,
        datastore,
        augmenter=None,
        normalization=None,
        crop=None,
        function=None,
        classes=None,
    ):
        self.datastore, self.augmenter, self.function = datastore, augmenter, function
        self.classes = classes
        shape, self.dtype = tuple(datastore.image_shape), np.dtype(datastore.dtype)
        self.crop = crop if augmenter is None else None
        if augmenter is not None:
            self.image_shape = augmenter.image_shape(shape)
            self.fill = augmenter.filling(shape, self.dtype)
            if datastore.targets_shape is not None and len(datastore.targets_shape) > 1:
                raise UserError(
                    f"an augmenter moves images and not their targets, which "
                    f"{datastore.describe()} has: give MinibatchQueue a function that moves both"
                )
        else:
            self.image_shape, self.fill = shape, None
            if self.crop is not None:
                self._check_crop(shape)
                self.image_shape = (shape[0], *self.crop)
        if datastore.targets_shape is not None:
            self.labels_shape, self.labels_dtype = datastore.targets_shape, datastore.targets_dtype
        elif datastore.labels is not None:
            self.labels_shape, self.labels_dtype = (), np.dtype(np.int32)
        else:
            self.labels_shape = self.labels_dtype = None
        if function is not None and len(datastore):
            self._try_function()
        self.normalization = Normalization() if normalization is None else normalization
        if not isinstance(self.normalization, Normalization):
            raise TypeError(
                f"normalization: expected a Normalization, got {normalization!r}; "
                "dl.data.normalization(name, datastore, world) makes the one of a name"
            )
        self.normalization = self.normalization.window(self.image_shape[1:])
        self.normalization.check(self.image_shape)

    @property
    def late(self):
        """Whether pixels are changed on the host before they become blocks: by an affine map or by
        a user's function."""
        warps = self.augmenter is not None and self.augmenter.warps
        return warps or self.function is not None

    @property
    def read_shape(self):
        """(C, H, W) of the pixels that `read` returns."""
        return tuple(self.image_shape if self.late else self.datastore.image_shape)

    def _check_crop(self, shape):
        if self.crop[0] > shape[1] or self.crop[1] > shape[2]:
            raise UserError(
                f"crop: expected images of at least {self.crop[0]}x{self.crop[1]} pixels, "
                f"got {shape[1]}x{shape[2]} ({self.datastore.describe()})"
            )

    def moves(self, indices, epoch, seed):
        """What `backends.images` is to do beside normalizing: {} or size, mirrored, top, left,
        fill; after `read` of images that are not `late`."""
        if self.late:
            return {}
        shape = self.datastore.image_shape
        if self.augmenter is not None:
            found = self.augmenter.moves(seed, epoch, indices, shape)
            found["fill"] = self.fill if self.fill.any() else None
            return {"size": self.image_shape[1:], **found}
        if self.crop is None or self.crop == shape[1:]:
            return {}
        edges = centred(shape, self.crop)
        top, left = (np.full(len(indices), edge, np.int32) for edge in edges)
        return {"size": self.crop, "top": top, "left": left}

    def numbers(self):
        """What `backends.images` normalizes by: {} or centre and divisor."""
        return self.normalization.arrays()

    def span(self, blocks, workers):
        """How many blocks one task reads, see `span_of`."""
        size = int(np.prod(self.datastore.image_shape)) * self.dtype.itemsize * LANES
        return span_of(size, blocks, workers)

    def read(self, indices, epoch, seed):
        """(pixels, labels or None) of these images, as plain arrays: pixels (n, C, H, W), still to
        be moved (`moves`) and normalized."""
        pixels, labels = self._read(indices, epoch, seed)
        if self.classes is not None and labels is not None:
            check_below(self.classes, labels, self.datastore, indices)
        return pixels, labels

    def _read(self, indices, epoch, seed):
        pixels = read_images(self.datastore, indices)
        if self.datastore.targets_shape is not None:
            labels = read_targets(self.datastore, indices)
        elif self.datastore.labels is not None:
            labels = self.datastore.labels[indices].astype(np.int32)
        else:
            labels = None
        if self.augmenter is not None and self.late:
            pixels = self.augmenter.apply(pixels, indices, epoch=epoch, seed=seed)
        if self.function is None:
            return pixels, labels
        if self.crop is not None:
            top, left = centred(pixels.shape[1:], self.crop)
            pixels = pixels[:, :, top : top + self.crop[0], left : left + self.crop[1]]
        parts = []
        for first in range(0, len(indices), LANES):  # a block at a time, whoever reads it
            part = slice(first, first + LANES)
            given = None if labels is None else labels[part]
            at = At(indices[part], epoch, seed)
            parts.append(self._called(np.ascontiguousarray(pixels[part]), given, at))
        pixels = np.concatenate([p for p, _ in parts])
        labels = None if parts[0][1] is None else np.concatenate([v for _, v in parts])
        return pixels, labels

    def _try_function(self):
        """Learn on image 0 what the function makes of images and labels."""
        self.result = None
        found, labels = self.read(np.arange(1), 0, 0)
        self.result = found.shape[1:], found.dtype, _kind(labels)
        self.image_shape, self.dtype = found.shape[1:], found.dtype
        if labels is None:
            self.labels_shape = self.labels_dtype = None
        else:
            self.labels_shape, self.labels_dtype = labels.shape[1:], labels.dtype

    def _called(self, pixels, labels, at):
        """The function's (images, labels), checked."""
        n = len(pixels)
        found: Any = self.function(pixels, labels, at)
        images, labels = found if isinstance(found, tuple) else (found, labels)
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
            check_finite(labels, self.datastore, at.indices, "targets")
        check_finite(images, self.datastore, at.indices, "pixels")
        got = images.shape[1:], images.dtype, _kind(labels)
        if self.result is not None and got != self.result:
            raise UserError(
                f"function: expected the same as of image 0 ({_words(self.result)}), "
                f"got {_words(got)} of {self.datastore.located(int(at.indices[0]))}"
            )
        return images, labels


def span_of(size, blocks, workers):
    """How many of a rank's blocks one task reads, of `size` bytes of pixels each: enough to be
    worth it, few enough for all workers."""
    share = blocks if workers == 1 else -(-blocks // workers)
    return max(1, min(share, -(-SPAN // max(size, 1))))


def fill_blocks(pixels, moves, numbers, lanes):
    """Write pixels (n, C, H, W) to these lanes: moved and normalized, unused ones zero."""
    backends.of_type(np.float32).images(pixels, **moves, **numbers, out=lanes)


def _kind(labels):
    return None if labels is None else (labels.shape[1:], labels.dtype)


def _words(kind):
    shape, dtype, labels = kind
    images = f"{dtype} images of {'x'.join(map(str, shape))}"
    if labels is None:
        return f"{images} without labels"
    return f"{images} with {labels[1]} labels of shape {labels[0]}"
