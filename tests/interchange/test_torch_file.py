"""Test reading PyTorch's files: both formats, tables in other tables, and no execution of code."""

import io
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
        (0, (1,) * 33, (1,) * 33),
    ):
        tensor = torch_files.Tensor(storage, offset, shape, strides)
        path = torch_files.save({"w": tensor}, tmp_path / "a.pth")
        assert "not a file with the tensors" in refusal(torch_file.read, path)


def archive(path, data):
    """Write an archive with a pickle, and return the path."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", data)
    return path


def doubled(first, instruction):
    """Return instructions that apply `instruction` 60 times to the last value twice."""
    steps = [b"h%ch%c%bq%c" % (i, i, instruction, i + 1) for i in range(60)]
    return first + b"q\x00" + b"".join(steps)


@pytest.mark.parametrize(
    "name, data",
    [
        ("key", doubled(b")", b"\x86") + b"}h\x3cNs."),
        ("function", doubled(b")", b"\x86") + b"h\x3c)R."),
        ("kind", doubled(b")", b"\x86") + b"(U\x07storageh\x3cU\x010NNtQ."),
        ("label", doubled(b")", b"\x86") + b"(h\x3cctorch\nFloatStorage\nU\x010NNtQ."),
        ("storage", doubled(b")", b"\x86") + b"(U\x07storagectorch\nFloatStorage\nh\x3cNNtQ."),
        ("import", doubled(b"U\x01a", b"\x93") + b"."),
    ],
)
def test_values_with_many_references_to_a_value(tmp_path, name, data):
    """A program that prints or copies such a value, of 2**60 parts, does not end."""
    path = archive(tmp_path / f"{name}.pth", b"\x80\x04" + data)
    assert "not a file with the tensors" in refusal(torch_file.read, path)


def test_an_older_file_with_many_references_to_a_value(tmp_path):
    parts = [pickle.dumps(part, 2) for part in (torch_files.MAGIC, torch_files.PROTOCOL, {})]
    parts += [b"\x80\x02" + doubled(b")", b"\x86") + b".", pickle.dumps([], 2)]
    (tmp_path / "a.pth").write_bytes(b"".join(parts))
    assert "no dictionary of tensors" in refusal(torch_file.read, tmp_path / "a.pth")


def test_many_values_take_linear_time(tmp_path):
    data = b"\x80\x02(" + b"N" * 200_000 + b"N\x85" * 200_000 + b"t."
    assert "no dictionary" in refusal(torch_file.read, archive(tmp_path / "a.pth", data))
    short = archive(tmp_path / "b.pth", b"\x80\x02}U\x01w(N\x86s.")  # a pair of one value
    assert "pop from empty list" in refusal(torch_file.read, short)


@pytest.mark.parametrize("count, is_read", [(12, True), (40, False)])
def test_tensors_that_share_a_storage(tmp_path, count, is_read):
    """Tied weights are tensors of the same numbers, but the arrays must not fill the memory."""
    numbers = np.arange(10_000, dtype=np.float32)
    tied = torch_files.Tensor(torch_files.Storage("0", numbers), 0, numbers.shape, (1,))
    path = torch_files.save({f"w{i}": tied for i in range(count)}, tmp_path / "a.pth")
    if is_read:
        assert all(np.array_equal(array, numbers) for array in torch_file.read(path).values())
    else:
        assert refusal(torch_file.read, path).endswith("are much larger than the file")


def test_members_that_overlap(tmp_path):
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as file:
        file.writestr("a/data/1", bytes(10_000))
    archive(tmp_path / "a.pth", b"\x80\x02}.")
    with zipfile.ZipFile(tmp_path / "a.pth", "a") as file:
        file.writestr("a/data/0", inner.getvalue())
        outer, nested = file.getinfo("a/data/0"), zipfile.ZipFile(inner).getinfo("a/data/1")
        nested.header_offset = outer.header_offset + len(outer.FileHeader())
        file.filelist.append(nested)
    assert refusal(torch_file.read, tmp_path / "a.pth").endswith("are larger than the file")


def test_numbers_that_are_read_wrongly_otherwise(tmp_path):
    """Big-endian numbers and compressed members are refused."""
    weights = torch_files.tensors({"w": np.arange(6, dtype=np.float32)})
    path = torch_files.save(weights, tmp_path / "a.pth")
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    for changed, compression, text in (
        ({}, zipfile.ZIP_STORED, None),
        ({"archive/byteorder": b"big"}, zipfile.ZIP_STORED, "its numbers are not little-endian"),
        ({}, zipfile.ZIP_DEFLATED, "its members are compressed"),
    ):
        with zipfile.ZipFile(path, "w", compression) as file:
            for name, content in (members | changed).items():
                file.writestr(name, content)
        if text is None:
            assert torch_file.read(path)["w"].tolist() == list(range(6))
        else:
            assert refusal(torch_file.read, path).endswith(text)


def test_bfloat16_without_pytorch(tmp_path):
    numbers = np.array([1.0, -2.5, 3e38, np.inf], np.float32)
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.float16).copy()
    path = torch_files.save(torch_files.tensors({"w": halves}), tmp_path / "a.pth")
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    data = members["archive/data.pkl"].replace(b"HalfStorage", b"BFloat16Storage")
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (members | {"archive/data.pkl": data}).items():
            file.writestr(name, content)
    array = torch_file.read(path)["w"]
    assert array.dtype == np.float32 and np.array_equal(
        array.view(np.uint32) >> 16, halves.view("u2")
    )


def test_a_pickle_with_too_many_instructions(tmp_path, monkeypatch):
    path = archive(tmp_path / "a.pth", b"\x80\x02(" + b"N" * 1000 + b"t.")
    assert "no dictionary of tensors" in refusal(torch_file.read, path)
    monkeypatch.setattr(torch_file, "MOST_INSTRUCTIONS", 1000)
    assert refusal(torch_file.read, path).endswith("its pickle has too many instructions")


def test_a_prefix_of_only_some_names(tmp_path):
    arrays = {"module.w": np.zeros(2, np.float32), "other.w": np.ones(2, np.float32)}
    path = torch_files.save(torch_files.tensors(arrays), tmp_path / "a.pth")
    assert torch_file.read(path).keys() == arrays.keys()


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.pth")
    assert "a.pth: " in refusal(torch_file.read, tmp_path / "a.pth")


def test_a_storage_that_is_a_part_of_another_one(tmp_path):
    """Files of the first PyTorch have such storages; their numbers are elsewhere."""
    data = b"\x80\x02(U\x07storagectorch\nFloatStorage\nU\x010NNU\x010K\x01K\x02\x87tQ."
    text = refusal(torch_file.read, archive(tmp_path / "a.pth", data))
    assert text.endswith("a storage is a part of another one")


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
    for value, text in (
        (module, "it has no dictionary of tensors (state_dict)"),
        ({"w": torch._neg_view(torch.ones(2))}, "a tensor is a view that is not supported"),
        ({"w": torch.ones(2, dtype=torch.complex64)}, "are stored as ComplexFloatStorage"),
    ):
        torch.save(value, tmp_path / "a.pth", _use_new_zipfile_serialization=is_new)
        assert refusal(torch_file.read, tmp_path / "a.pth").endswith(text)
