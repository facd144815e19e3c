"""The training step on a GPU: recorded once, replayed for every mini-batch."""

from mpidl.backends.gpu import launching, program
from mpidl.backends.gpu.program import ROWS
from mpidl.backends.gpu.sums import Pending


class StepProgram:
    """gradient(net, images, labels) and the optimizer's step, as one program.

    gradient: what `value_and_grad` made, with its sums reduced; its value is a tuple of scalars.
    reader: gives the images and labels of the step, and takes those of each mini-batch
    (`data.on_device.Reader`). The network's parameters and state, and the optimizer's, lie on the
    device and are updated where they lie.
    """

    def __init__(self, net, optimizer, gradient, reader, counts, graphs=True):
        self.optimizer, self.reader, self.counts = optimizer, reader, counts
        optimizer.prepare(net.parameters)
        device = launching.device()
        recorder = program.Recorder(device)
        with launching.through(recorder):
            images, labels = reader.read()
            self.value, gradients, state = gradient(net, images, labels)
            parameters = optimizer.apply(net.parameters, gradients, optimizer.numbers())
            for new, old in ((parameters, net.parameters), (state, net.state)):
                for name, array in old.items():
                    if new[name] is not array:
                        recorder.carry(new[name], array)
            outputs = {
                f"{i}.{j}": root
                for i, pending in enumerate(self.value)
                for j, root in enumerate(_roots(pending))
            }
            self.program = recorder.finish(outputs, graphs)

    def start(self, feed):
        """Start the step of a mini-batch; returns what `finish` takes. Does not wait."""
        row = self.program.ready() % ROWS
        values = self.reader.values(feed, row) | self.optimizer.advance()
        return self.program.run(**values), feed.batch.count

    def finish(self, started):
        """The value of a step: waits for it."""
        number, count = started
        found = self.program.results(number)
        self.counts.count = count
        value = tuple(
            pending.finish([found[f"{i}.{j}"] for j in range(len(pending.roots))])
            for i, pending in enumerate(self.value)
        )
        self.counts.count = None
        return value


def _roots(pending):
    if not isinstance(pending, Pending):
        raise TypeError(f"a step on a GPU gives numbers summed over its images, got {pending!r}")
    return pending.roots
