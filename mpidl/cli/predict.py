"""`python -m mpidl.predict`: classify images with a trained network, or look inside it."""

import csv
import io
import math

import numpy as np

from mpidl import backends, data, losses
from mpidl.cli import arguments, start
from mpidl.comm import World, failure
from mpidl.data.datastore import read_targets
from mpidl.errors import UserError
from mpidl.evaluation import confusion, evaluate, predict
from mpidl.evaluation.confusion import Confusion
from mpidl.files import on_rank_0
from mpidl.report import arrays
from mpidl.text import class_names, printable
from mpidl.training.files import model_file


def main(argv=None):
    """Run the command; returns its exit code."""
    given = arguments.predict(argv, quiet=failure.launched_rank() > 0)
    world = World(timeout=given.timeout, threads=None)
    backends.configure(winograd=given.winograd, precision=given.precision)
    lines = world.use_device(given.device, given.gpus) + world.use_threads(given.threads)
    for line in [*start.arithmetic(world), *lines]:
        print(line)
    on_rank_0(world, lambda: _check_outputs(given))
    net, about = on_rank_0(world, lambda: model_file.load_model(given.model))
    classes = about["classes"]
    images = data.open_test_data(
        given.data, world, classes=classes, labelled=False, option="--data"
    )
    how = start.preprocess(given.preprocess) if given.preprocess else net.preprocess
    why = getattr(images, "unlabelled", None)  # before it is made into another set
    images = data.preprocessed(images, how)
    if not net.takes(images.image_shape):
        raise UserError(
            f"--data {given.data}: expected images of shape {net.input_shape}, as the model was "
            f"trained on, found {images.image_shape} (--resize, --cover, --centre-crop and "
            "--colour make them so)"
        )
    if given.activations:
        _activations(given, world, net, images)
    elif images.targets_shape is not None or len(net.output_shape) != 1 or not classes:
        _outputs(given, world, net, images)
    else:
        _classes(given, world, net, images, classes, why)
    return 0


def _check_outputs(given):
    """Before anything is computed: that what is asked for can be written."""
    if given.confusion:
        confusion.check_path(given.confusion, "--confusion")
    if given.activations:
        for name in ("top_k", "confusion"):
            if getattr(given, name):
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"--activations writes what a layer computes: {flag} is without it")
        if not given.out:
            raise UserError("--activations: expected --out FILE.npy or FILE.h5 with it, found none")
        arrays.check_path(given.out, "--out")


def _activations(given, world, net, images):
    try:
        part = net.up_to(given.activations)
    except KeyError as error:
        raise UserError(f"--activations: {given.model}: {error.args[0]}") from error
    _write(given, world, part, images, "activations")
    if world.rank == 0:
        shape = "x".join(map(str, part.output_shape))
        print(f"Activations: {shape} of {given.activations}, {len(images)} images: {given.out}")


def _outputs(given, world, net, images):
    """Of a network whose outputs are images, numbers or a class a pixel: how right they are, where
    there are targets."""
    classifies = images.targets_shape is not None and images.targets_dtype.kind in "iu"
    for name in ("top_k",) if classifies else ("top_k", "confusion"):
        if getattr(given, name):
            raise UserError(
                f"--{name.replace('_', '-')}: expected a model with a score for each class, and "
                f"images with labels; {given.model} has outputs of shape {net.output_shape}"
            )
    if given.out and given.out.lower().endswith(".csv") and len(net.output_shape) == 1:
        _write_numbers(given, world, net, images)
    elif given.out:
        on_rank_0(world, lambda: arrays.check_path(given.out, "--out"))
        _write(given, world, net, images, "outputs")
    text = f"{len(images)} images, no targets known"
    how = {"world": world, "batch_size": given.batch_size}
    if classifies:
        found = evaluate.evaluate(net, images, confusion=bool(given.confusion), **how)
        each = losses.labels_of(images)
        text = f"Accuracy: {found.accuracy:.4f} ({found.images} images, {each} labels each)"
        if given.confusion:
            on_rank_0(world, lambda: found.confusion.save(given.confusion))
    elif images.targets_shape is not None:
        errors = evaluate.regression_errors(net, images, **how)
        text = f"RMSE: {errors.rmse:.6g}, MAE: {errors.mae:.6g} ({errors.images} images)"
    if world.rank == 0:
        print(text)
        for what, path in (("Confusion matrix", given.confusion), ("Outputs", given.out)):
            if path:
                print(f"{what}: {path}")


def _write(given, world, net, images, name):
    """Write the outputs for all images to --out, a mini-batch at a time, in their order."""
    file = None
    if world.rank == 0:
        about = {"names": [images.name(i) for i in range(len(images))]}
        if images.labels is not None:
            about["labels"] = images.labels
        file = arrays.ArrayFile(given.out, name, (len(images), *net.output_shape), about)
    how = {"world": world, "batch_size": given.batch_size}
    for _, values in predict.by_batch(net, images, predict.outputs, **how):
        if values is not None:
            file.write(values)
    on_rank_0(world, lambda: file.close())


def _write_numbers(given, world, net, images):
    """Write --out FILE.csv, a row an image: its name, the numbers that the network gives for it,
    and its targets where they are known."""
    (count,), has_targets = net.output_shape, images.targets_shape is not None
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    known = math.prod(images.targets_shape) if has_targets else 0
    rows.writerow(["image", *_numbered("output", count), *_numbered("target", known)])
    how = {"world": world, "batch_size": given.batch_size}
    for indices, values in predict.by_batch(net, images, predict.outputs, **how):
        if indices is None:
            continue
        targets = [()] * len(indices)
        if has_targets:
            targets = read_targets(images, indices).reshape(len(indices), known).tolist()
        for i, value, target in zip(indices, values.tolist(), targets, strict=True):
            # nine digits hold every bit of a float32
            rows.writerow([images.name(i), *(f"{v:.9g}" for v in value), *map(_shortest, target)])
    content = text.getvalue().encode()
    on_rank_0(world, lambda: model_file.write_whole(given.out, content))


def _numbered(name, count):
    """Headings of so many columns: the name, numbered from 1 where there are several."""
    return [name] if count == 1 else [f"{name} {i + 1}" for i in range(count)]


def _shortest(value):
    return str(value) if isinstance(value, int) else f"{value:.9g}"


def _classes(given, world, net, images, classes, why):
    """The classes of images, with what is known of how right they are; why: there are no labels
    for images in sub-folders."""
    if images.labels is None and (given.top_k or given.confusion):
        flag, found = "--top-k" if given.top_k else "--confusion", f": {why}" if why else ""
        raise UserError(
            f"{flag}: expected images with labels, found none in --data {given.data}{found}"
        )
    if given.out and given.out.lower().endswith(arrays.ENDINGS):
        raise UserError(f"--out {given.out}: the scores of classes are written as .csv")
    (count,) = net.output_shape
    if given.top_k and given.top_k > count:
        raise UserError(f"--top-k {given.top_k}: the model tells {count} classes apart")
    table = np.zeros((count, count), np.int64)
    among, text = 0, io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    names = [printable(name) for name in class_names(classes, count)]
    rows.writerow(["image", "predicted", *names])
    how = {"world": world, "batch_size": given.batch_size}
    for indices, given_by in predict.by_batch(net, images, predict.scores_and_labels, **how):
        if indices is None:
            continue
        scores, ranked, found = given_by
        if images.labels is not None:
            confusion.tally(table, images.labels[indices], found)
        if given.top_k:
            places = evaluate.places(ranked, images.labels[indices])
            among += int((places < given.top_k).sum())
        if given.out:
            for i, k, row in zip(indices, found, scores, strict=True):
                # nine digits hold every bit of a float32
                rows.writerow([images.name(i), names[k], *(f"{v:.9g}" for v in row)])
    if given.out:
        content = text.getvalue().encode()
        on_rank_0(world, lambda: model_file.write_whole(given.out, content))
    if given.confusion:
        made = Confusion(table, tuple(names))
        on_rank_0(world, lambda: made.save(given.confusion))
    if world.rank == 0:
        if images.labels is not None and len(images):
            print(f"Accuracy: {table.trace() / len(images):.4f} ({len(images)} images)")
            if given.top_k:
                print(f"Top-{given.top_k} accuracy: {among / len(images):.4f}")
        else:
            print(f"{len(images)} images, no labels known{f': {why}' if why else ''}")
        for what, path in (("Confusion matrix", given.confusion), ("Scores", given.out)):
            if path:
                print(f"{what}: {path}")
