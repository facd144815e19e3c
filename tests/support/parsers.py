"""List every parser of files in mpidl, with a valid file and a function that reads it.

`PARSERS` is {name: Parser}. `prepare(folder)` writes valid files into a folder. It returns the path
of the file to damage, and a function without arguments that reads this file. The function returns
whether the file was accepted. It raises no exception for rejected files, because `attempt` catches
UserError.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import certificate_files
import datafiles
import h5py
import numpy as np
import onnx
import tifffile
import torch_files
from image_sets import grow, pixels_of, save, write_idx

import mpidl as dl
from mpidl.certificates import certificate
from mpidl.certificates import images as image_digests
from mpidl.data import ArrayDatastore, ImageFolder, open_data, open_test_data, read_idx
from mpidl.data.checks import read_images, read_targets
from mpidl.data.datastore import Datastore
from mpidl.data.formats import packed, packing
from mpidl.errors import UserError
from mpidl.interchange import network_files, torch_file
from mpidl.performance import results
from mpidl.report import run_files, stop_file
from mpidl.report.live.run import LiveRun
from mpidl.sweeps import sweep_file
from mpidl.sweeps.trial_folder import TrialFolder
from mpidl.tiles import pictures
from mpidl.training import skipped_images
from mpidl.training.files import checkpoint
from mpidl.training.options import configuration


class Parser(NamedTuple):
    """A parser, and how to prepare its input.

    `beginning` is the number of bytes of the valid file that stay before random bytes.
    `is_slow` says whether an input takes milliseconds rather than microseconds.
    """

    prepare: Callable
    beginning: int = 0
    is_slow: bool = True


def attempt(function, *args, **keywords):
    """Return the call's result, or None after a UserError of one short line."""
    try:
        return function(*args, **keywords)
    except UserError as error:
        text = str(error)
        assert "\n" not in text and 0 < len(text) < 2000, text
        return None


# images


def use(store):
    """Read images of a datastore, and call its methods that describe it."""
    assert isinstance(store, Datastore)
    indices = np.unique([0, len(store) // 2, len(store) - 1])
    for read in (read_images, read_targets) if store.targets_shape is not None else (read_images,):
        attempt(read, store, indices)
    assert store.describe() and len(store.fingerprint()) == 64
    if store.labels is not None:
        assert len(store.labels) == len(store) and store.labels.max() < len(store.classes)
    for i in indices:
        attempt(store.name, int(i))


def open_and_use(path):
    """Open a path as --data and --test-data, use the datastores, and return whether this worked."""
    stores = attempt(open_data, str(path))
    test = attempt(open_test_data, str(path), classes=["a", "b", "c"], labelled=False)
    for store in [*(stores or ()), test]:
        if store is not None:
            use(store)
    return stores is not None


def open_and_verify(path):
    """Open and use a packed file, and also compare its pixels with their checksums."""
    open_and_use(path)
    store = attempt(packed.PackedDatastore, path, labelled=False)
    if store is not None:
        attempt(store.verify)
    return store is not None


def images(write, beginning, opened=None, check=open_and_use):
    """Return the Parser for a file that `write(folder)` writes.

    The Parser opens this file or, if `opened` is "folder", the folder.
    """

    def prepare(folder):
        path = write(folder)
        return path, lambda: check(folder if opened == "folder" else path)

    return Parser(prepare, beginning)


def idx(name):
    return images(
        lambda folder: write_idx(folder / name, pixels_of(0, 5, 4, 3)),
        3,
        check=lambda path: attempt(read_idx, path) is not None,
    )


def idx_folder(kind):
    def write(folder):
        write_idx(folder / "train-images-idx3-ubyte", pixels_of(0, 5, 4, 3))
        write_idx(folder / "train-labels-idx1-ubyte", np.arange(5, dtype=np.uint8))
        return folder / f"train-{kind}-ubyte"

    return images(write, 2, "folder")


def cifar(name):
    def write(folder):
        (datafiles.cifar100 if name == "train.bin" else datafiles.cifar10)(folder)
        return folder / name

    return images(write, 0, "folder")


def hdf5(kind):
    """Return the Parser for an HDF5 file.

    The oldest format version has no checksums, and the newest has checksums everywhere.
    """

    def write(folder):
        path = folder / "x.h5"
        version = {"old": "earliest", "new": "latest", "chunks": "earliest"}[kind]
        options = {"chunks": (2, 4, 3), "compression": "gzip"} if kind == "chunks" else {}
        with h5py.File(path, "w", libver=version) as file:
            file.create_dataset("images", data=pixels_of(0, 5, 4, 3), **options)
            file.attrs["layout"] = "NHW"
            file["labels"] = np.arange(5) % 3
            file["labels"].attrs["classes"] = ["a", "b", "c"]
        return path

    return images(write, 8)


def packed_file(labelled):
    def write(folder):
        store = ArrayDatastore(pixels_of(0, 5, 4, 3))
        if labelled:
            grow(folder / "set")
            store = ImageFolder(folder / "set")
        packing.pack({"train": store}, folder / "x.h5")
        return folder / "x.h5"

    return images(write, 8, check=open_and_verify)


def encoded_pack(damaged):
    """Return the Parser for PNG files in two shards, with a damaged index or shard."""

    def prepare(folder):
        grow(folder / "set")
        store = ImageFolder(folder / "set")
        packing.pack({"train": store}, folder / "x.h5", images="encoded", shards=2)
        return folder / damaged, lambda: open_and_verify(folder / "x.h5")

    return Parser(prepare, 8 if damaged == "x.h5" else 64)


def encoded_file(folder):
    """Write a packed set of PNG files in one file."""
    grow(folder / "set")
    store = ImageFolder(folder / "set")
    packing.pack({"train": store}, folder / "x.h5", images="encoded")
    return folder / "x.h5", lambda: open_and_verify(folder / "x.h5")


def table(text):
    """Return the Parser for a table of images with the given text."""

    def prepare(folder):
        grow(folder / "set")
        (folder / "x.csv").write_text(text)
        return folder / "x.csv", lambda: open_and_use(folder / "x.csv")

    return Parser(prepare, 5, is_slow=False)


TABLES_OF_IMAGES = {
    "label": 'path,label,split\nset/cat/0.png,"a,b",train\nset/dog/1.png,c,test\n'
    "set/emu/2.png,c,train\n",
    "labels": "path,labels\nset/cat/0.png,a;b\nset/dog/1.png,\nset/emu/2.png,c;a\n",
    "targets": "path,x,y\nset/cat/0.png,1,0\nset/dog/1.png,0,1\nset/emu/2.png,0.5,1e-3\n",
}


def npz(write_arrays):
    def write(folder):
        pixels, labels = pixels_of(0, 5, 4, 3), np.arange(5) % 3
        arrays = {"images": pixels, "labels": labels, "images_test": pixels, "labels_test": labels}
        write_arrays(folder / "x.npz", classes=["a", "b", "c"], **arrays)
        return folder / "x.npz"

    return images(write, 4)


def mat(version):
    def write(folder):
        path, classes = folder / "x.mat", ["a", "b", "c"]
        pixels = datafiles.matlab(pixels_of(0, 5, 3, 4, 2))
        variables = {"images": pixels, "labels": np.array([[1.0], [2], [3], [1], [2]])}
        if version == "7.3":
            return datafiles.mat73(path, classes=classes, **variables)
        return datafiles.mat5(path, version != "5", classes=datafiles.cells(*classes), **variables)

    return images(write, 520 if version == "7.3" else 128)


def picture(suffix):
    return images(
        lambda folder: save(folder / "c" / f"x.{suffix}", pixels_of(0, 3, 6, 5)), 8, "folder"
    )


def read_by_windows(path):
    """Read an image file by windows, and return whether this worked."""

    def read():
        (large_image,) = pictures.open_pictures(str(path), None, None, "--data")
        height, width = (min(n, 64) for n in large_image.shape[1:])
        return large_image.window(slice(0, height), slice(0, width))

    return attempt(read) is not None


def large_picture(write_file):
    def prepare(folder):
        path = write_file(folder)
        return path, lambda: read_by_windows(path)

    return Parser(prepare, 6)


def tiled_tiff(folder):
    path = folder / "large.tif"
    options = {"tile": (16, 16), "photometric": "rgb", "compression": "zlib"}
    tifffile.imwrite(path, pixels_of(0, 40, 40, 3), **options)
    return path


def array_file(folder):
    np.save(folder / "large.npy", pixels_of(0, 2, 3, 9, 8)[0])
    return folder / "large.npy"


# networks


def network():
    return dl.Network([dl.Conv2D(3, 4), dl.BatchNorm(), dl.Dense(3, name="fc")], (2, 6, 5))


def build(input_shape, outputs):
    layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.Dense(outputs, name="fc")]
    return dl.Network(layers, input_shape, seed=None)


def safetensors(folder):
    path = folder / "a.safetensors"
    dl.save_weights(network(), path)

    def read():
        is_loaded = attempt(dl.load_weights, network(), path) is not None
        attempt(network_files.load_into, path, build, (2, 6, 5), 3)
        return is_loaded

    return path, read


def torch_files_of(is_old):
    def prepare(folder):
        path = torch_files.save(torch_files.tensors(network().parameters), folder / "a.pth", is_old)
        return path, lambda: attempt(torch_file.read, path) is not None

    return prepare


def described_safetensors(folder):
    """Write a file that describes its network."""
    path = folder / "a.safetensors"
    dl.save_weights(network(), path)
    return path, lambda: attempt(network_files.load, path) is not None


def onnx_graph(described):
    def prepare(folder):
        path = folder / "a.onnx"
        layers = [dl.Conv2D(3, 4), dl.BatchNorm(), dl.MaxPool2D(2), dl.Dropout(), dl.Dense(3)]
        dl.save_onnx(dl.Network(layers, (2, 6, 5)), path)
        if not described:
            proto = onnx.load(path)
            del proto.metadata_props[:]
            path.write_bytes(proto.SerializeToString())
        return path, lambda: attempt(dl.load_onnx, path) is not None

    return Parser(prepare)


TABLES = {
    "learnables": {"conv1.weight": np.ones((2, 3), np.float32)},
    "state": {"batchnorm1.mean": np.ones(4, np.float32)},
}
FACTS = {
    "network": network().spec(),
    "classes": ["a", "b", "c"],
    "input_shape": (2, 6, 5),
    "normalization": "none",
    "position": {"iteration": 3},
}


def model(folder):
    path = folder / "model.h5"
    dl.save_model(path, network())
    return path, lambda: attempt(dl.load_model, path) is not None


def checkpoint_file(folder):
    """Write a checkpoint that has only one generation."""
    checkpoint.save(str(folder), TABLES, FACTS)
    return (
        folder / checkpoint.CURRENT,
        lambda: attempt(checkpoint.load, str(folder), print) is not None,
    )


# files of a run, options


RUN = {
    "options.toml": '[options]\nepochs = 3\nlearning_rate = 0.01\nflip = "x"\n'
    'learn_rate_schedule = "none"\n[run]\ndata = "digits"\nseed = 3\n[sources]\nepochs = "recipe"\n'
    '[versions]\nmpidl = "0.9"\n',
    "metrics.jsonl": "".join(
        json.dumps(record) + "\n"
        for record in [
            *(
                {
                    **{"kind": kind, "epoch": 1, "iteration": i, "loss": 2.5 / i, "accuracy": 0.5},
                    **{"learning_rate": 0.01, "images_per_second": 900.5, "seconds": 0.1 * i},
                }
                for i, kind in [(1, "iteration"), (2, "iteration"), (2, "epoch"), (2, "validation")]
            ),
            {
                **{"kind": "ranks", "epoch": 1, "iteration": 2, "seconds": 0.2, "memory": [5, 6]},
                **{"device": ["CPU", "CPU"], **{name: [0.1, 0.2] for name in run_files.TIMES}},
            },
        ]
    ),
    "status.json": '{"state": "finished", "stopped": null, "error": null, "ranks": 2, "host": "a", '
    '"epochs": 1, "iterations_per_epoch": 2, "iterations": 2}',
    "summary.json": '{"accuracy": 0.5, "loss": 1.25, "epochs": 1, "iterations": 2, "ranks": 2, '
    '"stopped": null, "device": "CPU", "weights_sha256": "0a"}',
    "confusion.csv": "true class,a,b,recall\na,3,1,0.75\nb,0,2,1.0\nprecision,1.0,0.6667,\n",
    "bad-images.csv": 'set,image,reason\ntraining,"a,b.png",cut short\nvalidation,c.png,empty\n',
    "trial.json": '{"trial": 1, "options": {"epochs": 3}, "state": "failed", "error": "x"}',
    "scaling.json": '{"rows": [{"ranks": 1, "seconds": 2.5}], "network": "digits"}',
    "stop": "epoch\n",
}
SWEEP = """[train]
data = "digits"
epochs = 3
[random]
count = 4
learning_rate = {log_uniform = [0.001, 0.1]}
momentum = {uniform = [0.5, 0.9]}
batch_size = {choices = [32, 64]}
"""
GRID = '[train]\nepochs = 3\n[grid]\nlearning_rate = [0.1, 0.01]\nflip = ["none", "x"]\n'


def read_run(folder):
    """Read the folder of a run as mpidl.report and mpidl.monitor do."""
    contents = attempt(run_files.read, str(folder))
    run = LiveRun(str(folder), "run")
    run.poll(at_once=True)
    assert run.describe()
    run.progress(), run.seconds_left(), stop_file.read(folder)
    trial = TrialFolder(str(folder), 1, {"epochs": 3})
    assert isinstance(trial.row(), dict) and isinstance(trial.changes(), list)
    return contents is not None


def run_file(name):
    def prepare(folder):
        for other, text in RUN.items():
            (folder / other).write_text(text)
        path = folder / name
        reads = {
            "scaling.json": lambda: attempt(results.read_json, str(path)) is not None,
            "bad-images.csv": lambda: attempt(skipped_images.write_list, folder, {}) or True,
        }
        return path, reads.get(name, lambda: read_run(folder))

    return Parser(prepare, is_slow=False)


def toml(text, read):
    def prepare(folder):
        path = folder / "a.toml"
        path.write_text(text)
        return path, lambda: attempt(read, str(path)) is not None

    return Parser(prepare, is_slow=False)


def certificate_file(folder):
    path = certificate_files.write(folder)
    return path, lambda: attempt(certificate.read, str(path)) is not None


def manifest(folder):
    path, counts = folder / certificate.MANIFEST, {"train": 3, "validation": 0, "test": 2}
    digests = {name: np.full((n, 32), 7, np.uint8) for name, n in counts.items()}
    image_digests.write_manifest(path, digests)
    return path, lambda: attempt(image_digests.read_manifest, path, counts) is not None


IMAGES = {
    **{f"idx {name}": idx(name) for name in ("x", "x.gz")},
    **{f"idx folder, {kind}": idx_folder(kind) for kind in ("images-idx3", "labels-idx1")},
    **{
        f"CIFAR {name}": cifar(name)
        for name in ("data_batch_2.bin", "test_batch.bin", "batches.meta.txt", "train.bin")
    },
    **{f"HDF5, {kind}": hdf5(kind) for kind in ("old", "new", "chunks")},
    **{f"packed, labelled: {labelled}": packed_file(labelled) for labelled in (True, False)},
    "packed, encoded": Parser(encoded_file, 8),
    "TIFF by windows": large_picture(tiled_tiff),
    "mapped .npy": large_picture(array_file),
    "packed, index of shards": encoded_pack("x.h5"),
    "packed, shard": encoded_pack("x-00002-of-00002.bin"),
    **{f"table, {kind}": table(text) for kind, text in TABLES_OF_IMAGES.items()},
    "npz": npz(np.savez),
    "npz compressed": npz(np.savez_compressed),
    **{f"MAT {version}": mat(version) for version in ("5", "5 compressed", "7.3")},
    **{suffix: picture(suffix) for suffix in ("png", "jpg", "bmp", "tif")},
}
NETWORKS = {
    "safetensors": Parser(safetensors),
    "PyTorch archive": Parser(torch_files_of(is_old=False)),
    "PyTorch stream": Parser(torch_files_of(is_old=True)),
    "safetensors, described": Parser(described_safetensors),
    "ONNX": onnx_graph(False),
    "ONNX, described": onnx_graph(True),
    "model.h5": Parser(model, 8),
    "checkpoint.h5": Parser(checkpoint_file, 8),
}
TEXTS = {
    **{name: run_file(name) for name in RUN},
    "config": toml(RUN["options.toml"], configuration.read_config),
    "sweep, random": toml(SWEEP, sweep_file.read),
    "sweep, grid": toml(GRID, sweep_file.read),
    "sweep, folds": toml("folds = 3\n" + GRID, sweep_file.read),
    "certificate": Parser(certificate_file),
    "manifest": Parser(manifest, is_slow=False),
}
PARSERS = IMAGES | NETWORKS | TEXTS


def prepared(name, folder):
    """Return (path, content, read, Parser), after checking that the valid file is accepted."""
    parser = PARSERS[name]
    path, read = parser.prepare(Path(folder))
    content = path.read_bytes()
    assert read(), f"{name}: the valid file is refused"
    return path, content, read, parser
