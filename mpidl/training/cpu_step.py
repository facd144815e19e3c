"""Record the training step on a CPU once per size of mini-batch, and replay it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.backends import settings
from mpidl.backends.cpu import arenas, builds
from mpidl.backends.cpu.recorder import Recorder
from mpidl.core.blocks import LANES, Batch, Blocked
from mpidl.core.fold import Late
from mpidl.core.grad import value_and_grad
from mpidl.losses import label_loss
from mpidl.training.optimizers import Optimizer
from mpidl.training.recorded_step import Results, record

if TYPE_CHECKING:
    from mpidl.backends.cpu.planned_arena import PlannedArena
    from mpidl.backends.cpu.program import Program
    from mpidl.nn import Network
    from mpidl.ranks.world import World

GRADIENT, UPDATE = range(2)  # the two parts of a program


def is_recordable(net: Network, optimizer: Any, loss: Any, options: Any) -> bool:
    """Return whether the training step can be recorded.

    Custom layers, losses, optimizers and transforms may behave differently in each step, and so may
    a loss that divides by a number that depends on the labels.
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

    The constructor records the step for a mini-batch. The program updates the learnables, the state
    and the arrays of the optimizer in place: those of `largest`, a program for larger mini-batches
    that must be current, or else copies. `problem` is a reason not to replay it, or None. Unless
    `checks_loss`, the caller must check the loss between `gradient` and `update`.
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
        self.batch, self._facts = images.batch, _facts(images, targets)
        if largest is None:
            net.parameters = {name: _copied(array) for name, array in net.parameters.items()}
            net.state = {name: _copied(array) for name, array in net.state.items()}
            optimizer.prepare(net.parameters)
        self._tables = [dict(table) for table in _tables(net, optimizer)]
        self._arrays, self._settings = _arrays(self._tables), _snapshot(_settings(net, optimizer))
        world.host_memory()  # collective; an error during the recording may occur on one rank only
        recorder = Recorder(self._arrays, None if largest is None else largest.memory)
        self.memory: PlannedArena = recorder.memory
        self._counts = recorder.constant(images.batch.counts())
        self._samples = recorder.constant(np.zeros(images.batch.blocks * LANES, np.int64))
        self._uses_samples = False  # whether a recorded kernel uses the sample numbers
        self.is_checked = False  # whether a replay has had the bytes of an eager step
        self.checks_loss = False
        self._gradients: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        recorder.input("images", images.lanes)
        recorder.input("targets", targets.lanes)
        batch = dataclasses.replace(images.batch, device=self)
        recorded = Blocked(images.lanes, batch), Blocked(targets.lanes, batch)
        compute = value_and_grad(objective, reduce=world)

        def at_update(results: Results) -> bool:
            (loss, *_), *tables = results
            self._gradients, self._state = (
                {name: recorder.place(array, "a result") for name, array in table.items()}
                for table in tables
            )
            if includes_update:
                self.checks_loss = recorder.need_finite(loss)
                recorder.next_part()
            return includes_update

        try:
            with recorder.recording():
                record(recorder, net, optimizer, compute, *recorded, at_update)
            self._program: Program = recorder.finish()
        except Exception as error:  # Python code may fail, because nothing is computed
            recorder.refuse(f"{type(error).__name__}: {error}")
        else:
            for table in self._gradients, self._state:
                table.update({name: place.view() for name, place in table.items()})
        self.problem = recorder.problem

    @contextlib.contextmanager
    def planned_memory(self, program: StepProgram | None) -> Iterator[None]:
        """Let an eager computation use the memory, with the planned places of its program."""
        self.memory.follow([] if program is None else program._program.places)
        with arenas.through(self.memory):
            yield

    def set_state(self, values: Mapping[str, np.ndarray]) -> None:
        """Copy values into the program's state arrays, and let the network use these arrays."""
        _, state, *_ = self._tables
        copy_into(state, values)
        self._net.state = state

    def is_current(self) -> bool:
        """Return whether the program matches the current network and optimizer.

        If arrays have been replaced by others of the same shapes and types, perhaps on this rank
        only, their values are copied to the program's arrays, which are then used again.
        """
        net, optimizer = self._net, self._optimizer
        if not _are_equal(_settings(net, optimizer), self._settings):
            return False
        tables = _tables(net, optimizer)
        arrays = _arrays(tables)
        if len(arrays) == len(self._arrays) and all(map(operator.is_, arrays, self._arrays)):
            return True
        if _formats(tables) != _formats(self._tables):
            return False
        values = [{name: np.array(array) for name, array in table.items()} for table in tables]
        for table, new_values in zip(self._tables, values, strict=True):
            copy_into(table, new_values)
        net.parameters, net.state, *state_arrays = self._tables
        for name, table in zip([*optimizer.state_arrays], state_arrays, strict=True):
            optimizer.state_arrays[name] = dict(table)
        return True

    def fits(self, images: Blocked, targets: Blocked) -> bool:
        """Return whether the program can be replayed for this mini-batch."""
        return _facts(images, targets) == self._facts

    def gradient(self, images: Blocked, targets: Blocked) -> Results:
        """Replay the computation of the value, the gradients and the new state, and return them."""
        self._set_inputs(images, targets)
        self._program.run(GRADIENT)
        return tuple(self._results()), self._gradients, self._state

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
        is_complete = self._program.run(GRADIENT, UPDATE)
        self._optimizer.steps += is_complete
        return list(map(float, self._results())), is_complete

    def _results(self):
        self._world.count_waits()
        return self._program.results()

    def _set_inputs(self, images, targets):
        inputs = self._program.inputs
        if self._uses_samples:
            self._samples[: len(images.batch.indices)] = images.batch.indices
            inputs.set("epoch", images.batch.epoch)
        inputs.set("images", arenas.address_of(images.lanes))
        inputs.set("targets", arenas.address_of(targets.lanes))

    def _set_numbers(self):
        for name, value in self._optimizer.numbers().items():
            self._program.inputs.set(name, value)

    # The recorded mini-batch calls the methods below as the methods of its device (`blocks.Batch`).

    def valid(self, batch: Batch) -> np.ndarray:
        """Return the number of images in each block, (blocks,) int32."""
        return self._counts

    def samples(self, batch: Batch) -> tuple[int, np.ndarray]:
        """Return the epoch and the sample numbers. Each replay sets both."""
        self._uses_samples = True
        return builds.recorder().scalar("epoch", batch.epoch), self._samples

    def per_image(self, batch: Batch) -> float | Late:
        """Return the reciprocal of the number of images in the whole mini-batch."""
        return dataclasses.replace(batch, device=None).per_image


def _facts(images, targets):
    """Return the properties of a mini-batch that must be equal in all replays."""
    batch, arrays = images.batch, (images.lanes, targets.lanes)
    formats = [(array.shape, array.dtype, array.flags.c_contiguous) for array in arrays]
    return batch.count, batch.total, batch.tree, batch.seed, formats


def _copied(array):
    result = arenas.empty(array.shape, array.dtype)
    result[...] = array
    return result


def copy_into(arrays: Mapping[str, np.ndarray], values: Mapping[str, np.ndarray]) -> None:
    """Copy values into arrays of the same names, except for values that are these arrays."""
    for name, array in arrays.items():
        if values[name] is not array:
            np.copyto(array, values[name])


def _tables(net, optimizer):
    """Return the tables of the arrays that a training step updates."""
    return [net.parameters, net.state, *optimizer.state_arrays.values()]


def _arrays(tables):
    return [array for table in tables for array in table.values()]


def _formats(tables):
    """Return the names, types and shapes of all arrays in the tables."""
    return [
        [(name, type(a), np.shape(a), getattr(a, "dtype", None)) for name, a in table.items()]
        for table in tables
    ]


def _settings(net, optimizer):
    """Return what determines the kernel calls of a training step, apart from its arrays."""
    parts = [*net.layers, *optimizer.transforms]
    factors, tables = optimizer.learning_rate_factors, [*optimizer.state_arrays]
    options = net.batchnorm, net.fuse, optimizer.average_share is None
    options += settings.winograd, settings.precision
    return [*options, factors, tables, *map(type, parts), *map(vars, parts)]


def _snapshot(value):
    """Return the value, with copies of its lists and dicts, whose later changes show."""
    if isinstance(value, dict):
        return {key: _snapshot(element) for key, element in value.items()}
    return [_snapshot(element) for element in value] if isinstance(value, list) else value


def _are_equal(value, expected):
    try:
        return value == expected
    except ValueError:  # a comparison of arrays
        return False


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
