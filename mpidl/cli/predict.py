"""`python -m mpidl.predict`: apply a trained network to images, or write its activations."""

import argparse
import csv
import io
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidl import backends, data, losses
from mpidl.cli import arguments, remote, start, user_files
from mpidl.cli.parser import RUN, Parser
from mpidl.data.checks import read_targets
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.transforms import normalize
from mpidl.data.urls import refuse_remote
from mpidl.errors import UserError
from mpidl.evaluation import confusion, evaluate, predict
from mpidl.evaluation.confusion import Confusion
from mpidl.files import on_rank_0
from mpidl.nn.layers import Sigmoid
from mpidl.options.declaration import flag
from mpidl.ranks import failure
from mpidl.ranks.world import World
from mpidl.report import Console, arrays
from mpidl.text import class_names, printable
from mpidl.training.files import model_file
from mpidl.training.options import training_options
from mpidl.training.options.run_inputs import EMBEDDED

# The ten most common options, in the order in which --help shows them.
COMMON = """
model data out top_k confusion activations resize colour batch_size device
""".split()
# Training options that the command also accepts.
OPTIONS = ("batch_size", "device", "gpus", "precision", "threads", "winograd", "timeout")
OPTIONS += ("on_bad_image", "test_flips")


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.predict; `arguments.train` describes parameters and errors.

    The attributes preprocess and storage are dicts {name: value} of the typed options in
    `arguments.PREPROCESS` and `arguments.STORAGE`. All other arguments are attributes.
    """
    parser = Parser(
        "mpidl.predict",
        "Classify images with a trained network.",
        quiet,
        COMMON,
        RUN,
        epilog=(
            "--colour, --resize, --cover and --centre-crop replace all of the model's own\n"
            "preprocessing, even if only one of these options is given."
        ),
    )
    parser.text("--model", "FILE", arguments.MODEL_HELP, required=True)
    parser.text("--layers", "FILE.py", "Python file with the model's custom layer classes")
    parser.text(
        "--data",
        "DATA",
        f"{arguments.DATA_HELP}. If the data have a training and a test part, the test part is "
        "used",
        EMBEDDED,
        required=True,
    )
    parser.text(
        "--out",
        "FILE",
        "Write the results. FILE.csv has one row per image: its name, its class and a score per "
        "class; for a regression model, its name, its outputs and its targets. FILE.npy or "
        "FILE.h5 stores an array, for --activations and models without classes",
    )
    parser.number(
        "--top-k",
        "Print the fraction of images whose class has one of the K largest scores",
        metavar="K",
    )
    parser.text(
        "--confusion",
        "FILE",
        "Write the confusion matrix to FILE.csv, or a picture of it to FILE.png",
    )
    parser.add_options("metrics")
    parser.text("--activations", "LAYER", "Write the output of this layer for each image to --out")
    names = arguments.PREPROCESS
    parser.add_options(*names, **dict.fromkeys(names, "the model's preprocessing"))
    arguments.add_normalization(parser, "the normalization that FILE describes")
    parser.add_options(*arguments.STORAGE, *OPTIONS)
    defaults = {name: training_options.OPTIONS[name].default for name in ("metrics", *OPTIONS)}
    values = defaults | vars(parser.parse(argv))
    groups = {
        group: {name: values.pop(name) for name in names if name in values}
        for group, names in (("preprocess", arguments.PREPROCESS), ("storage", arguments.STORAGE))
    }
    return argparse.Namespace(**values, **groups)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    world = World(timeout=parsed.timeout, threads=None)
    remote.configure({"data": parsed.data, **parsed.storage}, world)
    backends.configure(winograd=parsed.winograd, precision=parsed.precision)
    lines = world.use_device(parsed.device, parsed.gpus) + world.use_threads(parsed.threads)
    for line in [*start.arithmetic(world), *lines]:
        print(line)
    on_rank_0(world, lambda: _check_outputs(parsed))
    # Every rank needs the custom layers, because rank 0 sends the network to all ranks.
    layers = user_files.user_layers(parsed.layers)
    net = on_rank_0(world, lambda: _network(parsed, layers))
    parsed.bad_images = BadImages.of_options(parsed)
    console = Console(world.rank, stream=sys.stderr)  # stdout is for the results
    with console.stage("reading the data"):
        images = data.open_test_data(
            parsed.data, world, classes=losses.label_names(net), labelled=False, option="--data"
        )
    preprocess = net.preprocess
    if parsed.preprocess:
        preprocess = data.Preprocess.of_options(parsed.preprocess)
    reason = getattr(images, "unlabelled", None)  # `preprocessed` drops this attribute
    images = data.preprocessed(images, preprocess)
    if parsed.normalization and normalize.needs_statistics(parsed.normalization, images):
        raise UserError(
            f"--normalization {parsed.normalization}: expected 8-bit images, found {images.dtype}"
        )
    loss, classes = _loss_of(net, images), net.classes
    if classes is None and images.labels is not None and net.output_shape == (len(images.classes),):
        classes = images.classes  # for example, a file of another library has no class names
    if not net.takes(images.image_shape):
        raise UserError(
            f"--data {parsed.data}: expected images of shape {net.input_shape}, as in training, "
            f"found {images.image_shape} (--resize, --cover, --centre-crop and --colour convert "
            "them)"
        )
    with console.stage(f"prediction for {len(images)} images"):
        if parsed.activations:
            _activations(parsed, world, net, images)
        elif losses.has_label_scores(loss) and len(net.output_shape) == 1:
            _labels(parsed, world, net, images, loss)
        elif images.targets_shape is not None or len(net.output_shape) != 1 or not classes:
            _outputs(parsed, world, net, images, loss)
        else:
            _classes(parsed, world, net, images, classes, loss, reason)
    if world.rank == 0:
        print(f"Data: {images.describe()}", file=sys.stderr)
        print(f"Normalization: {net.normalization.describe()}", file=sys.stderr)
    if parsed.bad_images and world.rank == 0:
        for _, text in sorted(parsed.bad_images.reasons.items()):
            print(f"warning: skipped an image: {text}", file=sys.stderr)
        print(f"Skipped images: {len(parsed.bad_images)} of {len(images)}")
    return 0


def _network(parsed, layers):
    """Load the network, with the normalization of the file or of the user."""
    net = start.load_network(parsed.model, layers, parsed.normalization)
    net.normalization.need_known()
    return net


def _check_outputs(parsed):
    """Check the output files before the computation; raise UserError if one cannot be written."""
    for name in ("out", "confusion"):
        refuse_remote(getattr(parsed, name), flag(name), "a file")
    if parsed.confusion:
        confusion.check_path(parsed.confusion, "--confusion")
    if parsed.activations:
        for name in ("top_k", "confusion", "metrics"):
            if getattr(parsed, name):
                raise UserError(f"--activations: expected no {flag(name)} with it")
        if parsed.test_flips != "none":
            raise UserError("--activations: expected no --test-flips with it")
        if not parsed.out:
            raise UserError("--activations: expected --out FILE.npy or FILE.h5 with it, found none")
        arrays.check_path(parsed.out, "--out")


def _loss_of(net, images):
    """Return the loss used in training; if it is unknown, a loss that fits the outputs."""
    loss = losses.loss_of(net)
    if loss is not None:
        return loss
    has_targets, outputs = images.targets_shape is not None, net.output_shape
    if isinstance(net.layers[-1], Sigmoid):
        is_vector = len(outputs) == 1
        if is_vector or (has_targets and images.targets_dtype.kind in "iu"):
            return "binary-crossentropy"
    if has_targets and images.targets_dtype.kind not in "iu":
        return "mse"
    return "dice" if has_targets and outputs[0] == 1 else "crossentropy"


def _activations(parsed, world, net, images):
    """Write the activations of the layer that --activations names."""
    try:
        part = net.up_to(parsed.activations)
    except KeyError as error:
        raise UserError(f"--activations: {parsed.model}: {error.args[0]}") from error
    _write(parsed, world, part, images, "activations")
    if world.rank == 0:
        shape = "x".join(map(str, part.output_shape))
        text = f"Activations: {shape} of {parsed.activations}, {len(images)} images"
        print(f"{text}: {printable(parsed.out)}")


def _outputs(parsed, world, net, images, loss):
    """Write outputs that are images, numbers or pixel classes; print the accuracy or the errors."""
    has_targets = images.targets_shape is not None
    classifies = has_targets and losses.label_loss(loss) is not None
    refused = ["top_k", *(() if classifies else ("metrics",))]
    if not classifies or losses.has_label_scores(loss):
        refused.append("confusion")
    for name in refused:
        if getattr(parsed, name):
            raise UserError(
                f"{flag(name)}: expected a model with a score for each class, and "
                f"images with labels; {parsed.model} has outputs of shape {net.output_shape}"
            )
    if parsed.out and parsed.out.lower().endswith(".csv") and len(net.output_shape) == 1:
        _write_numbers(parsed, world, net, images)
    elif parsed.out:
        on_rank_0(world, lambda: arrays.check_path(parsed.out, "--out"))
        _write(parsed, world, net, images, "outputs")
    text = f"{len(images)} images, no targets known"
    if classifies:
        evaluation = evaluate.evaluate(
            net,
            images,
            world=world,
            loss=loss,
            batch_size=parsed.batch_size,
            confusion=bool(parsed.confusion),
            metrics=parsed.metrics or (),
            bad_images=parsed.bad_images,
            test_flips=parsed.test_flips,
        )
        count = losses.labels_per_image(net, images)
        text = (
            f"Accuracy: {evaluation.accuracy:.4f} ({evaluation.images} images, {count} labels each)"
        )
        text += _table(evaluation)
        if parsed.confusion:
            matrix: Any = evaluation.confusion  # has been computed
            on_rank_0(world, lambda: matrix.save(parsed.confusion))
    elif has_targets:
        errors = evaluate.regression_errors(
            net,
            images,
            world=world,
            batch_size=parsed.batch_size,
            bad_images=parsed.bad_images,
            test_flips=parsed.test_flips,
        )
        text = f"RMSE: {errors.rmse:.6g}, MAE: {errors.mae:.6g} ({errors.images} images)"
    if world.rank == 0:
        print(text)
        _print_files({"Confusion matrix": parsed.confusion, "Outputs": parsed.out})


def _table(evaluation):
    """Return the table of the requested metrics on separate lines, or an empty string."""
    return "" if evaluation.metrics is None else f"\n{evaluation.metrics}"


def _labels(parsed, world, net, images, loss):
    """Write the probabilities of several labels per image, and print how many labels are correct.

    A label is predicted if its probability is above 1/2.
    """
    (count,) = net.output_shape
    has_labels = images.targets_shape is not None or (images.labels is not None and count == 1)
    for name in ("top_k", "confusion", *(() if has_labels else ("metrics",))):
        if getattr(parsed, name):
            reason = "there are no labels"
            if has_labels:
                reason = f"the scores of {parsed.model} are probabilities of separate labels"
            raise UserError(
                f"{flag(name)}: expected a model with a score for each class, and "
                f"images with labels; {reason}"
            )
    if parsed.out and parsed.out.lower().endswith(arrays.ENDINGS):
        raise UserError(f"--out {parsed.out}: the probabilities of labels are written as .csv")
    names = [printable(name) for name in class_names(net.classes, count)]
    negative = printable(str((net.loss or {}).get("negative", "")))
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["image", "predicted", *names])
    if parsed.out:
        for indices, values in _batches(parsed, world, net, images, predict.probabilities):
            for i, row in zip(indices, values, strict=True):
                labels = ";".join(n for n, p in zip(names, row, strict=True) if p > 0.5) or negative
                labels = "" if np.isnan(row).any() else labels
                rows.writerow([images.name(i), labels, *(f"{p:.9g}" for p in row)])
        content = text.getvalue().encode()
        on_rank_0(world, lambda: model_file.write_whole(parsed.out, content))
    line = f"{len(images)} images, no labels known"
    if has_labels:
        evaluation = evaluate.evaluate(
            net,
            images,
            world=world,
            batch_size=parsed.batch_size,
            loss=loss,
            metrics=parsed.metrics or (),
            bad_images=parsed.bad_images,
            test_flips=parsed.test_flips,
        )
        images_text = f"{evaluation.images} images"
        images_text += f", {count} labels each" if count > 1 else ""
        line = f"Accuracy: {evaluation.accuracy:.4f} ({images_text}){_table(evaluation)}"
    if world.rank == 0:
        print(line)
        _print_files({"Scores": parsed.out})


def _print_files(paths):
    """Print the title and path of each written file in {title: path}; skip paths that are None."""
    for title, path in paths.items():
        if path:
            print(f"{title}: {printable(path)}")


def _batches(parsed, world, net, images, function):
    """Yield (indices, results) of each mini-batch, on rank 0 only.

    The function is collective.
    """
    options = {"world": world, "batch_size": parsed.batch_size, "bad_images": parsed.bad_images}
    options["test_flips"] = parsed.test_flips
    for batch in predict.by_batch(net, images, function, **options):
        if world.rank == 0:
            yield batch


def _write(parsed, world, net, images, name):
    """Write the outputs for all images to --out in image order, one mini-batch at a time.

    The outputs for skipped images are NaN.
    """
    file: Any = None
    written = 0
    if world.rank == 0:
        image_facts = {"names": [images.name(i) for i in range(len(images))]}
        if images.labels is not None:
            image_facts["labels"] = images.labels
        file = arrays.ArrayFile(parsed.out, name, (len(images), *net.output_shape), image_facts)
    for indices, values in _batches(parsed, world, net, images, predict.outputs):
        count = min(parsed.batch_size, len(images) - written)
        if len(values) < count:
            values, complete = np.full((count, *values.shape[1:]), np.nan, np.float32), values
            values[indices - written] = complete
        file.write(values)
        written += count
    on_rank_0(world, lambda: file.close())


def _write_numbers(parsed, world, net, images):
    """Write --out FILE.csv with a row per image: name, outputs, and targets if there are any."""
    (count,), has_targets = net.output_shape, images.targets_shape is not None
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    target_count = math.prod(images.targets_shape) if has_targets else 0
    rows.writerow(["image", *_numbered("output", count), *_numbered("target", target_count)])
    for indices, values in _batches(parsed, world, net, images, predict.outputs):
        targets = [()] * len(indices)
        if has_targets:
            targets = read_targets(images, indices).reshape(len(indices), target_count).tolist()
        for i, value, target in zip(indices, values.tolist(), targets, strict=True):
            # 9 significant digits determine a float32.
            rows.writerow([images.name(i), *(f"{v:.9g}" for v in value), *map(_shortest, target)])
    content = text.getvalue().encode()
    on_rank_0(world, lambda: model_file.write_whole(parsed.out, content))


def _numbered(name, count):
    """Return `count` column headings: the name, numbered from 1 if there are several columns."""
    return [name] if count == 1 else [f"{name} {i + 1}" for i in range(count)]


def _shortest(value):
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _check_class_options(parsed, images, count, reason):
    """Raise UserError if an option does not fit a model with `count` classes and these images."""
    missing = [name for name in ("top_k", "confusion", "metrics") if getattr(parsed, name)]
    if images.labels is None and missing:
        suffix = f": {reason}" if reason else ""
        raise UserError(
            f"{flag(missing[0])}: expected images with labels, found none in --data "
            f"{parsed.data}{suffix}"
        )
    if parsed.out and parsed.out.lower().endswith(arrays.ENDINGS):
        raise UserError(f"--out {parsed.out}: class scores are written as .csv")
    if parsed.top_k and parsed.top_k > count:
        raise UserError(f"--top-k {parsed.top_k}: the model has {count} classes")


def _classes(parsed, world, net, images, classes, loss, reason):
    """Classify images, write the scores, and print the accuracy if the images have labels.

    `reason` explains why images in sub-folders have no labels; for other images it is None.
    """
    (count,) = net.output_shape
    _check_class_options(parsed, images, count, reason)
    table = np.zeros((count, count), np.int64)
    in_top_k, n, text = 0, 0, io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    names = [printable(name) for name in class_names(classes, count)]
    rows.writerow(["image", "predicted", *names])
    undefined = 0  # images with NaN scores
    for indices, outputs in _batches(parsed, world, net, images, predict.scores_and_labels):
        scores, ranked, predicted = outputs
        n += len(indices)
        undefined += int((predicted < 0).sum())
        if images.labels is not None:
            confusion.tally(table, images.labels[indices], predicted)
        if parsed.top_k:
            places = evaluate.places(ranked, images.labels[indices])
            in_top_k += int((places < parsed.top_k).sum())
        if parsed.out:
            for i, k, row in zip(indices, predicted, scores, strict=True):
                # 9 significant digits determine a float32.
                name = names[k] if k >= 0 else ""
                rows.writerow([images.name(i), name, *(f"{v:.9g}" for v in row)])
    if parsed.out:
        content = text.getvalue().encode()
        on_rank_0(world, lambda: model_file.write_whole(parsed.out, content))
    if parsed.confusion:
        matrix = Confusion(table, tuple(names), is_complete=not undefined)
        on_rank_0(world, lambda: matrix.save(parsed.confusion))
    evaluation = None
    if parsed.metrics:
        options = {"batch_size": parsed.batch_size, "bad_images": parsed.bad_images}
        options |= {"test_flips": parsed.test_flips, "metrics": parsed.metrics, "loss": loss}
        evaluation = evaluate.evaluate(net, images, world=world, **options)
    if world.rank == 0:
        if undefined:
            print(
                f"warning: {undefined} of {n} images have NaN scores and no predicted class",
                file=sys.stderr,
            )
        if images.labels is not None and n:
            accuracy, top_k = table.trace() / n, in_top_k / n
            if undefined:  # the accuracy of the other images would hide the fault
                accuracy = top_k = math.nan
            print(f"Accuracy: {accuracy:.4f} ({n} images)")
            if parsed.top_k:
                print(f"Top-{parsed.top_k} accuracy: {top_k:.4f}")
            if evaluation is not None:
                print(evaluation.metrics)
        else:
            print(f"{n} images, no labels known{f': {reason}' if reason else ''}")
        _print_files({"Confusion matrix": parsed.confusion, "Scores": parsed.out})
