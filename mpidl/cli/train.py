"""`python -m mpidl.train`: train, test, and leave the results in a folder."""

import json
import os
from dataclasses import replace

from mpidl import data
from mpidl.cli import arguments, start
from mpidl.comm import World, failure
from mpidl.data import gallery
from mpidl.data.loading.pipeline import Pipeline
from mpidl.errors import UserError
from mpidl.evaluation import evaluate, validation
from mpidl.files import on_rank_0
from mpidl.report import Console, metrics
from mpidl.training import input_pipeline, progress, trainer
from mpidl.training.files import checkpoint, model_file
from mpidl.training.options import configuration, training_options
from mpidl.training.schedules import ENDING


def main(argv=None):
    """Run the command; returns its exit code."""
    given = arguments.train(argv, quiet=failure.launched_rank() > 0)
    # the world waits with the time-out it is given here, before the files are read
    world = World(
        timeout=given.get("timeout", training_options.TrainingOptions().timeout), threads=None
    )
    with failure.Signals() as signals:
        return _train(given, world, signals)


def _train(given, world, signals):
    resume = on_rank_0(world, lambda: _checkpoint(given))
    kept = None if resume is None else resume[1]
    chosen = on_rank_0(
        world, lambda: configuration.resolve(given, config=given.get("config"), resumed=kept)
    )
    settings, run = chosen.options.for_ranks(world.size), chosen.run
    world.transport.timeout = settings.timeout
    lines = world.use_device(settings.device, settings.gpus)
    device = start.device_of(world)

    how = start.preprocess(run)
    train_set, test_set = data.open_data(run["data"], world, preprocess=how)
    train_set, test_set = start.with_test(
        run, train_set, test_set, world, seed=settings.seed, typed=given
    )
    if not len(train_set) or (test_set is not None and not len(test_set)):
        tested = "none" if test_set is None else len(test_set)
        raise UserError(
            f"--data {run['data']}: expected images to train on and to test on, found "
            f"{len(train_set)} and {tested}; --test-fraction is the share that is kept for the "
            "test (0: no test), --test-data names others"
        )
    if test_set is not None:
        _same_shape("--test-data", test_set, train_set)
    train_set, settings = _with_validation(given, run, settings, train_set, test_set, world, how)
    shape = input_pipeline.image_shape(settings, train_set.image_shape)
    Pipeline(
        train_set, input_pipeline.augmenter_of(settings)
    )  # or an error: an augmenter for other images
    if given.get("preview"):
        return _preview(given["preview"], train_set, settings, world)
    settings.load(world.size)  # refused before any work where it does not fit the ranks
    net = start.network(run["network"], shape, start.outputs_of(train_set), settings.seed)
    input_pipeline.check(net, train_set, settings)
    if resume is not None:
        now = configuration.resumable(settings, net, train_set, world.size)
        # `loop.train` would refuse it too, but the folder of results is touched before that
        configuration.changed_on_resume(kept, now, f"the run in {given['resume']}")
    out = on_rank_0(world, lambda: arguments.output_folder(given, run["network"]))

    shows = {"verbose_every": settings.verbose_every, "progress": settings.verbose == "on"}
    console = Console(world.rank, **shows)
    if settings.sampling == "partition":
        lines.append(
            f"note: --sampling partition: each of {world.size} rank(s) has a part of the images; "
            "with other ranks the weights differ"
        )
    if settings.batch_per_rank is not None:
        lines.append(
            f"note: --batch-per-rank {settings.batch_per_rank}: mini-batches of "
            f"{settings.batch_size} on {world.size} rank(s); with other ranks the weights differ"
        )
    lines += world.use_threads(settings.threads)
    for line in [*start.warnings(world, settings.batch_size), *lines]:
        console.line(line)
    on_what = f"{device}, {_threads(world.threads)}"
    about = {"data": train_set, "validation": settings.validation, "test": test_set}
    _announce(console, world, chosen, about, net, on_what, out)
    if kept is not None:
        at = kept["position"]
        console.line(f"Resumed after iteration {at['iteration']}, {_where(at, settings)}")
    on_rank_0(world, lambda: _write_options(out, chosen, world))
    with console:
        result = trainer.train(
            net,
            train_set,
            settings,
            world=world,
            out=out,
            console=console,
            resume=resume,
            facts={"run": run},
            signals=signals,
        )
        stopped, test = result.stopped, None
        if stopped in (None, progress.PATIENCE):
            if test_set is not None:
                how = {"world": world, "signals": signals, "loss": settings.loss}
                test = evaluate.evaluate(net, test_set, **how)
            stopped = trainer.stopped_by(signals, world)
        if stopped:
            console.close()
            console.line(
                f"{stopped}: stopped at iteration {result.iterations}, checkpoint written; "
                f"to go on, run again with --resume {out}"
            )
            return arguments.STOPPED
        for line in _about_validation(result, settings):
            console.line(line)
        on_rank_0(
            world,
            lambda: _write_results(out, net, result, test, world, device),
        )
        console.finish(out, result.train_seconds, test)
        console.line(f"weights_sha256: {model_file.weights_sha256(net)}")
    return 0


def _same_shape(option, images, train_set):
    if images.image_shape != train_set.image_shape:
        raise UserError(
            f"{option}: expected images of shape {train_set.image_shape}, as in --data, found "
            f"{images.image_shape}"
        )


def _preview(path, train_set, settings, world):
    """Draw what augmentation makes of the images."""
    augmenter = input_pipeline.augmenter_of(settings)

    def draw():
        model_file.write_whole(path, gallery.gallery(train_set, augmenter, settings.seed))
        print(f"Preview: {path}")

    on_rank_0(world, draw)
    return 0


def _with_validation(given, run, settings, train_set, test_set, world, how):
    """(images to train on, options with the images to validate on, where there are to be any)."""
    chosen = run["validation_data"]
    if chosen is None:
        if "validation_frequency" in given and not settings.validation_fraction:
            raise UserError(
                f"--validation-frequency {settings.validation_frequency}: expected images to "
                "validate on (--validation-data or --validation-fraction)"
            )
        return validation.held_out(train_set, settings)
    if settings.validation_fraction:
        raise UserError(
            f"--validation-data {chosen} and --validation-fraction {settings.validation_fraction}: "
            "expected one of them"
        )
    images = test_set
    if chosen == "test" and test_set is None:
        raise UserError(
            "--validation-data test: expected test images, found none (--test-fraction 0)"
        )
    if chosen != "test":
        named = {"classes": train_set.classes, "option": "--validation-data"}
        images = data.preprocessed(data.open_test_data(chosen, world, **named), how)
        _same_shape("--validation-data", images, train_set)
    return train_set, replace(settings, validation=images)


def _where(position, settings):
    epoch, limit = position["epoch"], settings.max_iterations
    if epoch > settings.epochs:
        schedule = settings.learn_rate_schedule
        over = f", where --learn-rate-schedule {schedule} ends: there is nothing left to train"
        over = over if schedule in ENDING else "; a larger --epochs trains on"
        return f"the end of epoch {epoch - 1}{over}"
    if limit is not None and position["iteration"] >= limit:
        return f"in epoch {epoch}; a larger --max-iterations trains on"
    return f"in epoch {epoch}"


def _about_validation(result, settings):
    """What validation had to do with the network that a run ended with, in lines."""
    lines, best = [], result.best_iteration
    if result.stopped == progress.PATIENCE:
        lines.append(
            f"Stopped at iteration {result.iterations}: the validation loss was least at iteration "
            f"{best} (--validation-patience {settings.validation_patience})"
        )
    if settings.output_network == "best-validation":
        lines.append(f"The network is that of iteration {best}, of the least validation loss")
    return lines


def _checkpoint(given):
    """(arrays, facts) to go on from, None of a new run; UserError, too, where --out holds another
    run."""
    if "preview" not in given:
        arguments.check_output_folder(given)
    return checkpoint.load(given["resume"]) if "resume" in given else None


def _threads(threads):
    each = "-".join(str(n) for n in sorted({min(threads), max(threads)}))
    return f"{each} thread{'' if each == '1' else 's'} each"


def _announce(console, world, chosen, sets, net, on_what, out):
    learnables = sum(count for *_, count in net.table())
    hosts = len(set(world.hosts))
    on = f" on {hosts} hosts" if hosts > 1 else ""
    console.header(
        network=f"{chosen.run['network']}, {len(net.layers)} layers, {learnables:,} learnables",
        **{name: images.describe() for name, images in sets.items() if images is not None},
        ranks=f"{world.size}{on}, {on_what}",
        results=out,
    )


def _write_options(out, chosen, world):
    mpi = world.transport.MPI.Get_library_version()
    versions = configuration.versions_of(mpi)
    configuration.write_options(os.path.join(out, "options.toml"), chosen, versions)


def _write_results(out, net, result, test, world, device):
    model_file.save_model(os.path.join(out, "model.h5"), net)
    summary = {
        "accuracy": test and test.accuracy,  # None of a loss that classifies nothing, and
        "loss": metrics.number(test and test.loss),  # where there was no test
        "epochs": result.epochs,
        "iterations": result.iterations,
        "ranks": world.size,
        "threads": world.threads[0],
        "device": device,
        "images_per_second": result.images_per_second,
        "train_seconds": result.train_seconds,
        "best_iteration": result.best_iteration,
        "validation_loss": metrics.number(result.validation_loss),
        "validation_accuracy": result.validation_accuracy,
        "stopped": result.stopped,
        "weights_sha256": model_file.weights_sha256(net),
    }
    model_file.write_whole(
        os.path.join(out, "summary.json"), (json.dumps(summary, indent=1) + "\n").encode()
    )
