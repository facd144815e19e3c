"""Replay a training step on a GPU: the Program and its operations, which `recorder` records."""

import numpy as np

from mpidl import phases
from mpidl.backends.gpu import launching
from mpidl.backends.gpu.program_times import ProgramTimes

ROWS = 8  # maximum number of training steps in progress at a time


class Operation:
    """Base class of operations. `place` names the part of the step, such as "update"."""

    place = ""


class Copy(Operation):
    """An operation that copies one Array to another Array of the same size."""

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
    """An operation that adds up the partial sums of all ranks through host memory.

    The partial sums are nodes of the reduction tree. The total is the root of the tree and is
    written to `target`. The host waits for the device, calls world.exchange(tree, nodes, combine),
    and continues as soon as the upload of the root has started.
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
        # copy the nodes, because world.exchange overwrites its argument and may keep a reference
        with phases.span(self.place or "exchange"):
            self.root[...] = self.world.exchange(self.tree, self.nodes.copy(), self.combine)
        device.upload(self.target.address, self.root)


class Between(Operation):
    """An operation that gathers reduction-tree nodes from all ranks, directly between GPUs.

    The operation calls mover.allgather(source, target).
    """

    def __init__(self, mover, source, target):
        self.mover, self.source, self.target = mover, source, target
        self.captured = mover.captured

    def play(self, device):
        self.mover.allgather(self.source, self.target)


class Program:
    """A recorded training step. `run` starts the step, and `results` waits for its results.

    `nbytes` is the size of the memory for the step's arrays.
    """

    def __init__(self, device, segments, ring, results, slots, names, owners, nbytes, graphs):
        # Assign the graphs first: attributes are deleted in the order of assignment, and the graphs
        # must be deleted before the memory that they use.
        self.graphs = None
        self.device, self.segments, self.nbytes = device, segments, nbytes
        self.ring, self.numbers, self.slots, self.names = ring, results, slots, names
        self.owners = owners  # objects that keep alive the memory used by the launches
        self.started, self.marks = 0, [None] * ROWS
        self.times = ProgramTimes(device)
        for launch in self.launches():
            launching.load(launch)  # nothing can be compiled during a capture
        if graphs and not device.synchronous:
            self.graphs = [
                self._capture(segment) if segment[0].captured else None for segment in segments
            ]

    def launches(self):
        """Return the Launches of the step, in order."""
        return [s.launch for segment in self.segments for s in segment if isinstance(s, Kernel)]

    def _capture(self, segment):
        return self.device.capture(lambda: [step.play(self.device) for step in segment])

    def ready(self):
        """Wait until fewer than ROWS steps are in progress; return the number of the next step.

        The caller may then overwrite the inputs of the steps that have finished.
        """
        mark = self.marks[self.started % ROWS]
        if mark is not None:
            self.device.wait(mark)
        return self.started

    def run(self, **values):
        """Start a training step, and return the number of the step for `results`.

        Parameters
        ----------
        **values
            Scalar inputs, by the names given to `launching.scalar` during the recording. By
            default, scalars have their recorded values.
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

        Parameters
        ----------
        started : int
            Number of the step, as returned by `run`.

        Raises
        ------
        ValueError
            If ROWS or more steps have been started since.
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
