"""Threads that read, decode and augment mini-batches ahead of their use.

Threads suffice, because decoders and kernels release the GIL while they work. Nothing here calls
MPI.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any


class Job:
    """One item to make.

    It keeps no task that has begun and no result that was delivered, so that the consumer of the
    item can free its memory.

    Parameters
    ----------
    tasks : list of callables
        Functions without arguments. Any thread may call them, in any order, once each.
    result : callable
        Returns the item. The consumer's thread calls it after all tasks are done.
    """

    __slots__ = ("tasks", "result")

    def __init__(self, tasks: list[Callable[[], None]], result: Callable[[], Any]):
        self.tasks: list[Any] = list(tasks)
        self.result: Any = result

    def run(self, number: int) -> None:
        """Call a task."""
        task, self.tasks[number] = self.tasks[number], None
        task()

    def item(self) -> Any:
        """Return the item. Call it once."""
        result, self.result = self.result, None
        return result()


def make_items(jobs: Iterable[Job]) -> Generator[Any]:
    """Generate the items of jobs; the thread that asks for an item makes it."""
    for job in jobs:
        for number in range(len(job.tasks)):
            job.run(number)
        yield job.item()


def prefetch_items(jobs: Iterable[Job], prefetch: int, workers: int = 1) -> Generator[Any]:
    """Generate the items of jobs in order; threads make them ahead of their use.

    An error of a task, or of the iterator of jobs, is raised in place of the item: of several tasks
    that of the first. The threads end with the last item or when the generator is closed.

    Parameters
    ----------
    jobs : iterable of Job
        The consumer's thread iterates it.
    prefetch : int
        Most items made ahead.
    workers : int
        Number of threads. They take tasks in the order of the jobs.
    """
    iterator = iter(jobs)
    started: collections.deque[tuple[Any, list[Future]]] = collections.deque()
    pool = ThreadPoolExecutor(workers, "mpidl-prefetch")

    def start():
        try:
            job = next(iterator, None)
            if job is not None:
                tasks = [pool.submit(job.run, number) for number in range(len(job.tasks))]
                started.append((job, tasks))
        except Exception as error:  # of the iterator: it is raised after the items before
            failed: Future = Future()
            failed.set_exception(error)
            started.append((None, [failed]))

    try:
        for _ in range(prefetch):
            start()
        while started:
            job, tasks = started.popleft()
            wait(tasks)
            start()
            for task in tasks:
                task.result()
            yield job.item()
    finally:
        pool.shutdown(cancel_futures=True)
