"""The results of the command `train`: the test, the files at the end, and the last lines."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from mpidl import numerics
from mpidl.cli import start
from mpidl.evaluation import confusion, evaluate
from mpidl.evaluation.evaluate import Evaluation
from mpidl.files import on_rank_0, write_whole
from mpidl.losses import has_class_scores
from mpidl.report import metrics, run_files
from mpidl.training import progress, skipped_images
from mpidl.training.files import model_file
from mpidl.training.schedules import ENDING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mpidl.data.datastore import Datastore
    from mpidl.data.loading.bad_images import BadImages
    from mpidl.nn import Network
    from mpidl.training.options.training_options import TrainingOptions
    from mpidl.training.progress import Result
    from mpidl.training.session import Session


def test_network(
    net: Network,
    train_set: Datastore,
    test_set: Datastore,
    options: TrainingOptions,
    session: Session,
    bad_images: BadImages | None,
) -> Evaluation:
    """Evaluate the network on the test set, and list the skipped images. Collective."""
    loss, world = options.loss_for(net, train_set, session.world), session.world
    with session.console.stage("test", len(test_set)) as advance:
        evaluation = evaluate.evaluate(
            net,
            test_set,
            world=world,
            signals=session.signals,
            loss=loss,
            confusion=has_class_scores(loss) and confusion.is_small(net.output_shape[0]),
            metrics=options.metrics or (),
            progress=advance,
            bad_images=bad_images,
            test_flips=options.test_flips,
        )
    session.lock.confirm()
    if bad_images:
        session.console.line(f"Skipped images: {len(bad_images)} of test")
        parts = {"test": (test_set, bad_images)}
        on_rank_0(world, lambda: skipped_images.write_list(session.folder, parts))
    return evaluation


def write_results(
    net: Network,
    result: Result,
    test: Evaluation | None,
    skipped: int,
    weights_file: Mapping[str, str] | None,
    session: Session,
) -> None:
    """Write model.h5, the tables of the test and summary.json, on rank 0.

    `skipped` is the number of test images that could not be read.
    """
    model_file.save_model(os.path.join(session.folder, "model.h5"), net)
    if test is not None and test.confusion is not None:
        test.confusion.save(os.path.join(session.folder, run_files.CONFUSION))
    if test is not None and test.metrics is not None:
        test.metrics.save(os.path.join(session.folder, run_files.CLASS_METRICS))
    world, number = session.world, metrics.number
    summary: dict[str, Any] = {
        "accuracy": number(test and test.accuracy),  # None without test or classes
        "loss": number(test and test.loss),
    }
    if test is not None and test.metrics is not None:
        summary["metrics"] = {name: number(v) for name, v in test.metrics.values.items()}
    summary |= {
        "epochs": result.epochs,
        "iterations": result.iterations,
        "ranks": world.size,
        "threads": world.threads[0],
        "device": start.device_of(world),
        "precision": net.trained_precision or "fp32",
        "images_per_second": result.images_per_second,
        "train_seconds": result.train_seconds,
        "best_iteration": result.best_iteration,
        "validation_loss": number(result.validation_loss),
        "validation_accuracy": number(result.validation_accuracy),
        "stopped": result.stopped,
        "rollbacks": result.rollbacks,
        "lost_ranks": len(world.lost_ranks),
        "skipped_images": result.skipped_images + skipped,
        **numerics.current(),
        "weights_sha256": model_file.weights_sha256(net),
    }
    if weights_file is not None:
        summary["weights_file"] = weights_file
    content = json.dumps(summary, indent=1) + "\n"
    write_whole(os.path.join(session.folder, run_files.SUMMARY), content.encode())


def describe_position(position: Mapping[str, Any], options: TrainingOptions) -> str:
    """Describe where a resumed run continues, and which option lets a finished run continue."""
    epoch, limit = position["epoch"], options.max_iterations
    if epoch > options.epochs:
        schedule = options.learn_rate_schedule
        advice = f", where --learn-rate-schedule {schedule} ends: there is nothing left to train"
        advice = advice if schedule in ENDING else "; increase --epochs to train further"
        return f"the end of epoch {epoch - 1}{advice}"
    if limit is not None and position["iteration"] >= limit:
        return f"in epoch {epoch}; increase --max-iterations to train further"
    return f"in epoch {epoch}"


def describe_validation(result: Result, options: TrainingOptions) -> list[str]:
    """Return messages about early stopping and about a network chosen by validation loss."""
    lines, best = [], result.best_iteration
    if result.stopped == progress.PATIENCE:
        lines.append(
            f"Stopped at iteration {result.iterations}: the validation loss has not improved "
            f"since iteration {best} (--validation-patience {options.validation_patience})"
        )
    if options.output_network == "best-validation":
        lines.append(f"The network is from iteration {best}, which has the lowest validation loss")
    return lines
