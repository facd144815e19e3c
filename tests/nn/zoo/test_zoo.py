"""Test the networks of the zoo: tables, recipes, bytes on any number of ranks, and the command."""

import json

import numpy as np
import pytest
from image_sets import pixels_of, save
from network_steps import bytes_of, step
from single_rank import SingleRank, blocked

import mpidl as dl
from mpidl.core import keyed
from mpidl.losses import cross_entropy
from mpidl.nn import zoo


def test_the_tables_of_the_cifar_network():
    net = zoo.cifar()
    kinds = [type(layer).__name__ for layer in net.layers]
    triples = ["Conv2D", "BatchNorm", "ReLU"] * 4
    pooled = [*triples, "MaxPool2D"]
    assert kinds == [*pooled, *pooled, *triples, "AveragePool2D", "Dense"]
    assert len(kinds) + 3 == 43  # MATLAB also counts image input, softmax and classification
    rows = net.table()
    assert len(rows) == 12 * 4 + 2 and sum(count for *_, count in rows) == 677_610
    assert rows[0] == ("conv1", "weight", (32, 3, 3, 3), 864)
    assert rows[16] == ("conv5", "weight", (64, 32, 3, 3), 18_432)
    assert rows[32] == ("conv9", "weight", (128, 64, 3, 3), 73_728)
    assert rows[-2:] == [("dense1", "weight", (10, 128), 1280), ("dense1", "bias", (10,), 10)]
    assert len(net.table("state")) == 24
    shapes = [s for s, kind in zip(net.output_shapes, kinds, strict=True) if "Pool" in kind]
    assert shapes == [(32, 16, 16), (64, 8, 8), (128, 1, 1)] and net.output_shape == (10,)


def test_other_images_and_classes():
    assert zoo.cifar((1, 64, 32), 7).output_shapes[-2:] == [(128, 2, 1), (7,)]
    with pytest.raises(ValueError, match=r"averagepool1: windows of \(8, 8\) leave no output"):
        zoo.cifar((1, 28, 28))


def test_the_tables_of_the_residual_network():
    net = zoo.resnet()
    summary = net.analyze(128)
    convolutions = [row for row in summary.rows if row.type == "Conv2D"]
    shortcuts = [row.name for row in convolutions if "shortcut" in row.name]
    assert shortcuts == ["block4_shortcut", "block7_shortcut"]
    assert len(convolutions) - len(shortcuts) + 1 == 20  # the paper counts these layers
    biases = sum(row.output_shape[0] for row in convolutions)
    assert summary.learnables - biases == 272_474  # usual implementations have no biases
    assert summary.learnables == 273_258
    adds = {row.name: row.reads for row in summary.rows if row.type == "Add"}
    assert len(adds) == 9 and adds["block1_add"] == ("block1_norm2", "relu1")
    assert adds["block4_add"] == ("block4_norm2", "block4_shortcut_norm")
    shapes = dict(zip(net.layer_names, net.output_shapes, strict=True))
    assert [shapes[f"block{i}_add"] for i in (3, 6, 9)] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    # multiply-adds: first convolution, 18 convolutions (2 with stride 2), 2 shortcuts, dense layer
    products = 1024 * 16 * 27 + (6 + 5 + 5) * 1024 * 16 * 144 + 2 * 1024 * 16 * 72
    products += 256 * 32 * 16 + 64 * 64 * 32 + 640
    assert summary.flops == 2 * products


def test_the_tables_of_alexnet(monkeypatch):
    """Compute the counts from the shapes, because drawing 61 million weights would take seconds."""
    monkeypatch.setattr(keyed, "uniform", lambda seed, key, count: np.zeros(count, np.float32))
    shape, learnables, products = (3, 227, 227), 0, 0
    layers = zoo.alexnet((3, 67, 67), 2).layers
    names = [layer.name for layer in layers]
    assert names[:8] == "conv1 relu1 norm1 pool1 conv2 relu2 norm2 pool2".split()
    layers[-1].outputs = 1000
    shapes = {}
    for layer in layers:
        built = layer.build(shape)
        products += layer.multiply_adds(shape, built.output_shape)
        learnables += sum(int(np.prod(size)) for size, _ in built.learnables.values())
        shape = shapes[layer.name] = built.output_shape
    assert learnables == 60_965_224 and shape == (1000,)
    assert [shapes[name] for name in ("conv1", "pool1", "pool2", "conv4", "pool5")] == [
        *((96, 55, 55), (96, 27, 27), (256, 13, 13), (384, 13, 13), (256, 6, 6))
    ]
    # the second, fourth and fifth convolutions have two groups, each with half of the channels
    expected = 55**2 * 96 * 363 + 27**2 * 256 * 48 * 25
    expected += 169 * 9 * (384 * 256 + 384 * 192 + 256 * 192)
    assert products == expected + 9216 * 4096 + 4096 * 4096 + 4096 * 1000


SLOW = pytest.mark.slow("ranks")


@pytest.mark.parametrize(
    "name, shape, classes, count",
    [
        ("cifar", (3, 32, 32), 10, 20),
        pytest.param("digits", (1, 28, 28), 10, 37, marks=SLOW),
        pytest.param("resnet", (2, 12, 12), 4, 20, marks=SLOW),
        pytest.param("fashion", (1, 13, 12), 10, 37, marks=SLOW),
        pytest.param("cifar-fast", (3, 9, 12), 4, 20, marks=SLOW),
        pytest.param("alexnet", (3, 67, 67), 4, 20, marks=SLOW),  # 47 MB of weights
    ],
)
def test_one_result_on_any_number_of_ranks(world, name, shape, classes, count):
    net = zoo.NETWORKS[name](shape, classes, 1)
    arrays = pixels_of(0, count, *shape) / np.float32(255), np.arange(count) % classes
    expected, result = (
        step(ranks, net, blocked(ranks, *arrays), cross_entropy) for ranks in (SingleRank(), world)
    )
    assert bytes_of(result) == bytes_of(expected)
    loss, gradients, _ = result
    assert np.isfinite(loss[0]) and all(abs(g).max() > 0 for g in gradients.values())


def test_every_network_has_a_recipe():
    assert set(zoo.NETWORKS) == set(zoo.RECIPES)
    for name in zoo.RECIPES:
        dl.TrainingOptions.from_recipe(name)
    options = dl.TrainingOptions.from_recipe("cifar")
    assert (options.batch_size, options.learning_rate, options.epochs) == (256, 0.1, 50)
    assert (options.momentum, options.l2, options.shuffle) == (0.9, 1e-10, "every-epoch")


@pytest.mark.slow_on_ranks
@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow("jobs")), 3])
def test_the_command_trains_the_cifar_network(world, without_plots, tmp_path, channels):
    from mpidl.cli.train import main

    folder = world.broadcast(str(tmp_path))
    if world.rank == 0:
        for name in ("cat", "dog"):
            for i in range(6):
                save(tmp_path / "data" / name / f"{i}.png", pixels_of((i,), channels, 32, 32))
    world.barrier()
    arguments = f"--network cifar --data {folder}/data --batch-size 6 --max-iterations 2"
    assert main([*arguments.split(), "--out", f"{folder}/out"]) == 0
    world.barrier()
    with open(f"{folder}/out/summary.json") as file:
        assert json.load(file)["iterations"] == 2
    net, description = dl.load_model(f"{folder}/out/model.h5")
    assert net.input_shape == (channels, 32, 32) and description["classes"] == ["cat", "dog"]
    world.barrier()
