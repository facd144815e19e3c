"""Background dispatch: order, errors, how far ahead, and that threads end; a user's function."""

import functools
import threading
import time
import weakref

import numpy as np
import pytest
from image_sets import refusal
from limits import settled

import mpidl as dl
from mpidl import keyed
from mpidl.data.loading.workers import Job, make_items, prefetch_items
from mpidl.errors import UserError

WAYS = [(0, 1), (1, 1), (2, 1), (2, 4), (5, 3)]


def prefetch_threads():
    return [t for t in threading.enumerate() if t.name.startswith("mpidl-prefetch")]


def made(jobs, prefetch, workers):
    return prefetch_items(jobs, prefetch, workers) if prefetch else make_items(jobs)


def jobs_of(count, tasks=3, broken=(), log=None):
    """Jobs whose item is what their tasks wrote; slow ones first, so that order is not by luck."""

    def job(number):
        found = [None] * tasks

        def task(i):
            time.sleep(0.001 * ((number * 7 + i * 5) % 4))
            if (number, i) in broken:
                raise UserError(f"{number}.{i}")
            found[i] = number * 10 + i
            if log is not None:
                log.append((number, i))

        return Job([lambda i=i: task(i) for i in range(tasks)], lambda: found)

    for number in range(count):
        yield job(number)


@pytest.mark.parametrize("prefetch, workers", WAYS)
@pytest.mark.parametrize("tasks", [0, 1, 3])
def test_items_come_in_order(prefetch, workers, tasks):
    found = list(made(jobs_of(12, tasks), prefetch, workers))
    assert found == [[n * 10 + i for i in range(tasks)] for n in range(12)]
    assert not prefetch_threads()


@pytest.mark.parametrize("prefetch, workers", WAYS)
def test_the_first_error_comes_at_its_item(prefetch, workers):
    items = made(jobs_of(9, broken={(4, 2), (4, 1), (6, 0)}), prefetch, workers)
    delivered = []
    with pytest.raises(UserError, match=r"^4\.1$"):
        for item in items:
            delivered.append(item[0])
    assert delivered == [0, 10, 20, 30] and list(items) == []
    assert settled(prefetch_threads, [])


@pytest.mark.parametrize("prefetch, workers", WAYS[1:])
def test_an_error_of_the_plan_comes_after_what_was_planned(prefetch, workers):
    def jobs():
        yield from jobs_of(3)
        raise UserError("no more")

    items = prefetch_items(jobs(), prefetch, workers)
    assert [next(items)[0] for _ in range(3)] == [0, 10, 20]
    with pytest.raises(UserError, match="no more"):
        next(items)
    assert settled(prefetch_threads, [])


@pytest.mark.parametrize("prefetch, workers", [(1, 1), (2, 4), (3, 2)])
def test_no_farther_ahead_than_asked(prefetch, workers):
    log = []
    items = prefetch_items(jobs_of(20, log=log), prefetch, workers)
    for used in range(1, 4):
        next(items)
        assert settled(lambda used=used: len(log), 3 * (used + prefetch))
        time.sleep(0.02)
        assert len(log) == 3 * (used + prefetch)
    items.close()
    assert not prefetch_threads()


def test_so_many_threads_work_at_once():
    inside, most, lock = 0, 0, threading.Lock()

    def task():
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.02)
        with lock:
            inside -= 1

    jobs = (Job([task] * 4, lambda: 1) for _ in range(3))
    assert sum(prefetch_items(jobs, 2, 4)) == 3 and most == 4


def test_threads_end_with_the_loop():
    for how in ("break", "raise", "close", "never started"):
        items = prefetch_items(jobs_of(50), 3, 4)
        if how == "close":
            next(items)
            items.close()
        elif how != "never started":
            try:
                for _ in items:
                    assert 1 <= len(prefetch_threads()) <= 4
                    if how == "raise":
                        raise RuntimeError
                    break
            except RuntimeError:
                pass
            items.close()
        del items
        assert settled(prefetch_threads, []), how


# a user's function


def store(count=50, labels=True):
    images = np.arange(count * 12, dtype=np.int64).astype(np.uint8).reshape(count, 1, 3, 4)
    return dl.ArrayDatastore(images, np.arange(count) % 3 if labels else None)


def noise(images, labels, at):
    """Floats of another size, with noise of each sample's own, and a target for each label."""
    drawn = np.stack(
        [keyed.uniform(at.seed, "noise", 12, epoch=at.epoch, sample=int(i)) for i in at.indices]
    )
    wide = images.astype(np.float32) / 255 + drawn.reshape(images.shape).astype(np.float32)
    return np.concatenate([wide, wide], axis=3), labels[:, None] * np.array([1.5, 2.0])


@pytest.mark.parametrize("prefetch, workers", WAYS)
def test_a_function_is_given_a_block_at_a_time(world, prefetch, workers):
    seen, data = [], store()

    def function(images, labels, at):
        seen.append(len(images))
        assert np.array_equal(images, data.images[at.indices])
        assert np.array_equal(labels, at.indices % 3)
        return noise(images, labels, at)

    queue = dl.MinibatchQueue(
        data, 40, 7, world, function=function, prefetch=prefetch, workers=workers
    )
    for images, targets in queue.epoch(2):
        batch = images.batch
        assert images.image_shape == (1, 3, 8) and images.dtype == np.float32
        assert targets.image_shape == (2,) and targets.dtype == np.float32
        at = type("SampleKeys", (), {"indices": batch.indices, "epoch": 2, "seed": 7})
        if len(batch.indices):
            known = noise(data.images[batch.indices], batch.indices % 3, at)
            assert np.array_equal(images.local(), known[0])
            assert np.array_equal(targets.local(), known[1].astype(np.float32))
    assert max(seen) <= 16


def test_a_function_comes_after_the_augmenter_and_before_normalization():
    data, augmenter = store(), dl.Augmenter(reflect_x=True, translate_x=1)

    def function(images, labels, at):
        mapped = augmenter.apply(data.images[at.indices], at.indices, epoch=at.epoch, seed=at.seed)
        assert images.dtype == np.uint8 and np.array_equal(images, mapped)
        return 255 - images

    queue = dl.MinibatchQueue(data, 20, augmenter=augmenter, function=function)
    for images, labels in queue.epoch(1):
        indices = images.batch.indices
        mapped = augmenter.apply(data.images[indices], indices, epoch=1, seed=0)
        assert np.array_equal(images.local(), (255 - mapped) / np.float32(255))
        assert np.array_equal(labels.local(), indices % 3)


def test_what_a_function_may_not_return():
    data = store()

    def changing(images, labels, at):
        return images if at.indices[0] == 0 else images[..., 1:]

    for function, text in (
        (lambda x, y, at: None, "function: expected 1 images, uint8 or float"),
        (lambda x, y, at: x[:, 0], "function: expected 1 images"),
        (lambda x, y, at: x.astype(int), "function: expected 1 images"),
        (lambda x, y, at: (x, ["a"]), "function: expected labels or targets of 1 images"),
        (lambda x, y, at: x / np.float32(0), "image 0: expected finite pixels"),
    ):
        with np.errstate(all="ignore"):
            assert text in refusal(lambda f=function: dl.MinibatchQueue(data, function=f)), text
    batches = dl.MinibatchQueue(data, 16, shuffle="never", function=changing).epoch(0)
    next(batches)
    assert "expected the same as of image 0 (uint8 images of 1x3x4" in refusal(next, batches)


def test_an_augmenter_leaves_no_image_targets_behind():
    class Pairs(dl.data.Datastore):
        image_shape, targets_shape = (1, 3, 4), (1, 3, 4)

        def __len__(self):
            return 5

        def read(self, indices):
            return np.zeros((len(indices), 1, 3, 4), np.uint8)

        def targets(self, indices):
            return np.zeros((len(indices), 1, 3, 4), np.float32)

    text = refusal(dl.MinibatchQueue, Pairs(), augmenter=dl.Augmenter(reflect_x=True))
    assert "moves images and not their targets" in text


def test_options_that_cannot_be_used():
    assert refusal(dl.MinibatchQueue, store(), workers=0) == "workers must be at least 1, got 0"


def test_a_thread_keeps_nothing_of_an_item_that_is_done():
    """Not even while it has not come to its next task."""

    def job(array):
        return Job([functools.partial(fill, array)], functools.partial(np.asarray, array))

    def fill(array):
        array[...] = 1

    jobs = [job(np.zeros(3))]
    done = jobs[0]
    done.run(0)  # as a thread does, which still holds the job
    item = done.item()
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
