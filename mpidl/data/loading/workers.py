"""Background dispatch: threads that read, decode and augment mini-batches ahead of their use.

Threads, because decoders and kernels release Python's lock while they work; MPI is not called here.
"""

import collections
import contextlib
import threading


class Job:
    """One item to be made: tasks, functions that any thread may call in any order, once each, and
    result(), which the thread that uses the item calls when all of them are done."""

    __slots__ = ("tasks", "result", "left", "errors")

    def __init__(self, tasks, result):
        self.tasks, self.result = tasks, result
        self.left, self.errors = len(tasks), {}

    def item(self):
        """result(), or what the first of the tasks that failed raised; called once. The job then
        keeps nothing of the item, whose memory is its user's to give back."""
        result, self.tasks, self.result = self.result, (), None
        if self.errors:
            raise self.errors[min(self.errors)]
        return result()


def in_turn(jobs):
    """Generate the items of jobs, made by the thread that asks for them."""
    for job in jobs:
        while job.tasks:
            job.tasks.pop(0)()
        yield job.item()


def ahead(jobs, prefetch, workers=1):
    """Generate the items of jobs in their order, up to `prefetch` of them made by `workers` threads
    ahead of their use.

    What a task raises, or the iterator of jobs, is raised where the item would have come. The
    threads end with the items, or with the generator (break out of the loop, or close()).
    """
    crew = _Crew(jobs, prefetch)
    threads = [
        threading.Thread(target=crew.work, name="mpidl-prefetch", daemon=True)
        for _ in range(workers)
    ]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        while (job := crew.next()) is not None:
            yield job.item()
    finally:
        crew.end()
        for thread in started:
            thread.join()


class _Crew:
    """What the threads share. Tasks are taken in the order of the jobs, so that the next item is
    made first; a job is begun only when a place for it is free."""

    def __init__(self, jobs, prefetch):
        self.jobs, self.free = iter(jobs), prefetch
        self.begun = collections.deque()  # jobs whose items were not delivered, in order
        self.tasks = collections.deque()  # (job, number, task) that nobody has taken
        self.ended = self.stopped = False
        self.change = threading.Condition()

    def work(self):
        """Do tasks until there are none any more."""
        while (taken := self._take()) is not None:
            job, number, task = taken
            error = None
            try:
                task()
            except BaseException as raised:
                error = raised
            del taken, task  # before the item is another's, who may give its memory back
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
                if self.ended:
                    return None
                if self.free:
                    self._begin()
                else:
                    self.change.wait()
            return None

    def _begin(self):
        """Begin the next job: a plan, in which nothing is read yet."""
        self.free -= 1
        try:
            job = next(self.jobs)
        except StopIteration:
            self.ended = True
        except BaseException as raised:
            job = Job([], None)
            job.errors[0] = raised
            self.begun.append(job)
            self.ended = True
        else:
            self.begun.append(job)
            self.tasks.extend((job, i, task) for i, task in enumerate(job.tasks))
        self.change.notify_all()

    def next(self):
        """The next job, once it is done; None after the last."""
        with self.change:
            while not (self.begun and not self.begun[0].left):
                if self.ended and not self.begun:
                    return None
                self.change.wait()
            self.free += 1
            self.change.notify_all()
            return self.begun.popleft()

    def end(self):
        """Have the threads end after the tasks they are at."""
        with self.change:
            self.stopped = True
            self.change.notify_all()
        close = getattr(self.jobs, "close", None)
        if close is not None:
            with contextlib.suppress(ValueError):  # it is being asked for a job
                close()
