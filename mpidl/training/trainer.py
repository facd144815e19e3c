"""The training loop: what `dl.train` and the command `train` run."""

import collections
import contextlib
import math
import sys
import time

import numpy as np

from mpidl import backends, losses
from mpidl.autodiff.tape import value_and_grad
from mpidl.comm import World
from mpidl.comm.failure import Signals
from mpidl.data import MinibatchQueue, NodeCache
from mpidl.data.datastore import without_images
from mpidl.errors import Fault, UserError
from mpidl.evaluation.evaluate import agreed
from mpidl.evaluation.validation import Validation, held_out
from mpidl.report import Console
from mpidl.training import input_pipeline, memory_budget
from mpidl.training.batchnorm_population import population
from mpidl.training.files import checkpoint, model_file
from mpidl.training.files.run_folder import Keeper, Place
from mpidl.training.load_balancing import Measured
from mpidl.training.optimizers import of_options
from mpidl.training.options.configuration import changed_on_resume, resumable, shares
from mpidl.training.options.training_options import TrainingOptions
from mpidl.training.progress import OUTPUT_FUNCTION, PATIENCE, Position, Progress, Result, Shown
from mpidl.training.schedules import rate_of

AHEAD = 4  # steps of a GPU that may be under way while the host prepares the next


def train(
    net,
    datastore,
    options=None,
    *,
    world=None,
    out=None,
    console=None,
    resume=None,
    overwrite=False,
    facts=(),
    signals=None,
):
    """Train a network; its parameters and state change in place. Collective.

    datastore: labelled images, or images with targets, as the options' loss wants them. options:
    TrainingOptions. world: all ranks by default. out: folder for metrics.jsonl, progress.png and
    the checkpoints (None: that of `resume`, else nothing is written); UserError where it holds
    another run, unless overwrite says that it is to be replaced. resume: the folder of a run to go
    on with, or (arrays, facts) of its checkpoint; UserError where it is of other options, network
    or images. facts: more to keep in the checkpoints. signals: entered `Signals`, where the caller
    watches for them before and after the training as well.

    USR1, TERM or INT on any rank ends the run after the present mini-batch, on all ranks, with a
    checkpoint; the result says so. An output function that returns True on any rank does so too.
    Raises Fault where the loss or the weights are not finite; the last good checkpoint is kept.

    The network ends as that of the last iteration or of the least validation loss, with the
    statistics of batch normalization that the options ask for; checkpoints hold the last
    iteration's, with the moving ones.
    """
    options = TrainingOptions() if options is None else options
    input_pipeline.check_kinds(net, datastore, options)
    world = World(timeout=options.timeout) if world is None else world
    options = options.for_ranks(world.size)
    datastore, options = held_out(datastore, options)
    input_pipeline.check(net, datastore, options)
    place = Place(out, resume, overwrite, world)
    backends.configure(winograd=options.winograd, precision=options.precision)
    settled = world.asked is not None or world.device is not None
    if options.device != "auto" or not settled:
        for line in world.use_device(options.device, options.gpus):
            print(line, file=sys.stderr)
    if options.threads and options.threads != max(world.threads, default=0):
        world.use_threads(options.threads)
    how = {"verbose_every": options.verbose_every, "progress": options.verbose == "on"}
    with console or Console(world.rank, **how) as shown:
        if (warning := without_images(datastore)) is not None:
            shown.line(warning)
        run = _Run(net, datastore, options, world, place, shown, dict(facts))
        with contextlib.nullcontext(signals) if signals else Signals() as held:
            return run.go(held)


def stopped_by(signals, world):
    """The name of the signal that the ranks agreed to stop on, or None. Collective."""
    if not signals.agreed:
        return None
    return next(name for name in world.broadcast(world.gather(signals.name)) if name)


class _Run:
    def __init__(self, net, datastore, options, world, place, console, facts):
        resume = place.resume
        self.net, self.options, self.world, self.signals = net, options, world, None
        self.console, self.facts = console, facts
        load = options.load(world.size)
        self.datastore = NodeCache(
            datastore, world, memory_budget.for_images(options, datastore, world)
        )
        self.optimizer = of_options(options, **net.factors)
        self.at, self.validation = Position(), Validation(options, world)
        self.under_way = collections.deque()  # steps of a GPU that were started: (handle, Shown)
        net.batchnorm = options.batchnorm
        if resume is not None:
            self._restore(*resume)
        shared = self.datastore, options.batch_size, options.seed, world, options.shuffle
        kept = None if resume is None else resume[0]
        how = input_pipeline.prepare(net, self.datastore, options, world, kept)
        how |= {"load": load, "sampling": options.sampling}
        self.minimized = losses.of(options.loss)
        self.gradient = value_and_grad(self.minimized, reduce=world)
        self.queue, self.recorded = MinibatchQueue(*shared, **how), None
        self.measured = Measured(world) if options.worker_load == "measured" else None
        if world.device is not None:
            self._record(shared, how)
        self.began = time.monotonic() - self.at.seconds
        self.keeper = Keeper(place, world, None if resume is None else self.at.iteration)

    def _record(self, shared, how):
        """Have the step recorded for this world's GPU, and a queue that feeds it."""
        from mpidl.data.loading.device_queue import DeviceQueue
        from mpidl.training.gpu_step import Step

        if self.options.batchnorm == "local":
            raise UserError("--batchnorm local: on GPUs statistics are global; use --device cpu")
        if self.measured:
            raise UserError(
                "--worker-load measured: on GPUs shares stay as the step was recorded; give "
                "numbers, or use --device cpu"
            )
        self.queue = DeviceQueue(*shared, **how)
        self.net.to(self.world.device)
        try:
            self.recorded = Step(
                self.net,
                self.optimizer,
                self.gradient,
                self.queue.reader(),
                self.world.counts,
                self.options.graphs != "off",
            )
        finally:
            if self.recorded is None:  # no room, say: with a smaller mini-batch there may be
                self.net.to(None)

    def go(self, signals):
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
                return self._go(signals)
        finally:
            if self.recorded is not None:
                self.net.to(None)

    def _go(self, signals):
        at, options, self.signals = self.at, self.options, signals
        limit = options.max_iterations or math.inf
        total = min(options.epochs * len(self.queue), limit)
        self.console.start(options.epochs, total, at.iteration)
        self._tell("start", self._rate(max(at.iteration, 1)))
        if self.validation.owed:
            self._validate(signals)
        while at.epoch <= options.epochs and at.iteration < limit and self._goes_on():
            batches = self.queue.epoch(at.epoch, start=at.batch)
            started, images = time.monotonic(), at.images
            with contextlib.closing(batches):
                for batch in agreed(batches, self.world, signals):
                    self._step(*batch)
                    del batch  # the next one may take its memory
                    if self.validation.due(at.iteration):
                        self._validate(signals)
                    ended = at.iteration >= limit or at.batch == len(self.queue)
                    if ended or not self._goes_on():
                        break
                    if self._checkpoint_is_due():
                        self._save()
            self._catch_up()
            if at.batch == len(self.queue):
                self._end_epoch((at.images - images) / (time.monotonic() - started))
                self._save()
                self._plot()
        if at.batch:
            self.console.last_iteration()
        if signals.agreed or at.batch:
            self._save()
        stopped = stopped_by(signals, self.world)
        if stopped is None and signals.name == OUTPUT_FUNCTION:
            signals.name = None  # it asked when no step was left: what ends the run goes on
        if stopped is None and self.validation.exhausted:
            stopped = PATIENCE
        if stopped in (None, OUTPUT_FUNCTION, PATIENCE):
            self._finish(None if stopped == OUTPUT_FUNCTION else signals)
            stopped = stopped or stopped_by(signals, self.world)
        self._plot(end=True)
        self._tell("done", self.optimizer.learning_rate, at.mean_loss)
        self.keeper.close()
        self.datastore.close()
        rate = at.all_images / max(at.seconds, 1e-9)
        done = stopped, at.epoch - 1, at.iteration, at.mean_loss, rate, at.seconds
        return Result(*done, self.validation.iteration or None, *self.validation.of_the_result())

    def _goes_on(self):
        return not self.signals.agreed and not self.validation.exhausted

    def _rate(self, iteration):
        """The learning rate of an iteration of the present epoch."""
        return rate_of(self.options, self.at.epoch, iteration, len(self.queue))

    def _step(self, images, labels):
        at, began = self.at, time.monotonic()
        at.batch, at.iteration = at.batch + 1, at.iteration + 1
        self.optimizer.learning_rate = rate = self._rate(at.iteration)
        shown = Shown(at.iteration, images.batch.count, rate, began)
        self.world.net.doing = f"epoch {at.epoch}, iteration {shown.iteration}"
        if self.recorded is not None:
            self._catch_up(AHEAD)
            self.under_way.append((self.recorded.start(images), shown))
            return
        if self.measured:
            self.measured.start(began)
        value, gradients, state = self.gradient(self.net, images, labels)
        loss, *correct = map(float, value)
        if not math.isfinite(loss):
            self._blame(images, labels, loss, shown)
        self.net.state = state
        self.net.parameters = self.optimizer(self.net.parameters, gradients)
        if self.measured:
            self.measured.stop(time.monotonic(), images.batch.blocks)
        self._account(shown, loss, *correct)

    def _catch_up(self, left=0):
        """Take the results of the steps under way on a GPU, but for the last `left`."""
        while len(self.under_way) > left:
            handle, shown = self.under_way.popleft()
            loss, *correct = self.recorded.finish(handle)
            if not math.isfinite(loss):
                raise Fault(
                    f"the loss is {loss} at epoch {self.at.epoch}, iteration {shown.iteration}; "
                    f"{self.keeper.advice(shown.learning_rate)}"
                )
            self._account(shown, loss, *correct)

    def _account(self, shown, loss, correct=None):
        """Add a step's results to the sums and show them."""
        at, count, accuracy = self.at, shown.count, None
        at.loss += loss * count
        if correct is not None:
            correct /= losses.labels_of(self.datastore)
            at.correct, accuracy = (at.correct or 0.0) + correct, correct / count
        at.images, at.all_images = at.images + count, at.all_images + count
        now = time.monotonic()
        at.seconds = now - self.began
        rate = count / (now - shown.started)
        self.console.iteration(at.epoch, shown.iteration, loss, rate, accuracy)
        how = loss, shown.learning_rate, rate, at.seconds, accuracy
        self.keeper.record("iteration", at.epoch, shown.iteration, *how)
        self._tell("iteration", shown.learning_rate, loss, accuracy, shown.iteration)

    def _tell(self, state, learning_rate, loss=None, accuracy=None, iteration=None):
        """Call the output functions; one that returns True asks for a stop."""
        at, found = self.at, self.validation.last
        info = Progress(
            state,
            at.epoch,
            at.iteration if iteration is None else iteration,
            loss,
            accuracy,
            learning_rate,
            at.seconds,
            found.loss if found else None,
            found.accuracy if found else None,
        )
        for function in self.options.output_functions:
            asked = function(info)
            if isinstance(asked, bool | np.bool_) and asked:
                self.signals.name = self.signals.name or OUTPUT_FUNCTION

    def _validate(self, signals):
        """Evaluate the network as it is on the validation set, and take note of it, unless signals
        end it. An output function that asked for a stop lets it come to its end."""
        self._catch_up()
        at, asked = self.at, self.signals.name == OUTPUT_FUNCTION
        if asked and signals is not None:
            signals.name = None
        found = self.validation.run(self.net, at.iteration, signals)
        if asked:
            self.signals.name = self.signals.name or OUTPUT_FUNCTION
        if found is None:
            return
        how = found.loss, self.optimizer.learning_rate, None, at.seconds, found.accuracy
        epoch = at.epoch if at.batch else at.epoch - 1  # at its end the next one is under way
        self.keeper.record("validation", epoch, at.iteration, *how)
        if at.batch < len(self.queue):  # else the line of the epoch, which ends here, has it
            self.console.validation(at.iteration, found)

    def _end_epoch(self, rate):
        at, learning_rate = self.at, self.optimizer.learning_rate
        loss, accuracy = at.loss / at.images, at.accuracy
        how = loss, learning_rate, rate, at.seconds, accuracy
        self.keeper.record("epoch", at.epoch, at.iteration, *how)
        if self.validation.due_at_end():
            self._validate(self.signals)
        found = self.validation.last if self.validation.last_iteration == at.iteration else None
        self.console.epoch(at.epoch, loss, rate, at.seconds, accuracy, found)
        self._tell("epoch", learning_rate, loss, accuracy)
        at.epoch, at.batch, at.loss, at.correct, at.images = at.epoch + 1, 0, 0.0, None, 0
        at.epoch_loss = loss
        if self.measured:
            self.queue.load = self.measured.load()

    def _finish(self, signals):
        """Make the network what the options ask for, now that the last checkpoint is written: a run
        that goes on from there does not know that it was ended. Signals leave it as it is."""
        last = self.validation.last_iteration
        if self.validation.store is not None and last != self.at.iteration:
            self._validate(signals)
            if self.validation.owed:
                return
        if self.recorded is not None:
            self.net.to(None)
        self.validation.give_best(self.net)
        if self.options.batchnorm_statistics == "population" and self.at.iteration:
            size = self.options.batch_size
            how = {"shuffle": "never", "prefetch": self.options.prefetch, **self.net.seen()}
            # in place of training's, whose memory goes
            self.queue = MinibatchQueue(self.datastore, size, world=self.world, **how)
            state = population(self.net.on(self.world.device), self.queue, self.world, signals)
            self.net.state = self.net.state if state is None else state

    def _blame(self, images, labels, loss, shown):
        """Raise the Fault of a loss that is not finite, naming the ranks whose images made it."""
        (own, *_), _, _ = value_and_grad(self.minimized)(self.net, images, labels)
        ranks = self.world.gather(not np.isfinite(own.local()).all())
        guilty = [str(r) for r, bad in enumerate(self.world.broadcast(ranks)) if bad]
        where = f"rank {', '.join(guilty)}" if len(guilty) < self.world.size else "all ranks"
        raise Fault(
            f"the loss is {loss} at epoch {self.at.epoch}, iteration {shown.iteration}, on "
            f"{where}; {self.keeper.advice(shown.learning_rate)}"
        )

    def _checkpoint_is_due(self):
        every = self.options.checkpoint_every
        return every and self.at.iteration % every == 0

    def _plot(self, end=False):
        if self.options.plots != "none":
            self.keeper.plot(end)

    def _save(self):
        if self.keeper.out is None:
            return
        self._catch_up()
        tables = {
            "learnables": {name: np.asarray(a) for name, a in self.net.parameters.items()},
            "state": {name: np.asarray(a) for name, a in self.net.state.items()},
            "optimizer": self.optimizer.state(),
            **self.validation.tables(),
            **input_pipeline.tables(self.net),
        }
        facts = {
            "network": self.net.spec(),
            "input_shape": self.net.input_shape,
            "classes": self.net.classes,
            "normalization": self.net.normalization.name,
            "crop": self.net.crop,
            "preprocess": self.net.preprocess,
            "options": self.options.as_dict(),
            "validation": self.validation.facts(),
            "fingerprint": self.datastore.fingerprint(),
            "shares": shares(self.options, self.world.size),
            **input_pipeline.facts(self.options),
            **self.facts,
        }
        self.keeper.save(tables, self.at, facts, self.optimizer.learning_rate)

    def _restore(self, arrays, facts):
        now = resumable(self.options, self.net, self.datastore, self.world.size)
        changed_on_resume(facts, now, "the run of this checkpoint")
        input_pipeline.changed(facts, self.options)
        self.net.parameters = model_file.matching(
            self.net.parameters, arrays["learnables"], checkpoint.CURRENT
        )
        self.net.state = model_file.matching(self.net.state, arrays["state"], checkpoint.CURRENT)
        self.optimizer.load_state(arrays["optimizer"])
        self.validation.restore(arrays, facts)
        self.at = Position(**facts["position"])
