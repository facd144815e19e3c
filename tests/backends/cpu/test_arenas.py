"""The arena: memory is used again once its array is gone, and never before."""

import gc
import subprocess
import sys
import threading
import weakref

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.arenas import Arena

BIG = (64, 1024)


def place(array):
    return array.ctypes.data


def test_the_memory_of_an_array_that_is_gone_is_used_again():
    first = arenas.empty(BIG)
    where = place(first)
    del first
    assert place(arenas.empty(BIG)) == where


def test_a_view_keeps_it():
    first = arenas.empty(BIG)
    first[...] = 1
    view, where = first[3:5], place(first)
    del first
    second = arenas.empty(BIG)
    second[...] = 2
    assert place(second) != where and (view == 1).all()


def test_arrays_are_aligned_writable_and_of_their_type():
    for shape, dtype in ((BIG, np.float32), ((3, 5, 7001), np.float64), ((2, 9999), np.uint8)):
        array = arenas.empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype) and array.flags.c_contiguous
        assert place(array) % 64 == 0
        array[...] = 1
    assert arenas.empty((0, 3)).shape == (0, 3)


def test_a_step_asks_for_no_more_after_the_first():
    def step():
        kept = [arenas.empty((n, 1 << 14)) for n in (5, 3, 9, 3)]
        kept[1] = None
        kept.append(arenas.empty((2, 1 << 14)))
        return [place(a) for a in kept if a is not None]

    first = step()
    held = arenas.reserved()
    assert all(step() == first for _ in range(5)) and arenas.reserved() == held


def test_an_arena_goes_with_the_last_of_its_arrays():
    arena = Arena()
    alive = weakref.ref(arena)
    first, second = (arenas.empty(BIG, arena=arena) for _ in range(2))
    held = arenas.reserved()
    assert place(second) - place(first) == first.nbytes and arena.bytes == arenas.REGION
    large = arenas.empty((arenas.REGION + 1,), np.uint8, arena)
    assert arena.bytes == 2 * arenas.REGION + arenas.HUGE and arenas.reserved() == held
    large[...] = 1
    del arena, first, large
    gc.collect()
    second[...] = 7
    assert (second == 7).all() and alive() is not None
    del second
    assert alive() is None


def test_neighbours_that_are_free_join():
    arena = Arena()
    places = [arena.take(1 << 20) for _ in range(8)]
    for i in (1, 3, 2, 7, 0, 5, 4, 6):
        arena.returned.append((places[i], 1 << 20))
    arena.take(1 << 20)
    (free,) = arena.free
    assert free == (places[0] + (1 << 20), arenas.REGION - (1 << 20))


def test_arrays_never_overlap():
    """Random sizes and lifetimes, each filled with its own number, on two threads."""
    wrong = []

    def run(seed):
        rng, alive = np.random.default_rng(seed), {}
        for i in range(300):
            if len(alive) > 12 or (alive and rng.random() < 0.4):
                key = list(alive)[rng.integers(len(alive))]
                if not (alive.pop(key) == key).all():
                    wrong.append(key)
            array = arenas.empty((int(rng.integers(5_000, 200_000)),))
            array[...] = 1000 * seed + i
            alive[1000 * seed + i] = array
        wrong.extend(key for key, array in alive.items() if not (array == key).all())

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not wrong


FORK = """
import os
from mpidl.backends.cpu import arenas

with arenas._reading.lock, arenas._arena.lock:  # as other threads may have them
    child = os.fork()
    if not child:
        arenas.to_read((1 << 20,), "u1")
        arenas.empty((1 << 20,))
        os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_takes_memory():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert done.stdout == "7\n", done.stderr
