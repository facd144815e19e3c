"""The training loop: what `dl.train` and the command `train` run."""

import collections
import contextlib
import hashlib
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from mpidl import backends, ops
from mpidl.comm import World
from mpidl.comm.guard import Signals
from mpidl.data import MinibatchQueue, NodeCache
from mpidl.errors import Fault, UserError
from mpidl.report import Console, Metrics, plots
from mpidl.tape import value_and_grad
from mpidl.training import checkpoint, modelfile
from mpidl.training.configuration import changed_on_resume
from mpidl.training.evaluate import agreed, evaluate
from mpidl.training.optimizers import SGDM
from mpidl.training.options import TrainingOptions

AHEAD = 4  # steps of a GPU that may be under way while the host prepares the next


class _Shown(NamedTuple):
    """A step as it will be reported: its iteration, its images, when it was started."""

    iteration: int
    count: int
    started: float


@dataclass
class Position:
    """How far a run has come; what of it a checkpoint keeps."""

    epoch: int = 1  # the epoch under way, from 1
    batch: int = 0  # mini-batches of it that are done
    iteration: int = 0  # mini-batches done in all
    loss: float = 0.0  # sum over this epoch's images so far
    correct: float = 0.0  # images of this epoch classified right in training
    images: int = 0  # of this epoch so far
    seconds: float = 0.0  # spent training, resumed runs included
    all_images: int = 0  # of all epochs


@dataclass
class Result:
    """What a training run came to. `stopped`: the signal that ended it early, or None.

    epochs: completed; loss: mean over the images of the last one that was begun.
    """

    stopped: str | None
    epochs: int
    iterations: int
    loss: float
    images_per_second: float
    train_seconds: float


def model_loss(net, images, labels):
    """Mean cross-entropy, which is differentiated, and how many images were classified right."""
    scores = net(images)
    return ops.softmax_cross_entropy(scores, labels), ops.correct_count(scores, labels)


def train(
    net,
    datastore,
    options=None,
    *,
    world=None,
    out=None,
    console=None,
    resume=None,
    facts=(),
    signals=None,
):
    """Train a classifier; the network's parameters and state change in place. Collective.

    datastore: labelled images. options: TrainingOptions. world: all ranks by default. out: folder
    for metrics.jsonl, progress.png and the checkpoints (None: nothing is written). resume:
    (arrays, facts) of a checkpoint to go on from; UserError where it is of other options, network
    or images. facts: more to keep in the checkpoints. signals: entered `Signals`, where the caller
    watches for them before and after the training as well.

    USR1, TERM or INT on any rank ends the run after the present mini-batch, on all ranks, with a
    checkpoint; the result says so. Raises Fault where the loss or the weights are not finite; the
    last good checkpoint is kept.
    """
    options = TrainingOptions() if options is None else options
    world = World(timeout=options.timeout) if world is None else world
    options = options.for_ranks(world.size)
    backends.configure(winograd=options.winograd, precision=options.precision)
    settled = world.asked is not None or world.device is not None
    if options.device != "auto" or not settled:
        for line in world.use_device(options.device, options.gpus):
            print(line, file=sys.stderr)
    if options.threads and options.threads != max(world.threads, default=0):
        world.use_threads(options.threads)
    with console or Console(world.rank, verbose_every=options.verbose_every) as shown:
        run = _Run(net, datastore, options, world, out, shown, resume, dict(facts))
        with contextlib.nullcontext(signals) if signals else Signals() as held:
            return run.go(held)


def stopped_by(signals, world):
    """The name of the signal that the ranks agreed to stop on, or None. Collective."""
    if not signals.agreed:
        return None
    return next(name for name in world.broadcast(world.gather(signals.name)) if name)


class _Run:
    def __init__(self, net, datastore, options, world, out, console, resume, facts):
        self.net, self.options, self.world, self.out = net, options, world, out
        self.console, self.facts = console, facts
        self.datastore = NodeCache(datastore, world)
        self.optimizer = SGDM(options.learning_rate, options.momentum, options.l2, **net.factors)
        self.at = Position()
        self.under_way = collections.deque()  # steps of a GPU that were started: (handle, _Shown)
        net.batchnorm = options.batchnorm
        if resume is not None:
            self._restore(*resume)
        how = self.datastore, options.batch_size, options.seed, world, options.shuffle
        self.gradient = value_and_grad(model_loss, reduce=world)
        self.queue, self.recorded = MinibatchQueue(*how), None
        if world.device is not None:
            self._record(how)
        self.began = time.monotonic() - self.at.seconds
        self.metrics = self.problem = None  # problem: what rank 0 could not write
        if out is not None:
            path = os.path.join(out, "metrics.jsonl")
            cut = None if resume is None else self.at.iteration
            error = None
            try:
                self.metrics = Metrics(path, world.rank, cut=cut)
            except UserError as problem:
                error = problem
            world.together(error)

    def _record(self, how):
        """Have the step recorded for this world's GPU, and a queue that feeds it."""
        from mpidl.data.on_device import DeviceQueue
        from mpidl.training.recorded import Step

        if self.options.batchnorm == "local":
            raise UserError("--batchnorm local: on GPUs statistics are global; use --device cpu")
        self.queue = DeviceQueue(*how)
        self.net.to(self.world.device)
        self.recorded = Step(
            self.net,
            self.optimizer,
            self.gradient,
            self.queue.reader(),
            self.world.counts,
            self.options.graphs != "off",
        )

    def go(self, signals):
        try:
            return self._go(signals)
        finally:
            if self.recorded is not None:
                self.net.to(None)

    def _go(self, signals):
        at, options = self.at, self.options
        limit = options.max_iterations or math.inf
        total = min(options.epochs * len(self.queue), limit)
        self.console.start(options.epochs, total, at.iteration)
        loss = math.nan
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            while at.epoch <= options.epochs and at.iteration < limit and not signals.agreed:
                batches = self.queue.epoch(at.epoch, start=at.batch)
                started, images = time.monotonic(), at.images
                with contextlib.closing(batches):
                    for batch in agreed(batches, self.world, signals):
                        self._step(*batch)
                        if at.iteration >= limit or at.batch == len(self.queue):
                            break
                        if self._checkpoint_is_due():
                            self._save()
                self._catch_up()
                loss = at.loss / at.images if at.images else loss
                if at.batch == len(self.queue):
                    self._end_epoch((at.images - images) / (time.monotonic() - started))
                    self._save()
                    self._plot()
            if signals.agreed or at.batch:
                self._save()
                self._plot()
        if self.metrics:
            self.metrics.close()
        self.datastore.close()
        stopped = stopped_by(signals, self.world)
        rate = at.all_images / max(at.seconds, 1e-9)
        return Result(stopped, at.epoch - 1, at.iteration, loss, rate, at.seconds)

    def _step(self, images, labels):
        at = self.at
        shown = _Shown(at.iteration + 1, images.batch.count, time.monotonic())
        self.world.net.doing = f"epoch {at.epoch}, iteration {shown.iteration}"
        at.batch, at.iteration = at.batch + 1, at.iteration + 1
        if self.recorded is not None:
            self._catch_up(AHEAD)
            self.under_way.append((self.recorded.start(images), shown))
            return
        (loss, correct), gradients, state = self.gradient(self.net, images, labels)
        loss = float(loss)
        if not math.isfinite(loss):
            self._blame(images, labels, loss, shown)
        self.net.state = state
        self.net.parameters = self.optimizer(self.net.parameters, gradients)
        self._account(shown, loss, float(correct))

    def _catch_up(self, left=0):
        """Take the results of the steps under way on a GPU, but for the last `left`."""
        while len(self.under_way) > left:
            handle, shown = self.under_way.popleft()
            loss, correct = self.recorded.finish(handle)
            if not math.isfinite(loss):
                raise Fault(
                    f"the loss is {loss} at epoch {self.at.epoch}, iteration {shown.iteration}; "
                    f"{self._advice()}"
                )
            self._account(shown, loss, correct)

    def _account(self, shown, loss, correct):
        """Add a step's results to the sums and show them."""
        at, count = self.at, shown.count
        at.loss, at.correct = at.loss + loss * count, at.correct + correct
        at.images, at.all_images = at.images + count, at.all_images + count
        now = time.monotonic()
        at.seconds = now - self.began
        rate, accuracy = count / (now - shown.started), correct / count
        self.console.iteration(at.epoch, shown.iteration, loss, rate, accuracy)
        self._write("iteration", at.epoch, loss, rate, accuracy, shown.iteration)

    def _write(self, kind, epoch, loss, rate, accuracy, iteration=None):
        """Write to metrics.jsonl; all ranks raise what goes wrong, at the next checkpoint."""
        if self.metrics is None or self.problem:
            return
        at, learning_rate = self.at, self.optimizer.learning_rate
        iteration = at.iteration if iteration is None else iteration
        try:
            self.metrics.record(
                kind, epoch, iteration, loss, learning_rate, rate, at.seconds, accuracy
            )
        except UserError as problem:
            self.problem = problem

    def _end_epoch(self, rate):
        at = self.at
        loss, accuracy = at.loss / at.images, at.correct / at.images
        found = None
        self._write("epoch", at.epoch, loss, rate, accuracy)
        if self.options.validation is not None:
            found = evaluate(self.net, self.options.validation, world=self.world)
            self._write("validation", at.epoch, found.loss, rate, found.accuracy)
        self.console.epoch(
            at.epoch, loss, rate, at.seconds, accuracy, found.accuracy if found else None
        )
        at.epoch, at.batch, at.loss, at.correct, at.images = at.epoch + 1, 0, 0.0, 0.0, 0

    def _blame(self, images, labels, loss, shown):
        """Raise the Fault of a loss that is not finite, naming the ranks whose images made it."""
        (own, _), _, _ = value_and_grad(model_loss)(self.net, images, labels)
        ranks = self.world.gather(not np.isfinite(own.local()).all())
        guilty = [str(r) for r, bad in enumerate(self.world.broadcast(ranks)) if bad]
        where = f"rank {', '.join(guilty)}" if len(guilty) < self.world.size else "all ranks"
        raise Fault(
            f"the loss is {loss} at epoch {self.at.epoch}, iteration {shown.iteration}, on "
            f"{where}; {self._advice()}"
        )

    def _checkpoint_is_due(self):
        every = self.options.checkpoint_every
        return every and self.at.iteration % every == 0

    def _tables(self):
        self._catch_up()
        return {
            "learnables": {name: np.asarray(a) for name, a in self.net.parameters.items()},
            "state": {name: np.asarray(a) for name, a in self.net.state.items()},
            "optimizer": self.optimizer.state(),
        }

    def _save(self):
        """Write a checkpoint, having seen that all ranks hold the same weights, and finite ones."""
        if self.out is None:
            return
        tables, error = self._tables(), self.problem
        self._compare(tables)
        self._check_finite(tables)
        if self.world.rank == 0 and error is None:
            try:
                self.metrics.flush()
                facts = {
                    "network": self.net.spec(),
                    "input_shape": self.net.input_shape,
                    "classes": list(self.datastore.classes),
                    "normalization": "rescale-zero-one",
                    "position": asdict(self.at),
                    "options": self.options.as_dict(),
                    "fingerprint": self.datastore.fingerprint(),
                    **self.facts,
                }
                checkpoint.save(self.out, tables, facts)
            except UserError as problem:
                error = problem
        self.world.together(error)

    def _plot(self):
        error = None
        if self.out is not None and self.world.rank == 0:
            try:
                plots.progress(self.metrics.path, os.path.join(self.out, "progress.png"))
            except UserError as problem:
                error = problem
        self.world.together(error)

    def _compare(self, tables):
        digest = hashlib.sha256()
        for arrays in tables.values():
            for array in arrays.values():
                digest.update(np.ascontiguousarray(array))
        mine = np.frombuffer(digest.digest(), np.int64)
        if not np.array_equal(self.world.gop("max", mine), self.world.gop("min", mine)):
            raise Fault(
                f"the ranks' weights differ at iteration {self.at.iteration}: expected the same "
                "bytes on all ranks (python -m mpidl.info shows what each runs on)"
            )

    def _check_finite(self, tables):
        """Keep the checkpoint before: from weights that are not finite no run can go on."""
        for arrays in tables.values():
            for name, array in arrays.items():
                if not np.isfinite(array).all():
                    raise Fault(
                        f"{name} is not finite after iteration {self.at.iteration}, on all ranks; "
                        f"{self._advice()}"
                    )

    def _advice(self):
        kept = self.out and checkpoint.exists(self.out)
        return (
            f"lower --learning-rate (now {self.optimizer.learning_rate:g}) or look at the images"
            + (f"; the last checkpoint is in {self.out}" if kept else "")
        )

    def _restore(self, arrays, facts):
        now = {
            "options": self.options.as_dict(),
            "network": self.net.spec(),
            "fingerprint": self.datastore.fingerprint(),
        }
        changed_on_resume(facts, now, "the run of this checkpoint")
        self.net.parameters = modelfile.matching(
            self.net.parameters, arrays["learnables"], checkpoint.CURRENT
        )
        self.net.state = modelfile.matching(self.net.state, arrays["state"], checkpoint.CURRENT)
        self.optimizer.load_state(arrays["optimizer"])
        self.at = Position(**facts["position"])
