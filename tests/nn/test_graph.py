"""Test networks whose layers name their inputs: shapes, errors, gradients, bytes, replacements."""

import json
import weakref

import numpy as np
import pytest
from cpu_builds import needs_kernels
from network_steps import conv_norm_relu, fused_and_separate, in_float64, step, step_bytes
from single_rank import SingleRank, all_images, assert_slopes, blocked, finite_differences, numbers

import mpidl as dl
from mpidl.backends.deferred import DeferredActivation
from mpidl.data.transforms import normalize
from mpidl.data.transforms.preprocess import Preprocess
from mpidl.nn import fusion, graph

SHAPE = (3, 8, 8)


def residual(**conv1_options):
    """Return two residual blocks. The second shortcut is a projection to another size."""
    return [
        *conv_norm_relu(3, 6, padding=1, **conv1_options),
        *(dl.Conv2D(3, 6, padding=1), dl.BatchNorm(), dl.Add(("relu1", "batchnorm2")), dl.ReLU()),
        *conv_norm_relu(3, 9, stride=2, padding=1),
        *(dl.Conv2D(3, 9, padding=1), dl.BatchNorm()),
        dl.Conv2D(1, 9, stride=2, name="shortcut", after="relu2"),
        *(dl.Add(("batchnorm4", "shortcut")), dl.ReLU(), dl.AveragePool2D(4), dl.Dense(4)),
    ]


def branches():
    """Return layers in which a convolution, a pooling and a concatenation read one activation."""
    return [
        *conv_norm_relu(3, 8, padding=1),
        dl.Conv2D(3, 8, padding=1, name="left"),
        dl.MaxPool2D(3, stride=1, padding=1, name="right", after="relu1"),
        dl.Concat(inputs=("left", "relu1", "right")),
        *conv_norm_relu(1, 5),
        dl.Dense(4),
    ]


def batch_of(world, count=37, dtype=np.float32):
    images = numbers("graph images", count, *SHAPE).astype(np.float32)
    return blocked(world, images.astype(dtype), np.arange(count) * 3 % 4)


def network(layers=residual, seed=1):
    return dl.Network(layers(), SHAPE, seed=seed)


def by_hand(p, images):
    """Return the scores of `residual` in training mode, computed by NumPy in float64."""

    def conv(x, name, stride=1, padding=0):
        w, b = p[f"{name}.weight"], p[f"{name}.bias"]
        x = np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
        windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))
        return np.einsum("nchwrs,kcrs->nkhw", windows[:, :, ::stride, ::stride], w) + b.reshape(
            -1, 1, 1
        )

    def norm(x, name):
        mean, variance = x.mean((0, 2, 3), keepdims=True), x.var((0, 2, 3), keepdims=True)
        gamma, beta = (p[f"{name}.{key}"].reshape(-1, 1, 1) for key in ("gamma", "beta"))
        return (x - mean) / np.sqrt(variance + 1e-5) * gamma + beta

    relu1 = np.maximum(norm(conv(images, "conv1", padding=1), "batchnorm1"), 0)
    relu2 = np.maximum(relu1 + norm(conv(relu1, "conv2", padding=1), "batchnorm2"), 0)
    relu3 = np.maximum(norm(conv(relu2, "conv3", stride=2, padding=1), "batchnorm3"), 0)
    add2 = norm(conv(relu3, "conv4", padding=1), "batchnorm4") + conv(relu2, "shortcut", stride=2)
    return np.maximum(add2, 0).mean((2, 3)) @ p["dense1.weight"].T + p["dense1.bias"]


def loss_by_hand(p, images, labels):
    scores = by_hand(p, images)
    scores = scores - scores.max(1, keepdims=True)
    logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return -logs[np.arange(len(labels)), labels].mean()


@pytest.mark.parametrize("elements", [1, pytest.param(3, marks=pytest.mark.slow("ranks"))])
def test_a_residual_network_against_numpy(elements):
    world = SingleRank()
    net = in_float64(network(seed=3))
    images, labels = batch_of(world, dtype=np.float64)
    loss, gradients, _ = step(world, net, (images, labels))
    arrays = all_images(world, images), all_images(world, labels)
    np.testing.assert_allclose(loss, loss_by_hand(net.parameters, *arrays), rtol=1e-12)
    scores = all_images(world, net.bind(net.parameters)(images))
    np.testing.assert_allclose(scores, by_hand(net.parameters, arrays[0]), rtol=1e-10, atol=1e-12)
    differences = finite_differences(
        lambda p: loss_by_hand(p, *arrays), net.parameters, step=1e-6, max_elements=elements
    )
    # biases before a batch normalization have gradient 0, which `assert_slopes` compares with 1e-3
    assert_slopes(gradients, differences, tolerance=2e-6)


def test_gradients_of_a_residual_network_against_pytorch(world):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    functional = torch.nn.functional
    net, (images, labels) = network(seed=3), batch_of(world)
    _, gradients, _ = step(world, net, (images, labels))
    p = {k: torch.tensor(v, dtype=torch.float64) for k, v in net.parameters.items()}
    p = {k: v.requires_grad_() for k, v in p.items()}

    def conv(x, name, **options):
        return functional.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"], **options)

    def norm(x, name):
        gamma, beta = p[f"{name}.gamma"], p[f"{name}.beta"]
        return functional.batch_norm(x, None, None, gamma, beta, training=True, eps=1e-5)

    x = torch.tensor(all_images(world, images), dtype=torch.float64)
    relu1 = norm(conv(x, "conv1", padding=1), "batchnorm1").relu()
    relu2 = (relu1 + norm(conv(relu1, "conv2", padding=1), "batchnorm2")).relu()
    relu3 = norm(conv(relu2, "conv3", stride=2, padding=1), "batchnorm3").relu()
    add2 = norm(conv(relu3, "conv4", padding=1), "batchnorm4") + conv(relu2, "shortcut", stride=2)
    scores = functional.linear(add2.relu().mean((2, 3)), p["dense1.weight"], p["dense1.bias"])
    functional.cross_entropy(scores, torch.tensor(all_images(world, labels).astype(int))).backward()
    for name, gradient in gradients.items():
        expected = p[name].grad.numpy()
        size = max(abs(expected).max(), 1e-2)
        assert abs(gradient - expected).max() / size < 1e-5, name


each_network = pytest.mark.parametrize("layers", [residual, branches], ids=lambda f: f.__name__)


@each_network
def test_one_result_on_any_number_of_ranks(world, layers):
    expected, result = (
        step_bytes(ranks, network(layers), batch_of(ranks)) for ranks in (SingleRank(), world)
    )
    assert result == expected


@needs_kernels
@pytest.mark.parametrize("count", [37, 16, 3])
@each_network
def test_fused_layers_have_the_bytes_of_the_separate_ones(world, layers, count):
    batch = batch_of(world, count)
    fused, separate = fused_and_separate(lambda: network(layers))
    assert step_bytes(world, fused, batch) == step_bytes(world, separate, batch)
    assert fused(batch[0]).local().tobytes() == separate(batch[0]).local().tobytes()


def fused_runs(layers):
    net = dl.Network(layers, SHAPE)
    return [run for run in fusion.find_runs(net.layers, net.reads) if len(run) > 1]


def test_which_layers_fuse():
    pairs = [(3, 4), (5, 6), (10, 11)]  # convolution and normalization, or addition and ReLU
    assert fused_runs(residual()) == sorted([(0, 1, 2), (7, 8, 9), (12, 13, 14), *pairs])
    assert fused_runs(branches()) == [(0, 1, 2), (6, 7, 8)]
    inner = [  # another layer reads the output of a layer inside the run
        dl.Conv2D(3, 4, padding=1, name="c"),
        dl.BatchNorm(name="b"),
        dl.ReLU(name="r"),
        dl.Add(inputs=("r", "b"), name="a"),
        dl.Conv2D(3, 4, padding=1, name="d"),
        dl.BatchNorm(),
        dl.ReLU(name="s"),
        dl.Add(inputs=("s", "d")),
    ]
    assert fused_runs(inner) == []
    aside = [dl.Conv2D(1, 3), dl.BatchNorm(name="norm"), dl.ReLU(after="conv1")]
    # the ReLU follows the normalization in the list, but does not read its output
    assert fused_runs([*aside, dl.Add(("relu1", "norm"))]) == []


@needs_kernels
def test_a_fused_activation_with_several_readers_stays_deferred(world):
    inputs = []

    class Reader(dl.Flatten):
        def forward(self, x, context):
            inputs.append(x)
            return super().forward(x, context)

    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.ReLU(), Reader(name="a")]
    layers += [Reader(name="b", after="relu1"), dl.Add(inputs=("a", "b"))]
    dl.Network(layers, SHAPE)(batch_of(world)[0])
    assert len(inputs) == 2 and inputs[0] is inputs[1]
    assert isinstance(inputs[0], DeferredActivation)


def test_a_plain_list_is_a_graph_of_single_steps():
    net = dl.nn.zoo.digits()
    assert net.reads == [(name,) for name in ["images", *net.layer_names[:-1]]]
    specs = [layer.spec() for layer in net.layers]
    for spec, (read_name,) in zip(specs, net.reads, strict=True):
        spec["after"] = read_name
    rebuilt = dl.Network.from_spec(specs, net.input_shape)
    assert rebuilt.reads == net.reads and rebuilt.output_shapes == net.output_shapes


def test_the_images_have_many_readers(world):
    layers = [
        dl.ReLU(),
        dl.Conv2D(1, 3, name="c", after="images"),
        dl.Add(("relu1", "c", "images")),
    ]
    net, (images, _) = dl.Network(layers, SHAPE), batch_of(world)
    x = images.local()
    expected = np.maximum(x, 0) + dl.conv2d(images, *net.parameters.values()).local() + x
    assert net(images).local().tobytes() == expected.tobytes()


def test_outputs_live_until_their_last_reader(world):
    alive_counts, references = [], []

    class Watch(dl.Layer):
        """A layer that counts the outputs of earlier layers that are still in memory."""

        def forward(self, x, context):
            alive_counts.append(sum(ref() is not None for ref in references))
            lanes = (x[0] if isinstance(x, tuple) else x).lanes + 1
            references.append(weakref.ref(lanes))
            return images.like(lanes)

    class Both(Watch):
        inputs = ("a", "c")

        def build(self, shapes):
            return dl.Built(shapes[0])

    layers = [Watch() for _ in range(6)]
    layers.insert(3, Both())
    for layer, name in zip(layers, "abcdefg", strict=True):
        layer.name = name
    images, _ = batch_of(world)
    dl.Network(layers, SHAPE)(images)
    # a and b are in memory while c is computed, a and c while d is computed, then one output
    assert alive_counts == [0, 1, 2, 2, 1, 1, 1]


ERRORS = {
    "unknown": ([dl.ReLU(after="conv")], "relu1: reads 'conv', and no layer has that name"),
    "near": ([dl.ReLU(name="first"), dl.ReLU(after="frist")], "did you mean first"),
    "later": ([dl.ReLU(name="a", after="b"), dl.ReLU(name="b")], "a: reads b, which comes later"),
    "itself": ([dl.ReLU(name="a", after="a")], "a: it cannot read its own output"),
    "unread": (
        [dl.ReLU(name="a"), dl.Dense(3, name="b"), dl.ReLU(name="c", after="a")],
        "b: no layer reads its output",
    ),
    "one input": ([dl.ReLU(name="a"), dl.Add(inputs=("a",))], "names of two or more inputs"),
    "a text": ([dl.ReLU(name="a"), dl.Add(inputs="ab")], "two or more inputs, got 'ab'"),
    "no inputs": ([dl.ReLU(name="a"), dl.Add()], "add1: expected the names of two or more inputs"),
    "both": (
        [dl.ReLU(name="a"), dl.Add(inputs=("a", "images"), after="a")],
        "add1: a layer with `inputs` cannot also have `after`",
    ),
    "shapes": (
        [dl.Conv2D(3, 4, name="c"), dl.Add(inputs=("c", "images"))],
        r"add1: .*\(add1 reads c: 4x6x6, images: 3x8x8\)",
    ),
    "one shape": ([dl.Dense(3, name="d"), dl.Conv2D(3, 4)], r"conv1: .*\(conv1 reads d: 3\)"),
    "the images": ([dl.ReLU(name="images")], "no layer can have that name"),
    "factor": ([dl.Dense(3, weight_l2_factor=-1.0)], "dense1: factors .* got -1.0 for weight"),
    "infinite": ([dl.Dense(3, bias_learn_rate_factor=np.inf)], "got inf for bias"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_building_a_network_that_does_not_fit_raises(case):
    layers, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        dl.Network(layers, SHAPE)


def test_a_description_keeps_the_graph(tmp_path, world):
    net = dl.Network(residual(weight_learn_rate_factor=2.0), SHAPE, seed=2).freeze("conv3")
    rebuilt = dl.Network.from_spec(json.loads(json.dumps(net.spec())), SHAPE, seed=2)
    assert rebuilt.layers == net.layers and rebuilt.reads == net.reads
    assert not rebuilt["conv3"].trainable and rebuilt["conv1"].weight_learn_rate_factor == 2
    path = tmp_path / "model.h5"
    dl.save_model(path, net, ["a", "b", "c", "d"], "none")
    loaded, _ = dl.load_model(path)
    assert loaded.reads == net.reads and loaded.layers == net.layers
    images, _ = batch_of(world)
    assert loaded(images).local().tobytes() == net(images).local().tobytes()


def test_a_description_leaves_out_default_inputs_and_factors():
    spec = dl.Network([dl.Conv2D(3, 4), dl.BatchNorm()], SHAPE).spec()
    keys = "type name size filters stride padding dilation groups"
    assert list(spec[0]) == keys.split()
    assert list(spec[1]) == ["type", "name", "epsilon", "decay"]


def test_named_access():
    net = network()
    assert net["conv2"] is net.layers[3] and net.layer_names[5] == "add1"
    with pytest.raises(KeyError, match="no layer conv22: did you mean conv2"):
        net["conv22"]
    last = net.layer_names[-1]
    with pytest.raises(KeyError, match=f"no layer fc8: the last layers are .*{last}"):
        net["fc8"]


@pytest.mark.parametrize("replacement", [[dl.Dense(3), dl.ReLU()], None, dl.Dense])
def test_one_layer_replaces_one(replacement):
    with pytest.raises(TypeError, match="replace_layers: expected one layer for conv2, got "):
        network().replace_layers({"conv2": replacement})


def test_replacing_a_layer_keeps_all_others(world):
    net = network(seed=4)
    _, gradients, net.state = step(world, net, batch_of(world))
    net.parameters = dl.SGDM(0.1)(net.parameters, gradients)
    other = net.replace_layers({"dense1": dl.Dense(7, weight_learn_rate_factor=20.0)}, seed=9)
    assert other.output_shape == (7,) and other.layer_names == net.layer_names
    for table in ("parameters", "state"):
        old, new = getattr(net, table), getattr(other, table)
        for name in old:
            is_same = old[name].tobytes() == new[name].tobytes()
            assert is_same == (not name.startswith("dense1."))
            assert new[name] is not old[name]
    fresh = dl.Network(residual()[:-1] + [dl.Dense(7, name="dense1")], SHAPE, seed=9).parameters
    assert other.parameters["dense1.weight"].tobytes() == fresh["dense1.weight"].tobytes()
    assert other["dense1"].weight_learn_rate_factor == 20 and net.output_shape == (4,)


def test_a_network_with_replaced_layers_keeps_its_input_pipeline():
    net = dl.Network([dl.Conv2D(3, 2), dl.Dense(2)], (1, 4, 4))
    images = dl.ArrayDatastore(np.zeros((3, 1, 4, 4), np.uint8))
    net.normalization = normalize.normalization("rescale-symmetric", images)
    net.crop, net.preprocess = (4, 4), Preprocess(colour="gray")
    other = net.replace_layers({"dense1": dl.Dense(3)})
    for name in ("normalization", "crop", "preprocess"):
        assert getattr(other, name) is getattr(net, name) is not None


def test_a_replaced_layer_is_read_by_its_new_name():
    net = network()
    other = net.replace_layers(
        {"relu1": dl.Tanh(name="bend"), "shortcut": dl.Conv2D(2, 9, stride=2)}
    )
    assert other.reads[other.layer_names.index("add1")] == ("bend", "batchnorm2")
    assert other.reads[other.layer_names.index("conv2")] == ("bend",)
    assert other.reads[other.layer_names.index("shortcut")] == ("relu2",)
    assert other.output_shape == net.output_shape


def test_a_replaced_sum_takes_the_inputs_of_the_old_one():
    net = network()
    other = net.replace_layers({"add2": dl.Concat(), "dense1": dl.Dense(4)})
    last = other.layer_names.index("add2")
    assert other.reads[last] == net.reads[last] == ("batchnorm4", "shortcut")
    assert other.output_shapes[last] == (18, 4, 4)
    reordered = net.replace_layers({"add2": dl.Add(inputs=("shortcut", "batchnorm4"))})
    assert reordered.reads[last] == ("shortcut", "batchnorm4")
    with pytest.raises(ValueError, match="relu1: expected the names of two or more inputs"):
        net.replace_layers({"relu1": dl.Add()})


def test_impossible_replacements_are_refused():
    net = network()
    with pytest.raises(KeyError, match="no layer dense2: did you mean dense1"):
        net.replace_layers({"dense2": dl.Dense(2)})
    with pytest.raises(ValueError, match=r"dense1.weight has shape \(4, 9\), but needs \(4, 36\)"):
        net.replace_layers({"averagepool1": dl.AveragePool2D(2)})
    with pytest.raises(ValueError, match="add2 reads batchnorm4: 5x4x4, shortcut: 9x4x4"):
        net.replace_layers({"conv4": dl.Conv2D(3, 5, padding=1)})


def test_last_readers():
    net = network()
    reads = graph.edges(net.layers)
    last_reads = graph.last_readers(reads, [(i,) for i in range(len(net.layers))])
    assert last_reads[net.layer_names.index("add1")] == ["relu1", "batchnorm2"]
    assert sum(last_reads, []).count("relu2") == 1 and "relu2" in last_reads[12]
