"""Record the training step on a CPU once per size of mini-batch, and replay it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import attribute_changes
from mpidl.attribute_changes import CountingDict
from mpidl.backends import settings
from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.planned_arena import PlannedArena
from mpidl.backends.cpu.program import Program
from mpidl.backends.cpu.recorder import Place, Recorder
from mpidl.core.blocks import LANES, Batch, Blocked
from mpidl.core.grad import value_and_grad
from mpidl.losses import label_loss
from mpidl.training.optimizers import Optimizer
from mpidl.training.recorded_step import record

if TYPE_CHECKING:
    from mpidl.nn import Network
    from mpidl.ranks.world import World

GRADIENT, UPDATE = range(2)  # indices of the two parts of a recorded step


class Stage(enum.Enum):
    """What is known about a program. A mini-batch without a program is computed eagerly."""

    NEW = "recorded for the current mini-batch"
    RECORDED = "not compared with an eager step"
    CHECKED = "a replay has had the bytes of an eager step"


def is_recordable(net: Network, optimizer: Any, loss: Any, options: Any) -> bool:
    """Return whether the training step can be recorded.

    Custom layers, losses, optimizers and transforms may behave differently in each step, so a step
    that contains them is not recorded. A loss that divides by a number that depends on the labels
    also prevents recording.
    """
    parts = [*net.layers, optimizer, *getattr(optimizer, "transforms", ())]
    named_loss = label_loss(loss)
    is_ours = (
        isinstance(loss, str)
        if named_loss is None
        else named_loss.is_replayable(net.output_shape[0])
    )
    return (
        options.graphs != "off"
        and options.worker_load != "measured"
        and options.batchnorm == "global"
        and is_ours
        and isinstance(optimizer, Optimizer)
        and all(type(part).__module__.startswith("mpidl.") for part in parts)
        and builds.kernels() is not None
    )


class StepProgram:
    """A program that replays the kernel calls of a training step on the host.

    The constructor records the step without computing anything. It replaces the network's
    learnables and state with copies, unless the program shares the arrays of another program. The
    program updates these copies and the arrays of the optimizer in place.

    Parameters
    ----------
    net : Network
        The network, in host memory.
    optimizer : Optimizer
        The optimizer.
    objective : callable
        The function f(net, images, targets) whose first result is the loss.
    world : World
        The ranks.
    images, targets : Blocked
        The mini-batch to record.
    largest : StepProgram, optional
        A program for larger mini-batches of the same run, which must be current. The new program
        updates the same arrays and uses the same memory. By default, the program has new arrays.
    includes_update : bool
        Whether to record the update, too.

    Attributes
    ----------
    batch : Batch
        The recorded mini-batch.
    problem : str or None
        Reason why the step cannot be replayed, or None.
    memory : PlannedArena
        The memory of the program.
    state : dict
        {name: array}: the new state of the network, computed by the last call to `gradient`.
    stage : Stage
        What is known about the program.
    checks_loss : bool
        Whether the method `step` can be called. Otherwise, the caller must check that the loss is
        finite between `gradient` and `update`.
    """

    def __init__(
        self,
        net: Network,
        optimizer: Any,
        objective: Callable[..., Any],
        world: World,
        images: Blocked,
        targets: Blocked,
        *,
        largest: StepProgram | None = None,
        includes_update: bool = True,
    ) -> None:
        self._net, self._optimizer, self._world = net, optimizer, world
        self.batch, self.stage = images.batch, Stage.NEW
        if largest is None:
            net.parameters = {name: _copied(array) for name, array in net.parameters.items()}
            net.state = {name: _copied(array) for name, array in net.state.items()}
            optimizer.prepare(net.parameters)
        self._tables = [dict(table) for table in _tables(net, optimizer)]
        self._arrays = _arrays(net, optimizer)
        self._options = _options(net, optimizer)
        self._settings = _settings(_parts(net, optimizer))
        self._numbers: Any = None  # the values that determined the numbers of the last update
        # The objects that `is_current` last compared, and the count of changes at that time.
        self._used_tables: list[Any] = []
        self._parts: list[Any] = []
        self._changes = -1
        self._formats = _facts(images.batch), _format(images), _format(targets)
        world.host_memory()  # collective; an error during the recording may occur on one rank only
        recorder = Recorder(self._arrays, None if largest is None else largest.memory)
        self.memory: PlannedArena = recorder.memory
        self._counts = recorder.constant(images.batch.counts())
        self._samples = recorder.constant(np.zeros(images.batch.blocks * LANES, np.int64))
        self._uses_samples = False  # whether a recorded kernel uses the sample numbers
        self.checks_loss = False
        recorder.input("images", images.lanes)
        recorder.input("targets", targets.lanes)
        batch = dataclasses.replace(images.batch, device=self)
        recorded = Blocked(images.lanes, batch), Blocked(targets.lanes, batch)
        self._gradients: dict[str, np.ndarray] = {}
        self.state: dict[str, np.ndarray] = {}
        self._program: Program | None = None
        try:
            tables = self._record(recorder, objective, *recorded, includes_update)
            self._program = recorder.finish()
            self._gradients, self.state = (
                {name: v.view() if isinstance(v, Place) else v for name, v in table.items()}
                for table in tables
            )
        except Exception as error:  # Python code may fail, because nothing is computed
            recorder.refuse(f"{type(error).__name__}: {error}")
        self.problem = recorder.problem

    def _record(self, recorder, objective, images, targets, includes_update):
        """Record the step. Return {name: Place} of the gradients and of the new state."""
        net, places = self._net, [{}, {}]

        def at_update(results):
            value, gradients, state = results
            for table, arrays in zip(places, (gradients, state), strict=True):
                for name, array in arrays.items():
                    is_new = array is not net.state.get(name)
                    table[name] = recorder.place(array, "a result") if is_new else array
            if includes_update:
                root = recorder.is_finite_with(value[0])
                if root is not None:
                    recorder.need_finite(root)
                    self.checks_loss = True
                recorder.next_part()
            return includes_update

        compute = value_and_grad(objective, reduce=self._world)
        with recorder.recording():
            record(recorder, net, self._optimizer, compute, images, targets, at_update)
        return places

    @contextlib.contextmanager
    def planned_memory(self, program: StepProgram | None) -> Iterator[None]:
        """Let an eager computation use the memory, with the planned places of its program."""
        self.memory.follow([] if program is None else program._program.places)
        with arenas.through(self.memory):
            yield

    def set_state(self, values: Mapping[str, np.ndarray]) -> None:
        """Copy values into the program's state arrays, and let the network use these arrays."""
        for name, array in self._tables[1].items():
            if values[name] is not array:
                np.copyto(array, values[name])
        self._net.state = self._tables[1]
        if self._used_tables:
            self._used_tables[1] = self._net.state

    def is_current(self) -> bool:
        """Return whether the program matches the current network and optimizer.

        A hook may have replaced arrays, possibly on this rank only. If the new arrays have the
        expected shapes and types, their values are copied into the program's arrays. The network
        and the optimizer then use the program's arrays again.
        """
        net, optimizer = self._net, self._optimizer
        if _options(net, optimizer) != self._options:
            return False
        parts, tables = _parts(net, optimizer), _tables(net, optimizer)
        if (
            attribute_changes.count == self._changes
            and _are_same(parts, self._parts)
            and _are_same(tables, self._used_tables)
        ):
            return True
        if not _are_equal(_settings(parts), self._settings):
            return False
        if not _are_same(_arrays(net, optimizer), self._arrays):
            if _formats(tables) != _formats(self._tables):
                return False
            values = [{name: np.array(array) for name, array in t.items()} for t in tables]
            for arrays_of_program, new_values in zip(self._tables, values, strict=True):
                for name, array in arrays_of_program.items():
                    np.copyto(array, new_values[name])
        _set_tables(net, optimizer, self._tables)
        self._parts, self._used_tables = parts, _tables(net, optimizer)
        self._changes = attribute_changes.count
        return True

    def fits(self, images: Blocked, targets: Blocked) -> bool:
        """Return whether the program can be replayed for this mini-batch."""
        return (
            (_facts(images.batch), _format(images), _format(targets)) == self._formats
            and images.lanes.flags.c_contiguous
            and targets.lanes.flags.c_contiguous
        )

    def gradient(
        self, images: Blocked, targets: Blocked
    ) -> tuple[tuple, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Replay the computation of the value, the gradients and the new state, and return them."""
        self._set_inputs(images, targets)
        self._program.run(GRADIENT)
        return tuple(self._results()), self._gradients, self.state

    def update(self) -> None:
        """Replay the update of the learnables, the state and the optimizer."""
        self._set_numbers()
        self._program.run(UPDATE)
        self._optimizer.steps += 1

    def step(self, images: Blocked, targets: Blocked) -> tuple[list[float], bool]:
        """Replay the step. Return the value, and whether the network has been updated.

        The network and the optimizer are not updated if the loss is not finite.
        """
        self._set_inputs(images, targets)
        self._set_numbers()
        is_complete = self._program.run_all()
        self._optimizer.steps += is_complete
        return list(map(float, self._results())), is_complete

    def _results(self):
        self._world.count_waits()
        return self._program.results()

    def _set_inputs(self, images, targets):
        inputs = self._program.inputs
        if self._uses_samples:
            self._samples[: len(images.batch.indices)] = images.batch.indices
            inputs.set_number("epoch", images.batch.epoch)
        inputs.set_address("images", arenas.address_of(images.lanes))
        inputs.set_address("targets", arenas.address_of(targets.lanes))

    def _set_numbers(self):
        optimizer = self._optimizer
        sources = attribute_changes.count, optimizer.learning_rate, optimizer.average_share
        if sources != self._numbers or any(part.counts_steps for part in optimizer.transforms):
            for name, value in optimizer.numbers().items():
                self._program.inputs.set_number(name, value)
            self._numbers = sources

    # The recorded mini-batch calls the methods below as the methods of its device (`blocks.Batch`).

    def valid(self, batch: Batch) -> np.ndarray:
        """Return the number of images in each block, (blocks,) int32."""
        return self._counts

    def samples(self, batch: Batch) -> tuple[int, np.ndarray]:
        """Return the epoch and the sample numbers. Each replay sets both."""
        self._uses_samples = True
        return builds.recorder().scalar("epoch", batch.epoch), self._samples

    def per_image(self, batch: Batch) -> float:
        """Return the reciprocal of the number of images in the whole mini-batch."""
        return 1.0 / (self.batch.total or self.batch.count)


def _facts(batch):
    """Return the properties of a mini-batch that must be equal in all replays."""
    return batch.count, batch.total, batch.tree, batch.seed


def _format(blocked):
    return blocked.lanes.shape, blocked.lanes.dtype


def _copied(array):
    result = arenas.empty(array.shape, array.dtype)
    result[...] = array
    return result


def _tables(net, optimizer):
    """Return the tables of the arrays that a training step updates."""
    return [net.parameters, net.state, *optimizer.state_arrays.values()]


def _arrays(net, optimizer):
    """Return the arrays that a training step updates."""
    return [array for table in _tables(net, optimizer) for array in table.values()]


def _formats(tables):
    """Return the names, types and shapes of all arrays in the tables."""
    return [
        [(name, type(a), np.shape(a), getattr(a, "dtype", None)) for name, a in table.items()]
        for table in tables
    ]


def _set_tables(net, optimizer, tables):
    """Set the arrays of the network and the optimizer to the arrays in these tables."""
    net.parameters, net.state, *state_arrays = tables
    for name, arrays in zip([*optimizer.state_arrays], state_arrays, strict=True):
        optimizer.state_arrays[name] = CountingDict(arrays)


def _parts(net, optimizer):
    """Return the objects whose attributes affect the kernel calls of a training step."""
    return [*net.layers, *optimizer.transforms]


def _options(net, optimizer):
    """Return the other settings that affect the kernel calls of a training step."""
    options = net.batchnorm, net.fuse, settings.winograd, dict(optimizer.learning_rate_factors)
    return *options, [*optimizer.state_arrays], optimizer.average_share is None


def _settings(parts):
    """Return copies of the attributes of these objects and of the dicts among the attributes."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in table.items()}
        for table in map(vars, parts)
    ]


def _are_equal(settings_of_parts, expected):
    try:
        return settings_of_parts == expected
    except ValueError:  # a comparison of arrays
        return False


def _are_same(objects, expected):
    """Return whether two lists contain the same objects."""
    return len(objects) == len(expected) and all(map(operator.is_, objects, expected))


def digest(
    value: tuple, gradients: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]
) -> bytes:
    """Return a hash of the results of a gradient computation."""
    sha256 = hashlib.sha256(repr(tuple(map(float, value))).encode())
    for table in gradients, state:
        for name, array in sorted(table.items()):
            sha256.update(name.encode())
            sha256.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return sha256.digest()
