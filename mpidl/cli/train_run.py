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
from mpidl.data.storage.settings import refuse_remote
from mpidl.errors import UserError
from mpidl.evaluation import confusion, evaluate, validation
from mpidl.files import on_rank_0
from mpidl.losses import has_class_scores
from mpidl.ranks import failure, survival
from mpidl.ranks.world import World
from mpidl.report import Console, metrics
from mpidl.report.trackers import tracking
from mpidl.text import printable
from mpidl.training import (
    input_pipeline,
    live_page,
    lost_ranks,
    progress,
    skipped_images,
    status_hooks,
    tracking_hooks,
)
from mpidl.training.files import checkpoint, model_file, run_folder
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
    if "preview" not in typed:
        _lock_folder(typed, lock, create=False)
    resume = on_rank_0(world, lambda: _checkpoint(typed))
    saved = None if resume is None else resume[1]
    resolved = on_rank_0(
        world, lambda: configuration.resolve(typed, config=typed.get("config"), resumed=saved)
    )
    settings, run = resolved.options.for_ranks(world.size), resolved.run
    network_file = on_rank_0(world, lambda: _network_file(typed, resolved, saved))
    remote.configure(run, world)
    world.transport.timeout = settings.timeout
    gpus = None if settings.gpus is None else str(settings.gpus)
    lines = world.use_device(settings.device, gpus)
    lost_ranks.prepare(settings, world)
    device = start.device_of(world)
    console = Console(
        world.rank, verbose_every=settings.verbose_every, progress=settings.verbose == "on"
    )

    preprocess = data.Preprocess.of_options(run)
    with console.stage("reading the data"):
        sets = registry.open_sets(
            run["data"],
            world,
            preprocess=preprocess,
            validation=run["validation_data"] is None,
            labelled_validation=_unused_validation(settings, saved) is None,
        )
    source = pretrained.load(resolved, resume, sets.train, world)
    if source is not None and not preprocess:
        preprocess = pretrained.conversion(source.net, sets.train, settings)
        sets = registry.Sets(*(images and data.preprocessed(images, preprocess) for images in sets))
    with console.stage("reading the test data"):
        train_set, test_set = start.with_test(
            run,
            sets.train,
            sets.test,
            world,
            preprocess,
            seed=settings.seed,
            typed=typed,
        )
    if not len(train_set) or (test_set is not None and not len(test_set)):
        test_count = "none" if test_set is None else len(test_set)
        raise UserError(
            f"--data {run['data']}: expected training and test images, found {len(train_set)} "
            f"and {test_count}; --test-fraction sets the fraction to hold out for testing (0: "
            "no test), --test-data names other images"
        )
    if test_set is not None:
        _check_shape("--test-data", test_set, train_set)
    sets = registry.Sets(train_set, sets.validation, test_set)
    train_set, settings = _with_validation(
        typed, run, settings, sets, world, preprocess, saved=saved, lines=lines
    )
    shape = input_pipeline.image_shape(settings, train_set.image_shape)
    Pipeline(train_set, data.Augmenter.of_options(settings))  # only to check the augmentation
    if typed.get("preview"):
        return _preview(typed["preview"], train_set, settings, world)
    settings.load(world.size)  # raises if worker_load does not fit the number of ranks
    if source is None:
        net = start.network_for(run["network"], shape, train_set, settings)
    else:
        pretrained.check_shape(source, train_set, settings)
        net, settings, resolved = pretrained.network(source, resolved, settings, train_set)
    input_pipeline.check(net, train_set, settings)
    if resume is not None:
        now = configuration.resumable(settings, net, train_set, world.size)
        # Check here, because dl.train checks only after the output folder has changed.
        configuration.changed_on_resume(saved, now, f"the run in {typed['resume']}")
    trackers = tracking_hooks.of_run(settings, run)
    page = live_page.open_page(world, typed.get("monitor"), "--monitor")
    page_hooks = [_PageHook(page)] if "monitor" in typed else []
    title = pretrained.title(run)
    _lock_folder(typed, lock)
    out = on_rank_0(world, lambda: start.output_folder(typed, title))
    lock.take(out)

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
    lines += world.use_threads(settings.threads)
    for line in [*start.warnings(world, settings.batch_size), *lines]:
        console.line(line)
    hardware = f"{device}, {_threads(world.threads)}"
    sets = {"data": train_set, "validation": settings.validation, "test": test_set}
    weights = {} if source is None else pretrained.describe(source, run, net, train_set)
    _announce(console, world, title, weights, sets, net, hardware, out)
    if saved is not None:
        position = saved["position"]
        position_text = _describe_position(position, settings)
        console.line(f"Resumed after iteration {position['iteration']}, {position_text}")
    weights_file = None if source is None else source.file
    on_rank_0(world, lambda: _write_options(out, resolved, world, weights_file))
    with (
        console,
        tracking_hooks.abandoned_on_error(trackers),
        status_hooks.watched(out, world, signals, lock),
        # The page must close after the status hook to show the final status.
        live_page.served(page, out, console.line),
        status_hooks.StatusHook(out, world, lock) as status_hook,
    ):
        result = train_network(
            net,
            train_set,
            settings,
            world=world,
            out=out,
            console=console,
            resume=resume,
            facts={
                "run": run,
                **({"weights_file": weights_file} if source else {}),
                **({"network_file": network_file} if network_file else {}),
            },
            hooks=[*trackers, status_hook, *page_hooks],
            signals=signals,
            lock=lock,
        )

        def conclude():
            """Test the network and write the results; return the exit code. Collective."""
            stopped, test = result.stopped, None
            skipped = BadImages.of_options(settings)  # images of the test set
            if stopped in (None, progress.PATIENCE):
                if test_set is not None:
                    loss = settings.loss_for(net, train_set, world)
                    small = has_class_scores(loss) and confusion.is_small(net.output_shape[0])
                    with console.stage("test", len(test_set)) as advance:
                        test = evaluate.evaluate(
                            *(net, test_set),
                            world=world,
                            signals=signals,
                            loss=loss,
                            confusion=small,
                            metrics=settings.metrics or (),
                            progress=advance,
                            bad_images=skipped,
                            test_flips=settings.test_flips,
                        )
                lock.confirm()
                if skipped:
                    _list_skipped(out, test_set, skipped, world, console)
                stopped = failure.agreed_signal(signals, world)
            lock.confirm()
            if stopped:
                status_hook.status.stopped = stopped
                problem = tracking_hooks.concluded(trackers, world, None, state=tracking.STOPPED)
                console.close()
                if problem is not None:
                    console.line(f"warning: {problem}")
                console.line(
                    f"{stopped}: stopped at iteration {result.iterations}, checkpoint written; "
                    f"to continue, run again with --resume {out}"
                )
                return arguments.STOPPED
            for line in _validation_lines(result, settings):
                console.line(line)
            with console.stage("writing the results"):
                on_rank_0(
                    world,
                    lambda: _write_results(
                        out, net, result, test, skipped, world, device, weights_file
                    ),
                )
                problem = tracking_hooks.concluded(trackers, world, out, test)
            console.finish(out, result.train_seconds, test)
            console.line(f"weights_sha256: {model_file.weights_sha256(net)}")
            if run["upload"] is not None:
                with console.stage("uploading the results"):
                    on_rank_0(world, lambda: remote.upload(out, run["upload"]))
                console.line(f"Uploaded: {run['upload']}")
            if problem is not None:
                raise problem
            return 0

        return survival.attempt(
            world, conclude, lambda: lost_ranks.restart_test(world, console, signals, lock, result)
        )


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


def _check_shape(option, images, train_set):
    """Raise UserError if the images differ in shape from the training images."""
    if images.image_shape != train_set.image_shape:
        raise UserError(
            f"{option}: expected images of shape {train_set.image_shape}, as in --data, found "
            f"{images.image_shape}"
        )


def _preview(path, train_set, settings, world):
    """Write a picture of images before and after augmentation; return the exit code."""
    augmenter = data.Augmenter.of_options(settings)

    def draw():
        model_file.write_whole(path, gallery.gallery(train_set, augmenter, settings.seed))
        print(f"Preview: {printable(path)}")

    on_rank_0(world, draw)
    return 0


def _unused_validation(settings, saved):
    """Return why validation images in --data are not used, or None if they are."""
    reason = validation.held_out_by(settings)
    if saved is not None and saved.get("validation", {}).get("fingerprint") is None:
        reason = reason or "the resumed run had no validation"
    return reason


def _with_validation(typed, run, settings, sets, world, preprocess, *, saved, lines):
    """Return the training images, and a copy of the options that contains the validation set.

    The validation images in --data serve unless --validation-fraction or --fold holds out others,
    or the resumed run had no validation. `lines` then receives a note.
    """
    source, train_set, images = run["validation_data"], sets.train, sets.validation
    if source is None:
        reason = _unused_validation(settings, saved)
        if images is not None and reason:
            lines.append(
                f"note: {reason}: the validation images in --data are not used: {images.describe()}"
            )
        elif images is not None:
            _check_shape("--data", images, train_set)
            return train_set, replace(settings, validation=images)
        held_out = validation.held_out(train_set, settings)
        if "validation_frequency" in typed and held_out[1].validation is None:
            raise UserError(
                f"--validation-frequency {settings.validation_frequency}: expected validation "
                "images (--validation-data, --validation-fraction or --fold)"
            )
        return held_out
    validation.refuse_second_validation(settings, f"--validation-data {source}")
    images = sets.test
    if source == "test" and images is None:
        raise UserError(
            "--validation-data test: expected test images, found none (--test-fraction 0)"
        )
    if source != "test":
        images = data.open_test_data(
            source, world, classes=train_set.classes, option="--validation-data"
        )
        images = data.preprocessed(images, preprocess)
        _check_shape("--validation-data", images, train_set)
    return train_set, replace(settings, validation=images)


def _describe_position(position, settings):
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


def _threads(threads):
    counts = "-".join(str(n) for n in sorted({min(threads), max(threads)}))
    return f"{counts} thread{'' if counts == '1' else 's'} each"


def _announce(console, world, network, weights, sets, net, hardware, out):
    learnables = sum(count for *_, count in net.table())
    hosts = len(set(world.hosts))
    on = f" on {hosts} hosts" if hosts > 1 else ""
    console.header(
        network=f"{network}, {len(net.layers)} layers, {learnables:,} learnables",
        **weights,
        **{name: images.describe() for name, images in sets.items() if images is not None},
        ranks=f"{world.size}{on}, {hardware}",
        results=out,
    )


def _write_options(out, resolved, world, weights_file):
    mpi = world.transport.MPI.Get_library_version()
    versions = configuration.versions_of(mpi)
    path = os.path.join(out, "options.toml")
    configuration.write_options(path, resolved, versions, weights_file)


def _list_skipped(out, test_set, skipped, world, console):
    """Add the skipped test images to the list in the folder of the run."""
    console.line(f"Skipped images: {len(skipped)} of test")
    on_rank_0(world, lambda: skipped_images.write_list(out, {"test": (test_set, skipped)}))


def _metrics_of(test):
    """Return {"metrics": {name: value}} for the summary, or {} if none were requested."""
    if test is None or test.metrics is None:
        return {}
    return {"metrics": {name: metrics.number(v) for name, v in test.metrics.values.items()}}


def _write_results(out, net, result, test, skipped, world, device, weights_file):
    model_file.save_model(os.path.join(out, "model.h5"), net)
    if test is not None and test.confusion is not None:
        test.confusion.save(os.path.join(out, run_folder.CONFUSION))
    if test is not None and test.metrics is not None:
        test.metrics.save(os.path.join(out, run_folder.CLASS_METRICS))
    summary = {
        "accuracy": metrics.number(test and test.accuracy),  # None without a test set or classes
        "loss": metrics.number(test and test.loss),
        **_metrics_of(test),
        "epochs": result.epochs,
        "iterations": result.iterations,
        "ranks": world.size,
        "threads": world.threads[0],
        "device": device,
        "images_per_second": result.images_per_second,
        "train_seconds": result.train_seconds,
        "best_iteration": result.best_iteration,
        "validation_loss": metrics.number(result.validation_loss),
        "validation_accuracy": metrics.number(result.validation_accuracy),
        "stopped": result.stopped,
        "rollbacks": result.rollbacks,
        "lost_ranks": len(world.lost_ranks),
        "skipped_images": result.skipped_images + (0 if skipped is None else len(skipped)),
        "weights_sha256": model_file.weights_sha256(net),
    }
    if weights_file is not None:
        summary["weights_file"] = weights_file
    model_file.write_whole(
        os.path.join(out, "summary.json"), (json.dumps(summary, indent=1) + "\n").encode()
    )
