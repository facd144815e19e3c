"""What the tests of whole jobs share."""

import pytest
import small


@pytest.fixture(scope="session")
def pictures(tmp_path_factory):
    """A folder of 210 small images in three classes."""
    return small.draw(tmp_path_factory.mktemp("pictures") / "shapes")
