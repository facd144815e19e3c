"""Check that an arena reuses the memory of an array after the array is deleted, and not before."""

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


def test_memory_is_reused_once_its_array_is_gone():
    first = arenas.empty(BIG)
    address = place(first)
    del first
    assert place(arenas.empty(BIG)) == address


def test_a_view_keeps_the_memory():
    first = arenas.empty(BIG)
    first[...] = 1
    view, address = first[3:5], place(first)
    del first
    second = arenas.empty(BIG)
    second[...] = 2
    assert place(second) != address and (view == 1).all()


def test_arrays_are_aligned_writable_and_of_their_type():
    for shape, dtype in ((BIG, np.float32), ((3, 5, 7001), np.float64), ((2, 9999), np.uint8)):
        array = arenas.empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, dtype) and array.flags.c_contiguous
        assert place(array) % 64 == 0
        array[...] = 1
    assert arenas.empty((0, 3)).shape == (0, 3)


def test_only_the_first_step_reserves_memory():
    def step():
        arrays = [arenas.empty((n, 1 << 14)) for n in (5, 3, 9, 3)]
        arrays[1] = None
        arrays.append(arenas.empty((2, 1 << 14)))
        return [place(a) for a in arrays if a is not None]

    first = step()
    reserved = arenas.reserved()
    assert all(step() == first for _ in range(5)) and arenas.reserved() == reserved


def test_an_arena_is_freed_with_its_last_array():
    arena = Arena()
    alive = weakref.ref(arena)
    first, second = (arenas.empty(BIG, arena=arena) for _ in range(2))
    reserved = arenas.reserved()
    assert place(second) - place(first) == first.nbytes and arena.bytes == arenas.REGION
    large = arenas.empty((arenas.REGION + 1,), np.uint8, arena)
    assert arena.bytes == 2 * arenas.REGION + arenas.HUGE and arenas.reserved() == reserved
    large[...] = 1
    del arena, first, large
    gc.collect()
    second[...] = 7
    assert (second == 7).all() and alive() is not None
    del second
    assert alive() is None


def test_free_neighbours_join():
    arena = Arena()
    places = [arena.take(1 << 20) for _ in range(8)]
    for i in (1, 3, 2, 7, 0, 5, 4, 6):
        arena.returned.append((places[i], 1 << 20))
    arena.take(1 << 20)
    (free,) = arena.free
    assert free == (places[0] + (1 << 20), arenas.REGION - (1 << 20))


def test_arrays_never_overlap():
    """On two threads, allocate arrays of random sizes and lifetimes with different contents."""
    damaged = []

    def run(seed):
        rng, alive = np.random.default_rng(seed), {}
        for i in range(300):
            if len(alive) > 12 or (alive and rng.random() < 0.4):
                key = list(alive)[rng.integers(len(alive))]
                if not (alive.pop(key) == key).all():
                    damaged.append(key)
            array = arenas.empty((int(rng.integers(5_000, 200_000)),))
            array[...] = 1000 * seed + i
            alive[1000 * seed + i] = array
        damaged.extend(key for key, array in alive.items() if not (array == key).all())

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not damaged


FORK = """
import os
from mpidl.backends.cpu import arenas

with arenas._reading.lock, arenas._activations.lock:  # as if other threads held these locks
    child = os.fork()
    if not child:
        arenas.to_read((1 << 20,), "u1")
        arenas.empty((1 << 20,))
        os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_can_allocate():
    process = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True)
    assert process.stdout == "7\n", process.stderr
