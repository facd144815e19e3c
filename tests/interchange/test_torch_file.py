"""Test reading PyTorch's files: both formats, tables in other tables, and no execution of code."""

import os
import pickle
import zipfile

import numpy as np
import pytest
import torch_files
from image_sets import refusal

import mpidl as dl
from mpidl.interchange import network_files, torch_file
from mpidl.training.files.model_file import weights_sha256


def network(seed=0):
    layers = [dl.Conv2D(3, 4, name="conv"), dl.BatchNorm(name="norm"), dl.Dense(3, name="fc")]
    return dl.Network(layers, (2, 6, 5), seed=seed)


def arrays_of(net):
    arrays = net.parameters | net.state
    names = {"norm.gamma": "norm.weight", "norm.beta": "norm.bias"}
    names |= {"norm.mean": "norm.running_mean", "norm.variance": "norm.running_var"}
    renamed = {names.get(name, name): array for name, array in arrays.items()}
    return renamed | {"norm.num_batches_tracked": np.array(7)}


@pytest.mark.parametrize("is_old", [False, True])
def test_weights_of_both_formats(tmp_path, is_old):
    net = network(seed=1)
    path = torch_files.save(torch_files.tensors(arrays_of(net)), tmp_path / "a.pth", is_old)
    arrays = torch_file.read(path)
    assert {k: (a.dtype, a.shape) for k, a in arrays.items()} == {
        k: (a.dtype, a.shape) for k, a in arrays_of(net).items()
    }
    loaded = dl.load_weights(network(), path, names="torchvision")
    assert weights_sha256(loaded) == weights_sha256(net) != weights_sha256(network())
    assert "--network NAME" in refusal(network_files.load, path)


def test_tables_in_other_tables(tmp_path):
    """A checkpoint has other facts beside the weights; DistributedDataParallel adds a prefix."""
    weights = torch_files.tensors({f"module.{k}": a for k, a in arrays_of(network(1)).items()})
    facts = {"epoch": 3, "state_dict": weights, "best": 0.5, "names": ["a", ("b", None, True)]}
    path = torch_files.save(facts, tmp_path / "a.ckpt")
    loaded = dl.load_weights(network(), path, names="torchvision")
    assert weights_sha256(loaded) == weights_sha256(network(1))


def test_strides_and_types(tmp_path):
    transposed = np.arange(12, dtype=np.float32).reshape(3, 4).T
    arrays = {"a": transposed, "b": np.arange(5.0), "c": np.array(True)}
    arrays |= {"d": np.arange(3, dtype=np.float16)}
    read = torch_file.read(torch_files.save(torch_files.tensors(arrays), tmp_path / "a.pt"))
    for name, array in arrays.items():
        assert read[name].dtype == array.dtype and np.array_equal(read[name], array)


class Attack:
    """A value whose pickle runs a command when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("is_old", [False, True])
def test_no_code_runs(tmp_path, is_old):
    marker = tmp_path / "marker"
    weights = torch_files.tensors(arrays_of(network(1)))
    path = torch_files.save({"model": weights, "x": Attack(marker)}, tmp_path / "a.pth", is_old)
    assert len(torch_file.read(path)) == len(weights) and not marker.exists()
    (tmp_path / "b.pth").write_bytes(pickle.dumps({"w": Attack(marker)}))
    refusal(torch_file.read, tmp_path / "b.pth")
    assert not marker.exists()
    # A negative control: Python's reader runs the command.
    pickle.loads(pickle.dumps(Attack(marker)))
    assert marker.exists()


def test_files_without_tensors(tmp_path):
    def text(name):
        return refusal(torch_file.read, tmp_path / name)

    torch_files.save({"epoch": 3}, tmp_path / "a.pth")
    assert text("a.pth").endswith("it has no dictionary of tensors (state_dict)")
    assert text("none.pth").endswith("none.pth: no such file")
    (tmp_path / "b.pth").write_bytes(b"\x80\x02")
    assert "b.pth: not a file with the tensors of a PyTorch module: " in text("b.pth")
    with zipfile.ZipFile(tmp_path / "c.pth", "w") as archive:
        archive.writestr("a.txt", "text")
    assert "not a file with the tensors" in text("c.pth")


def test_tensors_outside_their_storages(tmp_path):
    storage = torch_files.Storage("0", np.zeros(6, np.float32))
    for offset, shape, strides in (
        (0, (7,), (1,)),
        (5, (2,), (1,)),
        (0, (2, 3), (4, 1)),
        (-1, (2,), (1,)),
        (0, (-2,), (1,)),
        (0, (2,), (-1,)),
        (0, (1 << 40,), (0,)),
        (0, (2, 3), (1,)),
    ):
        tensor = torch_files.Tensor(storage, offset, shape, strides)
        path = torch_files.save({"w": tensor}, tmp_path / "a.pth")
        assert "not a file with the tensors" in refusal(torch_file.read, path)


@pytest.mark.parametrize("is_new", [True, False])
def test_files_of_pytorch(tmp_path, is_new):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    optimizer = torch.optim.Adam(module.parameters())
    values = {"w": torch.randn(4, 6)[1:, ::2].t(), "b": torch.randn(5).bfloat16()}
    state = module.state_dict()
    for value, expected in (
        (state, state),
        ({"model": state, "optimizer": optimizer.state_dict(), "epoch": 1}, state),
        (values, values),
        (dict(module.named_parameters()), dict(module.named_parameters())),
    ):
        torch.save(value, tmp_path / "a.pth", _use_new_zipfile_serialization=is_new)
        arrays = torch_file.read(tmp_path / "a.pth")
        assert arrays.keys() == expected.keys()
        for name, tensor in expected.items():
            wide = tensor.detach().float() if tensor.dtype is torch.bfloat16 else tensor.detach()
            assert np.array_equal(arrays[name], wide.numpy()), name
