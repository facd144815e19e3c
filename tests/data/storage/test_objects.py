"""Test that image sets in object stores (memory, file) give the same images as local files."""

import gc
import shutil

import datafiles
import fsspec
import h5py
import numpy as np
import pytest
from image_sets import grow, pixels_of, refusal, write_idx

from mpidl.data import (
    HDF5Datastore,
    ImageFolder,
    MinibatchQueue,
    NodeCache,
    PackedDatastore,
    configure_storage,
    open_data,
    open_test_data,
    open_validation_data,
    pack,
)
from mpidl.data.paths import stamp_of
from mpidl.data.storage import disk_cache, objects, settings
from mpidl.data.storage.store import Store
from mpidl.data.urls import check_url


@pytest.fixture(autouse=True)
def _default_settings():
    yield
    configure_storage()


@pytest.fixture(params=["memory", pytest.param("file", marks=pytest.mark.slow("stores"))])
def put(request, tmp_path):
    """Return a function that copies a local folder or file to a store and returns its URL."""
    memory = fsspec.filesystem("memory")

    def copy(path):
        if request.param == "file":
            return f"file://{path}"
        for file in [path, *path.rglob("*")]:
            if file.is_file():
                memory.pipe(f"/{file.relative_to(path.parent)}", file.read_bytes())
        return f"memory://{path.name}"

    yield copy
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


@pytest.fixture
def reads(monkeypatch):
    """Record (start, stop) of every byte range that is read from a store."""
    spans, read = [], Store._read

    async def recorded(self, url, expected, start, stop):
        spans.append((start, stop))
        return await read(self, url, expected, start, stop)

    monkeypatch.setattr(Store, "_read", recorded)
    return spans


def batches(store, **options):
    """Return the bytes of all mini-batches of an epoch."""
    queue = MinibatchQueue(store, 5, seed=3, **options)
    return [
        (images.lanes.tobytes(), None if labels is None else labels.lanes.tobytes())
        for images, labels in queue.epoch(1)
    ]


def assert_same_set(remote, local):
    assert len(remote) == len(local) and remote.classes == local.classes
    assert (remote.labels is None and local.labels is None) or (
        remote.labels.tolist() == local.labels.tolist()
    )
    indices = np.random.default_rng(0).permutation(len(local))
    assert remote.read(indices).tobytes() == local.read(indices).tobytes()
    assert remote.fingerprint() == local.fingerprint()
    assert batches(remote, prefetch=2, workers=2) == batches(local, prefetch=0)


def write_sets(folder):
    """Write the same images in each format, and return {name: path}."""
    grow(folder / "photos", per_class=6)
    grow(folder / "split" / "train", per_class=6)
    grow(folder / "split" / "val", per_class=3)
    grow(folder / "split" / "test", per_class=2)
    pack({"train": ImageFolder(folder / "photos")}, folder / "packed.h5")
    pixels, labels = pixels_of(0, 17, 1, 6, 5), np.arange(17) % 3
    for name, options in (("plain", {}), ("chunked", {"chunks": (4, 1, 3, 5)})):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset("images", data=pixels, **options)
            file["labels"] = labels
    with h5py.File(folder / "deflated.h5", "w") as file:
        file.create_dataset("images", data=pixels, chunks=(2, 1, 6, 5), compression="gzip")
        file["targets"] = pixels_of(1, 17, 2, 3).astype(np.float32)
    (folder / "two").mkdir()
    shutil.copy(folder / "plain.h5", folder / "two" / "train.h5")
    (folder / "idx").mkdir()
    write_idx(folder / "idx" / "train-images-idx3-ubyte.gz", pixels[:, 0])
    write_idx(folder / "idx" / "train-labels-idx1-ubyte", labels.astype(np.uint8))
    np.savez(folder / "arrays.npz", images=pixels, labels=labels)
    names = ("photos", "split", "packed.h5", "plain.h5", "chunked.h5", "deflated.h5", "two")
    return [folder / name for name in (*names, "idx", "arrays.npz")]


@pytest.mark.parametrize("cache", [False, True])
def test_every_format_has_the_images_of_local_files(put, cache, tmp_path):
    for path in write_sets(tmp_path):
        url = put(path)
        configure_storage(cache_dir=tmp_path / "cache" if cache else None, requests=3)
        local, remote = (open_data(str(text)) for text in (path, url))
        assert_same_set(remote[0], local[0])
        assert (remote[1] is None) == (local[1] is None)
        validation = open_validation_data(url)
        assert (validation is None) == (path.name != "split")
        if validation is not None:
            assert_same_set(validation, open_validation_data(str(path)))
        assert_same_set(open_test_data(url), open_test_data(str(path)))
        assert remote[0].describe().startswith(url)
    grow(tmp_path / "split" / "more")
    url = put(tmp_path / "split")
    assert refusal(open_data, url).startswith(f"{url}: found images in more/ beside train/")
    settings.configure_storage()


@pytest.mark.parametrize("cache", [False, True])
def test_packs_of_image_files_and_shards(put, reads, cache, tmp_path):
    """Packs are read by the byte ranges of the requested images, or copied as a whole."""
    grow(tmp_path / "photos", per_class=6)
    folder, kinds = ImageFolder(tmp_path / "photos"), []
    (tmp_path / "packs").mkdir()
    for images in ("decoded", "encoded"):
        for shards in (None, 3):
            kinds.append(f"{images}-{shards}.h5")
            pack({"train": folder}, tmp_path / "packs" / kinds[-1], images=images, shards=shards)
    url = put(tmp_path / "packs")
    configure_storage(cache_dir=tmp_path / "cache" if cache else None, requests=3)
    for name in kinds:
        remote, local = (open_data(f"{place}/{name}")[0] for place in (url, tmp_path / "packs"))
        assert_same_set(remote, local)
        reads.clear()
        if not cache:
            remote.read([2, 3])
            rows = 2 * 30 if name.startswith("decoded") else int(folder.sizes[2:4].sum())
            assert sum(stop - start for start, stop in reads) == rows
    settings.configure_storage()
    shutil.copytree(tmp_path / "packs", tmp_path / "fewer")
    name = "encoded-3-00002-of-00003.bin"
    (tmp_path / "fewer" / name).unlink()
    text = refusal(open_data, f"{put(tmp_path / 'fewer')}/encoded-3.h5")
    assert text.endswith(f"{name}: no such file: expected this shard of the packed set")


def test_a_table_lists_objects_below_its_prefix(put, tmp_path):
    images = sorted(grow(tmp_path / "set" / "photos", per_class=6))
    rows = [
        f"photos/{image},{image[:3]},{'test' if i % 5 else 'train'}"
        for i, image in enumerate(images)
    ]
    (tmp_path / "set" / "t.csv").write_text("\n".join(["path,label,split", *rows]))
    url = put(tmp_path / "set")
    remote, local = (open_data(f"{place}/t.csv") for place in (url, tmp_path / "set"))
    for pair in zip(remote, local, strict=True):
        assert_same_set(*pair)
    (tmp_path / "set" / "t.csv").write_text("path,label\nphotos/none.png,a\n")
    text = refusal(open_data, f"{put(tmp_path / 'set')}/t.csv")
    assert "t.csv, line 2, column path: " in text and text.endswith("none.png: no such file")
    (tmp_path / "set" / "t.csv").write_text(f"path,label\n{tmp_path}/a.png,a\n")
    text = refusal(open_data, f"{put(tmp_path / 'set')}/t.csv")
    assert "column path: expected a path relative to the table" in text


def test_rows_that_are_close_are_read_together(put, reads, tmp_path):
    images = pixels_of(0, 40, 1, 64, 64)
    datafiles.hdf5(tmp_path / "rows.h5", images, np.arange(40) % 4)
    grow(tmp_path / "photos", per_class=2)
    local = HDF5Datastore(tmp_path / "rows.h5")
    pack({"train": local}, tmp_path / "packed.h5")
    for kind, name in ((HDF5Datastore, "rows.h5"), (PackedDatastore, "packed.h5")):
        store = kind(put(tmp_path / name))
        reads.clear()
        indices = [3, 2, 39, 5]
        fetches = store.read_ahead(indices)
        assert store.read(indices).tobytes() == images[indices].tobytes()
        data = [(start, stop) for start, stop in reads if stop - start >= 64 * 64]
        # 139 KB lie between rows 5 and 39, which is too much to read unnecessarily.
        sizes = sorted(stop - start for start, stop in data if (stop - start) % (64 * 64) == 0)
        assert sizes == [64 * 64, 4 * 64 * 64]
        del fetches
    folder = ImageFolder(put(tmp_path / "photos"))
    reads.clear()
    fetches = folder.read_ahead([0, 1, 2])
    folder.read([2, 0]), folder.read([1])
    assert len(reads) == 3  # bytes that were read ahead are not read again
    del fetches
    folder.read([2])
    assert len(reads) == 4


def test_a_row_that_is_read_ahead_is_no_block_of_the_file(put, tmp_path):
    """A row and an HDF5 block that begin at the same byte (row 127) are not confused."""
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["images"] = pixels_of(0, 200, 1, 32, 64)
        start = file["images"].id.get_offset()
    assert start % 2048 == 0 and (row := (objects.BLOCK - start) // 2048) < 200
    stream = objects.ByteStream(url := put(tmp_path / "rows.h5"), stamp_of(url))
    fetches = stream.file.read_ahead(start + np.array([row]) * 2048, 2048)
    stream.seek(objects.BLOCK)
    assert stream.read(5000) == (tmp_path / "rows.h5").read_bytes()[objects.BLOCK :][:5000]
    del fetches


def test_images_in_the_cache_of_the_node_are_not_read_ahead(put, reads, tmp_path):
    grow(tmp_path / "photos")
    store = ImageFolder(put(tmp_path / "photos"))
    cache = NodeCache(store.subset(range(8)), budget_bytes=5 * 31)
    reads.clear()
    assert len(batches(cache)) == 2 and len(reads) == 8
    assert cache.capacity == 5 and batches(cache) and len(reads) == 11


def test_cache_dir_keeps_objects_by_version(put, reads, tmp_path, capsys):
    grow(tmp_path / "photos")
    url, folder = put(tmp_path / "photos"), tmp_path / "cache"
    configure_storage(cache_dir=folder)
    first = ImageFolder(url)
    pixels = first.read(range(9))
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 9 and all(path.suffix == "" for path in files)
    reads.clear()
    assert ImageFolder(url).read(range(9)).tobytes() == pixels.tobytes() and not reads
    damaged = files[0].read_bytes()
    files[0].write_bytes(damaged[:20] + bytes([damaged[20] ^ 1]) + damaged[21:])
    assert ImageFolder(url).read(range(9)).tobytes() == pixels.tobytes() and len(reads) == 1
    assert files[0].read_bytes() == damaged  # the copy has been written again
    disk_cache.write(str(tmp_path / "photos" / "cat" / "0.png" / "no folder"), b"")
    assert "this rank caches no more objects" in capsys.readouterr().err
    settings.ACCESS.cache_is_full = False


def test_large_objects_are_brought_over_once(put, reads, tmp_path, monkeypatch):
    monkeypatch.setattr(objects, "PIECE", 1000)
    images = pixels_of(0, 30, 1, 20, 20)
    datafiles.hdf5(tmp_path / "rows.h5", images, np.arange(30) % 4)
    url = put(tmp_path / "rows.h5")
    configure_storage(cache_dir=tmp_path / "cache")
    assert HDF5Datastore(url).read([4, 29]).tobytes() == images[[4, 29]].tobytes()
    assert len({span for span in reads if span[1] - span[0] == 1000}) >= 12
    (copy,) = [path for path in (tmp_path / "cache").rglob("*.file")]
    killed = copy.with_name(f"{copy.name}.killed.part")  # a file of a killed process
    killed.write_bytes(b"half")
    assert copy.read_bytes() == (tmp_path / "rows.h5").read_bytes()
    objects.remote_file.cache_clear()
    store = HDF5Datastore(url)
    store.read([0])
    reads.clear()
    assert store.read(range(30)).tobytes() == images.tobytes() and not reads
    assert not killed.exists()


def test_changed_and_missing_objects(put, tmp_path):
    grow(tmp_path / "photos")
    datafiles.hdf5(tmp_path / "rows.h5", pixels_of(0, 9, 1, 30, 30), np.arange(9) % 2)
    photos, rows = put(tmp_path / "photos"), put(tmp_path / "rows.h5")
    store, table = ImageFolder(photos), HDF5Datastore(rows)
    grow(tmp_path / "photos", classes=("cat",), shape=(1, 7, 5))
    datafiles.hdf5(tmp_path / "rows.h5", pixels_of(1, 9, 1, 30, 30), np.arange(9) % 2)
    for path in ("photos", "rows.h5"):
        put(tmp_path / path)
    text = refusal(store.read, [1])
    assert text.startswith(f"{photos}/cat/1.png: the file has changed since the run began (")
    text = refusal(table.read, [1])
    assert text.startswith(f"{rows}: the file has changed since the run began (")
    for url in (f"{photos}/none", f"{photos}-2"):
        for option in ("--data", "--test-data"):
            open_one = open_data if option == "--data" else open_test_data
            expected = f"{option} {url}: no such object, and no objects below it"
            assert refusal(open_one, url) == expected


def test_credentials_in_urls_are_refused():
    for url in (
        "s3://KEY:topsecret@bucket/photos",
        "s3://KEY:with/slash/topsecret@bucket/photos",
        "https://user:topsecret@host/set.h5",
        "https://host/set.h5?X-Amz-Signature=topsecret",
    ):
        text = refusal(open_data, url)
        assert "topsecret" not in text and "credentials come from the environment" in text
        assert "topsecret" not in refusal(ImageFolder, url)
    text = refusal(configure_storage, endpoint_url="http://user:topsecret@host")
    assert "topsecret" not in text and text.startswith("--endpoint-url http://host: expected")
    for url in ("s3://bucket/a:b@c", "http://host:80/a@b", "http://[::1]:80/a@b", "s3://arn:x/a@b"):
        check_url(url, "--data")
    assert refusal(open_data, "s3://") == "--data s3://: expected a URL such as s3://bucket/prefix"


def test_settings_are_checked(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for options, text in (
        ({"endpoint_url": "localhost:9000"}, "--endpoint-url localhost:9000: expected http://"),
        ({"requests": 0}, "requests must be at least 1, found 0"),
        ({"retry_seconds": 0}, "retry_seconds must be positive, found 0"),
        ({"cache_dir": "s3://bucket/x"}, "--cache-dir s3://bucket/x: expected a local folder"),
        (
            {"cache_dir": tmp_path / "file" / "x"},
            f"--cache-dir {tmp_path}/file/x: cannot be created",
        ),
    ):
        assert refusal(configure_storage, **options).startswith(text)
    assert refusal(open_data, "nosuch://x") == ("nosuch://: expected a protocol that fsspec knows")


def test_the_collector_is_paused_while_hdf5_reads(put, tmp_path):
    """If the requests' thread collected an h5py object, both threads would block."""
    datafiles.hdf5(tmp_path / "rows.h5", pixels_of(0, 9, 1, 6, 5), np.arange(9) % 2)
    stream = objects.ByteStream(url := put(tmp_path / "rows.h5"), stamp_of(url))
    states = []
    with stream.in_hdf5():
        with stream.in_hdf5():
            states.append(gc.isenabled())
        states.append(gc.isenabled())
    assert states == [False, False] and gc.isenabled()
    for _ in range(30):  # create h5py garbage while another file is read
        cycle = [h5py.File(tmp_path / "rows.h5")]
        cycle.append(cycle)
        del cycle
        HDF5Datastore(url).read([1])
        gc.collect(0)
