"""The training that `python -m mpidl.train` runs: train, test, and write the results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpidl import data
from mpidl.cli import arguments, pretrained, remote, start, user_files
from mpidl.data import gallery, registry
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.loading.pipeline import Pipeline
from mpidl.data.urls import refuse_remote
from mpidl.errors import UserError
from mpidl.evaluation import confusion, evaluate, validation
from mpidl.files import on_rank_0
from mpidl.losses import has_class_scores
from mpidl.ranks import failure, survival
from mpidl.ranks.world import World
from mpidl.report import Console, metrics, status
from mpidl.text import printable
from mpidl.training import (
    input_pipeline,
    live_page,
    lost_ranks,
    progress,
    skipped_images,
    status_hooks,
    tracking,
)
from mpidl.training.files import checkpoint, model_file, resume_changes, run_folder
from mpidl.training.files.run_lock import RunLock
from mpidl.training.options import configuration, training_options
from mpidl.training.schedules import ENDING
from mpidl.training.train import train as train_network
from mpidl.training.trainer import Trainer

if TYPE_CHECKING:
    from mpidl.report.live.address import Address


def run(typed: Mapping[str, Any]) -> int:
    """Start the ranks' world, train, and return the exit code. `typed` as for `train`."""
    # This time-out applies until --config and the checkpoint have been read.
    world = World(
        timeout=typed.get("timeout", training_options.TrainingOptions().timeout), threads=None
    )
    with failure.Signals() as signals, RunLock(world) as lock:
        return train(typed, world, signals, lock)


def train(typed: Mapping[str, Any], world: World, signals: failure.Signals, lock: RunLock) -> int:
    """Train a network as the command does, and return the exit code. Collective.

    Parameters
    ----------
    typed : mapping
        The result of `arguments.train`.
    world : World
        The ranks that train.
    signals : Signals
        Requests to stop.
    lock : RunLock
        Lock of the results folder. This function takes the lock if the caller has not taken it.
    """
    training = _Training(typed, world, signals, lock)
    training.resolve_options()
    training.open_data()
    if "preview" in typed:
        return training.draw_preview()
    training.build_network()
    training.prepare_folder()
    training.announce()
    return training.train()


class _Training:
    """One training, in phases that `train` calls from top to bottom. All phases are collective."""

    def __init__(self, typed, world, signals, lock):
        self.typed, self.world, self.signals, self.lock = typed, world, signals, lock

    def resolve_options(self):
        """Resolve the options and the checkpoint; settle the device and open the console."""
        typed, world = self.typed, self.world
        if "preview" not in typed:
            _lock_folder(typed, self.lock, create=False)
        self.resume = on_rank_0(world, lambda: _checkpoint(typed))
        self.saved = None if self.resume is None else self.resume[1]
        self.resolved = on_rank_0(
            world,
            lambda: configuration.resolve(typed, config=typed.get("config"), resumed=self.saved),
        )
        self.settings = settings = self.resolved.options.for_ranks(world.size)
        self.run = self.resolved.run
        self.network_file = on_rank_0(
            world, lambda: _network_file(typed, self.resolved, self.saved)
        )
        remote.configure(self.run, world)
        world.transport.timeout = settings.timeout
        gpus = None if settings.gpus is None else str(settings.gpus)
        self.notes = world.use_device(settings.device, gpus)  # lines to print before training
        lost_ranks.prepare(settings, world)
        self.device = start.device_of(world)
        self.console = Console(
            world.rank, verbose_every=settings.verbose_every, progress=settings.verbose == "on"
        )

    def open_data(self):
        """Open the training, validation and test images, and the network of --weights."""
        run, world, settings = self.run, self.world, self.settings
        preprocess = data.Preprocess.of_options(run)
        with self.console.stage("reading the data"):
            sets = registry.open_sets(
                run["data"],
                world,
                preprocess=preprocess,
                validation=run["validation_data"] is None,
                labelled_validation=_unused_validation(settings, self.saved) is None,
            )
        self.source = pretrained.load(self.resolved, self.resume, sets.train, world)
        if self.source is not None and not preprocess:
            preprocess = pretrained.conversion(self.source.net, sets.train, settings)
            converted: list[Any] = [s and data.preprocessed(s, preprocess) for s in sets]
            sets = registry.Sets(*converted)
        with self.console.stage("reading the test data"):
            train_set, test_set = start.with_test(
                run,
                sets.train,
                sets.test,
                world,
                preprocess,
                seed=settings.seed,
                typed=self.typed,
            )
        _check_counts(run["data"], train_set, test_set)
        if test_set is not None:
            _check_shape("--test-data", test_set, train_set)
        self._choose_validation(registry.Sets(train_set, sets.validation, test_set), preprocess)
        self.image_shape = input_pipeline.image_shape(self.settings, self.sets.train.image_shape)
        augmenter = data.Augmenter.of_options(self.settings)
        Pipeline(self.sets.train, augmenter=augmenter)  # only to check the augmentation

    def _choose_validation(self, sets, preprocess):
        """Set the validation images in `sets` and `settings`.

        The validation images in --data serve unless --validation-fraction or --fold holds out
        others, or the resumed run had no validation; a note then says so.
        """
        source, settings, images = self.run["validation_data"], self.settings, sets.validation
        reason = _unused_validation(settings, self.saved)
        if source is not None:
            images = self._open_validation(source, sets, preprocess)
            train_set, self.settings = sets.train, replace(settings, validation=images)
        elif images is not None and not reason:
            _check_shape("--data", images, sets.train)
            train_set, self.settings = sets.train, replace(settings, validation=images)
        else:
            if images is not None:
                self.notes.append(
                    f"note: {reason}: the validation images in --data are not used: "
                    f"{images.describe()}"
                )
            train_set, self.settings = validation.held_out(sets.train, settings)
            if "validation_frequency" in self.typed and self.settings.validation is None:
                raise UserError(
                    f"--validation-frequency {settings.validation_frequency}: expected validation "
                    "images (--validation-data, --validation-fraction or --fold)"
                )
        self.sets = registry.Sets(train_set, self.settings.validation, sets.test)

    def _open_validation(self, source, sets, preprocess):
        """Return the images that --validation-data names."""
        validation.refuse_second_validation(self.settings, f"--validation-data {source}")
        if source == "test":
            if sets.test is None:
                raise UserError(
                    "--validation-data test: expected test images, found none (--test-fraction 0)"
                )
            return sets.test
        images = data.open_test_data(
            source, self.world, classes=sets.train.classes, option="--validation-data"
        )
        images = data.preprocessed(images, preprocess)
        _check_shape("--validation-data", images, sets.train)
        return images

    def draw_preview(self):
        """Write a picture of images before and after augmentation; return the exit code."""
        path, settings = self.typed["preview"], self.settings
        augmenter = data.Augmenter.of_options(settings)

        def draw():
            picture = gallery.gallery(self.sets.train, augmenter, settings.seed)
            model_file.write_whole(path, picture)
            print(f"Preview: {printable(path)}")

        on_rank_0(self.world, draw)
        return 0

    def build_network(self):
        """Build the network, or complete that of --weights; check it against a resumed run."""
        train_set, source = self.sets.train, self.source
        self.settings.load(self.world.size)  # raises if worker_load does not fit the ranks
        if source is None:
            self.net = start.network_for(
                self.run["network"], self.image_shape, train_set, self.settings
            )
        else:
            pretrained.check_shape(source, train_set, self.settings)
            self.net, self.settings, self.resolved = pretrained.network(
                source, self.resolved, self.settings, train_set
            )
        self.weights_file = None if source is None else source.file
        input_pipeline.check(self.net, train_set, self.settings)
        if self.saved is not None:
            now = resume_changes.resumable(self.settings, self.net, train_set, self.world.size)
            # Check here, because dl.train checks only after the output folder has changed.
            resume_changes.refuse_changes(self.saved, now, f"the run in {self.typed['resume']}")

    def prepare_folder(self):
        """Open the trackers and the live page, and lock the folder of the run."""
        typed = self.typed
        self.trackers = tracking.requested(self.settings, self.run)
        for tracker in self.trackers:
            tracker.ends_with_training = False
        self.page = live_page.open_page(self.world, typed.get("monitor"), "--monitor")
        self.title = pretrained.title(self.run)
        _lock_folder(typed, self.lock)
        self.out = on_rank_0(self.world, lambda: start.output_folder(typed, self.title))
        self.lock.take(self.out)

    def announce(self):
        """Print notes, warnings and what is trained on what, and write options.toml."""
        world, settings, console = self.world, self.settings, self.console
        notes = [
            *self.notes,
            *_rank_dependence(settings, world),
            *world.use_threads(settings.threads),
        ]
        for line in [*start.warnings(world, settings.batch_size), *notes]:
            console.line(line)
        learnables = sum(count for *_, count in self.net.table())
        weights = {}
        if self.source is not None:
            weights = pretrained.describe(self.source, self.run, self.net, self.sets.train)
        sets = {"data": self.sets.train, "validation": self.sets.validation, "test": self.sets.test}
        hosts = len(set(world.hosts))
        on = f" on {hosts} hosts" if hosts > 1 else ""
        console.header(
            network=f"{self.title}, {len(self.net.layers)} layers, {learnables:,} learnables",
            **weights,
            **{name: images.describe() for name, images in sets.items() if images is not None},
            ranks=f"{world.size}{on}, {self.device}, {_threads(world.threads)}",
            results=self.out,
        )
        if self.saved is not None:
            position = self.saved["position"]
            position_text = describe_position(position, settings)
            console.line(f"Resumed after iteration {position['iteration']}, {position_text}")
        on_rank_0(world, self._write_options)

    def _write_options(self):
        mpi = self.world.transport.MPI.Get_library_version()
        versions = configuration.versions_of(mpi)
        path = os.path.join(self.out, "options.toml")
        configuration.write_options(path, self.resolved, versions, self.weights_file)

    def train(self):
        """Train and test the network, and write the results; return the exit code."""
        world, lock, out, console = self.world, self.lock, self.out, self.console
        files = {"weights_file": self.weights_file, "network_file": self.network_file}
        page_hooks = [_PageHook(self.page)] if "monitor" in self.typed else []
        with (
            console,
            tracking.abandoned_on_error(self.trackers),
            status_hooks.watched(out, world, self.signals, lock),
            # The page must close after the status hook to show the final status.
            live_page.served(self.page, out, console.line),
            status_hooks.StatusHook(out, world, lock) as self.status_hook,
        ):
            self.result = train_network(
                self.net,
                self.sets.train,
                self.settings,
                world=world,
                out=out,
                console=console,
                resume=self.resume,
                facts={"run": self.run, **{name: file for name, file in files.items() if file}},
                hooks=[*self.trackers, self.status_hook, *page_hooks],
                signals=self.signals,
                lock=lock,
            )
            return survival.attempt(
                world,
                self._conclude,
                lambda: lost_ranks.restart_test(world, console, self.signals, lock, self.result),
            )

    def _conclude(self):
        """Test the network and write the results; return the exit code."""
        stopped = self.result.stopped
        self.test = None
        self.skipped = BadImages.of_options(self.settings)  # images of the test set
        if stopped in (None, progress.PATIENCE):
            if self.sets.test is not None:
                self.test = self._evaluate(self.sets.test)
            self.lock.confirm()
            if self.skipped:
                self._list_skipped(self.skipped)
            stopped = failure.agreed_signal(self.signals, self.world)
        self.lock.confirm()
        return self._end_stopped(stopped) if stopped else self._end_finished()

    def _evaluate(self, test_set):
        """Evaluate the network on the test set."""
        settings = self.settings
        loss = settings.loss_for(self.net, self.sets.train, self.world)
        with self.console.stage("test", len(test_set)) as advance:
            return evaluate.evaluate(
                self.net,
                test_set,
                world=self.world,
                signals=self.signals,
                loss=loss,
                confusion=has_class_scores(loss) and confusion.is_small(self.net.output_shape[0]),
                metrics=settings.metrics or (),
                progress=advance,
                bad_images=self.skipped,
                test_flips=settings.test_flips,
            )

    def _list_skipped(self, skipped):
        """Add the skipped test images to the list in the folder of the run."""
        self.console.line(f"Skipped images: {len(skipped)} of test")
        parts = {"test": (self.sets.test, skipped)}
        on_rank_0(self.world, lambda: skipped_images.write_list(self.out, parts))

    def _end_stopped(self, stopped):
        """Say how to continue the run that a signal or a user has stopped."""
        self.status_hook.status.stopped = stopped
        problem = tracking.concluded(self.trackers, self.world, None, state=status.STOPPED)
        self.console.close()
        if problem is not None:
            self.console.line(f"warning: {problem}")
        self.console.line(
            f"{stopped}: stopped at iteration {self.result.iterations}, checkpoint written; "
            f"to continue, run again with --resume {self.out}"
        )
        return arguments.STOPPED

    def _end_finished(self):
        """Write, print and upload the results of a finished run."""
        world, console, upload = self.world, self.console, self.run["upload"]
        for line in _validation_lines(self.result, self.settings):
            console.line(line)
        with console.stage("writing the results"):
            on_rank_0(world, self._write_results)
            problem = tracking.concluded(self.trackers, world, self.out, self.test)
        console.finish(self.out, self.result.train_seconds, self.test)
        console.line(f"weights_sha256: {model_file.weights_sha256(self.net)}")
        if upload is not None:
            with console.stage("uploading the results"):
                on_rank_0(world, lambda: remote.upload(self.out, upload))
            console.line(f"Uploaded: {upload}")
        if problem is not None:
            raise problem
        return 0

    def _write_results(self):
        """Write model.h5, the tables of the test, and summary.json."""
        test, out = self.test, self.out
        model_file.save_model(os.path.join(out, "model.h5"), self.net)
        if test is not None and test.confusion is not None:
            test.confusion.save(os.path.join(out, run_folder.CONFUSION))
        if test is not None and test.metrics is not None:
            test.metrics.save(os.path.join(out, run_folder.CLASS_METRICS))
        text = json.dumps(self._summary(), indent=1) + "\n"
        model_file.write_whole(os.path.join(out, "summary.json"), text.encode())

    def _summary(self):
        """Return the content of summary.json."""
        test, result, world = self.test, self.result, self.world
        skipped_tests = 0 if self.skipped is None else len(self.skipped)
        summary = {
            "accuracy": metrics.number(test and test.accuracy),  # None without test or classes
            "loss": metrics.number(test and test.loss),
            **_metrics_of(test),
            "epochs": result.epochs,
            "iterations": result.iterations,
            "ranks": world.size,
            "threads": world.threads[0],
            "device": self.device,
            "images_per_second": result.images_per_second,
            "train_seconds": result.train_seconds,
            "best_iteration": result.best_iteration,
            "validation_loss": metrics.number(result.validation_loss),
            "validation_accuracy": metrics.number(result.validation_accuracy),
            "stopped": result.stopped,
            "rollbacks": result.rollbacks,
            "lost_ranks": len(world.lost_ranks),
            "skipped_images": result.skipped_images + skipped_tests,
            "weights_sha256": model_file.weights_sha256(self.net),
        }
        if self.weights_file is not None:
            summary["weights_file"] = self.weights_file
        return summary


class _PageHook:
    """Hook that reports that the live page has ended, because its rank is lost."""

    def __init__(self, page: Address | None) -> None:
        self.page = page

    def lost(self, run: Trainer) -> None:
        if self.page is None:
            run.console.line(
                "warning: --monitor: the page has ended with its rank; python -m mpidl.monitor "
                f"{run.writer.out} shows the run"
            )


def _check_counts(source, train_set, test_set):
    """Raise UserError if the training set or the test set is empty."""
    if not len(train_set) or (test_set is not None and not len(test_set)):
        test_count = "none" if test_set is None else len(test_set)
        raise UserError(
            f"--data {source}: expected training and test images, found {len(train_set)} "
            f"and {test_count}; --test-fraction sets the fraction to hold out for testing (0: "
            "no test), --test-data names other images"
        )


def _check_shape(option, images, train_set):
    """Raise UserError if the images differ in shape from the training images."""
    if images.image_shape != train_set.image_shape:
        raise UserError(
            f"{option}: expected images of shape {train_set.image_shape}, as in --data, found "
            f"{images.image_shape}"
        )


def _unused_validation(settings, saved):
    """Return why validation images in --data are not used, or None if they are."""
    reason = validation.held_out_by(settings)
    if saved is not None and saved.get("validation", {}).get("fingerprint") is None:
        reason = reason or "the resumed run had no validation"
    return reason


def describe_position(position, settings):
    """Describe where a resumed run continues, and which option lets a finished run continue."""
    epoch, limit = position["epoch"], settings.max_iterations
    if epoch > settings.epochs:
        schedule = settings.learn_rate_schedule
        advice = f", where --learn-rate-schedule {schedule} ends: there is nothing left to train"
        advice = advice if schedule in ENDING else "; increase --epochs to train further"
        return f"the end of epoch {epoch - 1}{advice}"
    if limit is not None and position["iteration"] >= limit:
        return f"in epoch {epoch}; increase --max-iterations to train further"
    return f"in epoch {epoch}"


def _validation_lines(result, settings):
    """Return messages about early stopping and about a network chosen by validation loss."""
    lines, best = [], result.best_iteration
    if result.stopped == progress.PATIENCE:
        lines.append(
            f"Stopped at iteration {result.iterations}: the validation loss has not improved "
            f"since iteration {best} (--validation-patience {settings.validation_patience})"
        )
    if settings.output_network == "best-validation":
        lines.append(f"The network is from iteration {best}, which has the lowest validation loss")
    return lines


def _lock_folder(typed, lock, create=True):
    """Lock the folder of --out or --resume; reject a run that is not resumed or overwritten."""
    option = "out" if "out" in typed else "resume"
    if option in typed:
        lock.take(typed[option], f"--{option} {{}}", create)
    on_rank_0(lock.world, lambda: start.check_output_folder(typed))


def _checkpoint(typed):
    """Load the checkpoint to resume from as (arrays, facts); return None for a new run."""
    refuse_remote(typed.get("preview"), "--preview", "a file")
    return checkpoint.load(typed["resume"]) if "resume" in typed else None


def _network_file(typed, resolved, saved):
    """Return the facts of the Python file of --network for checkpoints, or None without a file."""
    network = resolved.run["network"]
    if resolved.sources["network"] == "resumed run":
        user_files.check_resumed(network, saved, typed["resume"])
    return user_files.network_file(network)


def _rank_dependence(settings, world):
    """Return notes about options with which the weights depend on the number of ranks."""
    lines = []
    if settings.sampling == "partition":
        lines.append(
            f"note: --sampling partition: the images are partitioned among {world.size} "
            "rank(s); on another number of ranks, the weights differ"
        )
    if settings.batch_per_rank is not None:
        lines.append(
            f"note: --batch-per-rank {settings.batch_per_rank}: mini-batches of "
            f"{settings.batch_size} on {world.size} rank(s); on another number, the weights differ"
        )
    return lines


def _threads(threads):
    counts = "-".join(str(n) for n in sorted({min(threads), max(threads)}))
    return f"{counts} thread{'' if counts == '1' else 's'} each"


def _metrics_of(test):
    """Return {"metrics": {name: value}} for the summary, or {} if none were requested."""
    if test is None or test.metrics is None:
        return {}
    return {"metrics": {name: metrics.number(v) for name, v in test.metrics.values.items()}}
