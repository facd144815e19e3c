"""Parse the arguments of the sub-commands. Parsing needs no MPI and only --help prints."""

import argparse
import functools
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.gpu import floors
from mpidl.backends import PRECISIONS
from mpidl.cli.parser import Parser, rank_counts
from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.options.declaration import at_least, check_value
from mpidl.training.options import training_options

# {sub-command, usually the name of its module: what it measures}
BENCHMARKS = {
    "step": "each part of the training step; with --ranks, how the step scales",
    "kernels": "each layer and pass against the peak of the core",
    "roofline": "each pass of a training step against its floor, and the step as a whole",
    "accuracy": "the errors of each layer's activations and gradients, compared with PyTorch's",
    "fold": "the cost of summing in a fixed order, against a plain Allreduce",
    "compare": "the training step against PyTorch's, in turns on the same cores",
    "against": "the training step against the step of another checkout of mpidl",
    "input": "reading, decoding and augmenting images, alone and during a training step",
    "s3": "epochs from an object store against epochs from local files",
    "optimizers": "the optimizers' steps against PyTorch's, in turns on the same core",
    "interchange": "the scores of exported networks against onnxruntime's and PyTorch's",
    "transfer": "the epochs and images needed for an accuracy, with and without pretrained weights",
    "gpu": "the training step against PyTorch's on a GPU, and the time of each kernel",
    "pretrained": "the scores that published weights give, against PyTorch's",
    "sweep": "many models trained at once on groups of ranks, against one after another",
    "timeline": "the cost of recording a timeline, and how much of a step its spans cover",
    "monitor": "epochs with the live page open, against epochs without it",
    "logging": "the cost of metrics, event files for TensorBoard and the monitor",
    "saves": "the cost of writing checkpoints and plots during a training run",
    "certify": "the cost of a certificate, against reading the images and training",
    "large_batch": "the accuracy at several batch sizes, for the same images",
    "time_to_accuracy": "the time to reach an accuracy, against PyTorch with the same recipe",
    "memory": "whether the memory of a rank stays the same in a long training",
}
ROUNDS = ("rounds", 9, "number of rounds; results are medians over rounds")
VARIANTS = ["eager", "channels_last", "compile", "compile+channels_last"]
KINDS = ["jpeg", "png", "packed", "arrays"]
FASHION = "/usr/share/datasets/fashion-mnist"  # Debian: dataset-fashion-mnist
# declared as training options
SHARED = ("batch_size", "winograd", "precision", "seed", "batchnorm", "timeout")


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the command line of `python -m benchmarks`.

    Parameters
    ----------
    argv : sequence of str or None
        Command-line arguments. None means the arguments of this process.
    quiet : bool
        Whether --help prints nothing. True on all ranks except one.

    Returns
    -------
    argparse.Namespace
        `command`, the name of a sub-command in BENCHMARKS, and the options of that sub-command.

    Raises
    ------
    UserError
        If an option or sub-command is unknown, or if a value is invalid.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    width = max(map(len, BENCHMARKS)) + 2
    texts = "\n".join(f"  {name:{width}}{text}" for name, text in BENCHMARKS.items())
    overview = Parser(
        "benchmarks",
        f"Run a benchmark. It measures:\n\n{texts}\n\nOptions of a sub-command: "
        "python -m benchmarks step --help",
        quiet,
    )
    overview.add_argument("command", choices=list(BENCHMARKS), metavar="SUB-COMMAND")
    command = overview.parse(argv[:1]).command
    parser = Parser(f"benchmarks {command}", f"Measure {BENCHMARKS[command]}.", quiet)
    add = {
        "input": _add_input,
        "s3": _add_s3,
        "optimizers": _add_optimizers,
        "interchange": _add_interchange,
        "gpu": _add_gpu,
        "against": _add_against,
        "pretrained": lambda parser, command: None,
        "transfer": _add_transfer,
        "sweep": _add_sweep,
        "monitor": _add_monitor,
        "logging": _add_logging,
        "saves": _add_saves,
        "certify": _add_certify,
        "memory": _add_memory,
        "large_batch": _add_large_batch,
        "time_to_accuracy": _add_time_to_accuracy,
    }
    add.get(command, _add_subject)(parser, command)
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = {name: training_options.OPTIONS[name].default for name in SHARED}
    return argparse.Namespace(**options | vars(parser.parse(argv[1:])) | {"command": command})


def _add_subject(parser, command):
    """Add the options for the network and the rounds, then the options of one sub-command."""
    if command == "kernels":
        text = (
            "layers to measure, as network names; shapes: 3x3 convolutions of 20 to 128 channels; "
            "dense: a fully connected layer of 9216 inputs and 4096 outputs at batch 32, on one "
            "thread, compared with BLAS (digits,cifar,shapes,dense)"
        )
        networks = ["digits", "cifar", "shapes", "dense"]
        parser.text("--networks", "NAME,NAME,...", text, default=networks, type=_words)
    elif command == "roofline":
        _add_settings(parser, "digits:128,cifar:64,resnet:64,alexnet:32")
        parser.text("--page", "FILE", "also write the tables and charts to FILE, as an HTML page")
    else:
        text = "digits, cifar, resnet, alexnet, vgg16, resnet18, resnet50 or another network of "
        text += "the zoo, or FILE.py:FUNCTION, called as FUNCTION(input_shape, 10) (digits)"
        parser.text("--network", "NAME", text, default="digits")
    text = "shape of an image (the network's default, or 1x28x28)"
    parser.text("--image", "CxHxW", text, type=_image)
    if command != "roofline":
        parser.add_options("batch_size")
    parser.add_options("winograd", "seed", "timeout")
    _add_counts(parser, ("threads", 1, "threads of each rank or process"))
    if command != "accuracy":
        _add_counts(parser, ROUNDS)
    if command in ("step", "fold"):
        text = "numbers of ranks to start; groups of different size run in turns"
        if command == "fold":
            text += " (1,2, or the ranks that mpirun started)"
            parser.text("--ranks", "N,N,...", text, type=rank_counts)
        else:
            text += "; 2x1 is 2 ranks with 1 thread each"
            parser.text("--ranks", "N,NxT,...", text, type=_layouts)
            text = "with --ranks, also time the steps within dl.train"
            parser.add_argument("--train", action="store_true", help=text)
        _add_counts(parser, ("iterations", 10, "steps per turn"))
    if command == "timeline":
        _add_counts(parser, ("iterations", 20, "steps per turn"))
    if command == "fold":
        parser.add_options("batchnorm")
    if command == "accuracy":
        _add_counts(
            parser, ("seeds", 3, "seeds of weights and mini-batches; errors are medians of all")
        )
    if command in ("accuracy", "compare", "step"):
        _add_precision(parser)
    if command == "compare":
        _add_compare(parser)


def _add_precision(parser):
    text = "precision of all sides; bf16 runs PyTorch under autocast to bfloat16 (fp32)"
    choices = PRECISIONS["cpu"]
    parser.text("--precision", "|".join(choices), text, default="fp32", choices=choices)


def _add_s3(parser, command):
    text = "prefix of a store to which the images are written, such as s3://bucket/prefix; "
    text += "credentials and AWS_ENDPOINT_URL come from the environment"
    parser.text("--url", "URL", text)
    parser.text(
        "--network", "NAME", "network of the zoo, or FILE.py:FUNCTION (resnet)", default="resnet"
    )
    _add_counts(
        parser,
        ("side", 32, "height and width of an image in pixels"),
        ("images", 2000, "number of images"),
        ("batch-size", 128, "images per mini-batch"),
        ("threads", 2, "threads of the training step"),
        ("requests", 16, "concurrent requests to the store"),
        ("cache-mb", 1000, "size of the node's cache of images"),
        ("rounds", 5, "number of rounds; results are medians over rounds"),
    )
    parser.text("--workers", "N", "threads that decode (1)", default=[1], type=_counts("--workers"))
    text = "kind of image files: jpeg or png (jpeg)"
    parser.text("--kinds", "NAME", text, default=["jpeg"], type=_names("--kinds", KINDS[:2]))


def _add_input(parser, command):
    text = "network to train during the measurement: from the zoo, FILE.py:FUNCTION, or light, "
    text += "a convolution about as fast as reading JPEG files (alexnet)"
    parser.text("--network", "NAME", text, default="alexnet")
    _add_counts(
        parser,
        ("side", 227, "height and width of an image in pixels"),
        ("images", 64, "images of each kind"),
        ("batch-size", 32, "images per mini-batch"),
        ("threads", 1, "threads of the training step"),
        ROUNDS,
        ("gigabytes", 4, "with --memory, size of the packed set"),
        ("cache-mb", 256, "with --memory, the training's --cache-mb"),
    )
    text = "threads that read and decode (1)"
    parser.text("--workers", "N,N,...", text, default=[1], type=_counts("--workers"))
    text = "instead measure the peak memory of training on a large packed set, minus the peak of "
    text += "training on one mini-batch of the set, with the network light"
    parser.add_argument("--memory", action="store_true", help=text)
    text = "instead compare packs of JPEG files with the folder of these files: images/s and size"
    parser.add_argument("--packs", action="store_true", help=text)
    text = "with --memory, numbers of ranks to train on (1,4)"
    parser.text("--ranks", "N,N,...", text, default=[1, 4], type=rank_counts)
    text = f"kinds of files to read ({','.join(KINDS)})"
    parser.text("--kinds", "NAME,...", text, default=KINDS, type=_names("--kinds", KINDS))


def _add_against(parser, command):
    parser.add_argument("checkout", metavar="CHECKOUT", help="folder of the other checkout")
    networks = sorted(zoo.NETWORKS.keys() - set(zoo.PIXEL_NETWORKS))
    text = "network of the zoo with one label per image (digits)"
    parser.text("--network", "NAME", text, default="digits", choices=networks)
    parser.add_options("batch_size", "timeout")
    _add_counts(parser, ("rounds", 15, "number of rounds, each with a turn of both checkouts"))


def _add_sweep(parser, command):
    text = "digits, another network of the zoo that fits the digits, or FILE.py:FUNCTION (digits)"
    parser.text("--network", "NAME", text, default="digits")
    _add_counts(
        parser,
        ("ranks", 2, "number of ranks"),
        ("models", 8, "number of models"),
        ("iterations", 71, "mini-batches per model"),
        ("rounds", 3, "number of rounds; results are medians over rounds"),
    )


def _add_monitor(parser, command):
    parser.text("--network", "NAME", "network of the zoo that fits the digits (digits)")
    parser.set_defaults(network="digits")
    text = "further options of mpidl.train for the side with the page, as one argument (none)"
    parser.text("--also", "OPTIONS", text, default="")
    _add_counts(
        parser,
        ("ranks", 2, "number of ranks"),
        ("epochs", 10, "epochs after the first epoch"),
        ROUNDS,
    )


def _add_logging(parser, command):
    parser.add_options("seed")
    _add_counts(parser, ROUNDS)


def _add_saves(parser, command):
    text = "network of the zoo (alexnet)"
    parser.text("--network", "NAME", text, default="alexnet", choices=list(zoo.NETWORKS))
    parser.add_options("seed", "timeout")
    _add_counts(
        parser,
        ("batch-size", 32, "images per mini-batch"),
        ("threads", 1, "threads of each rank"),
        ("iterations", 20, "steps per turn"),
        ROUNDS,
    )


def _add_certify(parser, command):
    parts = ["manifest", "states", "audit"]
    text = f"parts of the benchmark ({','.join(parts)})"
    parser.text("--parts", "NAME,...", text, default=parts, type=_names("--parts", parts))
    _add_counts(
        parser,
        ("images", 1_300_000, "small packed images of the manifest"),
        ("side", 32, "height and width of the small images in pixels"),
        ("files", 500, "packed JPEG files of the manifest"),
        ("file-side", 224, "height and width of the JPEG files in pixels"),
        ("workers", 1, "threads that read and decode"),
        ("iterations", 50, "mini-batches per epoch of states, except for digits"),
        ("ranks", 4, "ranks of the job that is audited"),
        ROUNDS,
    )
    text, networks = "networks that record states and are audited", ["digits", "resnet"]
    parser.text("--networks", "NAME,...", text, default=networks, type=_words)


def _add_memory(parser, command):
    parser.add_options("timeout")
    _add_counts(
        parser,
        ("steps", 100_000, "steps to train"),
        ("warm-up", 1000, "step at which the first sample is taken"),
    )
    text = "largest allowed growth since the first sample, in percent (1)"
    parser.text("--percent", "X", text, default=1.0, type=float)


def _add_large_batch(parser, command):
    text = "a labelled data set of 8192 images or more (digits)"
    parser.text("--data", "DATA", text, default="digits")
    text = "sizes to train with (128,512,2048,8192)"
    sizes = _counts("--batch-sizes")
    parser.text("--batch-sizes", "N,N,...", text, default=[128, 512, 2048, 8192], type=sizes)
    _add_counts(
        parser,
        ("epochs", 20, "epochs of each training"),
        ("seeds", 1, "seeds; results are medians over seeds"),
    )


def _add_time_to_accuracy(parser, command):
    text = f"a labelled data set of uint8 images ({FASHION})"
    parser.text("--data", "DATA", text, default=FASHION)
    text = "network of the zoo: fashion or cifar-fast (fashion)"
    networks = ["fashion", "cifar-fast"]
    one_of = functools.partial(_one_of, "--network", candidates=networks)
    parser.text("--network", "NAME", text, default="fashion", type=one_of)
    text = "accuracy to reach (0.92)"
    parser.text("--accuracy", "X", text, default=0.92, type=float)
    text = f"ways to run PyTorch; the fastest one is used for training ({','.join(VARIANTS)})"
    parser.text(
        "--variants", "NAME,...", text, default=VARIANTS, type=_names("--variants", VARIANTS)
    )
    parser.add_options("seed")
    _add_precision(parser)
    _add_counts(
        parser,
        ("epochs", 7, "epochs of the schedule"),
        ("threads", 2, "threads of each side"),
        ("rounds", 2, "alternating trainings of each side; the ratio compares medians"),
    )


def _add_optimizers(parser, command):
    _add_counts(parser, ("floats", 10_000_000, "learnables"), ("threads", 1, "threads"), ROUNDS)


def _add_interchange(parser, command):
    networks = list(zoo.NETWORKS)
    text = f"networks to write and read ({','.join(networks)})"
    parser.text(
        "--networks", "NAME,...", text, default=networks, type=_names("--networks", networks)
    )
    parser.add_options("seed")


def _add_transfer(parser, command):
    text = "a labelled data set; half of its classes are for the pretraining (digits)"
    parser.text("--data", "DATA", text, default="digits")
    text = "numbers of images per class for learning the other classes (10,50)"
    parser.text("--per-class", "N,N,...", text, default=[10, 50], type=_counts("--per-class"))
    text = "accuracies to reach, in percent (80,90)"
    percents = _counts("--accuracies")
    parser.text(
        "--accuracies",
        "N,N,...",
        text,
        default=[0.8, 0.9],
        type=lambda text: [percent / 100 for percent in percents(text)],
    )
    _add_counts(
        parser,
        ("epochs", 40, "epochs of each training with the other classes"),
        ("batch-size", 16, "images per mini-batch"),
        ("seeds", 3, "number of seeds; results are medians over seeds"),
    )
    for flag, default, text in (
        ("--pretraining-epochs", 3, "epochs of the pretraining"),
        ("--test-images", 1000, "largest number of test images"),
    ):
        parser.number(flag, f"{text} ({default})", default=default)


def _add_compare(parser):
    text = "ranks of mpidl, and processes of DistributedDataParallel over gloo"
    _add_counts(parser, ("ranks", 1, text))
    variants = _names("--variants", VARIANTS)
    text = f"ways to run PyTorch; the fastest one is compared ({','.join(VARIANTS)})"
    parser.text("--variants", "NAME,...", text, default=VARIANTS, type=variants)
    text = "versions of PyTorch, such as 2.13.0, or paths of Python interpreters with PyTorch; "
    text += "missing versions are installed in build/ (the installed version)"
    parser.text("--torch", "VERSION|PYTHON,...", text, default=[], type=_torch_versions)
    text = "limit both sides to these CPU instructions"
    parser.text(
        "--held-to",
        "avx2",
        text,
        type=lambda name: _one_of("--held-to", name, ["avx2"]),
    )
    text = "compare predictions instead of training steps, also with onnxruntime"
    parser.add_argument("--predict", action="store_true", help=text)
    text = "measure the peak memory of a step, not its time"
    parser.add_argument("--memory", action="store_true", help=text)
    text = "other sides to time in addition to PyTorch, in float32; mpidl-fp32 is mpidl itself, "
    text += "beside --precision bf16"
    libraries = _names("--with", ["jax", "mygrad", "mpidl-fp32"])
    parser.text(
        "--with", "jax,mygrad,mpidl-fp32", text, default=[], type=libraries, dest="libraries"
    )
    parser.text(
        "--with-python", "PATH", "Python in which the libraries of --with are installed (this one)"
    )


def _add_gpu(parser, command):
    _add_settings(parser, "digits:128,digits:1024,cifar:256,cifar:1024")
    text = "total time limit; compiled variants run last (900)"
    parser.number("--limit", text, metavar="SECONDS", default=900)
    text = "count the launches, bytes and products of a training step, without a GPU"
    setting = functools.partial(_setting, "--count")
    parser.text("--count", "NETWORK:BATCH", text, nargs="+", type=setting)
    text = "count the instructions of conv_gemm's main loop, without a GPU"
    parser.switch("--sass", text)
    text = "with --count: the GPU that the times are forecast for, among "
    names = list(floors.GPU_RATES)
    text += f"{', '.join(names)} (H100)"
    parser.text("--gpu", "NAME", text, default="H100", type=lambda n: _one_of("--gpu", n, names))
    parser.text("--page", "FILE", "with --count: also write the counts to FILE, as an HTML page")
    text = "with --count: simulate N ranks with one GPU each, count the work of rank 0, and the "
    text += "bytes that each rank sends (1)"
    parser.number("--ranks", text, default=1)
    text = "shape of an image for --count (the network's default)"
    parser.text("--image", "CxHxW", text, type=_image)
    parser.add_options("precision")
    _add_counts(parser, ROUNDS)


def _add_settings(parser, default):
    text = f"networks and batch sizes to time ({default})"
    parser.text("--settings", "NETWORK:BATCH,...", text, default=_settings(default), type=_settings)


def _add_counts(parser, *counts):
    """Add options with integer values; each of `counts` is (name, default, help)."""
    for name, default, text in counts:
        flag = f"--{name}"
        parser.number(flag, f"{text} ({default})", default=default)


class Layout(NamedTuple):
    """Numbers of ranks, and of threads per rank; None stands for --threads."""

    ranks: int
    threads: int | None

    def __str__(self) -> str:
        return str(self.ranks) if self.threads is None else f"{self.ranks}x{self.threads}"


def _torch_versions(text):
    """Return the items of the value of --torch."""
    words = text.split(",")
    for word in words:
        if os.sep not in word and not re.fullmatch(r"\d+(\.\d+)+(\+\w+)?", word):
            raise UserError(
                "--torch must be versions such as 2.13.0, or paths of Python interpreters, found "
                f"{word}"
            )
    return words


def _layouts(text):
    """Convert N,NxT,... to a list of Layout."""
    layouts = []
    for part in text.split(","):
        ranks, cross, threads = part.partition("x")
        threads = check_value(at_least(1), threads, "--ranks", text=True) if cross else None
        layouts.append(Layout(rank_counts(ranks)[0], threads))
    return layouts


def _settings(text: str) -> list[tuple[str, int]]:
    """Convert NETWORK:BATCH,... to pairs."""
    return [_setting("--settings", part) for part in text.split(",")]


def _setting(flag: str, text: str) -> tuple[str, int]:
    """Convert NETWORK:BATCH to a pair."""
    network, _, batch = text.rpartition(":")
    if not network or not batch.isdigit() or not int(batch):
        raise UserError(f"{flag} must be NETWORK:BATCH, such as digits:128, found {text}")
    return network, int(batch)


def _words(text: str) -> list[str]:
    return text.split(",")


def _counts(flag: str) -> Callable[[str], list[int]]:
    """Return a parser for an option whose value is a list of integers of at least 1."""
    return lambda text: [
        check_value(at_least(1), part, flag, text=True) for part in text.split(",")
    ]


def _names(flag: str, candidates: list[str]) -> Callable[[str], list[str]]:
    """Return a parser for an option whose value is a list of candidates."""
    return lambda text: [_one_of(flag, name, candidates) for name in text.split(",")]


def _one_of(flag, name, candidates):
    if name not in candidates:
        raise UserError(
            f"{flag} must be among {', '.join(candidates)}, found "
            f"{name}{training_options.nearest(name, candidates)}"
        )
    return name


def _image(text):
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"--image must be CxHxW, such as 3x32x32, found {text}")
    return [int(part) for part in parts]
