"""Test the command `predict --tile`: masks, scores, any number of ranks, errors, memory."""

import h5py
import jobs
import launcher
import numpy as np
import pool
import pytest
import tifffile
from image_sets import pixels_of, refusal, save
from PIL import Image
from test_tiled import unet

import mpidl as dl
from mpidl.cli import predict
from mpidl.tiles import files

CLASSES = ("sky", "sea", "sand")
OPTIONS = ("--tile", 64, "--overlap", 24)
# Two images have the same size, so that mini-batches of 16 tiles per rank cross their border.
SIZES = {"a.png": (150, 131), "b.tif": (150, 131), "sub/c.tif": (40, 300), "d.bmp": (9, 10)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model and images of several sizes and formats."""
    folder = tmp_path_factory.mktemp("large")
    (folder / "set" / "sub").mkdir(parents=True)
    for i, (name, size) in enumerate(SIZES.items()):
        pixels = pixels_of(i, 3, *size)
        if name.endswith(".tif"):
            options = {"tile": (32, 48), "compression": "zlib"} if i == 1 else {"rowsperstrip": 7}
            rows = pixels.transpose(1, 2, 0)
            tifffile.imwrite(folder / "set" / name, rows, photometric="rgb", **options)
        else:
            save(folder / "set" / name, pixels)
    np.save(folder / "stack.npy", pixels_of(0, 2, 3, 90, 70))
    net = unet()
    net.classes = CLASSES
    dl.save_model(folder / "model.h5", net)
    return folder


def run(folder, ranks, out, *words, images="set", check=0):
    arguments = ["--model", folder / "model.h5", "--data", folder / images, "--out", out]
    return pool.run(ranks, "-m", "mpidl.predict", *arguments, *OPTIONS, *words, check=check)


def refused(folder, *words, images="set", out="out", tile=OPTIONS):
    """Return the one-line error of the command."""
    arguments = ["--model", folder / "model.h5", "--data", folder / images, *tile, *words]
    arguments += ["--out", folder / out] if out else []
    return refusal(predict.main, [str(word) for word in arguments])


def contents(out):
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_any_number_of_ranks_writes_the_same_masks(folder, tmp_path):
    """Negative control: another overlap changes them."""
    results = []
    for ranks in (1, 2, 3):
        result = run(folder, ranks, tmp_path / f"{ranks}")
        results.append(contents(tmp_path / f"{ranks}"))
        assert "Tiles: 64x64, overlap 24\nClasses: 0 sky, 1 sea, 2 sand\nMasks: " in result.stdout
    assert set(results[0]) == {"a.png", "b.png", "sub/c.png", "d.png"}
    assert results[0] == results[1] == results[2]
    run(folder, 2, tmp_path / "other", "--overlap", 0)
    assert contents(tmp_path / "other") != results[0]
    for i, (name, size) in enumerate(SIZES.items()):
        expected = dl.classify(unet(), pixels_of(i, 3, *size), tile=64, overlap=24)[0]
        with Image.open((tmp_path / "1" / name).with_suffix(".png")) as picture:
            assert picture.mode == "P"
            np.testing.assert_array_equal(np.asarray(picture), expected)
            colours = np.asarray(picture.convert("RGB"))
        np.testing.assert_array_equal(colours, files.palette()[expected])


@pytest.mark.parametrize("ending", ["npy", pytest.param("h5", marks=pytest.mark.slow("jobs"))])
def test_scores(folder, tmp_path, ending):
    outs = []
    for ranks in (1, 3):
        path = tmp_path / f"{ranks}.{ending}"
        run(folder, ranks, path, "--batch-size", 5, images="stack.npy")
        outs.append(np.load(path) if ending == "npy" else h5py.File(path)["outputs"][...])
    expected = dl.predict(unet(), np.load(folder / "stack.npy"), tile=64, overlap=24)
    assert np.array_equal(outs[0], expected) and np.array_equal(outs[1], expected)


def test_one_file_a_gray_file_and_a_data_set(folder, tmp_path):
    run(folder, 1, tmp_path / "one", images="set/b.tif")
    run(folder, 1, tmp_path / "all")
    assert contents(tmp_path / "one") == {"b.png": contents(tmp_path / "all")["b.png"]}
    gray = pixels_of(9, 1, 70, 65)
    tifffile.imwrite(folder / "gray.tif", gray[0])
    run(folder, 2, tmp_path / "gray", "--colour", "rgb", images="gray.tif")
    expected = dl.classify(unet(), np.repeat(gray, 3, 0), tile=64, overlap=24)[0]
    with Image.open(tmp_path / "gray" / "gray.png") as picture:
        np.testing.assert_array_equal(np.asarray(picture), expected)
    for name in ("x/1.png", "y/1.png"):
        save(folder / "labelled" / name, pixels_of(ord(name[0]), 3, 70, 66))
    result = run(folder, 2, tmp_path / "set", images="labelled")
    assert set(contents(tmp_path / "set")) == {"000000-1.png", "000001-1.png"}
    assert "Accuracy" not in result.stdout


def test_masks_of_a_data_set_are_not_compared(folder, tmp_path):
    pairs = {"images": pixels_of(5, 2, 3, 70, 66), "targets": np.zeros((2, 70, 66), np.int32)}
    np.savez(folder / "pairs.npz", **pairs)
    result = run(folder, 2, tmp_path / "out", images="pairs.npz")
    assert result.stdout.count("Accuracy: not computed, because outputs of tiles are not") == 1
    assert set(contents(tmp_path / "out")) == {"000000.png", "000001.png"}


def test_undefined_scores(folder, tmp_path):
    net = unet()
    bias = np.array(net.parameters["scores.bias"])
    bias[1] = np.nan
    net.parameters = {**net.parameters, "scores.bias": bias}
    dl.save_model(tmp_path / "model.h5", net)
    save(tmp_path / "image.png", pixels_of(0, 3, 20, 20))
    run(tmp_path, 1, tmp_path / "out", images="image.png")
    with Image.open(tmp_path / "out" / "image.png") as picture:
        assert (np.asarray(picture) == files.UNDEFINED).all()


def test_the_palette():
    """The first colours of PASCAL VOC's masks, and the colour of pixels without a class."""
    table = files.palette()
    assert table[:4].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0]]
    assert table[255].tolist() == [224, 224, 192]
    assert len(set(map(tuple, table.tolist()))) == 256


def test_refusals(folder):
    for words, options, text in (
        (("--metrics", "all"), {}, "--metrics: expected no --tile with it"),
        (("--top-k", 2), {}, "--top-k: expected no --tile with it"),
        (("--on-bad-image", "skip"), {}, "--on-bad-image skip: expected no --tile with it"),
        ((), {"out": None}, "--tile: expected --out FOLDER, FILE.npy or FILE.h5 with it"),
        ((), {"out": "x.csv"}, f"--out {folder / 'x.csv'}: expected a folder for the pictures of"),
        ((), {"tile": ("--overlap", 8)}, "--overlap: expected --tile with it, found none"),
        ((), {"tile": ("--tile", 66)}, "--tile must be a multiple of 4"),
        (("--overlap", 33), {}, "--overlap must be a whole number from 0 to 32"),
        (("--resize", 64), {}, "--tile: expected images in their own size, found the preproc"),
        (("--colour", "gray"), {}, f"{folder / 'set' / 'a.png'}: expected an image of 3 channels"),
        ((), {"out": "s.npy"}, f"--out {folder / 's.npy'}: expected images of one size for one"),
        ((), {"out": "set"}, f"--out {folder / 'set'}: expected another folder, because"),
        ((), {"out": "model.h5/x"}, f"--out {folder / 'model.h5' / 'x'}: cannot be created"),
        ((), {"images": "none.tif"}, f"--data {folder / 'none.tif'}: no such "),
    ):
        line = refused(folder, *words, **options)
        assert line.startswith(text), line
    line = jobs.refusal(run(folder, 2, folder / "set", check=2))
    assert line.startswith(f"--out {folder / 'set'}: expected another folder")
    net = dl.Network([dl.Dense(3)], (3, 8, 8))
    dl.save_model(folder / "dense.h5", net)
    line = refused(folder, "--model", folder / "dense.h5")
    assert line.startswith("--tile: expected a network with outputs (K, 8, 8) for images 3x8x8")


def test_numbers_need_an_array(folder, tmp_path):
    net = unet()
    net.classes = ()
    dl.save_model(tmp_path / "model.h5", net)
    line = refused(folder, "--model", tmp_path / "model.h5")
    assert line.endswith("expected FILE.npy or FILE.h5 for a model that predicts numbers")


def test_damaged_files(folder, tmp_path, monkeypatch):
    """One line names the file, on any number of ranks."""
    content = (folder / "set" / "b.tif").read_bytes()
    (tmp_path / "cut.tif").write_bytes(content[: len(content) // 2] + bytes(100))
    png = (folder / "set" / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(png[: len(png) // 2])
    (tmp_path / "text.tif").write_text("text")
    (tmp_path / "text.npy").write_text("text")
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    np.save(tmp_path / "whole.npy", np.zeros((3, 8, 8), np.int16))
    np.save(tmp_path / "nan.npy", np.full((3, 8, 8), np.nan, np.float32))
    for name in ("cut.tif", "cut.png", "text.tif", "text.npy", "objects.npy", "whole.npy"):
        line = jobs.refusal(run(folder, 2, tmp_path / "out", images=tmp_path / name, check=2))
        assert line.startswith(f"{tmp_path / name}: "), line
    line = jobs.refusal(run(folder, 2, tmp_path / "out", images=tmp_path / "nan.npy", check=2))
    assert "nan.npy: expected finite pixels, found NaN or infinity" in line
    for name in ("same.png", "same.bmp"):
        save(tmp_path / "twice" / name, pixels_of(0, 3, 8, 8))
    line = refused(folder, images=tmp_path / "twice")
    assert "expected a name per picture" in line
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 19000)
    line = refused(folder, images="set/a.png")
    assert line.startswith(
        f"{folder / 'set' / 'a.png'}: expected at most 19000 pixels, found 150x131"
    )
    refusal(predict.main, ["--model", "x.h5", "--data", "x", "--tile", "64"])


@pytest.mark.slow("jobs")
def test_emulated_gpus_write_the_same_masks(folder, tmp_path):
    for ranks in (1, 2, 3):
        words = ["--model", folder / "model.h5", "--data", folder / "stack.npy", *OPTIONS]
        words += ["--out", tmp_path / f"{ranks}", "--device", "gpu", "--threads", 1]
        pool.run(ranks, jobs.ROOT + "/tests/launch/emulated.py", "predict", *words, check=0)
    results = [contents(tmp_path / f"{ranks}") for ranks in (1, 2, 3)]
    assert len(results[0]) == 2 and results[0] == results[1] == results[2]


@pytest.mark.slow("wings")
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("kind", "tile", "overlap"), [("tif", 512, 64), ("png", 256, 32)])
def test_a_large_image_takes_little_memory(kind, tile, overlap, tmp_path):
    """Negative control: the scores of the whole image alone would take 0.75 GiB per rank."""
    pixels = pixels_of(0, 8192, 8192, 3)
    if kind == "tif":
        tifffile.imwrite(tmp_path / "large.tif", pixels, tile=(256, 256), photometric="rgb")
    else:
        Image.fromarray(pixels).save(tmp_path / "large.png", compress_level=1)
    del pixels
    dl.save_model(tmp_path / "model.h5", dl.nn.zoo.unet((3, 64, 64), 3))
    program = tmp_path / "program.py"
    program.write_text(
        "import resource, sys\nfrom mpidl.cli import predict\npredict.main(sys.argv[1:])\n"
        "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    words = ["--model", tmp_path / "model.h5", "--data", tmp_path / f"large.{kind}"]
    words += ["--tile", tile, "--overlap", overlap, "--out", tmp_path / "out"]
    result = launcher.mpirun(2, program, *words)
    assert result.returncode == 0, result.stderr
    peaks = [int(line.split()[1]) for line in result.stdout.splitlines() if "peak" in line]
    assert len(peaks) == 2 and max(peaks) * 1024 <= 1.5e9, peaks
