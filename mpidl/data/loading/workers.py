"""Prepare items, such as mini-batches, in threads before a consumer requests them.

Threads suffice, because decoders and kernels release the GIL while they work. No function of this
module calls MPI.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, wait
from typing import Any

from mpidl import phases

READER = "reader "  # prefix of the names of the threads' tracks in a timeline


class Job:
    """The tasks that prepare one item.

    Each task is called once, by any thread and in any order. The consumer's thread calls `result`,
    which returns the item, after all tasks are done. A Job drops its reference to a task when the
    task starts, and to the result function when the item is delivered. The consumer can therefore
    free the memory of the item.
    """

    __slots__ = ("tasks", "result")

    def __init__(self, tasks: list[Callable[[], None]], result: Callable[[], Any]):
        self.tasks: list[Any] = list(tasks)
        self.result: Any = result

    def run(self, number: int) -> None:
        """Call the task with the given index."""
        task, self.tasks[number] = self.tasks[number], None
        task()

    def item(self) -> Any:
        """Return the item. Call this method only once."""
        result, self.result = self.result, None
        return result()


def make_items(jobs: Iterable[Job]) -> Generator[Any]:
    """Generate the items of jobs in order. The consumer's thread runs the tasks."""
    for job in jobs:
        for number in range(len(job.tasks)):
            job.run(number)
        yield job.item()


def prefetch_items(jobs: Iterable[Job], prefetch: int, workers: int = 1) -> Generator[Any]:
    """Generate the items of jobs in order.

    The consumer's thread iterates over the jobs, and threads run their tasks in this order, up to
    `prefetch` items in advance. If a task or the iterator of jobs fails, the error is raised when
    the item is requested. If several tasks of a job fail, the error of the first task in the list
    is raised. The threads end after the last item, or when the generator is closed.
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
        except Exception as error:  # an error of the iterator is raised after the earlier items
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
    """A pool of daemon threads that call functions in the order of submission.

    `ThreadPoolExecutor` is unsuitable: its threads delay the end of the program during a slow read,
    and it accepts no tasks after the main thread has ended.
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
                start = phases.now()
                future.set_result(function(number))
                if (spans := phases.spans()) is not None:
                    name = f"{READER}{threading.get_ident()}"
                    spans.add(name, "read", "read images", start, phases.now())
            except BaseException as error:
                future.set_exception(error)
            del task, future, function  # no reference may outlive the delivery of the item

    def close(self):
        """Discard tasks that have not started, and wait for the running tasks and the threads."""
        try:
            while True:
                self.tasks.get_nowait()
        except queue.Empty:
            pass
        for _ in self.threads:
            self.tasks.put(None)
        for thread in self.threads:
            thread.join()
