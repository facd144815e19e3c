"""A picture of what a network sees: images as they are, and beside each what augmentation makes."""

import io

import numpy as np

from mpidl.data.datastore import read_images
from mpidl.errors import UserError
from mpidl.text import printable

CELL, GAP, MARGIN = 96, 6, 12  # pixels: least side of an image, between images, around them
TEXT = 110  # pixels for a class name
ROWS, VARIANTS = 10, 7


def gallery(datastore, augmenter, seed=0, rows=ROWS, variants=VARIANTS):
    """The bytes of a PNG: a row an image, first as it is, then as it will be in the first epochs.

    Of each class as many images as there is room for, evenly from its first to its last.
    augmenter: None shows the images alone. Raises UserError where the images cannot be drawn.
    """
    from PIL import Image, ImageDraw

    if datastore.image_shape[0] not in (1, 3):
        raise UserError(
            f"{datastore.describe()}: expected images of 1 or 3 channels to draw, found "
            f"{datastore.image_shape[0]}"
        )
    indices = chosen(datastore, rows)
    originals = read_images(datastore, indices)
    drawn = [originals]
    if augmenter is not None:
        drawn += [
            augmenter.apply(originals, indices, epoch=epoch, seed=seed)
            for epoch in range(1, variants + 1)
        ]
    factor = max(1, -(-CELL // max(originals.shape[2:])))  # of all, so that sizes compare
    cells = [[_picture(Image, image, factor) for image in images] for images in drawn]
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
        pen.text((MARGIN, top + heights // 2 - 14), _class_of(datastore, i), fill="black")
        pen.text((MARGIN, top + heights // 2), f"image {i}", fill="gray")
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


def chosen(datastore, rows):
    """Indices of `rows` images, as many of each class as of others, or nearly so."""
    if not len(datastore):
        raise UserError(f"{datastore.describe()}: expected images to draw, found none")
    if datastore.labels is None:
        count = min(rows, len(datastore))
        return np.linspace(0, len(datastore) - 1, count).astype(np.int64)
    members = [np.nonzero(datastore.labels == label)[0] for label in np.unique(datastore.labels)]
    if len(members) > rows:  # evenly over the classes
        members = [members[i] for i in np.linspace(0, len(members) - 1, rows).astype(int)]
    counts = [len(part) for part in np.array_split(np.arange(rows), len(members))]
    found = [
        part[np.unique(np.linspace(0, len(part) - 1, min(count, len(part))).astype(int))]
        for part, count in zip(members, counts, strict=True)
    ]
    return np.concatenate(found)


def _picture(Image, image, factor):
    """A Pillow image of pixels (C, H, W), each shown as factor x factor; floats from their least to
    their largest."""
    if image.dtype != np.uint8:
        low, high = image.min(), image.max()
        image = ((image - low) / max(high - low, 1e-30) * 255).astype(np.uint8)
    pixels = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
    picture = Image.fromarray(np.ascontiguousarray(pixels)).convert("RGB")
    size = (picture.width * factor, picture.height * factor)
    return picture.resize(size, Image.Resampling.NEAREST)


def _class_of(datastore, i):
    if datastore.labels is None:
        return ""
    label = int(datastore.labels[i])
    name = datastore.classes[label] if label < len(datastore.classes) else str(label)
    text = printable(name)
    text = text.encode("ascii", "replace").decode()  # what Pillow's own font has
    return text if len(text) <= 16 else text[:15] + "."
