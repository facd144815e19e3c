"""Record a training step's sums over the ranks, so that replays exchange them too."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.backends.cpu import arenas
from mpidl.backends.cpu.recording import Recorder, address_of, fixed
from mpidl.blocks import OneRank
from mpidl.fold import Partial

if TYPE_CHECKING:
    from mpidl.comm.world import World


class RecordedWorld:
    """A world that records its sums; pass it as the argument `reduce` of `value_and_grad`.

    A replay calls the same functions of the world in the same order, on arrays at the same
    addresses. Ranks that replay a step can therefore exchange sums with ranks that run it eagerly.

    Parameters
    ----------
    world : World
        The ranks.
    recorder : Recorder
        Records the step.

    Attributes
    ----------
    outputs : dict
        {key: Partial}, the results of the step, which are its last sums.
    gradients : dict
        {name: array} of the last replay; only with several ranks.
    """

    def __init__(self, world: World, recorder: Recorder) -> None:
        self.world, self.recorder = world, recorder
        self.rank, self.size, self.plain = world.rank, world.size, world.plain
        self.outputs: dict[Any, Any] = {}
        self.gradients: dict[str, np.ndarray] = {}

    def gplus(self, value: Any) -> Any:
        """Sum a Partial, or the results of the step as a dict of Partials, over the ranks."""
        if isinstance(value, dict):
            self.outputs = {key: self.at_fixed_place(item) for key, item in value.items()}
            return self.world.gplus(value)
        if not isinstance(value, Partial):
            self.recorder.refuse("it sums a value that is not a Partial over the ranks")
            return self.world.gplus(value)
        if self.size == 1 and len(value.terms) == 1 and value.terms[0].scale == 1.0:
            if value.addend is None:  # on one rank, the single node is the sum
                return value.finish([np.reshape(value.terms[0].nodes[0], value.shape)])
        total = arenas.empty(value.shape, value.dtype)
        partial, target = self.at_fixed_place(value), fixed(total)

        def exchange() -> None:
            target[...] = self.world.gplus(partial)

        total[...] = self.world.gplus(value)
        self.recorder.call_python(exchange, [total])
        return total

    def results(self) -> dict[Any, Any]:
        """Return the sums of the step's results in a replay, {key: array}."""
        world = OneRank() if self.size == 1 else self.world
        return world.gplus(self.outputs)

    def reducer(self) -> Any:
        """Return an object that sums gradients and notes the sums."""
        return self.world.reducer() if self.size == 1 else RecordedReducer(self)

    def at_fixed_place(self, value: Any) -> Any:
        """Return a Partial or an array at the same addresses that does not own the memory."""
        if not isinstance(value, Partial):
            return self.recorder.fix(np.asarray(value))
        fix = self.recorder.fix
        terms = [replace(t, nodes=[fix(np.asarray(n)) for n in t.nodes]) for t in value.terms]
        addend = None if value.addend is None else fix(np.asarray(value.addend))
        return Partial(terms, addend, value.shape, value.dtype)


class RecordedReducer:
    """Sums gradients over several ranks like a `Reducer`, during recording and in each replay."""

    def __init__(self, world: RecordedWorld) -> None:
        self._world, self._recorder = world, world.recorder
        self._pushed: list[Any] = []  # replays must not reuse their memory before the end of a sum
        self._sums: list[str] = []
        self._begin()
        self._recorder.call_python(self._begin)

    def _begin(self):
        self._reducer = self._world.world.reducer()

    def push(self, name: str, value: Any) -> None:
        """Add a named value to the sums."""
        self._pushed.append(value)
        if isinstance(value, Partial):
            self._sums.append(name)
        place = self._world.at_fixed_place(value)
        self._reducer.push(name, value)
        self._recorder.call_python(functools.partial(self._push, name, place))

    def _push(self, name, value):
        self._reducer.push(name, value)
        self._reducer.progress()

    def progress(self) -> None:
        """Advance pending exchanges, without waiting."""
        self._reducer.progress()

    def finish(self) -> dict[str, Any]:
        """Wait for all sums and return {name: array}."""
        sums = self._reducer.finish()
        self._pushed.clear()
        for name in self._sums:
            self._recorder.input(f"gradient of {name}", sums[name])
        self._recorder.call_python(self._finish)
        return sums

    def _finish(self):
        sums = self._world.gradients = self._reducer.finish()
        for name in self._sums:
            self._recorder.inputs.set_address(f"gradient of {name}", address_of(sums[name]))
