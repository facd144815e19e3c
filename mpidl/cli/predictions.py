"""The predictions of the command `predict`: outputs, labels, classes and activations."""

import collections
import csv
import io
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidl import losses
from mpidl.data.checks import read_targets
from mpidl.errors import UserError
from mpidl.evaluation import confusion, evaluate, predict
from mpidl.evaluation.confusion import Confusion
from mpidl.files import on_rank_0, write_whole
from mpidl.options.declaration import flag
from mpidl.report import arrays
from mpidl.text import class_names, printable


class Task:
    """One prediction: its arguments, network, images and loss. All methods are collective."""

    def __init__(self, parsed, world, net, images, loss):
        self.parsed, self.world, self.net, self.images = parsed, world, net, images
        self.loss, self.has_targets = loss, images.targets_shape is not None

    # ---- the kinds of predictions ----

    def write_activations(self):
        """Write the activations of the layer that --activations names."""
        layer = self.parsed.activations
        try:
            part = self.net.up_to(layer)
        except KeyError as error:
            raise UserError(f"--activations: {self.parsed.model}: {error.args[0]}") from error
        self._write_array(part, "activations")
        shape = "x".join(map(str, part.output_shape))
        text = f"Activations: {shape} of {layer}, {len(self.images)} images"
        self._print(f"{text}: {printable(self.parsed.out)}", {})

    def write_outputs(self):
        """Write outputs that are images, numbers or pixel classes; print accuracy or errors."""
        parsed, world, net, images = self.parsed, self.world, self.net, self.images
        classifies = self.has_targets and losses.label_loss(self.loss) is not None
        refused = ["top_k", *(() if classifies else ("metrics",))]
        if not classifies or losses.has_label_scores(self.loss):
            refused.append("confusion")
        self._refuse(refused, f"{parsed.model} has outputs of shape {net.output_shape}")
        if parsed.out and parsed.out.lower().endswith(".csv") and len(net.output_shape) == 1:
            self._write_numbers()
        elif parsed.out:
            on_rank_0(world, lambda: arrays.check_path(parsed.out, "--out"))
            self._write_array(net, "outputs")
        text = f"{len(images)} images, no targets known"
        if classifies:
            evaluation = self._evaluate(confusion=bool(parsed.confusion))
            count = losses.labels_per_image(net, images)
            text = _accuracy(evaluation, f", {count} labels each")
            if evaluation.confusion is not None:
                on_rank_0(world, lambda: evaluation.confusion.save(parsed.confusion))
        elif self.has_targets:
            errors = evaluate.regression_errors(net, images, **self._options())
            text = f"RMSE: {errors.rmse:.6g}, MAE: {errors.mae:.6g} ({errors.images} images)"
        self._print(text, {"Confusion matrix": parsed.confusion, "Outputs": parsed.out})

    def predict_labels(self):
        """Write the probabilities of several labels per image; print how many labels are correct.

        A label is predicted if its probability is above 1/2.
        """
        parsed, net, images = self.parsed, self.net, self.images
        (count,) = net.output_shape
        has_labels = self.has_targets or (images.labels is not None and count == 1)
        reason = "there are no labels"
        if has_labels:
            reason = f"the scores of {parsed.model} are probabilities of separate labels"
        self._refuse(["top_k", "confusion", *(() if has_labels else ("metrics",))], reason)
        self._need_csv("the probabilities of labels")
        names = [printable(name) for name in class_names(net.classes, count)]
        negative = printable(str((net.loss or {}).get("negative", "")))

        def predicted(row):
            positives = ";".join(n for n, p in zip(names, row, strict=True) if p > 0.5)
            return "" if np.isnan(row).any() else positives or negative

        if parsed.out:
            rows = (
                [images.name(i), predicted(row), *map(_digits, row)]
                for indices, values in self._batches(predict.probabilities)
                for i, row in zip(indices, values, strict=True)
            )
            self._write_csv(["image", "predicted", *names], rows)
        text = f"{len(images)} images, no labels known"
        if has_labels:
            text = _accuracy(self._evaluate(), f", {count} labels each" if count > 1 else "")
        self._print(text, {"Scores": parsed.out})

    def classify(self, classes, reason):
        """Classify images, write the scores, and print the accuracy if the images have labels.

        `reason` explains why images in sub-folders have no labels; for other images it is None.
        """
        parsed, images, (count,) = self.parsed, self.images, self.net.output_shape
        suffix = f": {reason}" if reason else ""
        if images.labels is None:
            for name in ("top_k", "confusion", "metrics"):
                if getattr(parsed, name):
                    raise UserError(
                        f"{flag(name)}: expected images with labels, found none "
                        f"in --data {parsed.data}{suffix}"
                    )
        self._need_csv("class scores")
        if parsed.top_k and parsed.top_k > count:
            raise UserError(f"--top-k {parsed.top_k}: the model has {count} classes")
        names = [printable(name) for name in class_names(classes, count)]
        table, in_top_k, n = np.zeros((count, count), np.int64), 0, 0
        undefined = 0  # images with NaN scores

        def rows():
            nonlocal in_top_k, n, undefined
            for indices, (scores, ranked, predicted) in self._batches(predict.scores_and_labels):
                n += len(indices)
                undefined += int((predicted < 0).sum())
                if images.labels is not None:
                    confusion.tally(table, images.labels[indices], predicted)
                if parsed.top_k:
                    places = evaluate.places(ranked, images.labels[indices])
                    in_top_k += int((places < parsed.top_k).sum())
                if parsed.out:
                    for i, k, row in zip(indices, predicted, scores, strict=True):
                        yield [images.name(i), names[k] if k >= 0 else "", *map(_digits, row)]

        if parsed.out:
            self._write_csv(["image", "predicted", *names], rows())
        else:
            collections.deque(rows(), maxlen=0)
        if parsed.confusion:
            matrix = Confusion(table, tuple(names), is_complete=not undefined)
            on_rank_0(self.world, lambda: matrix.save(parsed.confusion))
        evaluation = self._evaluate() if parsed.metrics else None
        lines = [f"{n} images, no labels known{suffix}"]
        if images.labels is not None and n:
            accuracy, top_k = table.trace() / n, in_top_k / n
            if undefined:  # the accuracy of the other images would hide the fault
                accuracy = top_k = math.nan
            lines = [f"Accuracy: {accuracy:.4f} ({n} images)"]
            lines += [f"Top-{parsed.top_k} accuracy: {top_k:.4f}"] if parsed.top_k else []
            lines += [str(evaluation.metrics)] if evaluation is not None else []
        if undefined and self.world.rank == 0:
            print(
                f"warning: {undefined} of {n} images have NaN scores and no predicted class",
                file=sys.stderr,
            )
        files = {"Confusion matrix": parsed.confusion, "Scores": parsed.out}
        self._print("\n".join(lines), files)

    # ---- what they share ----

    def _refuse(self, names, reason):
        for name in names:
            if getattr(self.parsed, name):
                raise UserError(
                    f"{flag(name)}: expected a model with a score for each class, "
                    f"and images with labels; {reason}"
                )

    def _need_csv(self, subject):
        out = self.parsed.out
        if out and out.lower().endswith(arrays.ENDINGS):
            raise UserError(f"--out {out}: {subject} are written as .csv")

    def _options(self):
        parsed = self.parsed
        return {
            "world": self.world,
            "batch_size": parsed.batch_size,
            "bad_images": parsed.bad_images,
            "test_flips": parsed.test_flips,
        }

    def _evaluate(self, **options):
        options |= {"loss": self.loss, "metrics": self.parsed.metrics or ()}
        return evaluate.evaluate(self.net, self.images, **self._options(), **options)

    def _batches(self, function, net=None):
        """Yield (indices, results) of each mini-batch, on rank 0 only."""
        net = self.net if net is None else net
        for batch in predict.by_batch(net, self.images, function, **self._options()):
            if self.world.rank == 0:
                yield batch

    def _write_csv(self, headings, rows):
        """Write --out FILE.csv. Every rank consumes the rows, which only rank 0 has."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([headings, *rows])
        content = text.getvalue().encode()
        on_rank_0(self.world, lambda: write_whole(self.parsed.out, content))

    def _write_array(self, net, name):
        """Write the outputs for all images to --out in image order, one mini-batch at a time.

        The outputs for skipped images are NaN.
        """
        file: Any = None  # on rank 0
        images, written = self.images, 0
        if self.world.rank == 0:
            facts = {"names": [images.name(i) for i in range(len(images))]}
            if images.labels is not None:
                facts["labels"] = images.labels
            file = arrays.ArrayFile(self.parsed.out, name, (len(images), *net.output_shape), facts)
        for indices, values in self._batches(predict.outputs, net):
            count = min(self.parsed.batch_size, len(images) - written)
            if len(values) < count:
                values, complete = np.full((count, *values.shape[1:]), np.nan, np.float32), values
                values[indices - written] = complete
            file.write(values)
            written += count
        on_rank_0(self.world, lambda: file.close())

    def _write_numbers(self):
        """Write --out FILE.csv with a row per image: its name, outputs and targets, if any."""
        (count,), images = self.net.output_shape, self.images
        target_count = math.prod(images.targets_shape) if self.has_targets else 0

        def rows():
            for indices, values in self._batches(predict.outputs):
                targets: Sequence[Sequence] = [()] * len(indices)
                if self.has_targets:
                    table = read_targets(images, indices).reshape(len(indices), target_count)
                    targets = table.tolist()
                for i, value, target in zip(indices, values.tolist(), targets, strict=True):
                    yield [images.name(i), *map(_digits, value), *map(_digits, target)]

        self._write_csv(
            ["image", *_numbered("output", count), *_numbered("target", target_count)], rows()
        )

    def _print(self, text, files):
        """Print the results on rank 0, and then the title and path of each written file."""
        if self.world.rank == 0:
            print(text)
            for title, path in files.items():
                if path:
                    print(f"{title}: {printable(path)}")


def _accuracy(evaluation, labels):
    """Return the lines about an accuracy and the requested metrics."""
    table = "" if evaluation.metrics is None else f"\n{evaluation.metrics}"
    return f"Accuracy: {evaluation.accuracy:.4f} ({evaluation.images} images{labels}){table}"


def _numbered(name, count):
    """Return `count` column headings: the name, numbered from 1 if there are several columns."""
    return [name] if count == 1 else [f"{name} {i + 1}" for i in range(count)]


def _digits(value):
    """Format a number: whole numbers in full, others with the 9 digits that determine a float32."""
    return str(value) if isinstance(value, int) else f"{value:.9g}"
