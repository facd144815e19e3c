"""What the tests of whole jobs share."""

import pytest
import small


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """A folder of 210 small images in three classes."""
    return small.draw(tmp_path_factory.mktemp("pictures") / "shapes")


@pytest.fixture(scope="session")
def pairs(tmp_path_factory):
    """{kind of targets: an HDF5 file of 90 images with them}."""
    return small.pair(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="session")
def colours(tmp_path_factory):
    """A folder of 90 colour images of 32 x 32 pixels in three classes."""
    folder = tmp_path_factory.mktemp("colours") / "shapes"
    return small.draw(folder, per_class=30, side=32, channels=3)
