"""Find images that cannot be read, and leave out the same images on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidl.data.checks import read_images, read_targets
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError
from mpidl.files import call_together

CHUNK = 64  # number of images that `search` reads at a time


class Unreadable(NamedTuple):
    """Placeholder for a rank's share of a mini-batch that has unreadable images."""

    reasons: dict[int, str]  # {index of an unreadable image: error message}


class BadImages:
    """The unreadable images of a set, which mini-batches leave out.

    All ranks record the same unreadable images. If a rank cannot read an image of its share,
    `agreement.agreed` informs all ranks, and all ranks prepare the mini-batch again without the
    image. The other images are divided among the ranks like any smaller mini-batch.

    Attributes
    ----------
    reasons : dict
        {index of an unreadable image in the set: error message}
    """

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}

    @classmethod
    def of_options(cls, options: Any) -> BadImages | None:
        """Return a new BadImages if the option `on_bad_image` is "skip".

        Parameters
        ----------
        options : object
            Options with the attribute `on_bad_image`, such as `TrainingOptions`.

        Returns
        -------
        BadImages or None
            None if the option is "stop".
        """
        return cls() if options.on_bad_image == "skip" else None

    def __len__(self) -> int:
        return len(self.reasons)

    def merge(self, ranks: Iterable[Mapping[int, str]]) -> None:
        """Add the images that any rank could not read. Keep the message of the lowest rank.

        Parameters
        ----------
        ranks : iterable of mapping
            For each rank, {index of an image: error message}.
        """
        for reasons in ranks:
            self.reasons = {**reasons, **self.reasons}

    def readable_indices(self, indices: np.ndarray, datastore: Datastore) -> np.ndarray:
        """Return the sample numbers of the readable images, in the same order.

        Parameters
        ----------
        indices, datastore
            Sample numbers of images of the datastore: s refers to image s % len(datastore).

        Returns
        -------
        np.ndarray
            The sample numbers of readable images.

        Raises
        ------
        UserError
            If no image can be read.
        """
        if not self.reasons:
            return indices
        images = indices % len(datastore)
        readable = indices[~np.isin(images, list(self.reasons))]
        if len(indices) and not len(readable):
            raise UserError(
                f"{datastore.describe()}: expected a mini-batch with images, but none of the "
                f"{len(indices)} images can be read; the first: {self.reasons[int(images[0])]}"
            )
        return readable

    def usable(self, datastore: Datastore) -> Datastore:
        """Return a datastore of the readable images of a set.

        Parameters
        ----------
        datastore : Datastore
            The images.

        Returns
        -------
        Datastore
            The set itself if all images are readable, otherwise a subset.
        """
        if not self.reasons:
            return datastore
        return datastore.subset(self.readable_indices(np.arange(len(datastore)), datastore))

    def search(self, datastore: Datastore, world: Any) -> None:
        """Read all images of a set once, and add the unreadable images. Collective.

        Parameters
        ----------
        datastore : Datastore
            The images.
        world : World or None
            The ranks among which the reading is divided. None if there is only this rank.
        """
        rank, size = (0, 1) if world is None else (world.rank, world.size)
        first, stop = (len(datastore) * r // size for r in (rank, rank + 1))

        def read(indices):
            read_images(datastore, indices)
            if datastore.targets_shape is not None:
                read_targets(datastore, indices)

        def read_share():
            chunks = (np.arange(i, min(i + CHUNK, stop)) for i in range(first, stop, CHUNK))
            return {i: text for chunk in chunks for i, text in unreadable(read, chunk).items()}

        if world is None:
            self.merge([read_share()])
        else:
            self.merge(world.allgather(call_together(world, read_share)))


def unreadable(read: Callable[[np.ndarray], object], indices: np.ndarray) -> dict[int, str]:
    """Read images together or, if that fails, one by one, and return {index: error message}.

    `read(indices)` raises UserError on failure. Raises UserError if reading all images in one call
    fails, although reading each image separately succeeds.
    """
    try:
        read(indices)
        return {}
    except UserError:
        pass  # find the images that cause the error
    reasons = {}
    for i in indices:
        try:
            read(np.array([i]))
        except UserError as error:
            reasons[int(i)] = str(error)
    if not reasons:
        read(indices)
    return reasons
