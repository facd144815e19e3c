"""Threads that read, decode and augment mini-batches ahead of their use.

Threads suffice, because decoders and kernels release the GIL while they work. Nothing here calls
MPI.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any


class Job:
    """One item to make.

    Parameters
    ----------
    tasks : list of callables
        Functions without arguments. Any thread may call them, in any order, once each.
    result : callable
        Returns the item. The consumer's thread calls it after all tasks are done.
    """

    __slots__ = ("tasks", "result", "left", "errors")

    def __init__(self, tasks: list[Callable[[], None]], result: Callable[[], Any]):
        self.tasks, self.result = tasks, result
        self.left = len(tasks)  # tasks that are not done
        self.errors: dict[int, BaseException] = {}  # by task number

    def item(self) -> Any:
        """Return the item, or raise the error of the first failed task. Call it once.

        The job then holds no reference to the item, so that its consumer can free the memory.
        """
        result, self.tasks, self.result = self.result, (), None
        if self.errors:
            raise self.errors[min(self.errors)]
        return result()


def make_items(jobs: Iterable[Job]) -> Generator[Any]:
    """Generate the items of jobs; the thread that asks for an item makes it."""
    for job in jobs:
        while job.tasks:
            job.tasks.pop(0)()
        yield job.item()


def prefetch_items(jobs: Iterable[Job], prefetch: int, workers: int = 1) -> Generator[Any]:
    """Generate the items of jobs in order; threads make them ahead of their use.

    An error of a task, or of the iterator of jobs, is raised in place of the item. The threads end
    with the last item or when the generator is closed.

    Parameters
    ----------
    jobs : iterable of Job
        The threads iterate it, one at a time.
    prefetch : int
        Most items made ahead.
    workers : int
        Number of threads.
    """
    pool = _WorkerPool(jobs, prefetch)
    threads = [
        threading.Thread(target=pool.work, name="mpidl-prefetch", daemon=True)
        for _ in range(workers)
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        while (job := pool.next()) is not None:
            yield job.item()
    finally:
        pool.end()
        for thread in started:
            thread.join()


class _WorkerPool:
    """State that the threads share.

    Threads take tasks in the order of the jobs, so that the next item is ready first. A job starts
    only when one of the `prefetch` slots is free.
    """

    def __init__(self, jobs, prefetch):
        self.jobs: Iterator[Job] = iter(jobs)
        self.free = prefetch  # slots for further jobs
        self.started: collections.deque[Job] = collections.deque()  # undelivered, in order
        self.tasks: collections.deque = collections.deque()  # untaken (job, number, task)
        self.exhausted = self.stopped = False
        self.change = threading.Condition()

    def work(self):
        """Run tasks until none are left."""
        while (entry := self._take()) is not None:
            job, number, task = entry
            error = None
            try:
                task()
            except BaseException as raised:
                error = raised
            del entry, task  # no reference may outlive the item's delivery
            with self.change:
                job.left -= 1
                if error is not None:
                    job.errors[number] = error
                if not job.left:
                    self.change.notify_all()

    def _take(self):
        with self.change:
            while not self.stopped:
                if self.tasks:
                    return self.tasks.popleft()
                if self.exhausted:
                    return None
                if self.free:
                    self._start_job()
                else:
                    self.change.wait()
            return None

    def _start_job(self):
        """Queue the tasks of the next job. Reads nothing yet."""
        self.free -= 1
        try:
            job = next(self.jobs)
        except StopIteration:
            self.exhausted = True
        except BaseException as raised:
            job = Job([], None)
            job.errors[0] = raised
            self.started.append(job)
            self.exhausted = True
        else:
            self.started.append(job)
            self.tasks.extend((job, i, task) for i, task in enumerate(job.tasks))
        self.change.notify_all()

    def next(self):
        """Return the next job once it is done; None after the last."""
        with self.change:
            while not (self.started and not self.started[0].left):
                if self.exhausted and not self.started:
                    return None
                self.change.wait()
            self.free += 1
            self.change.notify_all()
            return self.started.popleft()

    def end(self):
        """Have the threads end after their current tasks."""
        with self.change:
            self.stopped = True
            self.change.notify_all()
        close = getattr(self.jobs, "close", None)
        if close is not None:
            with contextlib.suppress(ValueError):  # a thread is inside the generator
                close()
