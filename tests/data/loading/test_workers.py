"""Test worker threads: order of items, errors, prefetching, and the end of the threads."""

import contextlib
import functools
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest
from limits import settled

from mpidl.data.loading.workers import Job, make_items, prefetch_items
from mpidl.errors import UserError

THREADS = [(0, 1), (1, 1), (2, 1), (2, 4), (5, 3)]  # prefetch, workers


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("mpidl-prefetch")]


def make(jobs, prefetch, workers):
    return prefetch_items(jobs, prefetch, workers) if prefetch else make_items(jobs)


def jobs_of(count, tasks=3, broken=(), log=None):
    """Yield jobs whose items are the results of their tasks. Tasks take different times."""

    def job(number):
        item = [None] * tasks

        def task(i):
            time.sleep(0.001 * ((number * 7 + i * 5) % 4))
            if (number, i) in broken:
                raise UserError(f"{number}.{i}")
            item[i] = number * 10 + i
            if log is not None:
                log.append((number, i))

        return Job([lambda i=i: task(i) for i in range(tasks)], lambda: item)

    for number in range(count):
        yield job(number)


@pytest.mark.parametrize("prefetch, workers", THREADS)
@pytest.mark.parametrize("tasks", [0, 1, 3])
def test_items_come_in_order(prefetch, workers, tasks):
    items = list(make(jobs_of(12, tasks), prefetch, workers))
    assert items == [[n * 10 + i for i in range(tasks)] for n in range(12)]
    assert not prefetch_threads()


@pytest.mark.parametrize("prefetch, workers", THREADS)
def test_the_first_error_is_raised_at_its_item(prefetch, workers):
    items = make(jobs_of(9, broken={(4, 2), (4, 1), (6, 0)}), prefetch, workers)
    delivered = []
    with pytest.raises(UserError, match=r"^4\.1$"):
        for item in items:
            delivered.append(item[0])
    assert delivered == [0, 10, 20, 30] and list(items) == []
    assert settled(prefetch_threads, [])


@pytest.mark.parametrize("prefetch, workers", THREADS[1:])
def test_an_error_of_the_plan_is_raised_after_the_items_before(prefetch, workers):
    def jobs():
        yield from jobs_of(3)
        raise UserError("no more")

    items = prefetch_items(jobs(), prefetch, workers)
    assert [next(items)[0] for _ in range(3)] == [0, 10, 20]
    with pytest.raises(UserError, match="no more"):
        next(items)
    assert settled(prefetch_threads, [])


@pytest.mark.parametrize("prefetch, workers", [(1, 1), (2, 4), (3, 2)])
def test_threads_work_no_farther_ahead_than_prefetch(prefetch, workers):
    log = []
    items = prefetch_items(jobs_of(20, log=log), prefetch, workers)
    for used in range(1, 4):
        next(items)
        assert settled(lambda used=used: len(log), 3 * (used + prefetch))
        time.sleep(0.02)
        assert len(log) == 3 * (used + prefetch)
    items.close()
    assert not prefetch_threads()


def test_all_workers_run_at_once():
    together = threading.Barrier(4)  # fewer than four threads cannot pass the barrier
    jobs = (Job([lambda: together.wait(10)] * 4, lambda: 1) for _ in range(3))
    assert sum(prefetch_items(jobs, 2, 4)) == 3


def test_threads_end_with_the_loop():
    def read(items, ending):
        for _ in items:
            assert 1 <= len(prefetch_threads()) <= 4
            if ending == "raise":
                raise RuntimeError
            if ending == "close":
                items.close()
            break

    for ending in ("break", "raise", "close", "never started"):
        items = prefetch_items(jobs_of(50), 3, 4)
        if ending != "never started":
            with contextlib.suppress(RuntimeError):
                read(items, ending)
        del items
        assert settled(prefetch_threads, []), ending


def test_a_thread_keeps_no_reference_to_a_finished_item():
    """A worker thread drops its reference to an item immediately, not at its next task."""

    def filling(array):
        return Job([functools.partial(fill, array)], functools.partial(np.asarray, array))

    def fill(array):
        array[...] = 1

    jobs = [filling(np.zeros(3))]
    job = jobs[0]
    job.run(0)  # like a thread that still holds the job
    item = job.item()
    reference = weakref.ref(item)
    assert (item == 1).all()
    del item
    assert reference() is None


def test_items_ahead_take_the_memory_of_those_before():
    arrays = []

    def job(number):
        array = np.full(3, number)
        arrays.append(weakref.ref(array))
        return Job([functools.partial(array.fill, number)], functools.partial(np.asarray, array))

    items = prefetch_items(map(job, range(6)), 1)
    for number in range(6):
        item = next(items)
        assert (item == number).all()
        del item
        assert settled(lambda number=number: arrays[number]() is None, True)


LEFT_LOOP = """
import threading
from mpidl.data.loading.workers import Job, prefetch_items

def jobs():
    for number in range(9):
        yield Job([threading.Event().wait] if number else [lambda: None], lambda n=number: n)

items = prefetch_items(jobs(), 3, 2)
assert next(items) == 0
print("left")
"""
THREAD_ALONE = """
import threading
from mpidl.data.loading.workers import Job, prefetch_items

def train():
    threading.main_thread().join()
    print(sum(prefetch_items((Job([lambda: None], lambda: 1) for _ in range(5)), 2, 2)))

threading.Thread(target=train).start()
"""


@pytest.mark.parametrize("program, output", [(LEFT_LOOP, "left\n"), (THREAD_ALONE, "5\n")])
def test_threads_neither_hold_up_the_end_of_a_program_nor_need_its_main_thread(program, output):
    """A program ends although a read never returns. Prefetching works without the main thread."""
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, output, "")
