"""Compare the totals of `analyze` with known counts, PyTorch and the memory of a training step."""

import numpy as np
import pytest
from cpu_builds import needs_kernels
from network_steps import conv_norm_relu
from single_rank import blocked, numbers

import mpidl as dl
from mpidl.backends.cpu import arenas
from mpidl.cli import info
from mpidl.errors import UserError
from mpidl.nn import zoo


def residual():
    return dl.Network(
        [
            *conv_norm_relu(3, 8, padding=1),
            dl.Conv2D(3, 8, padding=1, groups=4),
            dl.Add(inputs=("relu1", "conv2")),
            dl.Conv2D((1, 3), 6, stride=2, dilation=2, after="add1"),
            dl.Concat(inputs=("conv3", "conv3")),
            dl.TransposedConv2D(3, 4, stride=2),
            dl.Flatten(),
            dl.Dense(5),
        ],
        (2, 20, 16),
    )


def test_the_digits_network():
    summary = dl.analyze(zoo.digits())
    assert summary.learnables == 123_090 and summary.state == 120 and summary.batch_size == 128
    pixels = 24 * 24
    products = [pixels * 20 * 25, pixels * 20 * 20 * 9, pixels * 20 * 20 * 9, 11_520 * 10]
    assert [row.flops for row in summary.rows if row.flops] == [2 * n for n in products]
    assert summary.flops == 2 * sum(products)
    assert summary.memory == 4 * 128 * (3 * 20 * pixels + 10)
    assert summary.rows[0] == (
        *("conv1", "Conv2D", ("images",), (20, 24, 24), 520, 0, 4 * 128 * 20 * pixels),
        *(2 * products[0], True),
    )


def test_the_cifar_network():
    summary = zoo.cifar().analyze(256)
    assert (summary.learnables, summary.state) == (677_610, 2 * 4 * (32 + 64 + 128))
    per_pixel = [(1024, 3, 32), *3 * [(1024, 32, 32)], (256, 32, 64), *3 * [(256, 64, 64)]]
    per_pixel += [(64, 64, 128), *3 * [(64, 128, 128)]]
    assert summary.flops == 2 * (sum(9 * p * c * k for p, c, k in per_pixel) + 128 * 10)
    stored = 4 * (32 * 1024 + 64 * 256 + 128 * 64) + 32 * 256 + 64 * 64 + 128 + 10
    assert summary.memory == 4 * 256 * stored


def test_operations_are_as_many_as_pytorch_counts():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch.utils.flop_counter import FlopCounterMode

    functional = torch.nn.functional
    with FlopCounterMode(display=False) as counter:
        x = functional.conv2d(torch.zeros(1, 2, 20, 16), torch.zeros(8, 2, 3, 3), padding=1)
        functional.conv2d(x, torch.zeros(8, 2, 3, 3), padding=1, groups=4)
        x = functional.conv2d(x, torch.zeros(6, 8, 1, 3), stride=2, dilation=2)
        x = functional.conv_transpose2d(
            torch.cat([x, x], 1), torch.zeros(12, 4, 3, 3), torch.zeros(4), stride=2
        )
        functional.linear(x.flatten(1), torch.zeros(5, x.numel()))
    net = residual()
    assert net.output_shapes[-3] == tuple(x.shape[1:])
    assert net.analyze().flops == counter.get_total_flops()


def test_memory_counts_whole_blocks_of_stored_values():
    net = residual()
    rows = {row.name: row for row in net.analyze(17).rows}
    image = 8 * 20 * 16
    assert rows["conv1"].memory == 4 * 32 * image == rows["add1"].memory
    assert rows["batchnorm1"].memory == rows["relu1"].memory == rows["flatten1"].memory == 0
    net.fuse = False
    rows = {row.name: row for row in net.analyze(16).rows}
    assert rows["batchnorm1"].memory == rows["relu1"].memory == 4 * 16 * image


@needs_kernels
def test_a_step_stores_as_much_as_the_summary_counts(monkeypatch):
    """A forward pass allocates the counted bytes, and one byte per maximum of a pooling layer."""
    layers = []
    for filters in (8, 16):
        layers += [*conv_norm_relu(3, filters, padding=1), dl.MaxPool2D(2)]
    net, count = dl.Network([*layers, dl.Dense(10)], (3, 16, 16)), 48
    arrays, empty = [], arenas.empty
    monkeypatch.setattr(
        arenas, "empty", lambda shape, *a: arrays.append(empty(shape, *a)) or arrays[-1]
    )
    images, _ = blocked(dl.OneRank(), numbers("x", count, 3, 16, 16).astype("f4"), np.arange(count))
    net.bind({name: dl.Var(v, name=name) for name, v in net.parameters.items()})(images)
    stored = sum(array.nbytes for array in arrays if array.dtype == np.float32 and array.ndim > 1)
    assert stored == net.analyze(count).memory


def test_the_text():
    lines = str(residual().freeze("conv2").analyze(32)).splitlines()
    assert lines[0].split() == "layer type reads output learnables state memory MFLOP".split()
    assert lines[1].split() == ["images", "2x20x16"]
    assert lines[5].split()[:4] == ["conv2", "Conv2D", "(frozen)", "8x20x16"]
    assert lines[6].split()[:5] == ["add1", "Add", "relu1,", "conv2", "8x20x16"]
    assert lines[7].split()[:3] == ["conv3", "Conv2D", "6x10x6"]
    assert lines[-2].split()[0] == "total" and "32 images" in lines[-1]
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        residual().analyze(0)


def test_a_chain_without_state_has_no_empty_columns_and_fits_a_terminal():
    lines = str(zoo.alexnet(seed=None).analyze()).splitlines()
    assert lines[0].split() == "layer type output learnables memory MFLOP".split()
    assert max(map(len, lines)) <= 80


def test_the_command(world, capsys):
    assert info.main(["--network", "digits"]) == 0
    output = capsys.readouterr().out
    if world.rank == 0:
        assert "123,090" in output and "16.9 MiB" in output and "128 images" in output
    else:
        assert output == ""
    options = "--network cifar --input-shape 1,32,32 --classes 3 --batch-size 16"
    assert info.main(options.split()) == 0
    if world.rank == 0:
        assert "1x32x32" in capsys.readouterr().out


@pytest.mark.parametrize(
    "line, text",
    [
        ("--network cifer", "did you mean cifar"),
        ("--network a.py:f", "expected --input-shape too, found none"),
        ("--network cifar --input-shape 3,4,4", "leave no output for images"),
        (
            "--network alexnet --input-shape 3,64,64",
            "pool5: .*; it is designed for larger images: train with --resize 227x227",
        ),
    ],
)
@pytest.mark.usefixtures("world")
def test_networks_that_cannot_be_built_are_refused(line, text):
    with pytest.raises(UserError, match=text):
        info.main(line.split())
