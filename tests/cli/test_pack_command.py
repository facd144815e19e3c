"""Test the command `pack` in this process: sources, options and refusals."""

import datafiles
import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal, save, write_idx
from PIL import Image

import mpidl as dl
from mpidl.cli import pack
from mpidl.data import ImageFolder, PackedDatastore, open_data, open_test_data


def run(*words):
    return pack.run(pack.parse([str(word) for word in words]))


SOURCES = {
    "folder": grow,
    "train and test": lambda folder: [grow(folder / part) for part in ("train", "test")],
    "idx": lambda folder: [
        write_idx(folder / f"{prefix}-{kind}", values)
        for prefix in ("train", "t10k")
        for kind, values in (
            ("images-idx3-ubyte", pixels_of(len(prefix), 9, 6, 5)),
            ("labels-idx1-ubyte", (np.arange(9) % 3).astype(np.uint8)),
        )
    ],
    "cifar": datafiles.cifar10,
    "hdf5": lambda folder: datafiles.hdf5(
        folder / "data.h5", pixels_of(0, 9, 6, 5, 3), np.arange(9) % 3, ["a", "b", "c"]
    ),
    "mat": lambda folder: datafiles.mat73(
        folder / "data.mat",
        XTrain=datafiles.matlab(pixels_of(0, 9, 3, 6, 5)),
        YTrain=(np.arange(9) % 3 + 1.0)[:, None],
        XTest=datafiles.matlab(pixels_of(1, 2, 3, 6, 5)),
        YTest=np.array([[3.0], [1]]),
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow("jobs")] * (kind not in ("folder", "hdf5")))
        for kind in SOURCES
    ],
)
def test_every_source_is_packed(tmp_path, kind, capsys):
    folder = tmp_path / "source"
    folder.mkdir()
    SOURCES[kind](folder)
    (source,) = [*folder.glob("data.*")] or [folder]
    assert run(source, tmp_path / "x.h5", "--threads", 2) == 0
    assert f"Packed: {tmp_path}/x.h5, " in capsys.readouterr().out
    stores, copies = open_data(str(source)), open_data(str(tmp_path / "x.h5"))
    for store, copy in zip(stores, copies, strict=True):
        assert (store is None) == (copy is None)
        if store is None:
            continue
        indices = np.arange(len(store))
        assert np.array_equal(copy.read(indices), store.read(indices))
        assert np.array_equal(copy.labels, store.labels) and copy.classes == store.classes
        assert copy.fingerprint() == store.fingerprint()
    test = open_test_data(str(tmp_path / "x.h5"), classes=store.classes if store else None)
    assert len(test) == len(open_test_data(str(source)))
    assert run(tmp_path / "x.h5", "--verify") == 0
    assert "images match their checksums" in capsys.readouterr().out
    assert run(tmp_path / "x.h5", tmp_path / "y.h5") == 0  # a packed file can be packed again
    assert open_data(str(tmp_path / "y.h5"))[0].fingerprint() == stores[0].fingerprint()


def test_pack_resizes_and_converts(tmp_path):
    save(tmp_path / "set" / "a" / "0.png", pixels_of(0, 3, 20, 30))
    save(tmp_path / "set" / "b" / "1.jpg", pixels_of(1, 1, 9, 9))
    options = ["--resize", "8x6", "--colour", "gray"]
    assert run(tmp_path / "set", tmp_path / "x.h5", *options) == 0
    store = PackedDatastore(tmp_path / "x.h5")
    assert store.preprocess == dl.Preprocess(size=(8, 6), colour="gray")
    assert dl.data.preprocessed(store, store.preprocess) is store
    folder = ImageFolder(tmp_path / "set", preprocess=store.preprocess)
    assert store.image_shape == (1, 8, 6) and store.fingerprint() == folder.fingerprint()
    assert np.array_equal(store.read([0, 1]), folder.read([0, 1]))
    floats = datafiles.hdf5(tmp_path / "f.h5", np.zeros((4, 2, 2)), [0, 1, 0, 1])
    text = refusal(run, floats, tmp_path / "z.h5", "--colour", "rgb")
    assert "expected gray or RGB images of uint8 to resize" in text


def test_pack_resizes_and_cuts_both_parts(tmp_path):
    datafiles.cifar10(tmp_path / "cifar")
    assert run(tmp_path / "cifar", tmp_path / "y.h5", "--resize", "16x12") == 0
    train, test = open_data(str(tmp_path / "y.h5"))
    pixels = open_data(str(tmp_path / "cifar"))[0].read([4])[0]
    picture = Image.fromarray(pixels.transpose(1, 2, 0)).resize((12, 16), Image.Resampling.BILINEAR)
    assert np.array_equal(train.read([4])[0], np.asarray(picture).transpose(2, 0, 1))
    assert test.image_shape == (3, 16, 12) and test.preprocess == train.preprocess
    options = ["--cover", "36", "--centre-crop", "30x20"]
    assert run(tmp_path / "cifar", tmp_path / "c.h5", *options) == 0
    store = PackedDatastore(tmp_path / "c.h5")
    assert store.image_shape == (3, 30, 20) and store.preprocess.cover
    line = f"{tmp_path}/c.h5: 15 images of 3x30x20 in 10 classes"
    assert store.describe() == line and store.split(0.5)[0].describe().endswith(f" of {line}")
    line = f"{tmp_path}/c.h5, resized to 9x9: 15 images of 3x9x9 in 10 classes"
    assert dl.data.preprocessed(store, dl.Preprocess(size=(9, 9))).describe() == line


def test_pack_refuses_options(tmp_path):
    grow(tmp_path / "set")
    source, target = tmp_path / "set", tmp_path / "x.h5"
    for size in ("0x5", "5x99999999", "-1x5"):
        text = refusal(run, source, target, f"--resize={size}")
        assert text.startswith("--resize must be HEIGHTxWIDTH such as 224x192, or 224")
        assert text.endswith(f"found {size}")
    text = refusal(run, source, target, "--resize", 5, "--cover", 5)
    assert text == "--resize and --cover: expected at most one of them"
    text = refusal(run, source, target, "--colour", "grey")
    assert text == "--colour must be gray or rgb, found grey"
    text = refusal(run, source, target, "--centre-crop", 9)
    assert "centre crop 9x9 (--centre-crop, or crop= in Python): expected" in text
    for arguments in ([target], ["--resize", "8"]):
        text = refusal(run, source, *arguments, "--verify")
        assert "expected only a packed file" in text


def test_pack_refuses_sources(tmp_path):
    datafiles.hdf5(tmp_path / "plain.h5", pixels_of(0, 4, 2, 2), [0, 1, 0, 1])
    text = refusal(run, tmp_path / "plain.h5", "--verify")
    assert "expected a file written by python -m mpidl.pack" in text
    grow(tmp_path / "both" / "train")
    grow(tmp_path / "both" / "test", shape=(1, 7, 7))
    text = refusal(run, tmp_path / "both", tmp_path / "x.h5")
    assert "expected images of shape (1, 6, 5)" in text and "--resize converts them" in text
