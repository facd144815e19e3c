"""Test the random numbers of dropout."""

import numpy as np

from mpidl.backends.reference.dropout import chances, philox


def test_philox_gives_the_known_answers():
    """Compare with the known answers of Random123 1.09 (kat_vectors, philox4x32 10)."""
    ones, zeros = (0xFFFFFFFF,) * 4, (0,) * 4
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    answers = {
        (zeros, zeros[:2]): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        (ones, ones[:2]): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        pi: "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (counter, key), words in answers.items():
        assert [int(w) for w in philox(counter, key)] == [int(w, 16) for w in words.split()]


def test_random_numbers_of_dropout_are_uniform_and_uncorrelated():
    elements, samples = 4096, np.arange(64)
    drawn = chances(elements, samples, 3, (1, 2))
    assert drawn.shape == (elements, 64) and drawn.min() >= 0 and drawn.max() <= 65535
    counts = np.bincount((drawn >> np.uint64(8)).ravel().astype(int), minlength=256)
    expected = drawn.size / 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 5 * np.sqrt(2 * 255)
    bits = (drawn >= 32768).astype(float) - 0.5
    for other in (
        np.roll(bits, 1, axis=0),
        np.roll(bits, 1, axis=1),
        (chances(elements, samples, 4, (1, 2)) >= 32768) - 0.5,
        (chances(elements, samples, 3, (1, 3)) >= 32768) - 0.5,
    ):
        assert abs((bits * other).mean()) * 4 < 5 / np.sqrt(bits.size)
