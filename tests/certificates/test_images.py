"""Test the digests of images against hashlib, as README.md defines them, and their files."""

import hashlib
import hmac
import json
import os

import numpy as np
import pytest
from PIL import Image

from mpidl.certificates import images
from mpidl.data import ArrayDatastore, ImageFolder, PackedDatastore, open_data
from mpidl.data.formats import packing
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.loading.cache import NodeCache
from mpidl.errors import UserError

SALT = bytes(range(32))
CLASSES = ["ant", "bee", "cow"]


def expected_digest(pixels, label=None, i=0, name="train", salt=SALT):
    """Return the digest of an image straight from the words of README.md."""
    parts = [hmac.new(salt, f"{name} {i}".encode(), hashlib.sha256).digest()] if salt else []
    for array in (pixels,) if label is None else (pixels, label):
        parts += [json.dumps([array.dtype.str, list(array.shape)]).encode(), array.tobytes()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def hexadecimal(digests):
    return [bytes(row).hex() for row in digests]


def drawn(count, shape=(3, 5, 4), dtype="|u1", seed=0):
    draw = np.random.default_rng(seed)
    if np.dtype(dtype) == np.uint8:
        return draw.integers(0, 256, (count, *shape), dtype=np.uint8)
    return draw.standard_normal((count, *shape)).astype(dtype)


def labels_of(count):
    return np.arange(count, dtype="<i8") % len(CLASSES)


@pytest.fixture
def on_root(world, tmp_path):
    """A folder that all ranks see."""
    return world.broadcast(str(tmp_path))


@pytest.mark.parametrize("salt", [SALT, None], ids=["salt", "no-salt"])
@pytest.mark.parametrize("count", [0, 1, 2, 37])
def test_digests_are_those_of_hashlib(world, count, salt):
    pixels, labels = drawn(count), labels_of(count)
    store = ArrayDatastore(pixels, labels, CLASSES)
    for name in ("train", "validation"):
        digests = images.digests(store, world, salt, name)
        assert digests.dtype == np.uint8 and digests.shape == (count, 32)
        assert hexadecimal(digests) == [
            expected_digest(pixels[i], labels[i], i=i, name=name, salt=salt) for i in range(count)
        ]


@pytest.mark.parametrize("dtype", ["<i4", "<f4"])
def test_digests_cover_targets_instead_of_labels(world, dtype):
    pixels, targets = drawn(9, dtype="<f4"), np.arange(18).reshape(9, 2).astype(dtype)
    digests = images.digests(ArrayDatastore(pixels, targets=targets), world, SALT, "test")
    assert hexadecimal(digests) == [
        expected_digest(pixels[i], targets[i], i=i, name="test") for i in range(9)
    ]


def test_digests_of_images_without_labels(world):
    pixels = drawn(5)
    digests = images.digests(ArrayDatastore(pixels), world, SALT, "train")
    assert hexadecimal(digests) == [expected_digest(pixels[i], i=i) for i in range(5)]


def test_large_images_are_read_in_several_chunks_and_threads(world, monkeypatch):
    monkeypatch.setattr(images, "CHUNK_BYTES", 500)
    pixels, labels, counts = drawn(101), labels_of(101), []
    store = ArrayDatastore(pixels, labels, CLASSES)
    digests = images.digests(store, world, None, "train", progress=counts.append, workers=3)
    assert hexadecimal(digests) == [
        expected_digest(pixels[i], labels[i], salt=None) for i in range(101)
    ]
    assert len(counts) > 1 and world.gop("sum", sum(counts)) == 101


def test_the_format_of_the_files_does_not_matter(world, on_root):
    """Files, packs, arrays and remote files have the same digests, which PIL confirms."""
    folder = os.path.join(on_root, "photos")
    if world.rank == 0:
        for i, image in enumerate(drawn(11, (3, 8, 8))):
            path = os.path.join(folder, CLASSES[i % 3], f"{i:02}.png")
            os.makedirs(os.path.dirname(path), exist_ok=True)
            Image.fromarray(image.transpose(1, 2, 0)).save(path)
        for kind in ("decoded", "encoded"):
            path = os.path.join(on_root, f"{kind}.h5")
            packing.pack({"train": ImageFolder(folder)}, path, images=kind)
        files = ImageFolder(folder)
        pixels = files.read(np.arange(11))
        np.savez(os.path.join(on_root, "photos.npz"), images=pixels, labels=files.labels)
    world.barrier()
    expected = []
    for number, name in enumerate(CLASSES):
        for file in sorted(os.listdir(os.path.join(folder, name))):
            pixels = np.asarray(Image.open(os.path.join(folder, name, file))).transpose(2, 0, 1)
            label = np.array(number, "<i8")
            expected.append(expected_digest(pixels, label, i=len(expected)))
    packs = [os.path.join(on_root, f"{kind}.h5") for kind in ("decoded", "encoded")]
    stores = [ImageFolder(folder), *map(PackedDatastore, packs)]
    stores += [open_data(path, world)[0] for path in (f"{folder}.npz", f"file://{folder}")]
    for store in stores:
        assert hexadecimal(images.digests(store, world, SALT, "train")) == expected


def test_digests_of_a_subset_are_numbered_by_its_order(world):
    pixels, labels, indices = drawn(9), labels_of(9), [7, 2, 2, 0]
    subset = ArrayDatastore(pixels, labels, CLASSES).subset(indices)
    assert hexadecimal(images.digests(subset, world, SALT, "train")) == [
        expected_digest(pixels[j], labels[j], i=i) for i, j in enumerate(indices)
    ]


class Files(ArrayDatastore):
    """Images that are not in memory, some of which cannot be read. Notes which were read."""

    in_memory = False

    def __init__(self, *args, bad=()):
        super().__init__(*args)
        self.bad, self.reads = set(bad), []

    def read(self, indices):
        self.reads += [int(i) for i in indices]
        if self.bad.intersection(self.reads[-len(indices) :]):
            raise UserError(f"{self.located(min(self.bad))}: cannot be read")
        return super().read(indices)


def test_a_cache_keeps_the_images_for_the_first_epoch(world):
    pixels, labels = drawn(20), labels_of(20)
    store = Files(pixels, labels, CLASSES)
    cache = NodeCache(store, world)
    images.digests(cache, world, SALT, "train")
    world.barrier()
    assert sorted(sum(world.allgather(store.reads), [])) == list(range(20))  # one reading
    store.reads.clear()
    np.testing.assert_array_equal(cache.read(np.arange(20)), pixels)
    assert not store.reads
    cache.close()


def test_bad_images_have_zeros_on_all_ranks(world):
    pixels, labels = drawn(23), labels_of(23)
    fresh, resumed = BadImages(), BadImages()
    resumed.reasons[4] = "could not be read in the first part of the run"
    for images_to_skip, zeros in ((fresh, {0, 11, 22}), (resumed, {0, 4, 11, 22})):
        store = Files(pixels, labels, CLASSES, bad=[0, 11, 22])
        digests = images.digests(store, world, SALT, "train", bad_images=images_to_skip)
        assert set(images_to_skip.reasons) == zeros
        assert hexadecimal(digests) == [
            "0" * 64 if i in zeros else expected_digest(pixels[i], labels[i], i=i)
            for i in range(23)
        ]


def test_a_bad_image_is_an_error_on_all_ranks_by_default(world):
    store = Files(drawn(23), labels_of(23), CLASSES, bad=[22])
    with pytest.raises(UserError, match="image 22: cannot be read"):
        images.digests(store, world, SALT, "train")


def merkle_tree_hash(leaves):
    """Return MTH(leaves), the recursion in section 2.1 of RFC 6962."""
    if len(leaves) <= 1:
        return hashlib.sha256(*(b"\0" + leaf for leaf in leaves)).digest()
    split = 1 << (len(leaves) - 1).bit_length() - 1
    parts = merkle_tree_hash(leaves[:split]), merkle_tree_hash(leaves[split:])
    return hashlib.sha256(b"\1" + parts[0] + parts[1]).digest()


def test_the_root_is_that_of_rfc_6962():
    # Leaves and roots from the tests of Google's certificate-transparency.
    texts = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657"]
    texts += ["606162636465666768696a6b6c6d6e6f"]
    leaves = [bytes.fromhex(text) for text in texts]
    assert merkle_tree_hash(leaves[:3]).hex() == (
        "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77"
    )
    assert merkle_tree_hash(leaves).hex() == (
        "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"
    )
    digests = drawn(70, (32,))
    for count in [*range(34), 63, 64, 65, 70]:
        expected = merkle_tree_hash([row.tobytes() for row in digests[:count]]).hex()
        assert images.root(digests[:count]) == expected
    assert images.root(digests[[1, 0, 2]]) != images.root(digests[:3])


def test_audit_paths_show_one_image_and_nothing_else():
    digests = drawn(70, (32,))
    for count in [*range(1, 18), 33, 64, 70]:
        root = images.root(digests[:count])
        for i in range(count):
            path = images.proof(digests[:count], i)
            assert len(path) <= (count - 1).bit_length()
            digest = digests[i].tobytes()
            assert images.check_proof(digest, i, count, path, root)
            other = digests[69 - i].tobytes()
            assert digest == other or not images.check_proof(other, i, count, path, root)
            if count > 1:
                assert not images.check_proof(digest, i ^ 1, count, path, root)
                assert not images.check_proof(digest, i, count, path[:-1], root)
            for damaged in ([*path, path[0] if path else "00"], ["xy", *path[1:]]):
                assert not images.check_proof(digest, i, count, damaged, root)


def test_an_audit_path_is_that_of_rfc_6962():
    """The path of leaf 5 of 7 is leaf 4, the root of leaves 6..6 and that of 0..3 (2.1.3)."""
    digests = drawn(7, (32,))
    leaves = [row.tobytes() for row in digests]
    parts = [leaves[4:5], leaves[6:], leaves[:4]]
    assert images.proof(digests, 5) == [merkle_tree_hash(part).hex() for part in parts]
    parts = [leaves[4:6], leaves[:4]]
    assert images.proof(digests, 6) == [merkle_tree_hash(part).hex() for part in parts]


def test_the_description_of_a_set_fits_json():
    pixels, labels = drawn(4), labels_of(4)
    digests = drawn(4, (32,))
    facts = images.describe(ArrayDatastore(pixels, labels, CLASSES), digests)
    assert json.loads(json.dumps(facts)) == {
        "images": 4,
        "image_shape": [3, 5, 4],
        "dtype": "|u1",
        "targets_shape": None,
        "classes": CLASSES,
        "root": merkle_tree_hash([row.tobytes() for row in digests]).hex(),
    }
    targets = ArrayDatastore(pixels.astype("<f4"), targets=drawn(4, (2, 3), "<f4"))
    facts = images.describe(targets, digests)
    assert (facts["dtype"], facts["targets_shape"], facts["classes"]) == ("<f4", [2, 3], [])


SETS = {"train": drawn(5, (32,)), "validation": drawn(0, (32,)), "test": drawn(2, (32,), seed=1)}
COUNTS = {name: len(rows) for name, rows in SETS.items()}


def test_a_manifest_is_a_text_of_headings_and_digests(tmp_path):
    path = tmp_path / "certificate-images.txt"
    digest = images.write_manifest(path, SETS)
    content = path.read_bytes()
    assert digest == hashlib.sha256(content).hexdigest()
    lines = []
    for name, rows in SETS.items():
        lines += [f"# {name} {len(rows)}", *hexadecimal(rows)]
    assert content.decode() == "".join(f"{line}\n" for line in lines)
    sets = images.read_manifest(path, COUNTS)
    assert list(sets) == list(SETS)
    for name, rows in SETS.items():
        np.testing.assert_array_equal(sets[name], rows)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:-1], r"expected the digests of 7 images .* found 488 bytes"),
        (lambda text: text + b"\n", r"expected the digests of 7 images .* found 490 bytes"),
        (lambda text: b"", r"found 0 bytes"),
        (lambda text: text.replace(b"# train 5", b"# train 7"), r"line 1: expected # train 5, fou"),
        (
            lambda text: text.replace(b"# test 2", b"# text 2"),
            r"line 8: expected # test 2",
        ),
        (lambda text: text.replace(b"\n", b" ", 3), r"line 1: expected # train 5"),
        (lambda text: text[:20].upper() + text[20:], r"line 1"),
        (lambda text: text[:20] + b"\xff\x1b" + text[22:], r"line 2: expected 64 digits 0-9 and"),
        (lambda text: text[:20] + b"A" + text[21:], r"line 2: expected 64 digits 0-9 and a-f"),
    ],
)
def test_a_damaged_manifest_is_a_user_error(tmp_path, damage, message):
    path = tmp_path / "certificate-images.txt"
    images.write_manifest(path, SETS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=message) as error:
        images.read_manifest(path, COUNTS)
    assert str(error.value).isprintable()


def test_a_manifest_that_is_no_file_is_a_user_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", ".", "pipe"):
        with pytest.raises(UserError):
            images.read_manifest(tmp_path / name, COUNTS)


def test_a_salt_is_drawn_once_and_readable_only_by_its_owner(world, on_root):
    salt = images.salt_of(on_root, world)
    path = os.path.join(on_root, "certificate-salt.txt")
    with open(path) as file:
        assert file.read() == f"{salt.hex()}\n"
    assert len(salt) == 32 and os.stat(path).st_mode & 0o777 == 0o600
    assert images.salt_of(on_root, world) == salt == images.read_salt(path)
    assert images.salt_digest(salt) == hashlib.sha256(salt).hexdigest()
    assert images.salt_digest(None) is None
    assert len({*world.allgather(salt)}) == 1


@pytest.mark.parametrize("text", ["", "ab" * 31, "ab" * 33, "xy" * 32, "é" * 64, "a b" * 22])
def test_a_damaged_salt_is_a_user_error_that_does_not_show_it(tmp_path, text):
    path = tmp_path / "certificate-salt.txt"
    path.write_text(text)
    with pytest.raises(UserError, match="expected 64 hexadecimal digits, found") as error:
        images.read_salt(path)
    assert not text or text[:4] not in str(error.value)
