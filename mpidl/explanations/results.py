"""The results of the command `explain`: a picture per image, the maps, and a table."""

from __future__ import annotations

import csv
import io
import os
import re
from typing import Any, NamedTuple

import numpy as np

from mpidl.core.blocks import Blocked
from mpidl.data.checks import read_images
from mpidl.data.datastore import Datastore
from mpidl.data.transforms.sizes import centred
from mpidl.errors import UserError
from mpidl.evaluation.predict import by_batch
from mpidl.explanations import pictures
from mpidl.explanations.explain import Explainer, maps_of, names_of_classes
from mpidl.files import on_rank_0, write_whole
from mpidl.nn import Network
from mpidl.ranks.world import World
from mpidl.report.arrays import ArrayFile
from mpidl.text import aligned, printable

MAX_ROWS = 20  # largest number of images in the table on the terminal
TABLE = "table.csv"


class Job(NamedTuple):
    """What a command explains, and where it writes. `options` are arguments of `by_batch`."""

    world: World
    net: Network
    images: Datastore
    folder: str
    options: dict[str, Any]

    def class_name(self, label: int) -> str:
        """Return the name of a class; "" for -1, of an image with NaN scores."""
        return "" if label < 0 else printable(names_of_classes(self.net)[label])

    def pixels(self, index: int) -> np.ndarray:
        """Return the part of an image (C, H, W) that the network reads, before normalization."""
        image = read_images(self.images, [index])[0]
        top, left = centred(image.shape, self.net.input_shape[1:])
        rows, columns = self.net.input_shape[1:]
        return image[:, top : top + rows, left : left + columns]


class Files:
    """Files that rank 0 writes while all ranks compute.

    Only `finish` raises an error if writing has failed, so that all ranks finish computing.
    """

    def __init__(self) -> None:
        self.problem: UserError | None = None

    def write(self, path: str, content: bytes) -> None:
        """Write a file, unless an earlier one could not be written."""
        try:
            if self.problem is None:
                write_whole(path, content)
        except UserError as error:
            self.problem = error

    def finish(self, world: World) -> None:
        """Raise the first error on all ranks. Collective."""
        world.raise_if_any(self.problem)


def explain_images(job: Job, explainer: Explainer) -> None:
    """Write and print the explanations of all images. Collective.

    The maps of images that cannot be read are NaN.
    """
    images, files, rows = job.images, Files(), []
    array: Any = None  # on rank 0
    if job.world.rank == 0:
        name = "attributions" if explainer.method.of_channels else "maps"
        shape = (len(images), *explainer.method.entry_shape(job.net))
        array = ArrayFile(os.path.join(job.folder, f"{name}.npy"), name, shape, {})

    def explain_and_draw(net: Network, batch: Blocked) -> tuple[np.ndarray, ...]:
        results = explainer(net, batch)
        drawn = np.empty(len(results[0]), object)  # each rank draws its own images
        for n, (i, values) in enumerate(zip(batch.batch.indices, maps_of(results[0]), strict=True)):
            pixels = pictures.overlay(job.pixels(i), values, explainer.method.is_signed)
            drawn[n] = pictures.png(pixels)
        return *results, drawn

    for indices, results in by_batch(
        explainer.net, images, explain_and_draw, exact=True, **job.options
    ):
        if job.world.rank:
            continue
        entries, *facts, drawn = results
        count = min(job.options["batch_size"], len(images) - array.count)
        written = np.full((count, *entries.shape[1:]), np.nan, np.float32)
        written[indices - array.count] = entries
        array.write(written)
        for i, content, *row in zip(indices, drawn, *facts, strict=True):
            name = _picture_name(images, i)
            rows.append([images.name(i), *_row(job, i, *row), name])
            path = os.path.join(job.folder, name)
            files.write(path, content)
    on_rank_0(job.world, lambda: array.close())
    files.finish(job.world)
    write_table(job, rows)


def write_table(job: Job, rows: list[list[str]]) -> None:
    """Write table.csv, and print the first rows. Collective; only rank 0 has the rows."""
    head = ["image", *(["label"] if _has_labels(job) else [])]
    head += ["predicted", "explained", "score", "probability", "picture"]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    content = text.getvalue().encode()
    path = os.path.join(job.folder, TABLE)
    on_rank_0(job.world, lambda: write_whole(path, content))
    if job.world.rank:
        return
    print(
        "\n".join(aligned([head[:-1], *(row[:-1] for row in rows[:MAX_ROWS])], left=len(head) - 3))
    )
    if len(rows) > MAX_ROWS:
        print(f"and {len(rows) - MAX_ROWS} more images: {printable(path)}")


def _has_labels(job):
    return job.images.labels is not None and job.images.targets_shape is None


def _row(job, index, label, score, probability, predicted):
    """Return the cells of an image's row without its name and its picture."""
    images = job.images  # may have other classes than the network
    cells = [printable(images.classes[images.labels[index]])] if _has_labels(job) else []
    chance = "" if np.isnan(probability) else f"{probability:.4f}"
    return [*cells, job.class_name(predicted), job.class_name(label), f"{score:.6g}", chance]


def _picture_name(images, index):
    """Return the name of an image's picture: its number, and the name of its file if it has one."""
    number = str(index).zfill(len(str(max(len(images) - 1, 0))))
    stem, ending = os.path.splitext(os.path.basename(images.name(index)))
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", stem)[:60]
    return f"{number}-{stem}.png" if ending else f"{number}.png"
