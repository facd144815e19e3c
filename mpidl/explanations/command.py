"""`python -m mpidl.explain`: show which pixels decide about the classes of images."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from mpidl import data, losses
from mpidl.cli import arguments, predict, user_files
from mpidl.cli.parser import RUN, Parser
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.urls import refuse_remote
from mpidl.errors import UserError
from mpidl.explanations import methods, mistakes, results
from mpidl.explanations.explain import BATCH, PREDICTED, TRUE, Explainer, target_classes
from mpidl.explanations.picture_files import PictureFiles, are_pictures
from mpidl.files import on_rank_0, reason
from mpidl.options.declaration import SIZE, Rule, at_least, numbers_of, one_of
from mpidl.ranks import failure
from mpidl.report import Console
from mpidl.text import printable

COMMON = "method target out worst layer window steps baseline resize device".split()
# Training options that the command also accepts.
OPTIONS = ("device", "gpus", "precision", "threads", "winograd", "timeout", "on_bad_image")
ARGUMENTS = ("layer", "window", "stride", "steps", "baseline")  # of some methods
NUMBER = Rule(float, "a number")
FOLDER = "explanations"


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.explain; `arguments.train` describes parameters and errors."""
    parser = Parser(
        "mpidl.explain",
        "Show which pixels of an image decide its class. The command writes a map of the pixels\n"
        "of each image, as a picture and as numbers. docs/explain.md compares the methods.",
        quiet,
        COMMON,
        RUN,
        epilog="exit codes: 0 success; 1 error; 2 invalid options or data",
    )
    parser.add_argument("model", metavar="MODEL", help=arguments.MODEL_HELP)
    parser.add_argument(
        "images",
        metavar="IMAGES",
        nargs="+",
        help="Image files, or one data set as for --data of mpidl.predict",
    )
    parser.text(
        "--method",
        "NAME",
        f"How maps are computed: {', '.join(methods.METHODS)}; default: grad-cam",
        methods.METHODS,
        type=one_of(*methods.METHODS),
        default="grad-cam",
    )
    parser.text(
        "--target",
        "CLASS",
        "The class to explain: predicted, true (the label of each image), or the name or the "
        "index of a class; default: predicted",
        (PREDICTED, TRUE),
    )
    parser.text("--out", "DIR", f"Folder for pictures, maps and table; default: {FOLDER}")
    parser.number(
        "--worst",
        "Explain only the K wrong predictions with the largest probabilities, in the page "
        "mistakes.html of --out; the images need labels",
        metavar="K",
    )
    _add_method_options(parser)
    parser.text("--layers", "FILE.py", "Python file with the model's custom layer classes")
    names = arguments.PREPROCESS
    parser.add_options(*names, **dict.fromkeys(names, "the model's preprocessing"))
    arguments.add_normalization(parser, "the normalization that FILE describes")
    parser.text(
        "--batch-size",
        "N",
        f"Images per mini-batch, over all ranks; default: {BATCH} per rank",
        type=at_least(1),
    )
    parser.add_options(*arguments.STORAGE, *OPTIONS)
    parsed = arguments.parsed_evaluation(parser, argv, OPTIONS)
    if parsed.worst and parsed.target:
        raise UserError("--target: expected no --worst with it, which explains both classes")
    parsed.data = parsed.images[0]
    return parsed


def _add_method_options(parser):
    """Add the options that only some of the methods have."""
    parser.text(
        "--layer",
        "LAYER",
        "Grad-CAM: name of the layer whose features the map shows; default: the last layer whose "
        "output has rows and columns",
    )
    parser.text(
        "--window",
        "HxW",
        "Occlusion: size of the window that hides pixels; default: an eighth of the image",
        type=SIZE,
    )
    parser.text(
        "--stride",
        "HxW",
        "Occlusion: step from one position of the window to the next; default: half of the window",
        type=SIZE,
    )
    parser.number(
        "--steps",
        "Integrated gradients: number of gradients per image, more are more exact; default: 50",
    )
    parser.text(
        "--baseline",
        "X",
        "Occlusion and integrated gradients: value of a pixel without information, in the units of "
        "normalized pixels; default: 0",
        type=NUMBER,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    options: dict[str, Any] = {name: getattr(parsed, name) for name in ARGUMENTS}
    options |= {name: numbers_of(SIZE, options[name]) for name in ("window", "stride")}
    with _flags_in_errors():
        method = methods.method_of(parsed.method, options)
    world = predict.start_ranks(parsed)
    folder = FOLDER if parsed.out is None else parsed.out
    on_rank_0(world, lambda: _make_folder(folder))
    # Every rank needs the custom layers, because rank 0 sends the network to all ranks.
    layers = user_files.user_layers(parsed.layers)
    net = on_rank_0(world, lambda: predict.load_network(parsed, layers))
    parsed.bad_images = BadImages.of_options(parsed)
    console = Console(world.rank, stream=sys.stderr)  # stdout is for the results
    with console.stage("reading the data"):
        opened = _opened(parsed, world, net)
        _need_labels(parsed, opened)
        images = predict.converted(parsed, net, opened)
    predict.check_shape(net, images, printable(parsed.data))
    if net.classes is None and images.labels is not None:
        if net.output_shape == (len(images.classes),):
            net.classes = tuple(images.classes)  # a file of another library may have no names
    settings = {
        "world": world,
        "batch_size": parsed.batch_size or BATCH * world.size,
        "bad_images": parsed.bad_images,
    }
    job = results.Job(world, net, images, folder, settings)
    with console.stage(f"{parsed.method} for {len(images)} images"):
        if parsed.worst:
            with _flags_in_errors():
                mistakes.explain_mistakes(job, method, parsed.worst)
        else:
            with _flags_in_errors():
                classes = target_classes(net, images, _target(net, parsed.target))
                explainer = Explainer(net, method, classes)
            results.explain_images(job, explainer)
    predict.print_facts(parsed, world, net, images)
    return 0


@contextlib.contextmanager
def _flags_in_errors():
    """Let UserErrors that begin with the name of an argument of `explain` begin with its flag."""
    try:
        yield
    except UserError as error:
        if not re.match(rf"({'|'.join(ARGUMENTS)}|target)[: ]", str(error)):
            raise
        raise UserError(f"--{error}") from error


def _target(net, text):
    """Return a target for `target_classes`: an index if no class has the text as its name."""
    names = losses.label_names(net) or ()
    return int(text) if text and text.isdecimal() and text not in names else text


def _make_folder(folder):
    refuse_remote(folder, "--out", "a folder")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {printable(folder)}: cannot be created: {reason(error)}") from None


def _need_labels(parsed, images):
    """Raise UserError if the options need labels, and sub-folders do not match the classes."""
    problem = getattr(images, "unlabelled", None)
    option = "--worst" if parsed.worst else "--target true" if parsed.target == TRUE else None
    if option and problem:
        raise UserError(
            f"{option}: expected a class of the network for each image: "
            f"{printable(parsed.data)}: {problem}"
        )


def _opened(parsed, world, net):
    """Open the image files, or the data set."""
    if are_pictures(parsed.images):
        return PictureFiles(parsed.images, world)
    if len(parsed.images) > 1:
        text = next(path for path in parsed.images if not are_pictures([path]))
        raise UserError(
            f"{printable(text)}: expected image files, or a single data set, found another file "
            f"among {len(parsed.images)}"
        )
    return data.open_test_data(
        parsed.data, world, classes=losses.label_names(net), labelled=False, option="IMAGES"
    )
