"""Test the names and arrays of PyTorch's recurrent modules."""

import numpy as np
import pytest
import safetensors.numpy
from image_sets import refusal
from onnx_models import scores
from single_rank import numbers

import mpidl as dl
from mpidl.interchange import input_pixels

UNITS = 3
RECURRENT = {"LSTM": dl.LSTM, "GRU": dl.GRU}
SHAPES = ((2, 5, 3), (4, 6, 1), (1, 5, 4))


def network(kind, shape, layers=1, bidirectional=False, bias=True, seed=1):
    """Return a network whose layers have the names of the arrays in PyTorch's module `enc.rnn`."""
    parts, source = [], "images"
    for i in range(layers):
        name = f"enc_rnn_l{i}" if layers > 1 or bidirectional else "enc_rnn"
        options = {"bias": bias, "after": source}
        parts.append(RECURRENT[kind](UNITS, name=name, **options))
        if bidirectional:
            back = f"{name}_reverse"
            parts.append(RECURRENT[kind](UNITS, reverse=True, name=back, **options))
            parts.append(dl.Concat(inputs=(name, back), name=f"both{i}"))
        source = parts[-1].name
    net = dl.Network([*parts, dl.Dense(4, name="fc")], shape, seed=seed)
    net.parameters = {
        name: numbers(f"{seed}{name}", *v.shape, low=-1, high=1, dtype=np.float32)
        for name, v in net.parameters.items()
    }
    return net


def module_of(torch, kind, shape, layers, bidirectional, bias):
    nn = torch.nn

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            options = {"bidirectional": bidirectional, "bias": bias, "batch_first": True}
            features = shape[0] * shape[2]
            self.enc = nn.Module()
            self.enc.rnn = getattr(nn, kind)(features, UNITS, num_layers=layers, **options)
            self.fc = nn.Linear(UNITS * (1 + bidirectional) * shape[1], 4)

        def forward(self, x):
            steps, _ = self.enc.rnn(x.permute(0, 2, 1, 3).flatten(2))
            return self.fc(steps.transpose(1, 2).flatten(1))

    torch.manual_seed(0)
    return Module().eval()


def error_of(torch, net, module):
    images = numbers("images", 4, *net.input_shape, low=-1, high=1, dtype=np.float32)
    expected = module(torch.from_numpy(images)).detach().numpy()
    return abs(scores(net, images) - expected).max() / abs(expected).max()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", RECURRENT)
def test_modules_of_pytorch(tmp_path, kind, bias):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    path, written = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for shape, (layers, bidirectional) in zip(
        SHAPES, ((1, False), (2, False), (2, True)), strict=True
    ):
        arguments = kind, shape, layers, bidirectional, bias
        module = module_of(torch, *arguments)
        arrays = {name: value.numpy() for name, value in module.state_dict().items()}
        safetensors.numpy.save_file(arrays, path)
        torch.save(module.state_dict(), tmp_path / "a.pth")
        for file in (path, tmp_path / "a.pth"):
            net = network(*arguments)
            dl.load_weights(net, file, names="torchvision", normalization="none")
            assert error_of(torch, net, module) <= 1e-5
        dl.save_weights(net, written, names="torchvision")
        other = module_of(torch, *arguments)
        read = safetensors.numpy.load_file(written)
        other.load_state_dict({name: torch.from_numpy(array) for name, array in read.items()})
        assert error_of(torch, net, other) <= 1e-5
        second = network(*arguments, seed=2)
        assert dl.weights_sha256(second) != dl.weights_sha256(net)
        dl.load_weights(second, written, names="torchvision", normalization="none")
        assert dl.weights_sha256(second) == dl.weights_sha256(net)


@pytest.mark.parametrize("kind", RECURRENT)
def test_exchanged_biases(tmp_path, kind):
    """The sum of an LSTM's biases does not depend on their order. The biases of a GRU differ."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    arguments = kind, SHAPES[0], 1, False, True
    module, path = module_of(torch, *arguments), tmp_path / "a.safetensors"
    arrays = {name: value.numpy() for name, value in module.state_dict().items()}
    names = [f"enc.rnn.bias_{part}_l0" for part in ("ih", "hh")]
    arrays[names[0]], arrays[names[1]] = arrays[names[1]], arrays[names[0]]
    safetensors.numpy.save_file(arrays, path)
    net = network(*arguments)
    dl.load_weights(net, path, names="torchvision", normalization="none")
    error = error_of(torch, net, module)
    assert error <= 1e-5 if kind == "LSTM" else error > 1e-3


def torch_arrays(net, path):
    dl.save_weights(net, path, names="torchvision")
    return safetensors.numpy.load_file(path)


def test_the_names_in_a_file(tmp_path):
    net, path = network("LSTM", SHAPES[0]), tmp_path / "a.safetensors"
    arrays, parameters = torch_arrays(net, path), net.parameters
    shapes = {name: array.shape for name, array in arrays.items() if name.startswith("enc.rnn.")}
    assert shapes == {
        "enc.rnn.weight_ih_l0": (12, 6),
        "enc.rnn.weight_hh_l0": (12, 3),
        "enc.rnn.bias_ih_l0": (12,),
        "enc.rnn.bias_hh_l0": (12,),
    }
    assert arrays["enc.rnn.bias_ih_l0"].tobytes() == parameters["enc_rnn.bias"].tobytes()
    assert not arrays["enc.rnn.bias_hh_l0"].any()
    other = network("LSTM", SHAPES[0], seed=2)
    names = {"enc.rnn.weight_ih_l0": "enc_rnn.weight", "enc.rnn.bias_ih_l0": "enc_rnn.bias"}
    names |= {"enc.rnn.weight_hh_l0": "enc_rnn.recurrent_weight", "fc.weight": "fc.weight"}
    names |= {"enc.rnn.bias_hh_l0": "enc_rnn.recurrent_bias", "fc.bias": "fc.bias"}
    dl.load_weights(other, path, names=names)
    assert dl.weights_sha256(other) == dl.weights_sha256(net)


def test_files_that_do_not_fit(tmp_path, monkeypatch):
    # The hint compares the file with all networks of the zoo, which takes seconds.
    monkeypatch.setattr(input_pixels, "zoo_hint", lambda arrays: "")
    net, path = network("LSTM", SHAPES[0]), tmp_path / "a.safetensors"
    before, arrays = dl.weights_sha256(net), torch_arrays(net, path)

    def text_of(changes, target=net):
        changed = {name: v for name, v in (arrays | changes).items() if v is not None}
        safetensors.numpy.save_file(changed, path)
        return refusal(dl.load_weights, target, path, names="torchvision")

    assert text_of({"enc.rnn.bias_hh_l0": None}) == f"{path}: the file lacks enc_rnn.bias"
    assert text_of({"enc.rnn.bias_ih_l0": None}) == f"{path}: the file lacks enc_rnn.bias"
    narrow = np.zeros((12, 5), np.float32)
    assert text_of({"enc.rnn.weight_ih_l0": narrow}) == (
        f"{path}: enc.rnn.weight_ih_l0 is float32 (12, 5), the network has (12, 2, 1, 3)"
    )
    for misfit in (np.zeros(11, np.float32), np.zeros(12, np.int32)):
        kind = f"{misfit.dtype} {misfit.shape}"
        assert text_of({"enc.rnn.bias_hh_l0": misfit}) == (
            f"{path}: enc.rnn.bias_hh_l0 is {kind}, the network has (12,)"
        )
    assert text_of({"enc.rnn.weight_ih_l1": narrow}).endswith(
        "the network lacks enc.rnn.weight_ih_l1"
    )
    assert "the network lacks" in text_of({}, network("LSTM", SHAPES[0], bias=False))
    assert "the network has (9, 2, 1, 3)" in text_of({}, network("GRU", SHAPES[0]))
    assert dl.weights_sha256(net) == before


def test_names_of_mpidl_have_one_bias(tmp_path):
    """A second bias is an error in a file with the names of the network."""
    net, path = network("LSTM", SHAPES[0]), tmp_path / "a.safetensors"
    extra = {"enc_rnn.recurrent_bias": net.parameters["enc_rnn.bias"]}
    safetensors.numpy.save_file(net.parameters | extra, path)
    text = refusal(dl.load_weights, net, path)
    assert text == f"{path}: the network lacks enc_rnn.recurrent_bias"
