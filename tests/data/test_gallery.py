"""Test the picture of augmented images."""

import io

import numpy as np
import pytest
from PIL import Image

from mpidl.data import ArrayDatastore, gallery


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((3, 10, 30), (120, 40)),  # enlarged by a factor of 4, to at least 96 pixels
        ((3, 96, 200), (200, 96)),
        ((1, 40, 2048), (512, 10)),  # reduced to 512 pixels
        ((1, 1, 2048), (512, 1)),
    ],
)
def test_the_size_of_an_image_in_the_picture(shape, size):
    store = ArrayDatastore(np.full((2, *shape), 7, np.uint8))
    with Image.open(io.BytesIO(gallery.gallery(store, None))) as picture:
        pixels = np.asarray(picture)
    row, column = 16 + gallery.MARGIN, gallery.MARGIN + gallery.TEXT
    is_image = (pixels[row:, column:] == 7).all(axis=-1)
    assert is_image[0].sum() == size[0] and is_image[: size[1], 0].all()
    assert is_image[:, 0].sum() == 2 * size[1]
