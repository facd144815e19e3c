"""`python -m mpidl.predict`: apply a trained network to images, or write its activations."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from mpidl import backends, data, losses
from mpidl.cli import arguments, remote, start, user_files
from mpidl.cli.parser import RUN, Parser
from mpidl.cli.predictions import Task
from mpidl.data.datastore import Datastore
from mpidl.data.loading.bad_images import BadImages
from mpidl.data.transforms import normalize
from mpidl.data.urls import refuse_remote
from mpidl.errors import UserError
from mpidl.evaluation import confusion
from mpidl.files import on_rank_0
from mpidl.nn import Network
from mpidl.nn.layers import Layer, Sigmoid
from mpidl.options.declaration import at_least, flag
from mpidl.ranks import failure
from mpidl.ranks.world import World
from mpidl.report import Console, arrays
from mpidl.text import printable
from mpidl.training.options.run_inputs import EMBEDDED

if TYPE_CHECKING:
    from mpidl.tiles.pictures import Pictures

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
        "Classify images with a trained network, or predict numbers or the classes of pixels.",
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
        "FILE.h5 stores an array, for --activations, models without classes, and scores of pixels. "
        "With --tile, a folder gets a picture of the classes of each image's pixels",
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
    parser.number(
        "--tile",
        "Predict images of any size in square tiles of this side, for models that predict pixels. "
        "--out FOLDER gets a picture of the classes of each image; --out FILE.npy or FILE.h5, the "
        "scores",
        group="Large images",
    )
    parser.text(
        "--overlap",
        "N",
        "Pixels that neighbouring tiles share at least; default: an eighth of --tile",
        type=at_least(0),
        group="Large images",
    )
    names = arguments.PREPROCESS
    parser.add_options(*names, **dict.fromkeys(names, "the model's preprocessing"))
    arguments.add_normalization(parser, "the normalization that FILE describes")
    parser.add_options(*arguments.STORAGE, *OPTIONS)
    return arguments.parsed_evaluation(parser, argv, ("metrics", *OPTIONS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    if parsed.tile is not None:
        from mpidl.tiles import files

        files.check_options(parsed)
    world = start_ranks(parsed)
    on_rank_0(world, lambda: _check_outputs(parsed))
    # Every rank needs the custom layers, because rank 0 sends the network to all ranks.
    layers = user_files.user_layers(parsed.layers)
    net = on_rank_0(world, lambda: load_network(parsed, layers))
    parsed.bad_images = BadImages.of_options(parsed)
    console = Console(world.rank, stream=sys.stderr)  # stdout is for the results
    if parsed.tile is not None:
        with console.stage("prediction in tiles"):
            pictures = files.write_predictions(parsed, world, net)
        print_facts(parsed, world, net, pictures)
        return 0
    with console.stage("reading the data"):
        images = data.open_test_data(
            parsed.data, world, classes=losses.label_names(net), labelled=False, option="--data"
        )
    reason = getattr(images, "unlabelled", None)  # `converted` drops this attribute
    images = converted(parsed, net, images)
    loss, classes = _loss_of(net, images), net.classes
    if classes is None and images.labels is not None and net.output_shape == (len(images.classes),):
        classes = images.classes  # for example, a file of another library has no class names
    check_shape(net, images, f"--data {parsed.data}")
    with console.stage(f"prediction for {len(images)} images"):
        task = Task(parsed, world, net, images, loss)
        if parsed.activations:
            task.write_activations()
        elif losses.has_label_scores(loss) and len(net.output_shape) == 1:
            task.predict_labels()
        elif images.targets_shape is not None or len(net.output_shape) != 1 or not classes:
            task.write_outputs()
        else:
            task.classify(classes, reason)
    print_facts(parsed, world, net, images)
    return 0


def start_ranks(parsed: argparse.Namespace) -> World:
    """Return the ranks, with the options for hardware and object stores applied. Collective."""
    world = World(timeout=parsed.timeout, threads=None)
    remote.configure({"data": parsed.data, **parsed.storage}, world)
    lines = world.use_device(parsed.device, parsed.gpus) + world.use_threads(parsed.threads)
    backends.configure(winograd=parsed.winograd, precision=parsed.precision)
    for line in [*start.arithmetic(world), *lines]:
        print(line, file=sys.stderr)
    return world


def load_network(parsed: argparse.Namespace, layers: Iterable[type[Layer]]) -> Network:
    """Load the network, with the normalization of the file or of the user."""
    net = start.load_network(parsed.model, layers, parsed.normalization)
    net.normalization.need_known()
    return net


def converted(parsed: argparse.Namespace, net: Network, images: Datastore) -> Datastore:
    """Apply the preprocessing of the user or of the network to images.

    Raises UserError if the normalization of the user needs 8-bit images and these are not.
    """
    preprocess = net.preprocess
    if parsed.preprocess:
        preprocess = data.Preprocess.of_options(parsed.preprocess)
    images = data.preprocessed(images, preprocess)
    if parsed.normalization and normalize.needs_statistics(parsed.normalization, images):
        raise UserError(
            f"--normalization {parsed.normalization}: expected 8-bit images, found {images.dtype}"
        )
    return images


def check_shape(net: Network, images: Datastore, source: str) -> None:
    """Raise UserError unless the network accepts the images, which `source` names."""
    if not net.takes(images.image_shape):
        raise UserError(
            f"{source}: expected images of shape {net.input_shape}, as in training, "
            f"found {images.image_shape} (--resize, --cover, --centre-crop and --colour convert "
            "them)"
        )


def print_facts(
    parsed: argparse.Namespace, world: World, net: Network, images: "Datastore | Pictures"
) -> None:
    """Print on rank 0 what was computed, and which images were skipped."""
    if world.rank:
        return
    print(f"Data: {images.describe()}", file=sys.stderr)
    if getattr(images, "image_shape", net.input_shape) != net.input_shape:  # not of Pictures
        window = "x".join(map(str, net.input_shape[1:]))
        advice = "; --tile N predicts whole images" if len(net.output_shape) == 3 else ""
        print(
            f"Cropped: the centre {window} of each image, as in training{advice}", file=sys.stderr
        )
    print(f"Normalization: {net.normalization.describe()}", file=sys.stderr)
    if net.trained_precision:
        trained_in = printable(net.trained_precision)
        print(f"Precision: {parsed.precision}, trained in {trained_in}", file=sys.stderr)
    elif parsed.precision != "fp32":
        print(f"Precision: {parsed.precision}", file=sys.stderr)
    if parsed.bad_images:
        for _, text in sorted(parsed.bad_images.reasons.items()):
            print(f"warning: skipped an image: {text}", file=sys.stderr)
        print(f"Skipped images: {len(parsed.bad_images)} of {len(images)}")


def _check_outputs(parsed):
    """Check the output files before the computation; raise UserError if one cannot be written."""
    for name in ("out", "confusion"):
        refuse_remote(getattr(parsed, name), flag(name), "a file")
    if parsed.overlap is not None and parsed.tile is None:
        raise UserError("--overlap: expected --tile with it, found none")
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
