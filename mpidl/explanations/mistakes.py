"""A page about the most confident mistakes of a network, with maps of both classes."""

from __future__ import annotations

import base64
import os

import numpy as np

from mpidl.core.blocks import Blocked
from mpidl.core.tape import value_of
from mpidl.errors import UserError
from mpidl.evaluation.class_metrics import predicted_classes
from mpidl.evaluation.predict import by_batch, collect
from mpidl.explanations import pictures
from mpidl.explanations.class_scores import (
    entries_of,
    scores_of,
    table_of_probabilities,
    table_of_scores,
)
from mpidl.explanations.explain import Explainer, maps_of, target_classes
from mpidl.explanations.methods import Method
from mpidl.explanations.results import Job
from mpidl.files import on_rank_0, write_whole
from mpidl.nn import Network
from mpidl.report.elements import STYLE, Content, element, page
from mpidl.text import aligned, printable

PAGE = "mistakes.html"
IMAGE_STYLE = """
.mistakes figure { margin: 0 0 26px; }
.mistakes img { width: 192px; max-width: 31%; margin-right: 8px; vertical-align: top; }
.mistakes figcaption { display: block; }
"""


def explain_mistakes(job: Job, method: Method, count: int) -> None:
    """Write a page about the `count` mistakes with the largest probabilities. Collective.

    For each image, the page has maps of the predicted class and of the true class. Raises UserError
    if the images have no labels, or if the network does not have a probability of each class.
    """
    if len(job.net.output_shape) > 1 or job.net.classes == ():
        raise UserError("--worst: expected a network whose outputs are scores of classes")
    if job.images.labels is None:
        raise UserError(
            f"--worst: expected images with a class label each, found none in "
            f"{job.images.describe()}"
        )
    try:
        labels = target_classes(job.net, job.images, "true")
    except UserError as error:
        raise UserError(f"--worst: {str(error).removeprefix('target: ')}") from None
    assert labels is not None
    indices, total, right = _worst(job, labels, count)
    worst = job._replace(images=job.images.subset(indices))
    explained = [
        _explained(worst, method, target_classes(worst.net, worst.images, target))
        for target in ("predicted", "true")
    ]
    accuracy = f"{right} of {total} images are classified correctly"
    facts = f"{job.images.describe()}. {accuracy}. In each row: an image, the map of the predicted "
    facts += f"class and the map of the true class, by {method.name}."
    path = os.path.join(job.folder, PAGE)
    if job.world.rank == 0:
        print(accuracy)
        if len(indices):
            _print_table(worst, explained)
    on_rank_0(job.world, lambda: write_whole(path, _page(worst, method, accuracy, explained or [])))
    if job.world.rank == 0:
        print(f"Page: {printable(path)}")


def judged(net: Network, images: Blocked) -> tuple[np.ndarray, np.ndarray]:
    """Return the predicted classes of this rank's images, and their probabilities."""
    outputs = value_of(scores_of(net, images)).stored()
    predicted = predicted_classes(table_of_scores(net, outputs))
    return predicted, entries_of(table_of_probabilities(net, outputs), predicted)


def _worst(job, labels, count):
    """Return the indices of the mistakes to show, the number of images, and that of right ones.

    An image with NaN scores has no predicted class, and is neither.
    """
    chances, total, right = {}, 0, 0  # {index of a mistake: probability of its wrong class}
    for indices, results in by_batch(job.net, job.images, judged, exact=True, **job.options):
        if job.world.rank == 0:
            total += len(indices)
            for i, predicted, chance in zip(indices, *results, strict=True):
                if predicted == labels[i]:
                    right += 1
                elif predicted >= 0:
                    chances[int(i)] = float(chance)
    indices = sorted(chances, key=lambda i: (-chances[i], i))[:count]
    return job.world.broadcast((np.array(indices, np.int64), total, right))


def _explained(job, method, classes):
    """Return the maps and the other results of an Explainer for all images, on rank 0."""
    explainer = Explainer(job.net, method, classes)
    if not len(job.images):
        return None
    arrays = collect(
        explainer.net,
        job.images,
        explainer,
        entries=explainer.entries,
        everywhere=False,
        exact=True,
        **job.options,
    )
    return None if arrays is None else [maps_of(arrays[0]), *arrays[1:]]


def _print_table(job, explained):
    (_, predicted, _, chances, _), (_, labels, _, true_chances, _) = explained
    rows = [["image", "label", "predicted", "probability", "of the label"]]
    for i in range(len(job.images)):
        names = [job.class_name(labels[i]), job.class_name(predicted[i])]
        rows.append([job.images.name(i), *names, f"{chances[i]:.4f}", f"{true_chances[i]:.4f}"])
    print("\n".join(aligned(rows, left=3)))


def _page(job, method, facts, explained):
    """Return the page; it needs no other file."""
    title = f"The {len(job.images)} most confident mistakes"
    figures = [_figure(job, method, i, explained) for i in range(len(job.images))]
    return page(
        title,
        STYLE + IMAGE_STYLE,
        element("h1", title),
        element("p", facts),
        element("div", *figures, class_="mistakes"),
    )


def _figure(job, method, index, explained):
    pixels, name = job.pixels(index), job.images.name(index)
    parts: list[Content] = [_image(pictures.plain(pixels), name)]
    texts = []
    for kind, (maps, classes, scores, chances, _) in zip(
        ("predicted", "true"), explained, strict=True
    ):
        label = job.class_name(classes[index])
        drawn = pictures.overlay(pixels, maps[index], method.is_signed)
        parts.append(_image(drawn, f"map of the {kind} class {label}"))
        text = f"{kind} {label}: probability {chances[index]:.4f}, score {scores[index]:.4g}"
        texts.append(text)
    caption = element("figcaption", element("b", name), f". {'; '.join(texts)}.")
    return element("figure", *parts, caption)


def _image(pixels, text):
    content = base64.b64encode(pictures.png(pixels)).decode()
    return element("img", src=f"data:image/png;base64,{content}", alt=text)
