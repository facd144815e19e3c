"""Test that data options give the same bytes for any number of ranks, threads and workers.

A resumed run must also give the same bytes.
"""

import jobs
import pool
import pytest

SLOW = pytest.mark.slow("jobs")
BALANCED = ["--sampling", "balanced", "--shuffle", "every-epoch", "--translate", 1]
FOLD = ["--fold", "2/3", "--validation-frequency", 2, "--output-network", "best-validation"]


def hashes(data, folder, words, network=jobs.SMALL):
    """Return {ranks: hash of the weights} of a run on one rank, and of a resumed run.

    The second run is stopped on 3 ranks with 2 workers, and resumed on 2 ranks with 2 threads each.
    """
    words = ["--epochs", 2, *words]
    single, halted = folder / "1", folder / "halted"
    jobs.train(1, data, single, *words, "--threads", 1, network=network)
    jobs.train(
        *(3, data, halted, *words, "--threads", 1, "--workers", 2, "--max-iterations", 3),
        network=network,
    )
    assert jobs.summary(halted)["iterations"] == 3 < jobs.summary(single)["iterations"]
    jobs.resume(2, halted, "--max-iterations", "none", "--threads", 2, "--workers", 3)
    return {1: jobs.weights_hash(single), "3, then 2": jobs.weights_hash(halted)}


def assert_other_weights(data, folder, words, expected):
    """Negative control: without the option, the weights differ."""
    out = folder / "control"
    jobs.train(2, data, out, "--epochs", 2, "--threads", 1, *words)
    assert jobs.weights_hash(out) != expected


@pytest.fixture(scope="module")
def unequal(tmp_path_factory):
    """Return a folder with 70, 25 and 4 images in three classes."""
    folder = jobs.draw_images(tmp_path_factory.mktemp("unequal") / "shapes")
    for name, count in (("box", 25), ("dot", 4)):
        for path in sorted((folder / name).iterdir())[count:]:
            path.unlink()
    return folder


def test_balanced_sampling(unequal, tmp_path):
    results = hashes(unequal, tmp_path, BALANCED)
    jobs.assert_same_weights(results)
    # With 89 training images, each class is drawn 30 times per epoch, so that an epoch has 2
    # mini-batches, of 50 and 40 images.
    assert jobs.summary(tmp_path / "1")["iterations"] == 4
    assert_other_weights(unequal, tmp_path, BALANCED[2:], results[1])


@SLOW
def test_folds(pictures, tmp_path):
    results = hashes(pictures, tmp_path, FOLD)
    jobs.assert_same_weights(results)
    line = jobs.refusal(jobs.resume(1, tmp_path / "halted", "--fold", "1/3", check=2))
    assert "--fold was 2/3, is 1/3" in line
    assert_other_weights(pictures, tmp_path, ["--fold", "1/3", *FOLD[2:]], results[1])


@SLOW  # test_pack_layout.py compares the mini-batches
def test_packs_of_image_files_in_shards(pictures, tmp_path):
    """Packed files give the weights of the folder, and a run on the folder can resume with them."""
    words = ["--shuffle", "every-epoch", "--cache-mb", 0]
    folder = jobs.trained_hash(1, pictures, tmp_path / "folder", "--epochs", 2, *words)
    packs = {}
    for options in (("encoded",), ("encoded", "--shards", 5), ("decoded", "--shards", 2)):
        path, runs = tmp_path / f"{'-'.join(map(str, options))}.h5", tmp_path / str(len(packs))
        pool.run(None, "-m", "mpidl.pack", pictures, path, "--images", *options, check=0)
        runs.mkdir()
        packs |= {(options, ranks): h for ranks, h in hashes(path, runs, words).items()}
    jobs.assert_same_weights(packs | {"folder": folder})
    halted = tmp_path / "halted"
    jobs.train(2, pictures, halted, "--epochs", 2, *words, "--max-iterations", 3)
    jobs.resume(3, halted, "--max-iterations", "none", "--data", tmp_path / "encoded.h5")
    assert jobs.weights_hash(halted) == folder


@pytest.fixture(scope="module")
def table(pictures):
    """Return a CSV table of the images with two labels (0 or 1) and a column for the split."""
    rows = []
    for i, image in enumerate(sorted(pictures.glob("*/*.png"))):
        part = "test" if i % 9 == 0 else "validation" if i % 9 == 1 else "train"
        name = image.parent.name
        cells = [str(image.relative_to(pictures)), int(name == "bar"), int(name != "dot"), part]
        rows.append(",".join(map(str, cells)))
    path = pictures.parent / "shapes.csv"
    rows = [f"shapes/{row}" for row in rows]
    path.write_text("\n".join(["path,tall,large,split", *rows]) + "\n")
    return path


@SLOW  # test_table.py reads tables on several ranks
def test_a_table_with_several_labels(table, tmp_path):
    """A network with one output per label trains, validates and tests on the rows of a table."""
    words = ["--loss", "mse", "--validation-frequency", 2]
    jobs.assert_same_weights(hashes(table, tmp_path, words))
    kinds = [record["kind"] for record in jobs.metrics(tmp_path / "1")]
    assert "validation" in kinds and jobs.summary(tmp_path / "1")["loss"] > 0
    result = jobs.train(None, table, tmp_path / "x", *words, "--validation-fraction", 0.1)
    unused = (
        f"note: --validation-fraction 0.1: the validation images in --data are not used: {table}"
    )
    assert [line for line in jobs.output_lines(result) if line.startswith(unused)]


REFUSED = {
    "balanced, never": (
        ["--sampling", "balanced", "--shuffle", "never"],
        "--sampling balanced and --shuffle never: expected a random order",
    ),
    "two validations": (
        ["--fold", "1/3", "--validation-data", "test"],
        "--validation-data test and --fold 1/3: expected at most one of them",
    ),
    "fold": (["--fold", "4/3"], "--fold 4/3: expected I/K with 1 <= I <= K and at least 2 folds"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(pictures, tmp_path, case):
    words, text = REFUSED[case]
    assert text in jobs.refusal(jobs.train(None, pictures, tmp_path / "run", *words, check=2))
