"""Test the arithmetic of random numbers: powers, logarithmic ranges and rectangles."""

import numpy as np
import pytest

from mpidl.data.transforms import draws


def test_powers_against_python():
    base = np.array([0.0, 1e-9, 0.3, 0.75, 1.0, 1.7, 40.0])[:, None]
    exponent = np.array([0.0, 2.0**-40, 0.1, 0.5, 1.0, 2.0, 5.25, 17.0])
    expected = [[float(b) ** float(e) for e in exponent] for b in base[:, 0]]
    powers = draws.power(base, exponent)
    assert powers == pytest.approx(np.array(expected), rel=4e-11, abs=1e-300)
    assert powers[:, 0].tolist() == [1] * 7 and powers[:, 5].tolist() == (base[:, 0] ** 2).tolist()


def test_the_logarithm_is_uniform():
    u = (np.arange(10000) + 0.5) / 10000
    logs = np.sort(np.log(draws.log_between(0.5, 4.0, u)))
    assert abs(logs - (np.log(0.5) + np.log(8) * u)).max() < 1e-9


def test_rectangles_have_the_drawn_area_and_ratio():
    """Rectangles equal those of a plain loop with the order of torchvision's RandomResizedCrop."""
    shape, area, aspect = (40, 60), (0.05, 0.9), (0.4, 2.5)
    u = draws.uniforms(draws.SampleKeys(np.arange(300), 2, 3), "rectangles", 40)
    *box, fits = draws.boxes(u, shape, area, aspect)
    rejected = 0
    for i, (top, left, height, width) in enumerate(np.stack(box, axis=1).tolist()):
        for a, r, y, x in u[:, i].reshape(10, 4):
            pixels = (area[0] + (area[1] - area[0]) * a) * 2400
            ratio = np.exp(np.log(aspect[0]) + np.log(aspect[1] / aspect[0]) * r)
            h, w = int(np.sqrt(pixels / ratio) + 0.5), int(np.sqrt(pixels * ratio) + 0.5)
            if h <= 40 and w <= 60:
                expected = [int((41 - h) * y), int((61 - w) * x), h, w]
                assert [top, left, height, width] == expected and fits[i]
                break
            rejected += 1
    assert fits.all() and rejected > 30
    assert top + height <= 40 and left + width <= 60


def test_no_rectangle_fits():
    u = draws.uniforms(draws.SampleKeys(np.arange(5), 1, 0), "rectangles", 8)
    *box, fits = draws.boxes(u, (4, 400), (0.9, 1.0), (1.0, 1.1))
    assert not fits.any() and not np.any(box)
