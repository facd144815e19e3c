"""Compare resizing with plain formulas, PyTorch and ONNX's reference, in float64 and float32."""

import itertools
import math

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from op_references import Case, OpChecks, gradients, torch_functions
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl


def positions(coordinates, n, m, scale):
    """Return the positions in n pixels of m pixels, as ONNX defines them."""
    i = np.arange(m)
    if coordinates == "align_corners":
        return i * (n - 1) / max(m - 1, 1)
    if coordinates == "asymmetric":
        return i / scale
    return (i + 0.5) / scale - 0.5


def bilinear(x, size, coordinates):
    """Interpolate one axis after the other with NumPy."""
    for axis, m in zip((2, 3), size, strict=True):
        n = x.shape[axis]
        points = positions(coordinates, n, m, m / n), np.arange(n)
        x = np.apply_along_axis(lambda row, points=points: np.interp(*points, row), axis, x)
    return x


def nearest(x, size):
    rows, columns = (np.arange(m) * n // m for n, m in zip(x.shape[2:], size, strict=True))
    return x[:, :, rows[:, None], columns]


class TestResize(OpChecks):
    cases = {
        "nearest": Case(
            lambda x: dl.resize2d(x, (8, 3)), lambda x: nearest(x, (8, 3)), [(3, 5, 4)]
        ),
        "bilinear, larger": Case(
            lambda x: dl.resize2d(x, scale=2, mode="bilinear"),
            lambda x: bilinear(x, (8, 6), "half_pixel"),
            [(4, 4, 3)],
        ),
        "bilinear, smaller": Case(
            lambda x: dl.resize2d(x, (3, 2), mode="bilinear", coordinates="align_corners"),
            lambda x: bilinear(x, (3, 2), "align_corners"),
            [(2, 7, 5)],
        ),
    }
    errors = [
        (lambda x, f, i: dl.resize2d(f, 1), ValueError, "expected x of shape"),
        (lambda x, f, i: dl.resize2d(x), ValueError, "expected either size or scale, got None"),
        (lambda x, f, i: dl.resize2d(x, 2, scale=2), ValueError, "expected either size or scale"),
        (lambda x, f, i: dl.resize2d(x, (2, 0)), ValueError, "size must be one or two integers"),
        (lambda x, f, i: dl.resize2d(x, scale=0), ValueError, "scale must be one or two numbers"),
        (lambda x, f, i: dl.resize2d(x, scale=np.inf), ValueError, "scale must be one or two"),
        (lambda x, f, i: dl.resize2d(x, scale=1e-9), ValueError, "scale must be at least 1 / "),
        (lambda x, f, i: dl.resize2d(x, scale=0.2), ValueError, "scale 0.2 leaves no pixels of"),
        (lambda x, f, i: dl.resize2d(x, 2, mode="cubic"), ValueError, "mode: expected nearest or"),
        (
            lambda x, f, i: dl.resize2d(x, 2, coordinates="half-pixel"),
            ValueError,
            "coordinates: expected .*: did you mean half_pixel",
        ),
        (lambda x, f, i: dl.resize2d(x, 2, rounding="up"), ValueError, "rounding: expected floor"),
    ]


SIZES = [(10, 14), (4, 3), (13, 9), (1, 1), (5, 20), (3, 1)]
# {PyTorch's mode and align_corners: the arguments of mpidl}
MODES = {
    ("nearest", None): {},
    ("nearest-exact", None): {"coordinates": "half_pixel", "rounding": "round_prefer_ceil"},
    ("bilinear", False): {"mode": "bilinear"},
    ("bilinear", True): {"mode": "bilinear", "coordinates": "align_corners"},
}


def assert_equals_pytorch(world, op, function, x):
    """Compare an op with PyTorch in float64; errors in float32 with those of PyTorch."""
    torch, _ = torch_functions()
    exact = []
    for dtype in (torch.float64, torch.float32):
        variable = torch.tensor(x, dtype=dtype, requires_grad=True)
        y = function(variable)
        y.backward(torch.from_numpy(numbers("dy", *y.shape)).to(dtype))
        exact.append((y.detach().double().numpy(), variable.grad.double().numpy()))
    result, (dx,) = gradients(world, op, [blocked(world, x)])
    np.testing.assert_allclose(result, exact[0][0], rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(dx, exact[0][1], rtol=1e-12, atol=1e-13)
    result, (dx,) = gradients(world, op, [blocked(world, x.astype(np.float32))])
    largest = abs(exact[0][1]).max()
    errors = [abs(values - exact[0][1]).max() for values in (dx, exact[1][1])]
    assert abs(result - exact[0][0]).max() <= 1e-6 * abs(exact[0][0]).max()
    assert errors[0] <= 3 * max(errors[1], 2.0**-24 * largest)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_sizes_against_pytorch(world, mode):
    _, functional = torch_functions()
    x, options = numbers("images", 18, 3, 5, 7), {"mode": mode[0], "align_corners": mode[1]}
    for size in SIZES:
        assert_equals_pytorch(
            world,
            lambda v, size=size: dl.resize2d(v, size, **MODES[mode]),
            lambda v, size=size: functional.interpolate(v, size=size, **options),
            x,
        )


@pytest.mark.parametrize("mode", list(MODES)[:3], ids=str)
def test_scales_against_pytorch(world, mode):
    """The size of the result may not be the size of x times the scale."""
    _, functional = torch_functions()
    x, options = numbers("images", 18, 2, 6, 9), {"mode": mode[0], "align_corners": mode[1]}
    for scale in (2, 1.5, 0.7, (3, 0.5), 1 / 3, (1, 1.2)):
        factors = scale if isinstance(scale, tuple) else (scale, scale)
        assert_equals_pytorch(
            world,
            lambda v, scale=scale: dl.resize2d(v, scale=scale, **MODES[mode]),
            lambda v, factors=factors: functional.interpolate(v, scale_factor=factors, **options),
            x,
        )


COORDINATES = ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
ROUNDINGS = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")


def onnx_result(x, size, mode, coordinates, rounding):
    """Return the result of ONNX's reference evaluator."""
    node = onnx.helper.make_node(
        *("Resize", ["x", "", "", "sizes"], ["y"]),
        mode={"bilinear": "linear"}.get(mode, mode),
        coordinate_transformation_mode=coordinates,
        nearest_mode=rounding,
    )
    double, integer = onnx.TensorProto.DOUBLE, onnx.TensorProto.INT64
    inputs = (("x", double, x.shape), ("sizes", integer, (4,)))
    graph = onnx.helper.make_graph(
        *([node], "resize", [onnx.helper.make_tensor_value_info(*v) for v in inputs]),
        [onnx.helper.make_tensor_value_info("y", double, None)],
    )
    opset = onnx.helper.make_opsetid("", 19)
    model = onnx.helper.make_model(graph, opset_imports=[opset])
    sizes = np.array([*x.shape[:2], *size], np.int64)
    return ReferenceEvaluator(model).run(None, {"x": x, "sizes": sizes})[0]


@pytest.mark.parametrize("coordinates", COORDINATES)
def test_coordinates_against_onnx(coordinates):
    x = numbers("images", 2, 1, 4, 6)
    rules = [("bilinear", "floor"), *(("nearest", rounding) for rounding in ROUNDINGS)]
    for (mode, rounding), size in itertools.product(rules, [(8, 3), (1, 12), (2, 1), (6, 8)]):
        options = {"mode": mode, "coordinates": coordinates, "rounding": rounding}
        expected = onnx_result(x, size, **options)
        y = dl.resize2d(blocked(SingleRank(), x), size, **options).local()
        np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13, err_msg=str(options))


def test_positions_are_exact():
    """Pixel 29 of 58 is at 14.5 of 29 pixels, and 14 times 29/14 is 29, in any precision."""
    for n, m in itertools.product(range(1, 30), range(1, 60)):
        x = np.arange(n, dtype=np.float32).reshape(1, 1, 1, n)
        y = dl.resize2d(blocked(SingleRank(), x), (1, m)).local().ravel()
        assert y.tolist() == [i * n // m for i in range(m)]
    x = blocked(SingleRank(), np.zeros((1, 1, 9, 10), np.float32))
    shapes = {scale: dl.resize2d(x, scale=scale).shape[2:] for scale in (0.7, 1 / 3, 1.1)}
    assert shapes == {0.7: (6, 7), 1 / 3: (3, 3), 1.1: (9, 11)}
    float32 = {s: dl.resize2d(x, scale=float(np.float32(s))).shape[2:] for s in shapes}
    assert float32 == shapes


def test_pixels_that_are_not_read_have_no_gradient(world):
    x = blocked(world, np.zeros((17, 1, 1, 4), np.float32))
    y, (dx,) = gradients(world, lambda v: dl.resize2d(v, (1, 2)), [x])
    dy = numbers("dy", *y.shape, dtype=np.float32)
    assert np.array_equal(dx[:, 0, 0], np.insert(dy[:, 0, 0], (1, 2), 0, axis=1))


def test_special_numbers_stay(world):
    x = numbers("images", 17, 2, 3, 3, dtype=np.float32)
    x[3, 1, 1, 1], x[16, 0, 0, 2], x[0, 0, 0, 0] = np.nan, -np.inf, -0.0
    y = all_images(world, dl.resize2d(blocked(world, x), scale=2))
    assert y.tobytes() == np.repeat(np.repeat(x, 2, 2), 2, 3).tobytes()
    y = all_images(world, dl.resize2d(blocked(world, x), 3, mode="bilinear"))
    assert y.tobytes() == x.tobytes()  # no product with a weight of 0


def test_the_layer(world):
    layers = [dl.Resize2D((6, 9), mode="bilinear"), dl.Resize2D(scale=(0.5, 1)), dl.Resize2D(4)]
    net = dl.Network(layers, (2, 4, 5))
    assert net.layer_names == ["resize1", "resize2", "resize3"]
    assert net.output_shapes == [(2, 6, 9), (2, 3, 9), (2, 4, 4)]
    assert net.spec()[2] == {"type": "Resize2D", "name": "resize3", "size": 4}
    rebuilt = dl.Network.from_spec(net.spec(), (2, 4, 5))
    x = blocked(world, numbers("images", 20, 2, 4, 5, dtype=np.float32))
    y = dl.resize2d(dl.resize2d(x, (6, 9), mode="bilinear"), scale=(0.5, 1))
    expected = all_images(world, dl.resize2d(y, 4)).tobytes()
    assert [all_images(world, n(x)).tobytes() for n in (net, rebuilt)] == [expected] * 2
    for layer, message in (
        (dl.Resize2D(), "resize1: expected either size or scale"),
        (dl.Resize2D(2, mode="linear"), "resize1: mode: expected nearest or bilinear"),
        (dl.Resize2D(scale=0.1), r"resize1: scale 0.1 leaves no pixels of images \(2, 4, 5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            dl.Network([layer], (2, 4, 5))
    with pytest.raises(ValueError, match=r"resize1: expected images \(C, H, W\), got \(3,\)"):
        dl.Network([dl.Resize2D(2)], (3,))


def adaptive(x, size):
    """Compute the mean of one window after another."""
    y = np.empty((*x.shape[:2], *size))
    for i, j in np.ndindex(*size):
        rows, columns = (
            slice(k * n // m, math.ceil((k + 1) * n / m))
            for k, n, m in zip((i, j), x.shape[2:], size, strict=True)
        )
        y[:, :, i, j] = x[:, :, rows, columns].mean(axis=(2, 3))
    return y


class TestAdaptivePooling(OpChecks):
    cases = {
        "overlapping": Case(
            lambda x: dl.adaptive_average_pool2d(x, (3, 4)),
            lambda x: adaptive(x, (3, 4)),
            [(3, 5, 6)],
        ),
        "apart": Case(
            lambda x: dl.adaptive_average_pool2d(x, 2), lambda x: adaptive(x, (2, 2)), [(2, 4, 6)]
        ),
        "larger": Case(
            lambda x: dl.adaptive_average_pool2d(x, (3, 7)),
            lambda x: adaptive(x, (3, 7)),
            [(4, 2, 5)],
        ),
    }
    errors = [
        (lambda x, f, i: dl.adaptive_average_pool2d(f, 1), ValueError, "expected x of shape"),
        (lambda x, f, i: dl.adaptive_average_pool2d(x, 0), ValueError, "size must be one or two"),
    ]


def test_adaptive_pooling_against_pytorch(world):
    _, functional = torch_functions()
    x = numbers("images", 18, 3, 13, 7)
    for size in [(7, 7), (6, 6), (1, 1), (4, 1), (13, 3), (20, 9)]:
        assert_equals_pytorch(
            world,
            lambda v, size=size: dl.adaptive_average_pool2d(v, size),
            lambda v, size=size: functional.adaptive_avg_pool2d(v, size),
            x,
        )


def test_adaptive_pooling_is_average_pooling_if_windows_are_equal(world):
    x = blocked(world, numbers("images", 20, 2, 6, 8, dtype=np.float32))
    pairs = [
        (dl.adaptive_average_pool2d(x, 1), dl.global_average_pool2d(x)),
        (dl.adaptive_average_pool2d(x, (3, 2)), dl.average_pool2d(x, (2, 4))),
        (dl.adaptive_average_pool2d(x, (6, 8)), x),
    ]
    for actual, expected in pairs:
        assert actual.local().tobytes() == expected.local().tobytes()


def test_the_layer_of_adaptive_pooling(world):
    net = dl.Network([dl.AdaptiveAveragePool2D((4, 2))], (2, 6, 5))
    assert net.layer_names == ["adaptiveaveragepool1"] and net.output_shape == (2, 4, 2)
    rebuilt = dl.Network.from_spec(net.spec(), (2, 6, 5))
    x = numbers("images", 20, 2, 6, 5)
    y = all_images(world, rebuilt(blocked(world, x.astype(np.float32))))
    np.testing.assert_allclose(y, adaptive(x, (4, 2)), atol=1e-6)
    with pytest.raises(ValueError, match=r"adaptiveaveragepool1: size must be one or two"):
        dl.Network([dl.AdaptiveAveragePool2D(0)], (2, 6, 5))
    with pytest.raises(ValueError, match=r"expected images \(C, H, W\), got \(3,\)"):
        dl.Network([dl.AdaptiveAveragePool2D(2)], (3,))
