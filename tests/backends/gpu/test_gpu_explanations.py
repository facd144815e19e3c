"""Check that explanations on a GPU are about the same as on the CPU."""

import numpy as np
import pytest
from single_rank import numbers
from test_gpu_evaluation import on_gpu_and_cpu, small

import mpidl as dl

OPTIONS = {
    "grad-cam": {"layer": "relu1"},
    "occlusion": {"window": 4},
    "gradient": {},
    "integrated-gradients": {"steps": 3},
}


@pytest.mark.parametrize("method", OPTIONS)
def test_maps_agree_with_the_cpu(method, world):
    net = small()
    images = numbers("gpu explanations", 21, *net.input_shape, dtype=np.float32)
    options = {"method": method, **OPTIONS[method]}
    result, expected = on_gpu_and_cpu(world, lambda w: dl.explain(net, images, world=w, **options))
    assert np.array_equal(result.classes, expected.classes)
    np.testing.assert_allclose(result.scores, expected.scores, atol=2e-5)
    limit = 1e-4 * np.abs(expected.maps).max()
    np.testing.assert_allclose(result.maps, expected.maps, atol=limit, rtol=0)
    assert not net.on_device  # the network itself was not moved


@pytest.mark.parametrize("shape", [(1,), (3, 8, 8)])
def test_one_output_and_scores_of_pixels_agree_with_the_cpu(shape, world):
    last = dl.Dense(1) if len(shape) == 1 else dl.Conv2D(1, shape[0])
    net = dl.Network([dl.Conv2D(3, 5, padding=1), dl.ReLU(), last], (1, 8, 8), seed=1)
    images = numbers("gpu explanations", 21, 1, 8, 8, dtype=np.float32)
    result, expected = on_gpu_and_cpu(
        world, lambda w: dl.explain(net, images, method="gradient", target=0, world=w)
    )
    limit = 1e-4 * np.abs(expected.maps).max()
    np.testing.assert_allclose(result.maps, expected.maps, atol=limit, rtol=0)
