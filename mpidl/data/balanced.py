"""Class-balanced sampling: an epoch uses each class equally often.

For n images in K nonempty classes, an epoch draws m = ceil(n / K) images of each class. From a
class with at least m images, it draws m different images. From a class with n_c < m images, it
draws every image m // n_c times, and m % n_c of the images once more. Each epoch selects these
images at random. The first draw of image i has the sample number i, and the following draws have n
+ i, 2n + i and so on. Random numbers per image depend on the sample number, so the copies of an
image differ.
"""

from __future__ import annotations

import numpy as np

from mpidl.core import keyed
from mpidl.data.datastore import Datastore
from mpidl.errors import UserError

MAX_SAMPLE = 2**31 - 1  # largest sample number: GPUs store them as int32


def check(datastore: Datastore) -> None:
    """Raise UserError unless balanced sampling is possible: it needs images with one label each."""
    if datastore.labels is None or datastore.targets_shape is not None or not len(datastore):
        raise UserError(
            f"{datastore.describe()}: --sampling balanced: expected images with one label each"
        )


def epoch_length(labels: np.ndarray) -> int:
    """Return the number of draws per epoch: K * ceil(n / K)."""
    classes = len(np.unique(labels))
    return classes * -(-len(labels) // classes)


def draw(labels: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return the sample numbers of an epoch in a random order.

    Sample number s refers to image s % n. The seed and the epoch are the keys of the random
    numbers.
    """
    total, classes = len(labels), np.unique(labels)
    per_class = -(-total // len(classes))
    most_copies = max(1, MAX_SAMPLE // total)  # further copies reuse the first sample numbers
    samples = []
    for label in classes:
        (members,) = np.nonzero(labels == label)
        order = keyed.permutation(len(members), seed, f"balance {label}", epoch=epoch)
        copies, places = np.divmod(np.arange(per_class), len(members))
        samples.append(members[order[places]] + total * (copies % most_copies))
    drawn = np.concatenate(samples)
    return drawn[keyed.permutation(len(drawn), seed, "shuffle balanced", epoch=epoch)]
