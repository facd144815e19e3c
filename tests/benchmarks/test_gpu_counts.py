"""Test `benchmarks gpu --count`: the bytes and products of a recorded step, without a GPU."""

import json

import numpy as np
import pytest

from benchmarks import arguments, subject
from benchmarks.gpu import compiling, counts, floors, launches, resources
from mpidl.backends.gpu import array, kernels, launching, nvrtc, sums
from mpidl.comm import reducer
from mpidl.errors import UserError

SMALL = """
import mpidl as dl

def net(shape, classes):
    return [dl.Conv2D(1, 4), dl.ReLU(), dl.Conv2D(3, 8, stride=2, padding=1), dl.Dense(classes)]
"""


def count(words):
    options = arguments.parse(["gpu", "--count", *words.split()])
    options.busy = 0.0
    return counts.main(options)["counts"]


@pytest.fixture
def device():
    """Compute on a device that gives out addresses only."""
    yield launching.open(compiling.Collector(compiling.Addresses("sm_90", 132)))
    launching.open(None)


def test_the_digits_step(tmp_path, capsys, monkeypatch):
    """The rows sum to the step, whose useful products are the network's multiply-adds."""
    monkeypatch.setattr(nvrtc, "installed", lambda: ())
    files = tmp_path / "counts.json", tmp_path / "page.html"
    step = count(f"digits:128 --page {files[1]}")["digits:128"]
    rows = step["kernels"]
    assert sum(row["launches"] for row in rows) == step["launches"]
    assert step["bytes"] == sum(row["bytes_read"] + row["bytes_written"] for row in rows)
    work = floors.work(subject.network("digits"))
    assert step["products_useful"] == 128 * work.flop / 2
    assert all(row["products_issued"] >= row["products_useful"] for row in rows)
    assert all(row["registers"] is row["occupancy"] is None for row in rows)
    # the forecast includes the time between kernels, and exceeds the floor of fused kernels
    floor = floors.milliseconds(work, 128, floors.GPU_RATES["H100"], "fp32")["floor"]
    assert step["forecast_ms"] > floor + 1e3 * step["launches"] * floors.LAUNCH
    assert "conv_gemm" in capsys.readouterr().out and launching.process.device is None
    text = files[1].read_text()
    assert "digits, batch 128, fp32" in text and "<circle" in text and ">launch</text>" in text


def test_the_products_of_a_small_network(tmp_path, monkeypatch):
    """Useful products must equal a count by hand; the first layer has no input gradient."""
    monkeypatch.setattr(nvrtc, "installed", lambda: ())
    (tmp_path / "net.py").write_text(SMALL)
    name = f"{tmp_path}/net.py:net"
    step = count(f"{name}:32 --image 3x8x8")[f"{name}:32"]
    first, second, dense = 64 * 3 * 4, 16 * 9 * 4 * 8, 10 * 16 * 8
    assert step["products_useful"] == 32 * (2 * first + 3 * second + 3 * dense)
    assert step["products_issued"] >= step["products_useful"]


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=pytest.mark.slow("gpu")), 4])
def test_bytes_that_ranks_send(ranks, monkeypatch, capsys):
    """Each of 4 ranks sends at most twice the gradients, most of them during backward."""
    monkeypatch.setattr(nvrtc, "installed", lambda: ())
    step = count(f"resnet50:{16 * ranks} --ranks {ranks}")[f"resnet50:{16 * ranks}"]
    sent = step["messages"]
    net = subject.network("resnet50")
    gradients = sum(weight.nbytes for weight in net.trainable.values())
    ends = "gamma", "beta"
    vectors = sum(v.nbytes for name, v in net.trainable.items() if name.endswith(ends))
    assert sent["gradient_bytes"] == gradients and sent["ranks"] == ranks
    # the gradients of batch normalizations come from the sums of its backward
    ring = 2 * (ranks - 1) / ranks * (gradients - vectors)
    # all ranks gather the nodes of the last bucket if it is small
    assert ring <= sent["bytes_sent"] <= ring + (ranks - 1) * sums.GATHERED
    assert sent["share_during_backward"] >= 0.8
    # forward sends means and M2 in float64, backward two sums per channel
    assert sent["statistics_bytes_sent"] == pytest.approx(4 * vectors * (ranks - 1), rel=0.01)
    assert f"Each of {ranks} ranks sends" in capsys.readouterr().out


def test_negative_control_one_bucket_is_sent_after_backward(monkeypatch):
    monkeypatch.setattr(nvrtc, "installed", lambda: ())
    monkeypatch.setattr(reducer, "GPU_BUCKET_BYTES", 1 << 40)
    sent = count("resnet18:64 --ranks 4")["resnet18:64"]["messages"]
    assert sent["share_during_backward"] == 0 < sent["bytes_sent"]


def test_registers_come_from_the_compiler():
    if not nvrtc.installed():
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    unit = kernels.Unit("pad")
    entry = resources.compile_all([unit], "sm_90")[unit]["pad2d"]
    assert 8 <= entry["registers"] <= 255 and entry["spills"] == 0


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "expected"),
    [  # blocks of threads limited by threads, registers, shared memory and the number of blocks
        (32, 0, 256, 1.0),
        (65, 0, 256, 3 * 256 / 2048),  # 72 registers per thread: 28 warps, 3 blocks of 8
        (32, 99 << 10, 256, 2 * 256 / 2048),
        (32, 0, 32, 32 * 32 / 2048),
    ],
)
def test_occupancy(registers, shared, threads, expected):
    entry = {"registers": registers, "shared": 0}
    assert resources.occupancy(entry, threads, shared, "sm_90") == expected


def launch_of(name, *values, defines=None):
    return kernels.make(name, 1, 256, values, 0, defines)


def test_bytes_of_arrays(device):
    x = array.empty((1000,))
    y = array.empty((1000,))
    assert launches.bytes_of(launch_of("add_value", x, y, y, 1000)) == (8000, 4000)  # y in place
    assert launches.bytes_of(launch_of("add_value", x, x, y, 1000)) == (4000, 4000)
    vectors = [array.empty((6,)), array.empty((6,), "f8"), array.empty((6,))]
    table = launching.table([[*vectors, 6, 0], [*vectors, 6, 0]])
    assert launches.bytes_of(launch_of("running", table)) == (2 * (24 + 48), 2 * 24)


def test_a_gather_counts_the_images_that_it_gathers(device):
    data = array.empty((1000, 3, 4, 5), np.uint8)
    indices = array.empty((32,), np.int32)
    lanes = array.empty_lanes((2, 3, 4, 5, 16))
    kind, numbers = 0, (3, 4, 5, 4, 5, 0, 32, 32, 1)
    table = launching.table([[data, indices, *7 * (None,), lanes, kind, *numbers]])
    read, written = launches.bytes_of(launch_of("images_gather", table))
    assert (read, written) == (32 * 60 + 32 * 4, 32 * 60 * 4)


def test_options():
    options = arguments.parse("gpu --count digits:32 a/net.py:make:16 --gpu A100".split())
    assert options.count == [("digits", 32), ("a/net.py:make", 16)]
    assert options.gpu == "A100" and options.precision == "fp32"
    with pytest.raises(UserError, match="--count must be NETWORK:BATCH, such as digits:128, found"):
        arguments.parse("gpu --count digits".split())
    with pytest.raises(UserError, match="--gpu must be among H200, H100, A100, found H300"):
        arguments.parse("gpu --count digits:1 --gpu H300".split())
    assert set(floors.MMA) >= {rate.architecture for rate in floors.GPU_RATES.values()}
    assert set(resources.LIMITS) >= {rate.architecture for rate in floors.GPU_RATES.values()}


def test_the_json_file(tmp_path, monkeypatch):
    from benchmarks import main

    monkeypatch.setattr(nvrtc, "installed", lambda: ())
    path = tmp_path / "counts.json"
    main(["gpu", "--count", "digits:16", "--json", str(path)])
    step = json.loads(path.read_text())["counts"]["digits:16"]
    assert set(step) >= {"launches", "bytes", "products_issued", "products_useful", "kernels"}


@pytest.mark.parametrize(
    ("step", "launches", "gigabytes", "ratio"),
    [
        ("digits:128", 34, 1, 2),
        ("cifar:1024", 110, 11, 1.05),
        ("resnet50:256", 420, 150, 1.03),
        ("mobilenet_v2:256", 420, 80, 1.1),
    ],
)
def test_the_work_of_networks_has_limits(monkeypatch, step, launches, gigabytes, ratio):
    """Bounds on the launches, GB, and products issued / useful of float32 steps."""
    monkeypatch.setattr(nvrtc, "installed", lambda: ())
    figures = count(step)[step]
    assert figures["launches"] <= launches and figures["bytes"] <= gigabytes * 1e9
    assert figures["products_useful"] <= figures["products_issued"]
    assert figures["products_issued"] <= ratio * figures["products_useful"]
