"""Check that arrays get their planned places, and other memory where a place is not free."""

import numpy as np

from mpidl.backends import memory_plan
from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.planned_arena import PLANNED, PlannedArena
from mpidl.backends.cpu.recorder import Recorder

KIB = 1 << 10


def place(array):
    return array.ctypes.data


def empty(arena, nbytes):
    return arenas.empty((nbytes,), np.uint8, arena)


def step(arena=None):
    """Allocate arrays like a step: a gradient remains, where best fit leaves no room for `last`."""
    first, second = (empty(arena, 600 * KIB) for _ in range(2))
    places = [place(first), place(second)]
    del first
    gradient = empty(arena, 512 * KIB)
    del second
    last = empty(arena, 1200 * KIB)
    return [*places, place(gradient), place(last)], (gradient, last)


def places_of(function):
    """Return the planned places of the arrays that a function allocates, and their bytes."""
    recorder = Recorder([])
    with recorder.recording():
        results = function()
        del results
    places = recorder.finish().places
    return places, max(offset + size for size, offset in places)


def test_arrays_get_their_planned_places():
    places, nbytes = places_of(step)
    assert nbytes == 1712 * KIB  # the gradient and the last array
    arena = PlannedArena()
    start = arena.reserve(nbytes)
    for _ in range(2):
        arena.follow(places)
        addresses, _ = step(arena)
        assert [address - start for address in addresses] == [offset for _, offset in places]


def test_a_place_that_is_not_free_is_not_used(monkeypatch):
    monkeypatch.setattr(arenas, "REGION", arenas.HUGE)
    arena, size = PlannedArena(), 1024 * KIB
    arena.reserve(2 * size)
    arena.follow([(size, 0), (size, 0), (size, size)])
    arrays = [empty(arena, size) for _ in range(3)]
    for value, array in enumerate(arrays):
        array[...] = value
    assert [int(array.max()) for array in arrays] == [0, 1, 2]
    assert len({place(array) for array in arrays}) == 3 and arena.bytes > 2 * size


def test_small_arrays_never_use_planned_places():
    arena = PlannedArena()
    start = arena.reserve(PLANNED)
    arena.follow([(PLANNED, 0)])
    small = [empty(arena, PLANNED - 64) for _ in range(100)]
    assert all(not start <= place(array) < start + arena.bytes for array in small)
    assert place(empty(arena, PLANNED)) == start
    address = place(small.pop())
    assert place(empty(arena, PLANNED - 64)) == address


def test_arrays_without_places_are_allocated_by_best_fit(monkeypatch):
    monkeypatch.setattr(arenas, "REGION", arenas.HUGE)
    arena = PlannedArena()
    arena.reserve(PLANNED)
    arena.follow([])
    array = empty(arena, 4096 * KIB)
    array[...] = 1
    assert arena.bytes == arenas.HUGE + 4096 * KIB


def test_random_buffers_do_not_overlap():
    rng = np.random.default_rng(3)
    lives = []
    for time in range(200):
        lives.append((64 * int(rng.integers(1, 50)), time, time + int(rng.integers(0, 30))))
    offsets, nbytes = memory_plan.place(lives)
    memory = np.full((230, nbytes // 64), -1)
    for i, ((size, first, last), offset) in enumerate(zip(lives, offsets, strict=True)):
        places = memory[first : last + 1, offset // 64 : (offset + size) // 64]
        assert (places == -1).all()
        places[...] = i
    largest_sum = (memory >= 0).sum(1).max() * 64
    assert largest_sum <= nbytes <= 1.25 * largest_sum
    assert memory_plan.place([]) == ([], 0)
