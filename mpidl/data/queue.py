"""Order the samples of an epoch, and deliver each rank's share of every mini-batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.core import keyed
from mpidl.core.blocks import Blocked, OneRank, Ranks, Source, blocks_of, share
from mpidl.data import balanced, partition
from mpidl.data.datastore import Datastore, Derived
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.loading.builders import BatchBuilder, ShareBuilder
from mpidl.data.loading.feed import FeedBuilder, upload_feeds
from mpidl.data.loading.gathering import Gatherer
from mpidl.data.loading.pipeline import Pipeline, Preparation
from mpidl.data.loading.workers import make_items, prefetch_items
from mpidl.data.parts import part_blocks, share_parts
from mpidl.errors import UserError
from mpidl.matlab_names import explain_arguments
from mpidl.text import did_you_mean

if TYPE_CHECKING:
    from typing_extensions import Unpack

SHUFFLES = ("every-epoch", "once", "never")
SAMPLINGS = ("global", "balanced", "partition")
PARTIAL_MINIBATCHES = ("return", "discard")


class MinibatchQueue:
    """A queue that delivers this rank's share of each mini-batch of an epoch.

    The queue permutes the whole set by seed and epoch, so the order does not depend on the number
    of ranks. It divides the set into mini-batches, each mini-batch into blocks of 16 images, and
    the blocks among the ranks. By default, every image is used exactly once per epoch.

    Parameters
    ----------
    datastore : Datastore
        The images.
    batch_size : int
        Images per mini-batch over all ranks. The last mini-batch of an epoch may be smaller.
    seed : int
        Seed of the order and of the augmentation.
    world : World, optional
        The ranks that share each mini-batch. By default, there is only this rank.
    shuffle : {"every-epoch", "once", "never"}
        When to permute the set. "once" uses the order of epoch 0 for all epochs, and "never" uses
        the order of the datastore.
    prefetch : int
        Number of mini-batches that threads prepare in advance. With 0, the consumer's thread
        prepares each mini-batch on request, and also if the images are in memory and are only a few
        to copy (see `Pipeline.needs_threads`). Results do not depend on `prefetch` or `workers`.
    plain : bool, optional
        Whether sums over a mini-batch add up each rank's blocks from left to right. Such sums
        depend on the number of ranks (see `fold.Tree`). By default, the setting of the world.
    workers : int
        Number of prefetch threads, which make no MPI calls. If there is more than one thread, the
        threads call the datastore's `read` concurrently.
    augmenter : Augmenter, optional
        Random transformations of the images, which differ in each epoch.
    normalization : Normalization, optional
        Normalization of the pixels. By default, uint8 pixels are divided by 255 and floats stay
        unchanged.
    crop : tuple of int, optional
        Size (P, Q) of a window cut from the centre of images. Ignored if there is an augmenter.
    function : callable, optional
        ``function(images, labels, keys)``, called after the augmenter and before normalization. It
        receives up to 16 images at a time:

        - images (n, C, H, W), uint8 or float32 as in the datastore,
        - labels int32 (n,), or the targets, or None,
        - keys, a `SampleKeys` with indices (n,), epoch and seed. A function that uses random
          numbers must derive them from these keys.

        The function returns images (n, C, H, W), uint8 or float, or a tuple (images, labels).
    load : tuple of int, optional
        Weight of each rank's share (see `fold.split_blocks`). To change it, assign the attribute
        `load` between epochs.
    sampling : {"global", "balanced", "partition"}
        With "global", an epoch uses each image once. With "balanced", an epoch draws ceil(n / K)
        images of each of the K classes. Images of small classes repeat, and some images of large
        classes are left out (see `mpidl.data.balanced`). With "partition", each rank draws from its
        own part of the set, and "every-epoch" permutes each part separately. The contents of a
        mini-batch, and therefore the weights, then depend on the number of ranks.
    bad_images : BadImages, optional
        Known unreadable images, which mini-batches leave out. A rank that finds another unreadable
        image yields `Unreadable`, so only `agreement.agreed` may iterate over such a queue. By
        default, an unreadable image raises an error.
    classes : int, optional
        Number of classes. If given, a label outside 0..classes-1 raises a `UserError` that names
        the image.
    ignore_label : int, optional
        A label that is valid although it is outside 0..classes-1.
    partial_minibatch : {"return", "discard"}
        What to do with the last mini-batch of an epoch if `batch_size` does not divide the number
        of images. "return" delivers a smaller mini-batch. "discard" leaves out the images:
        different images in each epoch, or the same images if `shuffle` is not "every-epoch". All
        mini-batches then have the same size, on any number of ranks.
    mixing : Mixing, optional
        Mixup and CutMix, applied after the augmenter and the function. The label of each image is
        then a float32 array of class probabilities, (classes,).

    Attributes
    ----------
    parts : int
        Maximum number of parts per mini-batch, 1 by default. If above 1, each mini-batch has a
        `parts.PartedBatch`, and training steps compute its parts one after another.

    Raises
    ------
    UserError
        If an argument is invalid, or if "discard" leaves no mini-batch.

    Notes
    -----
    A new mini-batch reuses the memory of an earlier one that is no longer referenced. Ending the
    loop body with ``del images, labels`` therefore saves the memory of one mini-batch.
    """

    @functools.partial(explain_arguments, passed_to=Pipeline)
    def __init__(
        self,
        datastore: Datastore,
        batch_size: int = 128,
        seed: int = 0,
        world: Ranks | None = None,
        shuffle: str = "every-epoch",
        prefetch: int = 2,
        plain: bool | None = None,
        *,
        workers: int = 1,
        load: tuple[int, ...] | None = None,
        sampling: str = "global",
        bad_images: BadImages | None = None,
        partial_minibatch: str = "return",
        **preparation: Unpack[Preparation],
    ):
        if batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, got {batch_size}")
        for name, value, choices in (
            ("shuffle", shuffle, SHUFFLES),
            ("sampling", sampling, SAMPLINGS),
            ("partial_minibatch", partial_minibatch, PARTIAL_MINIBATCHES),
        ):
            if value not in choices:
                hint = did_you_mean(str(value), choices)
                raise UserError(f"{name} must be one of {', '.join(choices)}, got {value}{hint}")
        if prefetch < 0:
            raise UserError(f"prefetch must be at least 0, got {prefetch}")
        if workers < 1:
            raise UserError(f"workers must be at least 1, got {workers}")
        if sampling == "balanced":
            balanced.check(datastore)
            if shuffle == "never":
                raise UserError("--sampling balanced and --shuffle never: expected a random order")
        if partial_minibatch == "discard":
            need_full_batch(datastore, batch_size, sampling)
        self.datastore, self.batch_size, self.seed = datastore, int(batch_size), seed
        self.partial_minibatch = partial_minibatch
        self.epoch_images: int = epoch_images(datastore, sampling)
        self.world: Any = OneRank() if world is None else world
        self.shuffle, self.prefetch, self.workers = shuffle, int(prefetch), int(workers)
        self.pipeline = Pipeline(datastore, **preparation)
        self._gatherer = Gatherer(self.pipeline)
        self.plain: bool = getattr(self.world, "plain", False) if plain is None else plain
        self.load, self.sampling, self.bad_images = load, sampling, bad_images
        self.parts = 1
        self.device = getattr(self.world, "device", None)  # the GPU that receives the images
        # In the arena of the training step, freed mini-batches would leave gaps that become too
        # small for the next mini-batch, so the queue has a separate arena.
        self.arena = arenas.Arena()

    @property
    def function_name(self) -> str | None:
        """Name of the `function`, or None if the queue has none."""
        function = self.pipeline.function
        return None if function is None else getattr(function, "__name__", type(function).__name__)

    def __len__(self) -> int:
        """Return the number of mini-batches per epoch."""
        full, images_left = divmod(self.epoch_images, self.batch_size)
        return full + (images_left > 0 and self.partial_minibatch == "return")

    def __iter__(self) -> NoReturn:
        """Raise UserError, because the order of the images depends on the number of the epoch."""
        raise UserError(
            "MinibatchQueue: expected the number of an epoch, which determines the order of the "
            "images: use `for images, labels in queue.epoch(epoch)`, with epoch = 1, 2, ..."
        )

    def __repr__(self) -> str:
        return f"MinibatchQueue({len(self)} mini-batches of {self.batch_size}, {self.datastore!r})"

    def order(self, epoch: int) -> np.ndarray:
        """Return the sample numbers of an epoch in the order in which they are used.

        Parameters
        ----------
        epoch : int
            Number of the epoch, from 1.

        Returns
        -------
        ndarray
            Sample numbers (n,), int64, without discarded samples. Sample number s refers to image
            s % len(datastore). Only balanced sampling has sample numbers of len(datastore) or more.
        """
        return self._complete_order(epoch)[: len(self) * self.batch_size]

    def _complete_order(self, epoch):
        n = len(self.datastore)
        every_epoch, parts = self.shuffle == "every-epoch", self.sampling == "partition"
        if self.sampling == "balanced":
            return balanced.draw(np.asarray(self.datastore.labels), self.seed, epoch * every_epoch)
        if self.shuffle == "never":
            order = np.arange(n)
        else:
            key = epoch if every_epoch and not parts else 0
            order = keyed.permutation(n, self.seed, "shuffle", epoch=key)
        if not parts:
            return order
        shares = [
            self._shares(min(self.batch_size, n - first)) for first in range(0, n, self.batch_size)
        ]
        return partition.partition_order(order, shares, self.seed, epoch if every_epoch else None)

    def _shares(self, count):
        """Return each rank's range (first, stop) of the `count` images of a mini-batch."""
        return partition.image_shares(count, self.world.size, self.load)

    def epoch(self, epoch: int, start: int = 0) -> Generator[tuple[Blocked, Blocked], None, None]:
        """Generate (images, labels) of each mini-batch of an epoch.

        Parameters
        ----------
        epoch : int
            Number of the epoch, which determines the order and the augmentation.
        start : int
            Index of the first mini-batch to deliver, from 0.

        Yields
        ------
        images : Blocked
            Augmented and normalized images, float32 (C, H, W) each. A block stores its images in 16
            lanes; lanes without an image are zero.
        labels : Blocked or None
            One int32 label per image, or one float32 or int32 target of shape
            `datastore.targets_shape` per image. None if the set has neither labels nor targets.
            Lanes without an image are zero.

        Raises
        ------
        ValueError
            If `start` is not between 0 and the number of mini-batches.

        Notes
        -----
        If a mini-batch cannot be read, the error is raised when that mini-batch is requested.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be between 0 and {len(self)}, got {start}")
        order = self.order(epoch)[start * self.batch_size :]
        runs = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        batches = self._prepared(runs, epoch, self.prefetch)
        return (
            batches
            if self.bad_images is None
            else self._repaired(batches, runs, epoch, self.bad_images)
        )

    def _prepared(self, runs, epoch, prefetch):
        """Generate one mini-batch per array of sample numbers in `runs`, without bad images."""
        blocks = blocks_of(-(-self.batch_size // self.world.size))
        is_ahead = self.device is not None or self.pipeline.needs_threads(blocks)
        jobs = (
            self._job(self._usable(indices), epoch, is_ahead and self.prefetch > 0)
            for indices in runs
        )
        if is_ahead and prefetch:
            batches = prefetch_items(jobs, prefetch, self.workers)
        else:
            batches = make_items(jobs)
        return batches if self.device is None else upload_feeds(batches, self.pipeline)

    def _usable(self, indices):
        if self.bad_images is None:
            return indices
        return self.bad_images.readable_indices(indices, self.datastore)

    def _repaired(self, batches, runs, epoch, bad_images):
        """Generate the mini-batches. Prepare a mini-batch again without its unreadable images.

        If a mini-batch has unreadable images, `agreed` sends the unreadable images of all ranks to
        this generator. All ranks then prepare the mini-batch again, because their shares change.
        """
        with contextlib.closing(batches):
            for indices in runs:
                item = [next(batches)]  # a list, so that the consumer can free the mini-batch
                while (ranks := (yield item.pop())) is not None:
                    bad_images.merge(ranks)
                    item = [*self._prepared([indices], epoch, prefetch=0)]

    def _job(self, indices, epoch, is_ahead):
        """Return a Job that prepares one mini-batch; each task reads some consecutive blocks."""
        builder = self._builder(indices, epoch, is_ahead)
        if is_ahead:
            builder.read_ahead()
        if self.bad_images is not None:
            builder.unreadable_images = {}
        return builder.job(self.workers)

    def _builder(self, indices, epoch, is_ahead) -> ShareBuilder:
        """Return the builder of this rank's share of a mini-batch."""
        normalization, shape = self.pipeline.normalization, tuple(self.pipeline.image_shape)
        normalization = None if normalization.centre is None else normalization
        keys = {"epoch": epoch, "seed": self.seed, "load": self.load, "plain": self.plain}
        keys["source"] = Source(self.function_name, normalization, shape)
        if self.parts > 1:
            blocks = part_blocks(self.batch_size, self.parts)
            batch: Any = share_parts(len(indices), blocks, self.world, indices, **keys)
        else:
            device = None if self.device is None else self.world.counts
            batch = share(len(indices), self.world, indices=indices, device=device, **keys)
        if self.device is not None:
            return FeedBuilder(self.pipeline, batch, batch.indices)
        gatherer = None if is_ahead else self._gatherer
        return BatchBuilder(self.pipeline, batch, self.arena, gatherer)


class QueueImages(Derived):
    """The images of a queue as an evaluation sees them: after the function, not augmented.

    The shapes and types are those of the mini-batches. `in_order` of `mpidl.evaluation` delivers
    the images; `read` does not apply the function.
    """

    def __init__(self, queue: MinibatchQueue):
        super().__init__(queue.datastore)
        self.queue, trained = queue, queue.pipeline
        pipeline = Pipeline(queue.datastore, crop=trained.crop, function=trained.function)
        self.image_shape, self.dtype = pipeline.image_shape, pipeline.dtype
        kind = pipeline.labels
        is_label = self.targets_shape is None and self.labels is not None
        if not (is_label and kind == ((), np.int32)):
            self.targets_shape = None if kind is None else kind.shape
            self.targets_dtype = self.targets_dtype if kind is None else kind.dtype

    def options(self, transform: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a queue for evaluation; `transform` is the network's own."""
        pipeline = self.queue.pipeline
        arguments = {"normalization": pipeline.normalization, "crop": pipeline.crop}
        arguments |= {name: value for name, value in transform.items() if value is not None}
        return {"function": pipeline.function, "seed": self.queue.seed, **arguments}


def epoch_images(datastore: Datastore, sampling: str) -> int:
    """Return the number of images per epoch, before a partial mini-batch is discarded."""
    if sampling != "balanced" or datastore.labels is None or not len(datastore):
        return len(datastore)
    return balanced.epoch_length(datastore.labels)


def need_full_batch(datastore: Datastore, batch_size: int, sampling: str = "global") -> None:
    """Raise UserError if the images do not fill one mini-batch and would all be discarded."""
    if (count := epoch_images(datastore, sampling)) < batch_size:
        raise UserError(
            f"{datastore.describe()}: --partial-minibatch discard: expected images for at least "
            f"one mini-batch of {batch_size}, found {count}"
        )
