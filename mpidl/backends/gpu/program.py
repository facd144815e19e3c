"""Replay a recorded training step: the Program and the operations it consists of.

The module `recorder` records them.
"""

import numpy as np

from mpidl import phases
from mpidl.backends.gpu import launching
from mpidl.backends.gpu.program_times import ProgramTimes

ROWS = 8  # training steps that may be in progress at a time


class Operation:
    """Base class of operations. `place` says where the step recorded it, such as "update"."""

    place = ""


class Copy(Operation):
    """An operation that copies one Array over another of the same size."""

    captured = True

    def __init__(self, target, source):
        self.target, self.source = target, source

    def play(self, device):
        device.copy(self.target.address, self.source.address, self.source.nbytes)


class Kernel(Operation):
    """An operation that launches a kernel."""

    captured = True

    def __init__(self, launch):
        self.launch = launch

    def play(self, device):
        device.launch(launching.load(self.launch), self.launch)


class Exchange(Operation):
    """An operation that sums the partial sums of all ranks through host memory.

    The partial sums are nodes of the reduction tree. The total, its root, is written to `target`.
    The host waits for the device, calls world.exchange(tree, nodes, combine), and continues as
    soon as the upload of the root has started.
    """

    captured = False

    def __init__(self, device, world, tree, matrix, combine, target):
        self.world, self.tree, self.combine = world, tree, combine
        self.matrix, self.target = matrix, target
        self.nodes = device.pinned(max(matrix.nbytes, 1))[: matrix.nbytes]
        self.nodes = self.nodes.view(matrix.dtype).reshape(matrix.shape)
        self.root = device.pinned(target.nbytes).view(target.dtype).reshape(target.shape)

    def play(self, device):
        if self.nodes.size:
            device.download(self.nodes, self.matrix.address)
        device.synchronize()
        # a copy, because world.exchange overwrites its argument and may keep a reference to it
        with phases.span(self.place or "exchange"):
            self.root[...] = self.world.exchange(self.tree, self.nodes.copy(), self.combine)
        device.upload(self.target.address, self.root)


class Between(Operation):
    """An operation that all-gathers reduction-tree nodes directly between GPUs.

    It calls mover.allgather(source, target).
    """

    def __init__(self, mover, source, target):
        self.mover, self.source, self.target = mover, source, target
        self.captured = mover.captured

    def play(self, device):
        self.mover.allgather(self.source, self.target)


class Program:
    """A recorded training step. `run` starts it, and `results` waits for its numbers.

    `nbytes` is the size of its slab of memory.
    """

    def __init__(self, device, segments, ring, results, slots, names, owners, nbytes, graphs):
        # assigned first: attributes are deleted in order of assignment, and graphs must go before
        # the memory they use
        self.graphs = None
        self.device, self.segments, self.nbytes = device, segments, nbytes
        self.ring, self.numbers, self.slots, self.names = ring, results, slots, names
        self.owners = owners  # objects that keep alive the memory used by the launches
        self.started, self.marks = 0, [None] * ROWS
        self.times = ProgramTimes(device)
        for launch in self.launches():
            launching.load(launch)  # nothing can be compiled during a capture
        if graphs:
            self.graphs = [
                self._capture(segment) if segment[0].captured else None for segment in segments
            ]

    def launches(self):
        """Return the Launches, in order."""
        return [s.launch for segment in self.segments for s in segment if isinstance(s, Kernel)]

    def _capture(self, segment):
        return self.device.capture(lambda: [step.play(self.device) for step in segment])

    def ready(self):
        """Wait until fewer than ROWS steps are in progress; return the number of the next step.

        The caller may then overwrite the data that it prepared for the oldest step.
        """
        mark = self.marks[self.started % ROWS]
        if mark is not None:
            self.device.wait(mark)
        return self.started

    def run(self, **values):
        """Start a training step, and return its number, which is the argument of `results`.

        Parameters
        ----------
        **values
            Scalar inputs, by the names given to `launching.scalar` during recording. Scalars that
            are left out have their recorded values.
        """
        row = self.ready() % ROWS
        unknown = [name for name in values if name not in self.slots]
        if unknown:
            raise ValueError(
                f"the step has no input {unknown[0]}: expected {', '.join(self.slots)}"
            )
        for name, (array, initial) in self.slots.items():
            word = array.offset // 4
            value = np.asarray(values.get(name, initial), array.dtype).reshape(array.shape)
            self.ring[row, word : word + -(-value.nbytes // 4)].view(array.dtype)[...] = value
        is_timed = phases.spans() is not None
        if is_timed:
            self.times.begin(self.started)
        for i, segment in enumerate(self.segments):
            graph = self.graphs[i] if self.graphs else None
            if is_timed:
                self.times.play(self.started, segment, graph)
            elif graph is not None:
                graph.launch()
            else:
                for step in segment:
                    step.play(self.device)
        self.marks[row] = self.device.mark()
        self.started += 1
        return self.started - 1

    def results(self, started):
        """Wait for a training step and return its results, {name: number}.

        Raises ValueError if ROWS or more steps have been started since.
        """
        if self.started - started > ROWS:
            raise ValueError(
                f"the results of step {started} were overwritten: {self.started} steps have been "
                "started"
            )
        self.device.wait(self.marks[started % ROWS])
        self.times.finish(started)
        row = self.numbers[started % ROWS]
        return dict(zip(self.names, map(float, row), strict=True))
