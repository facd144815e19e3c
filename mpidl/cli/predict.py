"""`python -m mpidl.predict`: classify images with a trained network."""

import csv
import io

from mpidl import backends, data
from mpidl.cli import arguments, start
from mpidl.comm import World, guard
from mpidl.data.datastore import on_rank_0, shown
from mpidl.errors import UserError
from mpidl.training import evaluate, modelfile


def main(argv=None):
    """Run the command; returns its exit code."""
    given = arguments.predict(argv, quiet=guard.launched_rank() > 0)
    world = World(timeout=given.timeout, threads=None)
    backends.configure(winograd=given.winograd, precision=given.precision)
    lines = world.use_device(given.device, given.gpus) + world.use_threads(given.threads)
    for line in [*start.arithmetic(world), *lines]:
        print(line)
    net, about = on_rank_0(world, lambda: modelfile.load_model(given.model))
    classes = about["classes"]
    images = data.open_test_data(
        given.data, world, classes=classes, labelled=False, option="--data"
    )
    if images.image_shape != net.input_shape:
        raise UserError(
            f"--data {given.data}: expected images of shape {net.input_shape}, as the model was "
            f"trained on, found {images.image_shape}"
        )
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    names = [shown(name) for name in classes]
    rows.writerow(["image", "predicted", *names])
    right = 0
    for indices, scores in evaluate.predict(net, images, world=world, batch_size=given.batch_size):
        if indices is None:
            continue
        found = scores.argmax(axis=1)
        if images.labels is not None:
            right += int((found == images.labels[indices]).sum())
        if given.out:
            for i, k, row in zip(indices, found, scores, strict=True):
                # nine digits hold every bit of a float32
                rows.writerow([images.name(i), names[k], *(f"{v:.9g}" for v in row)])
    if given.out:
        content = text.getvalue().encode()
        on_rank_0(world, lambda: modelfile.write_whole(given.out, content))
    if world.rank == 0:
        if images.labels is not None and len(images):
            print(f"Accuracy: {right / len(images):.4f} ({len(images)} images)")
        else:
            print(f"{len(images)} images, no labels known")
        if given.out:
            print(f"Scores: {given.out}")
    return 0
