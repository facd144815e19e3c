"""Draw the embedded set of cells: gray images with the exact class of each pixel.

An image shows 4 to 12 ellipses of various sizes, angles and brightness on an uneven, noisy
background. Ellipses may overlap. A pixel belongs to a cell if its centre is inside an ellipse. The
number of an image is a key of its random numbers. As in `digits`, pixels are computed only with
sums, products, quotients and square roots, so every machine draws the same bytes.
"""

from __future__ import annotations

import numpy as np

from mpidl.core import keyed
from mpidl.data.datastore import Datastore, Indices, counted
from mpidl.data.formats.format import OpenOptions, World, check_part, format_of_parts
from mpidl.errors import UserError
from mpidl.files import digest
from mpidl.text import printable

SIZE = 64
COUNTS = {"train": 800, "test": 200}
CLASSES = ["background", "cell"]
SEED = 0
MAX_CELLS = 12  # maximum number of cells in an image

# Ranges of random values. Each value is drawn uniformly from its range.
CELLS = (4, MAX_CELLS + 1)  # number of cells, rounded down
RADIUS = (4, 9)  # half axes in pixels
WHITE = (25, 95)  # gray levels by which a cell is brighter than the background
EDGE = (1.5, 4)  # width of a cell's blurred edge in pixels
SHADE = (0, 0.5)  # fraction by which a cell's brightness decreases from its centre to its edge
BACKGROUND = (30, 90)  # gray level of the background in the centre
SLOPE = (-30, 30)  # change of the background's gray level across the image, in each direction
NOISE = (6, 18)  # standard deviation of the noise in gray levels
_DRAWS = 8  # random numbers per cell


class Cells(Datastore):
    """A datastore of one part of the set, which draws each image when it is read.

    Parameters
    ----------
    part : {"train", "test"}
        Part of the set to open.

    Attributes
    ----------
    first : int
        Number of the first image in the whole set.
    """

    image_shape = (1, SIZE, SIZE)
    targets_shape = (SIZE, SIZE)
    targets_dtype = np.dtype(np.int32)

    def __init__(self, part: str = "train") -> None:
        check_part(part, "cells", tuple(COUNTS))
        self.part, self.count, self.classes = part, COUNTS[part], list(CLASSES)
        self.first = 0 if part == "train" else COUNTS["train"]

    def __len__(self) -> int:
        return self.count

    def read(self, indices: Indices) -> np.ndarray:
        return np.array([draw(self.first + int(i))[0] for i in indices], np.uint8).reshape(
            -1, *self.image_shape
        )

    def targets(self, indices: Indices) -> np.ndarray:
        return np.minimum(self.instances(indices), 1)

    def instances(self, indices: Indices) -> np.ndarray:
        """Return the number of the cell at each pixel, from 1, and 0 for background pixels.

        Parameters
        ----------
        indices : sequence of int
            Indices of images.

        Returns
        -------
        ndarray
            Numbers (n, 64, 64), int32. If cells overlap, the cell with the larger number is in
            front.
        """
        maps = [draw(self.first + int(i))[1] for i in indices]
        return np.array(maps, np.int32).reshape(-1, *self.targets_shape)

    def describe(self) -> str:
        return f"cells/{self.part}: {counted(self)}"

    def fingerprint(self) -> str:
        return digest(super().fingerprint(), "cells", self.part)


def cells(part: str = "train") -> Cells:
    """Open the embedded set of cells, with the class of each pixel as the target.

    Parameters
    ----------
    part : {"train", "test"}
        The 800 training images or the 200 test images.

    Returns
    -------
    Cells
        Gray images of 64x64. The target of a pixel is 1 if it belongs to a cell, and 0 otherwise.

    Raises
    ------
    UserError
        If `part` is unknown.
    """
    return Cells(part)


def draw(i: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw image i: gray levels (64, 64) uint8, and the number of the cell at each pixel, or 0,
    (64, 64) int32.
    """
    numbers = iter(keyed.uniform(SEED, "cells", 6 + _DRAWS * MAX_CELLS, sample=i))

    def between(low, high):
        return low + (high - low) * next(numbers)

    count, level, noise = int(between(*CELLS)), between(*BACKGROUND), between(*NOISE)
    across, down = between(*SLOPE) / SIZE, between(*SLOPE) / SIZE
    axis = np.arange(SIZE) - (SIZE - 1) / 2
    gray = level + across * axis[None, :] + down * axis[:, None]
    instances = np.zeros((SIZE, SIZE), np.int32)
    for number in range(1, count + 1):
        x, y = between(-SIZE / 2, SIZE / 2), between(-SIZE / 2, SIZE / 2)
        a, b, turn = between(*RADIUS), between(*RADIUS), between(-1, 1)
        white, edge, shade = between(*WHITE), between(*EDGE), between(*SHADE)
        cosine, sine = (1 - turn * turn) / (1 + turn * turn), 2 * turn / (1 + turn * turn)
        px, py = axis[None, :] - x, axis[:, None] - y
        u, v = (cosine * px + sine * py) / a, (cosine * py - sine * px) / b
        square = u * u + v * v  # 1 on the ellipse
        distance = (1 - np.sqrt(square)) * min(a, b)  # approximate distance to the edge in pixels
        cover = np.clip(distance / edge + 0.5, 0, 1)
        bright = level + white * (1 - shade * np.minimum(square, 1))
        gray = gray + cover * (bright - gray)
        instances[square <= 1] = number
    # The sum of a word's four 16-bit parts is nearly normal, with a standard deviation of 37837.
    parts = keyed.words(SEED, "cells noise", SIZE * SIZE, sample=i).astype("<u8").view("<u2")
    normal = parts.reshape(-1, 4).sum(axis=1, dtype=np.int64) - 2 * 65535
    gray = gray + normal.reshape(SIZE, SIZE) * (noise / 37837)
    return np.clip(np.rint(gray), 0, 255).astype(np.uint8), instances


def _open_part(text: str, part: str, world: World, options: OpenOptions) -> Cells:
    if options.classes is not None and list(options.classes) != CLASSES:
        raise UserError(
            f"{options.option} cells: expected the classes "
            f"{', '.join(map(printable, options.classes))}, found {', '.join(CLASSES)}"
        )
    return Cells(part)


FORMAT = format_of_parts(
    "cells", lambda path, head, option: False, _open_part, lambda path: list(COUNTS)
)
