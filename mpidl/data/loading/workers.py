"""Threads that read, decode and augment mini-batches ahead of their use.

Threads suffice, because decoders and kernels release the GIL while they work. Nothing here calls
MPI.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
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
    pool = _DaemonPool(workers)

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
        pool.close()


class _DaemonPool:
    """Threads that call functions in the order in which they are submitted.

    A ThreadPoolExecutor would not do: its threads hold up the end of the program while a read is
    slow, and it takes no tasks once the main thread has ended.
    """

    def __init__(self, workers: int):
        self.tasks: queue.SimpleQueue = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._work, name="mpidl-prefetch", daemon=True)
            for _ in range(workers)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, function: Callable[[int], None], number: int) -> Future:
        future: Future = Future()
        self.tasks.put((future, function, number))
        return future

    def _work(self):
        while (task := self.tasks.get()) is not None:
            future, function, number = task
            try:
                future.set_result(function(number))
            except BaseException as error:
                future.set_exception(error)
            del task, future, function  # nothing may outlive the item's delivery

    def close(self):
        """Drop the tasks that no thread has taken, and wait for the others."""
        try:
            while True:
                self.tasks.get_nowait()
        except queue.Empty:
            pass
        for _ in self.threads:
            self.tasks.put(None)
        for thread in self.threads:
            thread.join()
