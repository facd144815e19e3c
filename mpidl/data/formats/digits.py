"""Draw the embedded digit set: 10,000 gray 28 x 28 images, 1,000 per class, white on black.

The images use the eight type faces of `digit_glyphs`. Each digit is rotated by up to 30 degrees,
shifted, scaled and sheared. The width and brightness of the stroke vary, and noise is added.
The index of an image is a key of its random numbers. Pixels are computed only with float64
sums, products, quotients and square roots, which IEEE 754 defines to the last bit. No font, drawing
library or sine is used, so every machine draws the same bytes. The constant SHA256 is the digest of
these bytes.

The following table lists test accuracies after a seeded split into 9,000 training and 1,000 test
images. Each row shows the lowest and highest accuracy over the seeds 0 to 5 (0 to 4 for the
network):

    nearest class mean              0.62 to 0.65
    linear softmax                  0.88 to 0.90
    1-nearest neighbour             0.978 to 0.990
    the digits network, 20 epochs   0.9990 to 1.0000

The set must never change, because published accuracies and hashes of weights depend on these
bytes.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import warnings

import numpy as np

from mpidl.core import keyed
from mpidl.data.datastore import counted
from mpidl.data.formats.digit_glyphs import FACES, segments
from mpidl.data.formats.folder import ImageFolder
from mpidl.data.formats.format import OpenOptions, World, format_of_parts
from mpidl.errors import UserError
from mpidl.files import on_rank_0
from mpidl.text import printable

# SHA-256 of the decoded pixels, followed by the labels as little-endian int64.
SHA256 = "a51168f1d28ca8f866dea1385d78c3a685f24c05437b3cdcf15eac72f1d8afb6"

SIZE = 28
CLASSES = 10
PER_CLASS = 1000
SEED = 0

# Ranges of random values. Each value is drawn uniformly from its range.
TURN = (-0.27, 0.27)  # tangent of half the rotation angle: -30 to 30 degrees
HEIGHT = (13.5, 15)  # height of a digit in pixels
WIDEN = (0.95, 1.05)  # factor for the width of the type face
SHEAR = (-0.05, 0.05)  # shift of x per unit of y, added to the slant of the type face
SHIFT = (1.5, 2)  # distance from the centre in pixels, in a random direction
STROKE = (1.6, 2.1)  # width of the stroke in pixels
WHITE = (200, 255)  # gray level of the stroke
NOISE = (5, 25)  # standard deviation of the noise in gray levels


class Digits(ImageFolder):
    """An ImageFolder of the drawn digits, named "digits" in messages."""

    def describe(self) -> str:
        return f"digits: {counted(self)}"


def digits(world: World = None, cache: str | os.PathLike[str] | None = None) -> Digits:
    """Open the digit set, a folder of PNG files. The first call draws the files. Collective.

    Parameters
    ----------
    world : World, optional
        The ranks that open the set together. Rank 0 draws the set while the other ranks wait.
    cache : path-like, optional
        Folder in which the set is stored. The folder must be visible on the hosts of all ranks. The
        default is the first of $MPIDL_CACHE, $XDG_CACHE_HOME/mpidl and ~/.cache/mpidl that the
        environment of rank 0 defines.

    Returns
    -------
    Digits
        An `ImageFolder` of 10,000 gray images of 28x28.

    Raises
    ------
    UserError
        If the folder cannot be written, is not visible on a host, or has the wrong number of
        images.

    Notes
    -----
    Several jobs may draw the set at the same time, because each job draws to a temporary folder and
    then renames the folder.
    """
    folder = on_rank_0(world, lambda: _drawn(cache))
    if world is not None:
        unseen = UserError(
            f"{printable(folder)}: drawn by rank 0, but not visible on host {world.host}; set "
            "MPIDL_CACHE to a folder that all hosts see"
        )
        world.raise_if_any(None if os.path.isdir(folder) else unseen)
    store = Digits(folder, world)
    if len(store) != CLASSES * PER_CLASS:
        raise UserError(
            f"{printable(folder)}: expected {CLASSES * PER_CLASS} images, found {len(store)}; "
            "remove the folder to draw the set again"
        )
    return store


def digit_angles() -> np.ndarray:
    """Return the angle by which each digit of the set is rotated.

    Returns
    -------
    ndarray
        Angles in degrees clockwise, from -30 to 30, float32 (10000,), in the order of `digits`.
    """
    turns = [
        TURN[0] + (TURN[1] - TURN[0]) * keyed.uniform(SEED, "digits shape", 2, sample=i)[1]
        for i in range(CLASSES * PER_CLASS)
    ]
    return np.array([2 * math.degrees(math.atan(turn)) for turn in turns], np.float32)


def draw() -> tuple[np.ndarray, np.ndarray]:
    """Draw the images, uint8 (10000, 28, 28), sorted by class, and their labels, int64 (10000,).

    Warns if the digest of the bytes differs from SHA256.
    """
    images = np.empty((CLASSES * PER_CLASS, SIZE, SIZE), np.uint8)
    labels = np.repeat(np.arange(CLASSES, dtype=np.int64), PER_CLASS)
    glyphs = [[_glyph(face, digit) for face in FACES.values()] for digit in range(CLASSES)]
    for i, label in enumerate(labels):
        images[i] = _image(glyphs[label], i)
    if sha256(images, labels) != SHA256:
        warnings.warn(
            "the digit set drawn here differs from the published set, so accuracies and hashes "
            "of weights may differ from published values",
            stacklevel=2,
        )
    return images, labels


def sha256(images: np.ndarray, labels: np.ndarray) -> str:
    """Return the hex digest of images and labels, for comparison with SHA256."""
    return hashlib.sha256(images.tobytes() + labels.astype("<i8").tobytes()).hexdigest()


def _glyph(face, digit):
    """Return the line segments of a glyph as (face, x, y, u, v), with arrays of shape (n, 1).

    A segment leads from (x, y) to (x + u, y + v). Coordinates are divided by the pen's width and
    height, so that the pen is round.
    """
    start, end = np.moveaxis(segments(face, digit) / face.pen, 1, 0)
    return face, *start.T[:, :, None], *(end - start).T[:, :, None]


def _image(glyphs, i):
    """Draw image i of the set, uint8 (28, 28), with one of the given glyphs."""
    draws = iter(keyed.uniform(SEED, "digits shape", 11, sample=i))

    def between(low, high):
        return low + (high - low) * next(draws)

    face, x, y, u, v = glyphs[int(between(0, len(glyphs)))]
    turn, height, widen = between(*TURN), between(*HEIGHT), between(*WIDEN)
    shear = between(*SHEAR) + face.slant
    right, down = between(-1, 1), between(-1, 1)
    shift = between(*SHIFT) / np.sqrt(right * right + down * down)
    stroke, white, noise = between(*STROKE), between(*WHITE), between(*NOISE)
    cosine = (1 - turn * turn) / (1 + turn * turn)
    sine = 2 * turn / (1 + turn * turn)

    # Map the centre of each pixel to the glyph: invert shift, rotation, scale, shear and pen.
    centre = np.arange(SIZE) - (SIZE - 1) / 2
    px, py = centre[None, :] - shift * right, centre[:, None] - shift * down
    gy = (cosine * py - sine * px) / height
    gx = (cosine * px + sine * py) / (height * widen) + shear * gy
    gx, gy = gx.reshape(-1) / face.pen[0], gy.reshape(-1) / face.pen[1]

    # The distance to the nearest segment, in pixels, determines which fraction of a pixel the
    # stroke covers.
    dx, dy = gx - x, gy - y
    along = dx * u
    along += dy * v
    along /= u * u + v * v
    np.clip(along, 0, 1, out=along)
    dx -= along * u
    dy -= along * v
    dx *= dx
    dy *= dy
    dx += dy
    distance = np.sqrt(dx.min(axis=0)) * height
    cover = np.clip(stroke / 2 - distance + 0.5, 0, 1)

    # The sum of a word's four 16-bit parts is nearly normal, with a standard deviation of 37837.
    parts = keyed.words(SEED, "digits noise", SIZE * SIZE, sample=i).view(np.uint16)
    normal = parts.reshape(-1, 4).sum(axis=1, dtype=np.int64) - 2 * 65535
    gray = cover * white + normal * (noise / 37837)
    return np.clip(np.rint(gray), 0, 255).astype(np.uint8).reshape(SIZE, SIZE)


def _drawn(cache):
    """Return the absolute path of the set's folder; draw the set if the folder is missing."""
    root = os.path.abspath(cache or _default_cache())
    folder = os.path.join(root, f"digits-{SHA256[:12]}")
    if not os.path.isdir(folder):
        try:
            os.makedirs(root, exist_ok=True)
            # Only a complete set is renamed. A killed job leaves a temporary folder.
            with tempfile.TemporaryDirectory(prefix="unfinished-", dir=root) as temporary:
                written = os.path.join(temporary, "digits")
                _write(written)
                try:
                    os.rename(written, folder)
                except OSError:  # another job has stored the same images first
                    if not os.path.isdir(folder):
                        raise
        except OSError as error:
            raise UserError(
                f"cannot write the digit set to {printable(root)}: {error.strerror or error}; "
                f"set MPIDL_CACHE to a folder that can be written"
            ) from None
    return folder


def _default_cache():
    cache = os.environ.get("MPIDL_CACHE")
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return cache or os.path.join(user_cache, "mpidl")


def _write(folder):
    from PIL import Image

    images, labels = draw()
    for label in range(CLASSES):
        os.makedirs(os.path.join(folder, str(label)))
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        # The datastore's fingerprint includes file sizes. Without compression, the sizes do not
        # depend on Pillow's zlib.
        name = os.path.join(folder, str(label), f"{i:05d}.png")
        Image.fromarray(image).save(name, compress_level=0)


def _open_part(text: str, part: str, world: World, options: OpenOptions) -> Digits:
    """Open the set for `--data digits`.

    Raises UserError if the classes of the training set are not the ten digits.
    """
    store = digits(world)
    if options.classes is not None and list(options.classes) != store.classes:
        raise UserError(
            f"{options.option} digits: expected the classes "
            f"{', '.join(map(printable, options.classes))}, found {', '.join(store.classes)}"
        )
    return store


FORMAT = format_of_parts("digits", lambda path, head, option: False, _open_part)
