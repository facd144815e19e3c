"""Test that checkpoints and model files load as saved, and that damaged files never load."""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import resource
import signal
import stat
import subprocess
import sys

import faulty_calls
import faulty_saves
import h5py
import mutations
import numpy as np
import pytest
from limits import slowness

from mpidl import files, nn
from mpidl.data.formats import hdf5_probe
from mpidl.errors import UserError
from mpidl.training.files import checkpoint, model_file

LAYERS = [{"type": "Conv2D", "name": "conv1", "size": [5, 5]}, {"type": "Dense", "name": "dense1"}]
FACTS = {
    "network": LAYERS,
    "classes": ["0", "eins", "zwei"],
    "input_shape": (1, 28, 28),
    "normalization": "rescale-zero-one",
    "iteration": 7,
    "loss_sum": 0.1 + 0.2,
    "best": float("inf"),
    "options": {"seed": 2**63 - 1, "max_iterations": None},
}


def tables(seed):
    random = np.random.default_rng(seed)
    weights = {
        "conv1.weight": random.standard_normal((2, 1, 5, 5)).astype(np.float32),
        "conv1.bias": random.standard_normal(2).astype(np.float32),
        "batchnorm1.gamma": np.ones(2, np.float32),
    }
    return {
        "learnables": weights,
        "state": {"batchnorm1.mean": np.zeros(2, np.float32)},
        "optimizer": {f"velocity.{name}": -array for name, array in weights.items()},
        "sums": {"loss": np.array(random.random())},
    }


def described(arrays):
    """Convert tables of arrays to a value for which == compares all contents."""
    return [
        (table, [(name, a.dtype, a.shape, a.tobytes()) for name, a in arrays[table].items()])
        for table in arrays
    ]


def assert_tables(arrays, seed):
    assert described(arrays) == described(tables(seed))


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two checkpoints, of iterations 7 and 8."""
    checkpoint.save(tmp_path, tables(7), FACTS)
    checkpoint.save(tmp_path, tables(8), {**FACTS, "iteration": 8})
    return tmp_path


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_checkpoint_loads_as_it_was_saved(tmp_path):
    checkpoint.save(tmp_path, tables(1), FACTS)
    arrays, facts = checkpoint.load(tmp_path)
    assert_tables(arrays, 1)
    assert facts == FACTS
    assert os.listdir(tmp_path) == ["checkpoint.h5"]
    assert checkpoint.exists(tmp_path) and not checkpoint.exists(tmp_path / "not here")


def test_the_file_has_the_documented_format(folder):
    with h5py.File(folder / "checkpoint.h5") as file:
        assert file["learnables/conv1/weight"].shape == (2, 1, 5, 5)
        assert file["optimizer/velocity/conv1/bias"].dtype == "<f4"
        assert file["state/batchnorm1/mean"].dtype == "<f4"
        assert (file.attrs["format"], file.attrs["format_version"]) == ("mpidl", 1)
        assert json.loads(file.attrs["network"]) == LAYERS
        assert json.loads(file.attrs["classes"]) == FACTS["classes"]
        assert tuple(file.attrs["input_shape"]) == (1, 28, 28)
        assert file.attrs["normalization"] == "rescale-zero-one"


def test_the_same_content_makes_the_same_bytes(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        checkpoint.save(tmp_path / name, tables(1), FACTS)
    files = [(tmp_path / name / "checkpoint.h5").read_bytes() for name in "ab"]
    assert files[0] == files[1]


def test_facts_of_any_length(tmp_path):
    long = {**FACTS, "classes": [f"class {n}" for n in range(20000)], "note": "x" * 200000}
    checkpoint.save(tmp_path, tables(1), long)
    assert checkpoint.load(tmp_path)[1] == long


def test_facts_are_numbers_and_texts(tmp_path):
    checkpoint.save(tmp_path, tables(1), {**FACTS, "iteration": np.int64(3)})
    assert checkpoint.load(tmp_path)[1]["iteration"] == 3
    with pytest.raises(TypeError, match="not ndarray"):
        checkpoint.save(tmp_path, tables(1), {**FACTS, "sums": np.zeros(3)})


def test_there_are_two_generations(folder):
    assert sorted(os.listdir(folder)) == ["checkpoint-previous.h5", "checkpoint.h5"]
    assert checkpoint.load(folder)[1]["iteration"] == 8
    os.unlink(folder / "checkpoint.h5")  # as if the process died between the two renames of save
    lines = []
    assert checkpoint.load(folder, lines.append)[1]["iteration"] == 7
    assert len(lines) == 1 and "checkpoint.h5: it is missing" in lines[0]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_not_loaded(folder, share, capsys):
    path = folder / "checkpoint.h5"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    arrays, facts = checkpoint.load(folder)
    assert facts["iteration"] == 7
    assert_tables(arrays, 7)
    assert "checkpoint.h5" in capsys.readouterr().err


def test_a_flipped_bit_is_noticed(folder):
    path = folder / "checkpoint.h5"
    content = path.read_bytes()
    weight = tables(8)["learnables"]["conv1.weight"].tobytes()
    flip(path, content.index(weight) + 10)
    lines = []
    assert checkpoint.load(folder, lines.append)[1]["iteration"] == 7
    assert "does not match its checksum" in lines[0] and lines[0].endswith("checkpoint-previous.h5")


def test_a_flipped_bit_anywhere_never_changes_what_is_loaded(folder):
    path = folder / "checkpoint.h5"
    content = path.read_bytes()
    noticed = 0
    for place in range(0, len(content), 211):
        flip(path, place)
        arrays, facts = checkpoint.load(folder, lambda line: None)
        assert_tables(arrays, facts["iteration"])
        noticed += facts["iteration"] == 7
        path.write_bytes(content)
    assert noticed > 10


def test_changed_facts_are_noticed(folder):
    with h5py.File(folder / "checkpoint.h5", "r+") as file:
        file.attrs["facts"] = file.attrs["facts"].replace("8", "9")
    assert checkpoint.load(folder, lambda line: None)[1]["iteration"] == 7


def test_another_format_version_is_named(folder):
    with h5py.File(folder / "checkpoint.h5", "r+") as file:
        file.attrs["format_version"] = 2
    lines = []
    checkpoint.load(folder, lines.append)
    assert "its format_version is 2, but this version of mpidl reads 1" in lines[0]


def test_an_error_names_both_files_if_neither_loads(folder, tmp_path):
    for name in os.listdir(folder):
        (folder / name).write_bytes(b"torn")
    with pytest.raises(UserError) as error:
        checkpoint.load(folder)
    assert str(folder) in str(error.value) and "checkpoint-previous.h5" in str(error.value)
    with pytest.raises(UserError, match="expected a folder with checkpoint.h5"):
        checkpoint.load(tmp_path / "not here")


def test_a_torn_file_never_replaces_a_good_one(folder):
    (folder / "checkpoint.h5").write_bytes(b"torn")
    checkpoint.save(folder, tables(9), {**FACTS, "iteration": 9})
    assert checkpoint.load(folder)[1]["iteration"] == 9
    os.unlink(folder / "checkpoint.h5")
    assert checkpoint.load(folder, lambda line: None)[1]["iteration"] == 7


@pytest.mark.parametrize("broken", ["fsync", "replace"])
@pytest.mark.parametrize("count", [1, 2])
def test_one_checkpoint_loads_at_every_instant(folder, monkeypatch, broken, count):
    """A checkpoint can be loaded even if the disk fails during a save.

    The first or second call of os.fsync or os.replace fails.
    """
    real, calls = getattr(os, broken), []

    def fails(*args):
        calls.append(args)
        if len(calls) == count:
            raise OSError(errno.EIO, "Input/output error")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, broken, fails)
        if broken == "fsync" and count == 2:  # an error in flushing the folder is ignored
            checkpoint.save(folder, tables(9), {**FACTS, "iteration": 9})
        else:
            with pytest.raises(UserError, match="checkpoint.h5: cannot be written: Input/output"):
                checkpoint.save(folder, tables(9), {**FACTS, "iteration": 9})
    arrays, facts = checkpoint.load(folder, lambda line: None)
    assert facts["iteration"] in (8, 9)
    assert_tables(arrays, facts["iteration"])
    assert not [name for name in os.listdir(folder) if name.endswith(".part")]


def test_kept_checkpoints(folder, monkeypatch):
    """A kept checkpoint is a link or, without links, a copy; later saves do not change it."""

    def save(iteration, keep):
        checkpoint.write(folder, tables(iteration), checkpoint.attributes_of(FACTS), keep=keep)

    save(20, 20)
    first, last = (folder / "checkpoints" / name for name in ("00000020.h5", "00000040.h5"))
    assert os.path.samefile(first, folder / checkpoint.CURRENT)
    content = first.read_bytes()
    save(20, 20)  # once more, as after a rollback

    def link(*paths):
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", link)
    save(40, 40)
    assert not os.path.samefile(last, folder / checkpoint.CURRENT)
    save(50, None)
    assert first.read_bytes() == content
    assert checkpoint.kept_paths(folder) == {20: str(first), 40: str(last)}
    assert sorted(os.listdir(folder / "checkpoints")) == [first.name, last.name]
    assert_tables(model_file.read(last)[0], 40)
    checkpoint.remove_kept(folder, after=20)
    assert list(checkpoint.kept_paths(folder)) == [20]


def test_a_full_disk(folder):
    """If a write fails, the error is one line and the existing checkpoints are unchanged.

    A limit on the size of files makes the write fail.
    """
    before = {name: (folder / name).read_bytes() for name in os.listdir(folder)}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError) as error:
            checkpoint.save(folder, tables(9), FACTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{folder}/checkpoint.h5: cannot be written: " in str(error.value)
    assert before == {name: (folder / name).read_bytes() for name in os.listdir(folder)}


def walk(tmp_path, *words, start=()):
    """Make system calls fail during saves in another process. Return its report."""
    library = faulty_calls.compiled(tmp_path)
    (tmp_path / "walk").mkdir()
    command = [*start, sys.executable, faulty_saves.__file__, tmp_path / "walk", *words]
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


FAULTS = ("ENOSPC", "EIO", "EDQUOT", "EROFS", "lasting-EIO", "lasting-EROFS", "KILL")


@pytest.mark.parametrize(
    "faults", [("ENOSPC", "KILL"), pytest.param(FAULTS, marks=pytest.mark.slow("saves"))]
)
def test_a_checkpoint_loads_whichever_system_call_fails_or_kills(tmp_path, faults):
    """A checkpoint loads after any fault, and the next save removes all leftover files."""
    report = walk(tmp_path, "save", *faults)
    assert report["problems"] == []
    assert {"open", "read", "write", "fsync", "close", "rename"} <= set(report["calls"])
    assert report["old"] and report["new"] and report["no current"]
    written = report["calls"][report["calls"].index("write") :]
    order = [name for name in written if name in ("fsync", "rename")]
    # The file is flushed first. The folder is flushed after each rename.
    assert order == ["fsync", "rename", "fsync", "rename", "fsync"]


@pytest.mark.parametrize(
    "faults", [("KILL",), pytest.param(FAULTS, marks=pytest.mark.slow("saves"))]
)
def test_a_kept_checkpoint_is_whole_whichever_system_call_fails_or_kills(tmp_path, faults):
    """A run that resumes from an iteration has the kept checkpoint of this iteration."""
    report = walk(tmp_path, "keep", *faults)
    assert report["problems"] == []
    assert report["old"] and report["new"] and report["no current"]
    order = [name for name in report["calls"] if name in ("fsync", "link", "rename")]
    link = ["fsync", "link", "rename", "fsync"]  # before the renames of other saves
    assert order[-8:] == [*link, "rename", "fsync", "rename", "fsync"]


def test_a_save_that_is_not_safe_is_noticed(tmp_path):
    report = walk(tmp_path, "careless", "ENOSPC", "KILL")
    assert len(report["problems"]) == 2 and all("write" in text for text in report["problems"])


MOUNT = ("unshare", "--map-root-user", "--mount", "sh", "-c")


@pytest.mark.slow("saves")
def test_a_full_disk_and_a_read_only_one(tmp_path):
    """A failed save on a full or read-only file system keeps the existing checkpoints.

    The file system of 400 KB has space for two checkpoints of 130 KB, but not for a third.
    """
    script = 'mount -t tmpfs -o size=400k tmpfs "$1" && shift && exec "$@"'
    (tmp_path / "walk").mkdir()
    words = [*MOUNT, script, "sh", tmp_path / "walk"]
    trial = subprocess.run([*words, "true"], capture_output=True, text=True)
    if trial.returncode:
        pytest.skip(f"no file system can be mounted here: {trial.stderr.strip()}")
    command = [*words, sys.executable, faulty_saves.__file__, tmp_path / "walk", "disk"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["lines"] == [
        f"{tmp_path}/walk/checkpoint.h5: cannot be written: No space left on device",
        f"{tmp_path}/walk/checkpoint.h5: cannot be written: Read-only file system",
    ]
    assert report["iterations"] == [8, 9, 9]


def test_a_file_instead_of_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="checkpoint.h5: cannot be written: Not a directory"):
        checkpoint.save(tmp_path / "file", tables(1), FACTS)


def network(seed, *, size=2):
    return nn.Network([nn.Conv2D(3, size), nn.BatchNorm(), nn.Dense(3)], (1, 5, 5), seed=seed)


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.h5"
    model_file.save_model(path, network(1), ["a", "b", "c"], "rescale-zero-one")
    return path


def test_a_model_loads_as_it_was_saved(model):
    net, info = model_file.load_model(model)
    assert net.spec() == network(1).spec() and net.input_shape == (1, 5, 5)
    assert model_file.weights_sha256(net) == model_file.weights_sha256(network(1))
    assert model_file.weights_sha256(net) != model_file.weights_sha256(network(2))
    assert (info["classes"], info["normalization"]) == (["a", "b", "c"], "rescale-zero-one")
    with h5py.File(model) as file:
        assert list(file["learnables"]) == ["conv1", "batchnorm1", "dense1"]


def test_files_that_are_no_models_are_refused(model, tmp_path):
    with pytest.raises(UserError, match="none.h5: the model cannot be loaded: it is missing"):
        model_file.load_model(tmp_path / "none.h5")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = 1
    with pytest.raises(UserError, match="it was not written by mpidl"):
        model_file.load_model(tmp_path / "other.h5")
    (tmp_path / "text.h5").write_text("hello")
    with pytest.raises(UserError, match="text.h5: the model cannot be loaded"):
        model_file.load_model(tmp_path / "text.h5")


def test_files_that_hdf5_never_finishes_reading(model, tmp_path, monkeypatch):
    checkpoint.save(tmp_path, tables(1), FACTS)
    checkpoint.save(tmp_path, tables(2), FACTS)
    monkeypatch.setattr(hdf5_probe, "SECONDS", 1.0 * slowness())
    for path in model, tmp_path / checkpoint.CURRENT:
        path.write_bytes(mutations.endless(path.read_bytes()))
        with pytest.raises(model_file.Torn, match="library did not finish reading it"):
            model_file.read(path)
    lines = []
    assert_tables(checkpoint.load(tmp_path, lines.append)[0], 1)
    assert "the HDF5 library did not finish" in lines[0] and lines[0].endswith(checkpoint.PREVIOUS)
    # Negative control: without the helper process, reading the file never returns.
    monkeypatch.setattr(hdf5_probe, "problem_of", lambda *_, **__: None)
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.5)
        with contextlib.suppress(BaseException):
            model_file.read(model)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGVTALRM


def test_a_model_is_no_checkpoint(model, tmp_path):
    checkpoint.save(tmp_path, tables(1), FACTS)
    checkpoint.save(tmp_path, tables(2), FACTS)
    (tmp_path / checkpoint.CURRENT).write_bytes(model.read_bytes())
    lines = []
    assert_tables(checkpoint.load(tmp_path, lines.append)[0], 1)
    assert "checkpoint.h5: it is a model, not a checkpoint; continuing" in lines[0]


def test_inconsistent_models_are_refused(tmp_path):
    path = tmp_path / "model.h5"
    net = network(1)
    attributes = model_file.describe(
        {
            "network": net.spec(),
            "classes": [],
            "input_shape": net.input_shape,
            "normalization": "none",
        }
    )

    def write(parameters):
        tables = {"learnables": parameters, "state": net.state}
        model_file.write_whole(path, model_file.pack(tables, attributes))

    write(network(1, size=3).parameters)
    with pytest.raises(UserError, match=r"conv1.weight: the network has \(2, 1, 3, 3\), the file"):
        model_file.load_model(path)
    write({**net.parameters, "dense2.bias": np.zeros(1, np.float32)})
    with pytest.raises(UserError, match="dense2.bias: the network has no such array, the file"):
        model_file.load_model(path)
    attributes["network"] = '[{"type": "Konv"}]'
    write(net.parameters)
    with pytest.raises(UserError, match="its network cannot be built: .*Konv"):
        model_file.load_model(path)
    del attributes["classes"]
    write(net.parameters)
    with pytest.raises(UserError, match="it has no attribute 'classes'"):
        model_file.load_model(path)


@dataclasses.dataclass
class Shift(nn.Layer):
    """A custom layer with learnables and an argument."""

    amount: float = 0.0

    def build(self, shape):
        return nn.Built(shape, {"bias": (shape, 1.0)})

    def forward(self, x, context):
        return x + self.amount


def test_a_model_with_custom_layers(tmp_path):
    path = tmp_path / "model.h5"
    net = nn.Network([nn.Flatten(), Shift(0.5), nn.Dense(3)], (1, 4, 4), seed=1)
    model_file.save_model(path, net, ["a", "b", "c"])
    loaded, description = model_file.load_model(path, layers=[Shift])
    assert [layer["type"] for layer in description["network"]] == ["Flatten", "Shift", "Dense"]
    assert loaded.layers == net.layers and loaded["shift1"].amount == 0.5
    assert model_file.weights_sha256(loaded) == model_file.weights_sha256(net)
    images = np.arange(64, dtype=np.float32).reshape(4, 1, 4, 4) / 64
    assert loaded.predict(images).tobytes() == net.predict(images).tobytes()
    with pytest.raises(UserError, match="cannot be built: unknown layer type 'Shift': expected"):
        model_file.load_model(path)
    for layers in (Shift, [Shift()], ["Shift"], "Shift"):
        with pytest.raises(UserError, match="^layers: expected"):
            model_file.load_model(path, layers=layers)
    with pytest.raises(UserError, match="needs a name other than mpidl's Dense"):
        model_file.load_model(path, layers=[type("Dense", (Shift,), {})])


def test_weights_sha256_is_over_the_bytes_in_table_order():
    net = network(3)
    arrays = [*net.parameters.values(), *net.state.values()]
    content = b"".join(array.astype("<f4").tobytes() for array in arrays)
    assert model_file.weights_sha256(net) == hashlib.sha256(content).hexdigest()
    net.state = {**net.state, "batchnorm1.mean": np.full(2, 1e-30, np.float32)}
    assert model_file.weights_sha256(net) != hashlib.sha256(content).hexdigest()


def test_a_device_is_not_replaced(tmp_path):
    """Saving to a device or pipe is an error, because a rename would replace it with a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UserError, match="expected the path of a file, found a device or a pipe"):
        files.write_whole(pipe, b"content")
    assert stat.S_ISFIFO(os.stat(pipe).st_mode) and os.listdir(tmp_path) == ["pipe"]
