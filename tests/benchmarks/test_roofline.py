"""Test `benchmarks roofline`: operations, bytes and lower time bounds of passes, and the page."""

import math

import numpy as np
import pytest
from cpu_builds import needs_kernels

import mpidl as dl
from benchmarks import arguments, floors, passes, roofline
from mpidl.errors import UserError
from mpidl.nn import zoo


def test_a_floor_is_the_larger_time():
    floor = floors.floor(flop=3e9, nbytes=1e9, flop_rate=1e10, bandwidth=1e10)
    assert (floor.products, floor.bytes, floor.seconds) == (0.3, 0.1, 0.3)
    assert floors.floor(0, 1e9, 1e10, 1e10).seconds == 0.1


@needs_kernels
@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [  # Winograd divides the number of products by this factor (Lavin and Gray's formula)
        # in forward passes, more inputs permit larger tiles
        (dl.Conv2D(3, 128, padding=1), (128, 8, 8), {"forward": 4, "dx": 4, "dweight": 4}),
        (dl.Conv2D(3, 32, padding=1), (127, 8, 8), {"forward": 3, "dx": 4, "dweight": 4}),
        (dl.Conv2D(3, 32, padding=1), (32, 8, 8), {"forward": 3, "dx": 4, "dweight": 4}),
        (dl.Conv2D(3, 20, padding=1), (31, 8, 8), {"forward": 2.25, "dx": 4, "dweight": 4}),
        (dl.Conv2D(3, 16, padding=1), (16, 8, 8), {"forward": 2.25, "dx": 4, "dweight": 4}),
        (dl.Conv2D(3, 15, padding=1), (16, 8, 8), {"forward": 1, "dx": 4, "dweight": 4}),
        (dl.Conv2D(3, 16, padding=1, groups=2), (32, 8, 8), {"forward": 1, "dx": 4, "dweight": 4}),
        # 10 x 10 pixels have 5 x 3 tiles of 2 x 4, or 3 x 3 tiles of 4 x 4. In forward and dx,
        # a partial tile has one product less along its dimension
        (
            dl.Conv2D(3, 32, padding=1, groups=1),
            (32, 10, 10),
            {"forward": 900 / (20 * 17), "dx": 900 / 17**2, "dweight": 900 / 18**2},
        ),
        (
            dl.Conv2D(5, 64, padding=2, groups=2),
            (64, 8, 8),
            {"forward": 25 / 9, "dx": 25 / 9, "dweight": 6.25},
        ),
        (dl.Conv2D(1, 32), (32, 8, 8), {"forward": 1, "dx": 1, "dweight": 1}),
        # 11 x 11 filters at stride 4 are 3 x 3 filters of 4 x 4 phases. Along one dimension, one
        # of four phases has 2 taps, so tiles of 2 and 4 outputs have 15 and 23 products, and
        # partial tiles 3 products less, or 4 for dx
        (
            dl.Conv2D(11, 32, stride=4),
            (3, 43, 43),
            {
                "forward": 81 * 121 / ((5 * 15 - 3) * (3 * 23 - 3)),
                "dx": 81 * 121 / (3 * 23 - 4) ** 2,
                "dweight": 81 * 121 / (3 * 23) ** 2,
            },
        ),
        # 3 x 3 filters at stride 2 have phases of 2 and 1 taps. Tiles of 4 have 5 + 4 products
        (
            dl.Conv2D(3, 64, stride=2, padding=1),
            (32, 16, 16),
            {"forward": 9 * 64 / 18**2, "dx": 9 * 64 / 18**2, "dweight": 9 * 64 / 18**2},
        ),
        # with even padding, no phase of dx has its zero tap at the point infinity
        (
            dl.Conv2D(3, 64, stride=2, padding=((0, 1), (0, 1))),
            (32, 16, 16),
            {"forward": 9 * 64 / 18**2, "dx": 9 * 64 / 20**2, "dweight": 9 * 64 / 18**2},
        ),
    ],
)
def test_products_after_winograd(layer, shape, expected):
    net = dl.Network([dl.ReLU(), layer], shape)
    by_name = {case.name: case for case in passes.layer_cases(net, net.layers[1], "conv", 32)}
    for name, factor in expected.items():
        case = by_name[name]
        assert case.flops / case.products == pytest.approx(factor), name
    total = by_name["dx"].products + by_name["dweight"].products
    assert by_name["fused backward"].products == total


@needs_kernels
def test_without_winograd_all_products_count():
    net = dl.Network([dl.ReLU(), dl.Conv2D(3, 32, padding=1)], (32, 8, 8))
    dl.configure(winograd="off")
    try:
        for case in passes.layer_cases(net, net.layers[1], "conv", 16):
            assert case.products == case.flops
    finally:
        dl.configure(winograd="auto")


def test_passes_of_a_step():
    """Fused normalizations, ReLUs and additions must have no separate passes."""
    in_step = roofline.step_passes(zoo.digits())
    assert in_step["conv1"] == {"forward", "dx", "dweight"}  # dx has no Case for the first layer
    assert in_step["conv2"] == {"fused forward", "fused backward"}
    assert in_step["batchnorm2"] == in_step["relu2"] == set()
    assert in_step["dense1"] == {"forward", "backward"}
    in_step = roofline.step_passes(zoo.alexnet())
    assert in_step["conv2"] == {"forward", "dx", "dweight"} and not in_step["norm2"]
    assert in_step["pool2"] == {"fused forward", "fused dx"}
    assert in_step["pool5"] == {"forward", "dx"}
    in_step = roofline.step_passes(zoo.resnet((3, 8, 8)))
    assert in_step["block1_conv2"] == {"fused forward", "fused backward"}
    assert in_step["block1_norm2"] == in_step["block1_relu2"] == set()
    assert in_step["block1_add"] == {"forward", "dx"}
    in_step = roofline.step_passes(dl.Network([dl.BatchNorm(), dl.Dense(2)], (3, 8, 8)))
    assert in_step["batchnorm1"] == {"statistics", "forward", "sums", "dx"}


LAYERS = [
    *(dl.Conv2D(3, 8, padding=1, bias=False), dl.ReLU(), dl.CrossChannelNorm(5)),
    *(dl.MaxPool2D(3, 2), dl.BatchNorm(), dl.ReLU(name="a"), dl.Conv2D(1, 8, name="b")),
    *(dl.Add(inputs=("a", "b")), dl.AveragePool2D(2), dl.GlobalAveragePool2D()),
    *(dl.Dropout(), dl.Dense(10)),
]


@needs_kernels
def test_every_layer_has_passes_that_run():
    """Each layer that computes something in a step must also run separately."""
    net = dl.Network(LAYERS, (3, 13, 13))
    in_step = roofline.step_passes(net)
    for layer in net.layers:
        cases = {c.name: c for c in passes.layer_cases(net, layer, layer.name, 16)}
        assert bool(cases) == (type(layer) is not dl.Dropout)
        missing = in_step[layer.name] - set(cases)
        assert missing <= {"dx"} or not cases  # additions and first layers lack dx
        for case in cases.values():
            case.run()


def rows_of(times):
    floor = floors.Floor(0.001, 0.002)
    groups = ("convolution, forward", "convolution, backward", "pooling")
    names = ("fused forward", "dx", "forward")
    parts = zip(groups, names, times, strict=True)
    return [roofline.Row(i, "a&b", n, g, i, s, floor) for i, (g, n, s) in enumerate(parts)]


def test_sums_count_the_passes_of_a_step():
    rows = rows_of([0.004, 0.010, 0.004])  # times of layers 0, 1 and 2
    sums = {name: cells for name, *cells in roofline.sums_of(rows, 0.025)}
    assert sums["convolution, backward"] == ["10.0", "2.000", "20%"]
    assert sums["pooling"] == ["8.000", "4.000", "50%"]
    assert sums["sum"] == ["18.0", "6.000", "33%"]
    assert sums["training step"] == ["25.0", "6.000", "24%"]
    assert "convolution, forward" not in sums


def test_the_page_shows_every_pass():
    rows = rows_of([0.004, 0.010, 0.004])
    sections = roofline.page_sections("digits, batch 128", rows, roofline.sums_of(rows, 0.025))
    record = {"cpu": "<CPU>", "arithmetic": "C kernels", "threads": 1}
    text = roofline.render(record, "peak 100 GFLOP/s", sections).decode()
    assert "&lt;CPU&gt;, C kernels, 1 thread(s); peak 100 GFLOP/s." in text
    assert text.count(" a&amp;b<") == 3 and "<circle" in text and ">layer</text>" in text
    points = [cell for cell in text.split("<title>") if cell.startswith("pooling, layer 2: 50")]
    assert len(points) == 1


def test_settings():
    options = arguments.parse("roofline --settings digits:32,a/net.py:make:16".split())
    assert options.settings == [("digits", 32), ("a/net.py:make", 16)]
    with pytest.raises(UserError, match="--settings must be NETWORK:BATCH"):
        arguments.parse("roofline --settings digits".split())


@needs_kernels
def test_a_small_network_is_measured(tmp_path, monkeypatch, capsys):
    """Lower time bounds must follow from the counts and the peak. Every pass must have a time."""
    layers = [
        *(dl.Conv2D(3, 16, padding=1), dl.BatchNorm(), dl.ReLU(), dl.MaxPool2D(2)),
        *(dl.Conv2D(3, 16, padding=1), dl.BatchNorm(), dl.ReLU(), dl.Dense(10)),
    ]
    monkeypatch.setattr(
        roofline.subject, "network", lambda *_, **__: dl.Network(layers, (3, 8, 8), seed=0)
    )
    monkeypatch.setattr(roofline.kernels, "ENOUGH", 1e-4)
    page = tmp_path / "page.html"
    options = arguments.parse(f"roofline --settings net:16 --rounds 1 --page {page}".split())
    options.busy = 0.0
    record = roofline.main(options)
    figures = record["networks"]["net, batch 16"]
    by_pass = {(row["layer"], row["name"]): row for row in figures["passes"]}
    conv = by_pass["conv2", "fused backward"]
    products = 2 * 2 * 36 * 16 * 16 * 16  # one tile of 4 x 4 outputs in each of two passes
    assert conv["count"] == 1
    assert conv["floor"]["products"] == pytest.approx(products / record["peak_gflops"] / 1e9)
    assert by_pass["optimizer", "update"]["floor"]["products"] == 0
    assert by_pass["maxpool1", "dx"]["count"] == by_pass["dense1", "backward"]["count"] == 1
    assert ("conv1", "dx") not in by_pass and ("conv1", "fused forward") not in by_pass
    assert all(row["seconds"] > 0 for row in by_pass.values()) and figures["step_seconds"] > 0
    assert np.isfinite(math.fsum(row["floor"]["bytes"] for row in by_pass.values()))
    assert "training step" in capsys.readouterr().out and page.stat().st_size > 3000
