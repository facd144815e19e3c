"""Draw images of a datastore, each next to its augmented variants, as a PNG."""

from __future__ import annotations

import io

import numpy as np

from mpidl.data.checks import read_images
from mpidl.data.datastore import Datastore
from mpidl.data.loading.bad_images import unreadable
from mpidl.data.transforms.augment import Augmenter
from mpidl.errors import UserError
from mpidl.text import printable

# Sizes in pixels: limits of the longer side of an image, gap between images, outer margin.
CELL, LARGEST, GAP, MARGIN = 96, 512, 6, 12
TEXT = 110  # width of the column of class names in pixels
ROWS, VARIANTS = 10, 7


def gallery(
    datastore: Datastore,
    augmenter: Augmenter | None,
    seed: int = 0,
    rows: int = ROWS,
    variants: int = VARIANTS,
    skip_unreadable: bool = False,
) -> bytes:
    """Return a PNG of images with their augmented variants.

    Each row shows one image without augmentation, then its augmented variants from the first
    `variants` epochs; without an augmenter, there are none. The rows are divided evenly among the
    classes, whose images are evenly spaced from the first to the last. `skip_unreadable` leaves out
    the rows of images that cannot be read. Raises UserError if the datastore is empty, or if its
    images cannot be read or do not have 1 or 3 channels.
    """
    from PIL import Image, ImageDraw

    if datastore.image_shape[0] not in (1, 3):
        raise UserError(
            f"{datastore.describe()}: expected images of 1 or 3 channels to draw, found "
            f"{datastore.image_shape[0]}"
        )
    indices = select_images(datastore, rows)
    if skip_unreadable:
        reasons = unreadable(lambda part: read_images(datastore, part), indices)
        readable = indices[~np.isin(indices, list(reasons))]
        indices = readable if len(readable) else indices  # reading `indices` raises the error
    originals = read_images(datastore, indices)
    columns = [originals]
    if augmenter is not None:
        columns += [
            augmenter.apply(originals, indices, epoch=epoch, seed=seed)
            for epoch in range(1, variants + 1)
        ]
    side = max(originals.shape[2:])
    factor = LARGEST / side if side > LARGEST else -(-CELL // side)  # the same for all images
    cells = [[_resized(Image, image, factor) for image in images] for images in columns]
    widths = [column[0].width for column in cells]
    heights = max(column[0].height for column in cells)
    size = (
        2 * MARGIN + TEXT + sum(widths) + GAP * len(widths) + GAP,
        2 * MARGIN + 16 + (heights + GAP) * len(indices),
    )
    sheet = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(sheet)
    left = MARGIN + TEXT
    for number, (column, width) in enumerate(zip(cells, widths, strict=True)):
        title = f"epoch {number}" if number else "as it is"
        pen.text((left, MARGIN), title, fill="black")
        for row, picture in enumerate(column):
            sheet.paste(picture, (left, MARGIN + 16 + row * (heights + GAP)))
        left += width + (2 * GAP if number == 0 else GAP)
    for row, i in enumerate(indices):
        top = MARGIN + 16 + row * (heights + GAP)
        pen.text((MARGIN, top + heights // 2 - 14), _class_text(datastore, i), fill="black")
        pen.text((MARGIN, top + heights // 2), f"image {i}", fill="gray")
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


def select_images(datastore: Datastore, rows: int) -> np.ndarray:
    """Select up to `rows` images, spread evenly over the classes, and return their indices."""
    if not len(datastore):
        raise UserError(f"{datastore.describe()}: expected images to draw, found none")
    if datastore.labels is None:
        count = min(rows, len(datastore))
        return np.linspace(0, len(datastore) - 1, count).astype(np.int64)
    members = [np.nonzero(datastore.labels == label)[0] for label in np.unique(datastore.labels)]
    if len(members) > rows:  # select evenly spaced classes
        members = [members[i] for i in np.linspace(0, len(members) - 1, rows).astype(int)]
    counts = [len(part) for part in np.array_split(np.arange(rows), len(members))]
    selected = [
        part[np.unique(np.linspace(0, len(part) - 1, min(count, len(part))).astype(int))]
        for part, count in zip(members, counts, strict=True)
    ]
    return np.concatenate(selected)


def _resized(Image, image, factor):
    """Convert pixels (C, H, W) to a Pillow image, and scale its sides by `factor`.

    Float pixels are scaled so that the smallest pixel becomes 0 and the largest becomes 255.
    """
    if image.dtype != np.uint8:
        low, high = image.min(), image.max()
        image = ((image - low) / max(high - low, 1e-30) * 255).astype(np.uint8)
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    picture = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
    size = tuple(max(1, round(side * factor)) for side in picture.size)
    return picture.resize(size, Image.Resampling.BOX if factor < 1 else Image.Resampling.NEAREST)


def _class_text(datastore, i):
    """Return the class name of image i, shortened to 16 characters, or "" without labels."""
    if datastore.labels is None:
        return ""
    label = int(datastore.labels[i])
    name = datastore.classes[label] if label < len(datastore.classes) else str(label)
    text = printable(name)
    text = text.encode("ascii", "replace").decode()  # Pillow's font has only ASCII characters
    return text if len(text) <= 16 else text[:15] + "."
