"""Test the fast networks of the zoo: tables, recipes, and bytes on any number of ranks."""

import pytest
from short_training import pictures

import mpidl as dl
from mpidl.nn import zoo
from mpidl.training.files.model_file import weights_sha256


def learnables(net):
    return sum(count for *_, count in net.table())


def test_the_fashion_network_is_small():
    net = zoo.fashion()
    assert net.spec() == zoo.cifar_fast((1, 28, 28), filters=32).spec()
    assert learnables(net) == 487_230 <= 500_000
    assert f"{learnables(net):,}" in zoo.fashion.__doc__
    # multiply-adds of whitening, three stages of three convolutions, and dense
    products = 784 * 18 * 9 + 9 * 784 * 18 * 32 + 2 * 9 * 196 * 32 * 32
    products += 9 * 196 * 32 * 64 + 2 * 9 * 49 * 64 * 64
    products += 9 * 49 * 64 * 128 + 2 * 9 * 16 * 128 * 128 + 1280
    assert net.analyze().flops == 2 * products


@pytest.mark.parametrize(
    "shape, options, whitening",
    [((3, 32, 32), {}, (24, 2)), ((1, 28, 28), {"filters": 16}, (18, 3))],
)
def test_the_tables_of_the_fast_residual_network(shape, options, whitening):
    net, filters = zoo.cifar_fast(shape, 7, **options), options.get("filters", 48)
    (outputs, side), convolutions, inputs = whitening, 0, whitening[0]
    for count in (filters, 2 * filters, 4 * filters):
        convolutions += 9 * (inputs + 2 * count) * count + 3 * 2 * count
        inputs = count
    frozen = outputs * (shape[0] * side**2 + 1)
    assert learnables(net) == frozen + convolutions + (inputs + 1) * 7
    trainable = sum(array.size for array in net.trainable.values())
    assert trainable == learnables(net) - frozen
    assert net["whiten"].weight_initializer == "whitening"
    shapes = dict(zip(net.layer_names, net.output_shapes, strict=True))
    assert shapes["stage3_add"] == (4 * filters, 4, 4) and shapes["pool"][1:] == (1, 1)


def test_the_description_of_the_fast_residual_network():
    net = zoo.cifar_fast()
    assert f"{learnables(net):,}" in " ".join(zoo.cifar_fast.__doc__.split())


def test_other_images_and_classes():
    for create in (zoo.fashion, zoo.cifar_fast):
        net = create((2, 17, 30), 3)
        assert net.output_shape == (3,)


def test_the_recipes_have_one_cycle_of_the_rate():
    for name in ("fashion", "cifar-fast"):
        options = dl.TrainingOptions.from_recipe(name)
        assert options.learn_rate_schedule == "cosine" and options.warmup_epochs > 0
        assert options.average == "ema" and options.test_flips == "x"
        assert options.flip_mode == "alternate"


def fast_training(world, name, keywords, out=None, resume=None, **options):
    """Train for two epochs of three mini-batches with the recipe, and return the network."""
    short = {"epochs": 2, "warmup_epochs": 1, "batch_size": 40, "verbose": "off"}
    recipe = dl.TrainingOptions.from_recipe(name, **short, **options)
    net = zoo.NETWORKS[name]((1, 6, 6), 3, seed=1, **keywords)
    dl.train(net, pictures(100), recipe, world=world, out=out, resume=resume)
    return net


@pytest.mark.parametrize(
    "name, keywords",
    [
        ("cifar-fast", {"filters": 4}),
        pytest.param("fashion", {}, marks=pytest.mark.slow("ranks")),
    ],
)
def test_one_training_on_any_number_of_ranks_also_resumed(
    world, tmp_path, without_plots, name, keywords
):
    mpi = pytest.importorskip("mpi4py.MPI")
    single = fast_training(dl.World(mpi.COMM_SELF, threads=1), name, keywords)
    out = world.broadcast(str(tmp_path))
    fast_training(world, name, keywords, out, max_iterations=4)
    resumed = fast_training(world, name, keywords, resume=out)
    assert weights_sha256(resumed) == weights_sha256(single)
    world.barrier()
