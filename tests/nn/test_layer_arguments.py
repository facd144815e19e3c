"""Test that layers explain arguments in the order, or with the names, of other libraries."""

import pickle
from dataclasses import dataclass, field

import pytest

import mpidl as dl


@dataclass
class Pick(dl.Layer):
    """A layer that declares `name` again, as well as arguments of its own."""

    kind: str = "tanh"
    name: str | None = None


@dataclass
class Bent(Pick):
    name: str | None = field(default="bent")
    angle: int = 0


EXPLAINED = {
    "channels first, as in PyTorch": (
        lambda: dl.Conv2D(3, 32, 3),
        r"Conv2D\(3, 32, 3\): expected Conv2D\(size, filters\), .* stride=, padding=, .*; "
        "the network infers the shape of the input",
    ),
    "channels first": (lambda: dl.TransposedConv2D(3, 32, 3), r"expected \w+\(size, filters\), "),
    "filters first, as in Keras": (
        lambda: dl.Conv2D(32, 3),
        r"Conv2D\(32, 3\): expected Conv2D\(size, filters\), .* write Conv2D\(3, 32\), or size=",
    ),
    "the size as a pair": (lambda: dl.Conv2D(32, (3, 3)), r"write Conv2D\(\(3, 3\), 32\)"),
    "LeNet": (lambda: dl.Conv2D(6, 5), r"write Conv2D\(5, 6\)"),
    "with a stride": (lambda: dl.Conv2D(64, 5, stride=2), r"write Conv2D\(5, 64\)"),
    "transposed": (lambda: dl.TransposedConv2D(32, 3, stride=2), r"write TransposedConv2D\(3, 32"),
    "inputs, outputs": (lambda: dl.Dense(512, 10), r"expected Dense\(outputs\), .* infers the"),
    "an activation": (lambda: dl.Dense(8, "relu"), "an activation is a layer, such as dl.ReLU"),
    "channels": (lambda: dl.BatchNorm(64), r"BatchNorm\(\), .* epsilon=, decay=\)"),
    "slopes": (lambda: dl.PReLU(64), r"expected PReLU\(\), .* shared=, initial=\)"),
    "in place": (lambda: dl.ReLU(True), r"ReLU\(True\): expected ReLU\(\), "),
    "dim": (lambda: dl.Softmax(1), r"Softmax\(1\): expected Softmax\(\), "),
    "dilation": (lambda: dl.MaxPool2D(2, 2, 0, 1), r"expected MaxPool2D\(size, stride, padding\)"),
    "two names": (lambda: dl.Add("a", "b"), r"expected Add\(inputs\), .* one tuple of names"),
    "kernel_size": (lambda: dl.Conv2D(kernel_size=3, filters=4), "did you mean size"),
    "out_channels": (lambda: dl.Conv2D(3, out_channels=4), "did you mean filters"),
    "in_channels": (lambda: dl.Conv2D(3, 4, in_channels=1), "network infers the shape"),
    "NumChannels": (lambda: dl.Conv2D(3, 4, NumChannels=1), "network infers the shape"),
    "strides": (lambda: dl.Conv2D(3, 4, strides=2), "did you mean stride"),
    "use_bias": (lambda: dl.Dense(3, use_bias=False), "did you mean bias"),
    "units": (lambda: dl.Dense(units=3), "did you mean outputs"),
    "activation": (lambda: dl.Dense(3, activation="relu"), "is a layer, such as dl.ReLU"),
    "momentum": (lambda: dl.BatchNorm(momentum=0.9), "decay= is the weight of a mini-batch"),
    "momentum of Adam": (lambda: dl.Adam(momentum=0.9), "did you mean gradient_decay_factor"),
    "learningRate": (lambda: dl.SGDM(learningRate=0.1), "did you mean learning_rate"),
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_arguments_of_other_libraries_are_explained(case):
    create, text = EXPLAINED[case]
    with pytest.raises((TypeError, ValueError), match=text) as raised:
        create()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ([dl.Conv2D(3, 1)], (3, 8, 8)),  # a map of scores
        ([dl.Conv2D(9, 3, padding="same")], (3, 32, 32)),  # SRCNN's last layer in colour
        ([dl.Conv2D(11, 96, stride=4)], (3, 227, 227)),  # AlexNet
        ([dl.Conv2D(28, 10)], (1, 28, 28)),  # a classifier without a dense layer
        ([dl.Conv2D(4, 1)], (8, 4, 4)),  # a discriminator's last layer
        ([dl.Conv2D(31, 64, padding="same", groups=64)], (64, 32, 32)),  # large depthwise filters
        ([dl.Conv2D(16, 3, stride=16)], (3, 32, 32)),  # patches
        ([dl.TransposedConv2D(64, 2, stride=32)], (2, 2, 2)),  # upsampling as in FCN-32s
        ([dl.Conv2D((1, 121), 1, padding="same")], (1, 121, 121)),  # separable deconvolution
        ([dl.Conv2D(size=32, filters=3)], (3, 32, 32)),  # what the error suggests
    ],
)
def test_usual_networks_are_accepted(layers, shape):
    net = dl.Network(layers, shape)
    rebuilt = dl.Network.from_spec(net.spec(), shape)  # model files store arguments by name
    assert rebuilt.spec() == net.spec() and rebuilt.output_shape == net.output_shape


def test_a_layer_with_its_own_constructor_checks_its_own_arguments():
    class Shift(dl.Layer):
        def __init__(self, *amounts, **options):
            super().__init__(**options)
            self.amounts = amounts

    shift = Shift(1, 2, name="shift")
    assert shift.amounts == (1, 2) and shift.name == "shift"
    with pytest.raises(TypeError, match="names"):
        Shift(1, names="shift")


def test_a_layer_that_declares_its_name_again_takes_it_by_keyword():
    @dataclass(slots=True)
    class Slotted(dl.Layer):
        name: str | None
        kind: str

    for layer in (Pick("relu"), Bent("relu", 3), Slotted("relu")):
        assert layer.kind == "relu"
    assert (Pick("relu").name, Bent("relu").name, Bent(angle=3).angle) == (None, "bent", 3)
    assert Slotted("relu", name="s").name == Pick(name="s").name == "s"
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments"):
        Pick("relu", "s")
    net = dl.Network([Pick("relu"), Bent("relu", 3)], (1, 4, 4))
    assert net.layer_names == ["pick1", "bent"]
    assert net.spec()[0] == {"type": "Pick", "name": "pick1", "kind": "relu"}
    assert pickle.loads(pickle.dumps(Bent("relu", 3))) == Bent("relu", 3)
    cloudpickle = pytest.importorskip("cloudpickle")
    copied = pickle.loads(cloudpickle.dumps(Slotted))("relu")
    assert (copied.kind, copied.name) == ("relu", None)
