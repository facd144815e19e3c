"""Class-balanced sampling: an epoch uses each class equally often.

For n images in K classes that have images, an epoch draws m = ceil(n / K) images of each class. A
class with more than m images gives m different ones. A class with n_c < m images gives each of them
m // n_c times, and m % n_c of them once more. Each epoch draws anew which images these are.

The first draw of image i has the sample number i, the next ones n + i, 2n + i and so on. Random
numbers per image, such as those of the augmentation, depend on the sample number, so the copies of
an image differ.
"""

from __future__ import annotations

import numpy as np

from mpidl import keyed
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError

MAX_SAMPLE = 2**31 - 1  # largest sample number: GPUs store them as int32


def check(datastore: Datastore) -> None:
    """Raise UserError if the images have no labels, so that no class can be drawn."""
    if datastore.labels is None or datastore.targets_shape is not None or not len(datastore):
        raise UserError(
            f"{datastore.describe()}: --sampling balanced: expected images with one label each"
        )


def epoch_length(labels: np.ndarray) -> int:
    """Return the number of draws of an epoch: K * ceil(n / K).

    Parameters
    ----------
    labels : ndarray of int, shape (n,)
        Label of each image.
    """
    classes = len(np.unique(labels))
    return classes * -(-len(labels) // classes)


def draw(labels: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return the sample numbers of an epoch in a random order.

    Parameters
    ----------
    labels : ndarray of int, shape (n,)
        Label of each image.
    seed, epoch : int
        Keys of the random numbers.

    Returns
    -------
    ndarray of int64
        Sample numbers; the image of sample number s is s % n.
    """
    total, classes = len(labels), np.unique(labels)
    per_class = -(-total // len(classes))
    most_copies = max(1, MAX_SAMPLE // total)  # further copies start again at the first number
    samples = []
    for label in classes:
        (members,) = np.nonzero(labels == label)
        order = keyed.permutation(len(members), seed, f"balance {label}", epoch=epoch)
        copies, places = np.divmod(np.arange(per_class), len(members))
        samples.append(members[order[places]] + total * (copies % most_copies))
    drawn = np.concatenate(samples)
    return drawn[keyed.permutation(len(drawn), seed, "shuffle balanced", epoch=epoch)]
