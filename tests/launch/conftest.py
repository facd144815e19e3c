"""Define fixtures with data for tests that run whole jobs."""

import jobs
import numpy as np
import pytest
from image_sets import pixels_of, save


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """Return a folder of 210 small images in three classes."""
    return jobs.draw_images(tmp_path_factory.mktemp("pictures") / "shapes")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """Return {kind of targets: HDF5 file of 90 images with targets of this kind}."""
    return jobs.write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def colours(tmp_path_factory):
    """Return a folder of 60 colour images of 32 x 32 pixels in three classes."""
    folder = tmp_path_factory.mktemp("colours") / "shapes"
    return jobs.draw_images(folder, per_class=20, side=32, channels=3)


@pytest.fixture(scope="session")
def sizes(tmp_path_factory):
    """Return a folder of images of many sizes, gray and RGB, PNG and JPEG."""
    folder = tmp_path_factory.mktemp("sizes") / "set"
    random = np.random.default_rng(0)
    for c, name in enumerate(("bright", "dark")):
        for i in range(40):
            height, width = random.integers(20, 45, 2)
            pixels = pixels_of((c, i), 3 if i % 3 else 1, height, width) // 2 + 100 * c
            save(folder / name / f"{i:02}.{'png' if i % 2 else 'jpg'}", pixels)
    return folder
