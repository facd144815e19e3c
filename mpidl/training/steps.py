"""Run training steps on the host (`EagerStep`) or on a GPU (`RecordedStep`).

Both classes have the same methods. `submit` starts the training step of a mini-batch and returns
the results that are ready. `drain` waits for all remaining results, and `close` moves the network
back to host memory. On the host, each step is complete when `submit` returns. On a GPU, up to
`STEPS_AHEAD` earlier steps may still be running when the next step is submitted.
"""

from __future__ import annotations

import collections
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidl import losses, phases
from mpidl.autodiff import value_and_grad
from mpidl.backends.cpu import arenas
from mpidl.data import MinibatchQueue
from mpidl.data.parts import PartedBatch, parts_of
from mpidl.errors import NotFinite, UserError
from mpidl.training import accumulation, cpu_step
from mpidl.training.optimizers import Optimizer

STEPS_AHEAD = 4  # largest number of GPU steps that may be pending when a step is submitted


class StepInfo(NamedTuple):
    """Description of a submitted training step.

    Attributes
    ----------
    epoch, iteration : int
        Epoch and iteration of the step, from 1.
    images : int
        Number of images in the mini-batch, summed over all ranks.
    learning_rate : float
        Learning rate of the step.
    start : float
        time.monotonic() at the start of the step, in seconds.
    """

    epoch: int
    iteration: int
    images: int
    learning_rate: float
    start: float


class StepResult(NamedTuple):
    """The result of a completed training step.

    Attributes
    ----------
    info : StepInfo
        Description of the step.
    loss : float
        Loss of the mini-batch.
    correct : float or None
        Number of correctly classified images. An image with several labels counts as the
        fraction of its labels that are correct. None if the loss has no classes.
    images_per_second : float
        Number of images in the mini-batch divided by the seconds since the start of the step.
    """

    info: StepInfo
    loss: float
    correct: float | None
    images_per_second: float

    @property
    def accuracy(self) -> float | None:
        """Fraction of images that were classified correctly; None if the loss has no classes."""
        return None if self.correct is None else self.correct / self.info.images


def make_step(net, optimizer, options, loss, world, datastore, queue_options, balancer, advice):
    """Create the mini-batch queue and the training step for the device of `world`.

    Parameters
    ----------
    loss : str or function
        The loss, as `TrainingOptions.loss_for` returns it.
    queue_options : dict
        Arguments of `MinibatchQueue` other than datastore, batch size, seed, world and shuffling.
    balancer : LoadBalancer or None
        Measures each rank's time per block of 16 images. None if the shares are fixed.
    advice : Callable[[float], str]
        Function that receives the learning rate, and returns advice for the error message about a
        loss that is not finite.

    Returns
    -------
    queue : MinibatchQueue
        The queue that delivers mini-batches for the step.
    step : EagerStep or RecordedStep
        The object that runs the training steps.

    Raises
    ------
    UserError
        If an option or the optimizer does not work on a GPU.
    """
    arguments = datastore, options.batch_size, options.seed, world, options.shuffle
    labels_per_image = losses.labels_per_image(net, datastore)
    accumulation.check(options, loss, world.device)
    if world.device is None:
        is_recordable = cpu_step.is_recordable(net, optimizer, loss, options)
        replayed = ReplayedStep if options.accumulate == 1 else ReplayedParts
        step_class = replayed if is_recordable else EagerStep
        queue = MinibatchQueue(*arguments, **queue_options)
        queue.parts = options.accumulate
        return queue, step_class(net, optimizer, loss, world, labels_per_image, balancer, advice)
    from mpidl.data.loading.device_queue import DeviceQueue  # only ranks with a GPU import GPU code

    if options.mixup or options.cutmix:
        raise UserError(
            "--mixup and --cutmix: GPUs have no kernels for labels that are probabilities; use "
            "--device cpu"
        )
    if options.batchnorm == "local":
        raise UserError("--batchnorm local: on GPUs the statistics are global; use --device cpu")
    if balancer:
        raise UserError(
            "--worker-load measured: on GPUs the shares are fixed when the step is recorded; "
            "give numbers, or use --device cpu"
        )
    missing = [
        name for name in ("apply", "prepare", "numbers", "advance") if not hasattr(optimizer, name)
    ]
    if missing:
        raise UserError(
            f"optimizer: {type(optimizer).__name__} has no {', '.join(missing)}, which a GPU's "
            "recorded step needs (see mpidl.training.optimizers.Optimizer); use --device cpu"
        )
    queue = DeviceQueue(*arguments, **queue_options)
    graphs = options.graphs != "off"
    return queue, RecordedStep(
        net, optimizer, loss, world, labels_per_image, queue.reader(), advice, graphs
    )


class EagerStep:
    """A training step on the host, where each op runs as soon as it is called."""

    def __init__(self, net, optimizer, loss, world, labels_per_image, balancer, advice):
        self.net, self.optimizer, self.world = net, optimizer, world
        self.objective = losses.loss_function(loss)
        self.gradient = value_and_grad(self.objective, reduce=world)
        self.labels_per_image, self.balancer, self.advice = labels_per_image, balancer, advice
        self.observers: list[Callable[[Mapping[str, np.ndarray]], None]] = []

    def observe_gradients(self, observer: Callable[[Mapping[str, np.ndarray]], None]) -> None:
        """Register a function that receives the gradients of each mini-batch before the update.

        The gradients are passed as {name: array}. The optimizer may overwrite the arrays, so the
        function must not keep references to them.
        """
        self.observers.append(observer)

    def submit(self, images, targets, info: StepInfo) -> list[StepResult]:
        """Compute the loss and gradients of a mini-batch, and update the network. Collective."""
        with phases.Phase(phases.COMPUTE, "training step"):
            sums = self._compute(images, targets, info)
        return [_result(info, sums, self.labels_per_image)]

    def _compute(self, images, targets, info):
        if self.balancer:
            self.balancer.start(info.start)
        value, gradients, state = self._gradient(images, targets)
        sums = [float(number) for number in value]
        if not math.isfinite(sums[0]):
            self._raise_fault(images, targets, sums[0], info)
        for observer in self.observers:
            observer(gradients)
        with phases.span("update"):
            self._update(gradients, state)
        if self.balancer:
            self.balancer.stop(time.monotonic(), images.batch.blocks)
        return sums

    def _gradient(self, images, targets):
        if isinstance(images.batch, PartedBatch):
            return accumulation.accumulated(self.gradient, self.net, images, targets)
        return self.gradient(self.net, images, targets)

    def _update(self, gradients, state):
        self.net.state = state
        self.net.parameters = checked_step(self.optimizer, self.net.parameters, gradients)

    def drain(self) -> list[StepResult]:
        return []

    def close(self) -> None:
        pass

    def _raise_fault(self, images, targets, loss, info):
        """Raise a `NotFinite` that names the ranks whose images cause a NaN or infinite loss."""
        gradient = value_and_grad(self.objective)
        own_losses = [gradient(self.net, *part)[0][0] for part in parts_of(images, targets)]
        is_finite = all(np.isfinite(own_loss.local()).all() for own_loss in own_losses)
        flags = self.world.gather(not is_finite)
        ranks = [str(rank) for rank, flag in enumerate(self.world.broadcast(flags)) if flag]
        place = f", on rank {', '.join(ranks)}"
        if len(ranks) == self.world.size:
            place = ", on all ranks"
        elif not ranks:  # a faulty processor, or a layer that is not a function of its input
            place = ", but finite when computed again"
        raise _not_finite(loss, info, place, self.advice)


class ReplayedStep(EagerStep):
    """A training step on the host that is recorded once and then replayed.

    The first mini-batch is recorded while it is computed eagerly. The second mini-batch is computed
    both eagerly and by replay. If the two gradients do not have the same bytes on all ranks, all
    later steps run eagerly. Mini-batches of other sizes, and steps whose spans are stored for a
    timeline, also run eagerly. Eager and replayed steps exchange the same messages.

    A hook may change settings of the network or the optimizer, possibly on one rank only. That rank
    then runs eagerly until the ranks agree to record again, at the first mini-batch of an epoch.

    Replays update the arrays of the network and the optimizer in place. The constructor takes the
    same arguments as `EagerStep`.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.program: cpu_step.StepProgram | None = None
        self._recording: cpu_step.StepProgram | None = None
        self._is_checked, self._is_off, self._epoch = False, False, 0
        self._finish: Callable[[Any, Any], None] = super()._update

    def close(self) -> None:
        self.program, self._recording, self._epoch = None, None, 0
        self._is_checked, self._is_off = False, False

    def _gradient(self, images, targets):
        if self._is_off or targets is None:
            return self._eager_gradient(images, targets)
        if self.program is not None and images.batch.epoch != self._epoch:
            self._agree()
        self._epoch = images.batch.epoch
        if self.program is None or _size(images.batch) > _size(self.program.batch):
            with phases.span("recording"):
                return self._record(images, targets)
        fits = self.program.fits(images, targets)
        if fits and not self._is_checked:
            with phases.span("check of the recording"):
                self._check(images, targets)
            return self._gradient(images, targets)
        if not self.program.is_current():
            return self._eager_gradient(images, targets)
        if fits and phases.spans() is None:
            self._finish = self._replay_update
            return self.program.gradient(images, targets)
        self._finish = self._update_in_place
        with arenas.through(self.program.arena):
            return super()._gradient(images, targets)

    def _eager_gradient(self, images, targets):
        self._finish = super()._update
        return super()._gradient(images, targets)

    def _update(self, gradients, state):
        self._finish(gradients, state)

    def _agree(self):
        """Discard the program unless it is current on all ranks. Collective."""
        if not self.world.gop("and", self.program.is_current()):
            self.close()

    def _record(self, images, targets):
        self.close()
        self._recording = cpu_step.StepProgram(
            self.net, self.optimizer, self.world, images, targets
        )
        self._finish = self._record_update
        return self._recording.record_gradient(self.objective, images, targets)

    def _record_update(self, gradients, state):
        self._end_recording(self._recording.record_update(gradients, state))

    def _end_recording(self, problem):
        self._is_off = not self.world.gop("and", problem is None)
        self.program, self._recording = None if self._is_off else self._recording, None

    def _check(self, images, targets):
        """Compare the bytes of an eager and a replayed gradient; stop replaying if they differ."""
        self._agree()
        if self.program is None:
            return
        with arenas.through(self.program.arena):
            expected = cpu_step.digest(*super()._gradient(images, targets))
        value, gradients, _ = self.program.gradient(images, targets)
        is_equal = expected == cpu_step.digest(value, gradients, self.program.state)
        self._is_checked = self.world.gop("and", is_equal)
        if not self._is_checked:
            self.close()
            self._is_off = True
            if self.world.rank == 0:
                text = "warning: replayed and eager training steps differ; please report"
                print(f"{text} this. The training continues with eager steps.", file=sys.stderr)

    def _update_in_place(self, gradients, state):
        with arenas.through(self.program.arena):
            parameters = self.optimizer(self.net.parameters, gradients)
            for news, olds in ((parameters, self.net.parameters), (state, self.net.state)):
                for name, old in olds.items():
                    if news[name] is not old:
                        np.copyto(old, news[name])

    def _replay_update(self, gradients, state):
        self.program.update()


class ReplayedParts(ReplayedStep):
    """A training step on the host that replays the gradients of the parts of mini-batches.

    The program has the gradient of a part only. The gradients of the parts are added up, and the
    update runs, eagerly. The constructor takes the same arguments as `EagerStep`.
    """

    def _gradient(self, images, targets):
        if not isinstance(images.batch, PartedBatch):
            return super()._gradient(images, targets)
        state = {name: np.array(array) for name, array in self.net.state.items()}
        results = accumulation.accumulated(self._part, self.net, images, targets)
        self._set_state(state)  # until the update
        return results

    def _part(self, net, images, targets):
        """Return the results for a part, in memory that later replays do not use."""
        self._set_state(net.state)
        value, gradients, state = super()._gradient(images, targets)
        copies = [
            {name: np.array(array) for name, array in table.items()} for table in (gradients, state)
        ]
        result = tuple(map(np.array, value)), *copies
        if self._recording is not None:
            self._end_recording(self._recording.finish())
        return result

    def _set_state(self, state):
        if self.program is None:
            self.net.state = dict(state)
        else:
            self.program.set_state(state)

    def _record_update(self, gradients, state):
        self._replay_update(gradients, state)

    def _replay_update(self, gradients, state):
        if self.program is None:
            EagerStep._update(self, gradients, state)
        else:
            self._update_in_place(gradients, state)


def _size(batch):
    """Return the images of a batch, and those of the mini-batch that it is a part of."""
    return batch.count, batch.total or 0


class RecordedStep:
    """A training step on a GPU, recorded once as a program and replayed for every mini-batch."""

    def __init__(self, net, optimizer, loss, world, labels_per_image, reader, advice, graphs: bool):
        from mpidl.training import gpu_step

        self.net, self.labels_per_image, self.advice = net, labels_per_image, advice
        self.pending: collections.deque = collections.deque()  # (handle, StepInfo)
        gradient = value_and_grad(losses.loss_function(loss), reduce=world)
        net.to(world.device)
        try:
            arguments = net, optimizer, gradient, reader, world.counts, graphs
            self.program: Any = gpu_step.StepProgram(*arguments)
        except BaseException:
            net.to(None)  # so that the caller can retry, for example with smaller mini-batches
            raise

    def observe_gradients(self, observer: Callable[[Mapping[str, np.ndarray]], None]) -> None:
        """Do nothing: gradients of a recorded step share memory and are not copied to the host."""

    def submit(self, images, targets, info: StepInfo) -> Iterator[StepResult]:
        """Yield results of earlier steps, then start the training step of a mini-batch.

        The method waits for all earlier steps except the last `STEPS_AHEAD`.

        Parameters
        ----------
        images : Feed
            The mini-batch from a `DeviceQueue`, including the labels.
        targets : None
            Not used.
        info : StepInfo
            Description of the step.
        """
        yield from self._results(STEPS_AHEAD)
        with phases.Phase(phases.COMPUTE, "start of the training step"):
            self.pending.append((self.program.start(images), info))

    def drain(self) -> Iterator[StepResult]:
        """Wait for all submitted steps and yield their results."""
        return self._results(0)

    def close(self) -> None:
        """Move the network back to host memory, and free the memory of the recorded step."""
        self.pending.clear()
        self.net.to(None)
        self.program = None

    def _results(self, max_pending: int) -> Iterator[StepResult]:
        while len(self.pending) > max_pending:
            handle, info = self.pending.popleft()
            with phases.Phase(phases.COMPUTE, "wait for the GPU"):
                sums = self.program.finish(handle)
            if not math.isfinite(sums[0]):
                raise _not_finite(sums[0], info, "", self.advice)
            yield _result(info, sums, self.labels_per_image)


def checked_step(optimizer: Any, parameters: dict[str, Any], gradients: dict) -> dict[str, Any]:
    """Apply an optimizer, and return the new parameters in the order of the old parameters.

    Raises
    ------
    UserError
        If a custom optimizer changes the name, shape or type of a parameter.
    """
    stepped = optimizer(parameters, gradients)
    if isinstance(optimizer, Optimizer):
        return stepped
    name = f"optimizer: {type(optimizer).__name__}"
    if not isinstance(stepped, Mapping):
        raise UserError(f"{name} must return new parameters, found {type(stepped).__name__}")
    unknown = [key for key in stepped if key not in parameters]
    missing = [key for key in parameters if key not in stepped]
    if unknown or missing:
        raise UserError(f"{name} must return all parameters; missing {missing}, unknown {unknown}")
    for key, old in parameters.items():
        new = stepped[key]
        if (type(new), getattr(new, "dtype", None)) != (type(old), old.dtype):
            new_type = f"{type(new).__name__} {getattr(new, 'dtype', '')}".strip()
            raise UserError(f"{name}: {key}: expected {old.dtype} as before, found {new_type}")
        if new.shape != old.shape:
            raise UserError(f"{name}: {key}: expected shape {old.shape}, found {new.shape}")
    return {key: stepped[key] for key in parameters}


def _result(info, sums, labels_per_image):
    """Return the StepResult for the sums that the loss returned (see `losses.base.Sums`)."""
    speed, correct = info.images / (time.monotonic() - info.start), None
    if len(sums) > 2:  # the loss ignores some labels
        correct = sums[1] / max(sums[2], 1.0) * info.images
    elif len(sums) == 2:
        correct = sums[1] / labels_per_image
    return StepResult(info, sums[0], correct, speed)


def _not_finite(loss, info, place, advice: Callable[[float], str]):
    problem = f"the loss is {loss} at epoch {info.epoch}, iteration {info.iteration}{place}"
    return NotFinite(problem, advice(info.learning_rate))
