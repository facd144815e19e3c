"""Replay a training step on a GPU: the Program and its operations, which `recorder` records."""

import numpy as np

from mpidl import phases
from mpidl.backends.gpu import launching
from mpidl.backends.gpu.program_times import ProgramTimes

ROWS = 8  # maximum number of training steps in progress at a time


class Operation:
    """An operation of a step: `play(device)` starts it, which a CUDA graph may have captured.

    `launch` is the Launch if it is a kernel, and `place` the part of the step, such as "update".
    """

    def __init__(self, play, captured=True, launch=None):
        self.play, self.captured, self.launch, self.place = play, captured, launch, phases.place()


def kernel(launch):
    """Return the operation that launches a kernel."""
    return Operation(lambda device: device.launch(launching.load(launch), launch), launch=launch)


def copy(source, target):
    """Return the operation that copies one Array to another Array of the same size."""
    return Operation(lambda device: device.copy(target.address, source.address, source.nbytes))


class Program:
    """A recorded training step. `run` starts the step, and `results` waits for its results.

    `segments` are lists of operations, each of which becomes a graph if `graphs`. The rows of
    `ring` and of `numbers` are pinned memory for the scalars, whose places are `slots`, and for the
    results, which `names` lists. `owners` keep alive the memory of the launches, of which `nbytes`
    are for the step's arrays.
    """

    def __init__(self, device, segments, *, ring, numbers, slots, names, owners, nbytes, graphs):
        # Assign the graphs first: attributes are deleted in the order of assignment, and the graphs
        # must be deleted before the memory that they use.
        self.graphs = None
        self.device, self.segments, self.nbytes = device, segments, nbytes
        self.ring, self.numbers, self.slots, self.names = ring, numbers, slots, names
        self.owners = owners
        self.started, self.marks = 0, [None] * ROWS
        self.times = ProgramTimes(device)
        for launch in self.launches():
            launching.load(launch)  # nothing can be compiled during a capture
        if graphs and not device.synchronous:
            self.graphs = [
                self._capture(segment) if segment[0].captured else None for segment in segments
            ]

    def operations(self):
        """Return the Operations of the step, in order."""
        return [step for segment in self.segments for step in segment]

    def launches(self):
        """Return the Launches of the step, in order."""
        return [step.launch for step in self.operations() if step.launch is not None]

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

        `values` are scalars by the names given to `launching.scalar`; the others have their
        recorded values.
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
        """Wait for the training step that `run` started, and return its results, {name: number}.

        Raise ValueError if ROWS or more steps have been started since.
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
