"""Test GELU layers in networks: specs, model files, memory, freezing, graphs and training."""

import numpy as np
import pytest
from cpu_builds import needs_kernels
from short_training import trained
from single_rank import SingleRank, all_images, blocked, numbers

import mpidl as dl
from mpidl.backends.cpu import arenas

APPROXIMATIONS = pytest.mark.parametrize("approximate", ["none", "tanh"])


def branched(approximate="none"):
    """Return a network in which several layers read the input and the output of a GELU."""
    return dl.Network(
        [
            dl.Conv2D(3, 4, name="scores"),
            dl.GELU(approximate, name="first"),
            dl.GELU(approximate, name="second", after="scores"),
            dl.Add(inputs=("first", "second", "scores"), name="sum"),
            dl.Concat(inputs=("sum", "first")),
            dl.Flatten(),
            dl.GELU(approximate),
            dl.Dense(3),
        ],
        (1, 6, 6),
        seed=1,
    )


def plain():
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.GELU(), dl.Dense(8), dl.GELU("tanh")]
    return dl.Network([*layers, dl.Dense(3)], (1, 6, 6), seed=1)


def images(world, count=21, dtype=np.float32):
    return blocked(world, numbers("images", count, 1, 6, 6, dtype=dtype))


def test_description():
    assert "approximate='tanh'" in repr(dl.GELU("tanh"))
    assert dl.GELU().spec() == {"type": "GELU", "approximate": "none", "name": None}
    rebuilt = dl.Network.from_spec(branched("tanh").spec(), (1, 6, 6), seed=1)
    assert rebuilt.spec() == branched("tanh").spec() and rebuilt["first"].approximate == "tanh"


@APPROXIMATIONS
def test_a_model_file_keeps_it(tmp_path, approximate):
    net = branched(approximate)
    dl.save_model(tmp_path / "model.h5", net, ["a", "b", "c"])
    loaded, _ = dl.load_model(tmp_path / "model.h5")
    assert loaded.spec() == net.spec()
    outputs = [all_images(SingleRank(), n.logits(images(SingleRank()))) for n in (loaded, net)]
    assert outputs[0].tobytes() == outputs[1].tobytes()


@needs_kernels
def test_memory_is_what_a_step_stores(monkeypatch):
    net, count, outputs = plain(), 48, []
    take = arenas.empty
    monkeypatch.setattr(
        arenas, "empty", lambda shape, *a: outputs.append(take(shape, *a)) or outputs[-1]
    )
    x = images(dl.OneRank(), count)
    net.bind({name: dl.Var(v, name=name) for name, v in net.parameters.items()})(x)
    stored = sum(array.nbytes for array in outputs if array.dtype == np.float32 and array.ndim > 1)
    rows = {row.name: row for row in net.analyze(count).rows}
    assert rows["gelu1"].memory == 4 * count * 4 * 4 * 4 and rows["gelu2"].memory == 4 * count * 8
    assert stored == net.analyze(count).memory


@APPROXIMATIONS
def test_fused_or_not_and_frozen(world, approximate):
    """No layer is fused with GELU, and a frozen network has the same outputs."""
    expected = all_images(world, branched(approximate)(images(world))).tobytes()
    separate, frozen = branched(approximate), branched(approximate)
    separate.fuse = False
    frozen.freeze(*frozen.layer_names[:2])
    for net in (separate, frozen):
        assert all_images(world, net(images(world))).tobytes() == expected


@APPROXIMATIONS
def test_gradients_where_several_read_it(world, approximate):
    net = branched(approximate)
    net.fuse = False  # check_vjp also differentiates the images
    x = images(world, dtype=np.float64)
    targets = blocked(world, numbers("targets", 21, 3), batch=x.batch)
    names = list(net.parameters)

    def loss(x, *learnables):
        bound = net.bind(dict(zip(names, learnables, strict=True)))
        return dl.mean_squared_error(bound(x), targets)

    values = [v.astype(np.float64) for v in net.parameters.values()]
    dl.check_vjp(loss, x, *values, tolerance=2e-7)


def one_rank():
    """Return a world that contains only this rank."""
    mpi = pytest.importorskip("mpi4py.MPI", reason="no mpi4py")
    return dl.World(mpi.COMM_SELF, threads=1)


@pytest.mark.parametrize("network", [branched, plain])
def test_training_gives_the_same_bytes_on_any_number_of_ranks(world, network):
    net, _ = trained(world, network())
    expected, _ = trained(one_rank(), network())
    for name, weights in expected.parameters.items():
        assert net.parameters[name].tobytes() == weights.tobytes(), name
    begin = network().parameters
    assert any(not np.array_equal(begin[name], v) for name, v in net.parameters.items())
