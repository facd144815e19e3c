"""The networks by name: their tables, their recipes, and that they train from the command line."""

import json

import numpy as np
import pytest
from image_sets import pixels_of, save
from single_rank import SingleRank, blocked

import mpidl as dl
from mpidl.losses import cross_entropy
from mpidl.nn import zoo


def test_the_tables_of_the_cifar_network():
    net = zoo.cifar()
    kinds = [type(layer).__name__ for layer in net.layers]
    triples = ["Conv2D", "BatchNorm", "ReLU"] * 4
    assert kinds == [
        *triples,
        "MaxPool2D",
        *triples,
        "MaxPool2D",
        *triples,
        "AveragePool2D",
        "Dense",
    ]
    assert len(kinds) + 3 == 43  # MATLAB counts image input, softmax and classification too
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
    with pytest.raises(ValueError, match=r"averagepool1: windows of \(8, 8\) leave nothing"):
        zoo.cifar((1, 28, 28))


def test_the_tables_of_the_residual_network():
    net = zoo.resnet()
    found = net.analyze(128)
    convolutions = [row for row in found.rows if row.type == "Conv2D"]
    shortcuts = [row.name for row in convolutions if "shortcut" in row.name]
    assert shortcuts == ["block4_shortcut", "block7_shortcut"]
    assert len(convolutions) - len(shortcuts) + 1 == 20  # layers as the paper counts them
    biases = sum(row.output_shape[0] for row in convolutions)
    assert found.learnables - biases == 272_474  # of the common count, without biases
    assert found.learnables == 273_258
    adds = {row.name: row.reads for row in found.rows if row.type == "Add"}
    assert len(adds) == 9 and adds["block1_add"] == ("block1_norm2", "relu1")
    assert adds["block4_add"] == ("block4_norm2", "block4_shortcut_norm")
    shapes = dict(zip(net.layer_names, net.output_shapes, strict=True))
    assert [shapes[f"block{i}_add"] for i in (3, 6, 9)] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
    # multiply-adds by hand: the first convolution, 18 of 9 * C * C, 2 halved, 2 shortcuts, dense
    products = 1024 * 16 * 27 + (6 + 5 + 5) * 1024 * 16 * 144 + 2 * 1024 * 16 * 72
    products += 256 * 32 * 16 + 64 * 64 * 32 + 640
    assert found.flops == 2 * products


def test_the_tables_of_alexnet():
    """From the shapes alone: drawing 61 million weights would take seconds."""
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
    # of groups of half the channels in the second, fourth and fifth convolution
    wanted = 55**2 * 96 * 363 + 27**2 * 256 * 48 * 25
    wanted += 169 * 9 * (384 * 256 + 384 * 192 + 256 * 192)
    assert products == wanted + 9216 * 4096 + 4096 * 4096 + 4096 * 1000


ALEXNET = pytest.param("alexnet", (3, 67, 67), marks=pytest.mark.slow("ranks"))  # 47 MB of it


@pytest.mark.parametrize("name, shape", [("resnet", (2, 12, 12)), ALEXNET])
def test_one_result_of_the_larger_networks_on_any_number_of_ranks(world, name, shape):
    net, images = zoo.NETWORKS[name](shape, 4, 1), pixels_of(0, 20, *shape) / np.float32(255)
    arrays, alone = (images, np.arange(20) % 4), SingleRank()
    loss, gradients, state = dl.value_and_grad(cross_entropy)(net, *blocked(alone, *arrays))
    loss, gradients = alone.gplus((loss, gradients))
    found = dl.value_and_grad(cross_entropy, reduce=world)(net, *blocked(world, *arrays))
    assert found[0][0].tobytes() == loss[0].tobytes() and np.isfinite(loss[0])
    for mine, theirs in ((found[1], gradients), (found[2], state)):
        assert all(mine[n].tobytes() == v.tobytes() for n, v in theirs.items())
    assert all(abs(g).max() > 0 for g in gradients.values())


def test_every_network_has_a_recipe():
    assert set(zoo.NETWORKS) == set(zoo.RECIPES)
    for name in zoo.RECIPES:
        dl.TrainingOptions.from_recipe(name)
    options = dl.TrainingOptions.from_recipe("cifar")
    found = options.batch_size, options.learning_rate, options.epochs, options.momentum
    assert found == (256, 0.1, 50, 0.9)
    assert (options.l2, options.shuffle) == (1e-10, "every-epoch")


def test_one_result_of_the_cifar_network_on_any_number_of_ranks(world):
    net, images = zoo.cifar(seed=1), pixels_of(0, 37, 3, 32, 32) / np.float32(255)
    arrays, alone = (images, np.arange(37) % 10), SingleRank()
    loss, gradients, _ = dl.value_and_grad(cross_entropy)(net, *blocked(alone, *arrays))
    loss, gradients = alone.gplus((loss, gradients))
    found = dl.value_and_grad(cross_entropy, reduce=world)(net, *blocked(world, *arrays))
    assert found[0][0].tobytes() == loss[0].tobytes() and np.isfinite(loss[0])
    assert {n: v.tobytes() for n, v in found[1].items()} == {
        n: v.tobytes() for n, v in gradients.items()
    }
    assert all(abs(g).max() > 0 for g in gradients.values())


@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.slow("jobs")), 3])
def test_the_command_trains_the_cifar_network(world, without_plots, tmp_path, channels):
    from mpidl.cli.train import main

    folder = world.broadcast(str(tmp_path))
    if world.rank == 0:
        for name in ("cat", "dog"):
            for i in range(20):
                save(tmp_path / "data" / name / f"{i}.png", pixels_of((i,), channels, 32, 32))
    world.barrier()
    arguments = f"--network cifar --data {folder}/data --batch-size 20 --max-iterations 2"
    assert main([*arguments.split(), "--out", f"{folder}/out"]) == 0
    world.barrier()
    with open(f"{folder}/out/summary.json") as file:
        assert json.load(file)["iterations"] == 2
    net, about = dl.load_model(f"{folder}/out/model.h5")
    assert net.input_shape == (channels, 32, 32) and about["classes"] == ["cat", "dog"]
    world.barrier()
