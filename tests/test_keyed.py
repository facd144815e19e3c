"""Test keyed random numbers, which must never change, because past runs' weights depend on them."""

import hashlib

import numpy as np
import pytest

from mpidl import backends, keyed
from mpidl.backends import REFERENCE as reference

MASK = (1 << 64) - 1


def philox(counter, key, rounds=10):
    """Compute Philox4x64-10 in plain integers (Salmon et al., SC 2011, section 3.3)."""
    c, k = list(counter), list(key)
    for _ in range(rounds):
        left, right = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(right >> 64) ^ c[1] ^ k[0], right & MASK, (left >> 64) ^ c[3] ^ k[1], left & MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def test_the_plain_generator_has_the_published_values():
    """The plain generator has the known answers of the authors' Random123 library (kat_vectors)."""
    zeros = philox([0] * 4, [0] * 2)
    assert zeros == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    ones = philox([MASK] * 4, [MASK] * 2)
    assert ones == [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0]


@pytest.mark.parametrize("seed, purpose, epoch, sample", [(0, "shuffle", 0, 0), (7, "é", 3, 59999)])
def test_words_are_philox_of_key_and_counter(seed, purpose, epoch, sample):
    digest = hashlib.sha256(str(seed).encode() + b"\0" + purpose.encode()).digest()
    key = [int.from_bytes(digest[i : i + 8], "little") for i in (0, 8)]
    expected = [w for i in range(1, 4) for w in philox([i, sample, epoch, 0], key)]
    assert keyed.words(seed, purpose, 12, epoch=epoch, sample=sample).tolist() == expected


def test_words_of_many_samples():
    samples = np.array([0, 1, 59999, 2**62])
    for count in (1, 4, 7, 12):
        expected = [keyed.words(7, "é", count, epoch=3, sample=int(s)) for s in samples]
        for backend in (reference, backends.of_type(np.float32)):
            words = backend.keyed_words(7, "é", count, 3, samples)
            assert words.dtype == np.uint64 and np.array_equal(words, expected)
    assert backends.of_type(np.float32).keyed_words(7, "é", 3, 0, []).shape == (0, 3)


def test_the_numbers_are_frozen():
    """These hashes must never change, because past runs must stay reproducible."""
    initial = keyed.words(1, "initial conv1.weight", 500, epoch=2, sample=3)
    for numbers, dtype, digest in (
        (keyed.words(0, "shuffle", 100), "<u8", "eca2b56bcb0e2941"),
        (initial, "<u8", "1319f7b98e98c6d2"),
        (keyed.uniform(42, "dropout", 100, epoch=1), "<f8", "7ec8ea0a1074f3cc"),
        (keyed.permutation(1000, 0, "shuffle", epoch=5), "<i8", "e62cc1b98651ba13"),
    ):
        data = np.ascontiguousarray(numbers).astype(dtype).tobytes()
        assert hashlib.sha256(data).hexdigest()[:16] == digest


def test_fewer_words_are_the_first_of_more():
    words = keyed.words(3, "noise", 1000)
    for count in (0, 1, 2, 3, 4, 5, 63, 64, 999):
        assert np.array_equal(keyed.words(3, "noise", count), words[:count])


def test_every_part_of_the_key_counts():
    keys = [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    keys += [(10, "a", 0, 0), (1, "0\0a", 0, 0)]
    words = [
        keyed.words(seed, purpose, 8, epoch=epoch, sample=sample)
        for seed, purpose, epoch, sample in keys
    ]
    assert len(np.unique(np.concatenate(words))) == 8 * len(keys)


def test_uniform_numbers_are_uniform():
    numbers = keyed.uniform(5, "test", 100_000)
    assert numbers.min() >= 0 and numbers.max() < 1
    assert np.array_equal(numbers * 2.0**53 % 1, np.zeros(100_000))
    counts, _ = np.histogram(numbers, 100, (0, 1))
    assert abs(counts - 1000).max() < 5 * np.sqrt(1000)


@pytest.mark.parametrize("n", [0, 1, 2, 17, 10_000])
def test_a_permutation_holds_every_number_once(n):
    order = keyed.permutation(n, 0, "shuffle")
    assert np.array_equal(np.sort(order), np.arange(n))
    if n > 10:
        assert not np.array_equal(order, np.arange(n))
        assert not np.array_equal(order, keyed.permutation(n, 0, "shuffle", epoch=1))


def test_all_ranks_draw_the_same(world):
    words = keyed.words(11, "rank", 1000)
    assert world.gop("and", np.array_equal(world.broadcast(words), words))
