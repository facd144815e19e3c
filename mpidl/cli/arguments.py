"""The commands' arguments. Pure parsing: no MPI, nothing printed but --help.

An option of training is defined once, in `training.options`; here it gets its flag and help text.
`train` returns only what was typed, so that `configuration.resolve` can tell where each value came
from.
"""

import argparse
import os
import sys
import textwrap

from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.training.files import run_folder
from mpidl.training.options import configuration, training_options
from mpidl.training.options.option_types import check_value

STOPPED = 75  # the exit code that asks for another run
EXIT_CODES = """\
exit codes: 0 done; 1 a fault; 2 unusable options or data; 75 asked to stop (USR1, TERM, INT),
checkpoint written: run again with --resume DIR
"""

# Of the options of training, those that the classifying of images has.
PREDICT = ("batch_size", "device", "gpus", "precision", "threads", "winograd", "timeout")
PREPROCESS = ("colour", "resize", "cover", "centre_crop")

LONGEST = 40  # of the choices that stand beside an option in --help


class Parser(argparse.ArgumentParser):
    """argparse with one-line UserErrors, no abbreviations, and help only where it is wanted."""

    def __init__(self, command, description, quiet, **keywords):
        super().__init__(
            prog=f"python -m {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **keywords,
        )
        self.quiet = quiet

    def error(self, message):
        raise UserError(message.removeprefix("argument "))

    def print_help(self, file=None):
        if not self.quiet:
            super().print_help(file)

    def parse(self, argv):
        """The Namespace; UserError for what is unknown, with the nearest known option."""
        argv = sys.argv[1:] if argv is None else list(argv)
        known = [text for action in self._actions for text in action.option_strings]
        for text in argv:
            name = text.partition("=")[0]
            if name == "--":
                break
            if name == "--ranks" and name not in known:
                raise UserError(
                    "unknown option --ranks: mpirun -n N starts the ranks, run/train as many as "
                    "MPIDL_RANKS says"
                )
            if name.startswith("--") and name not in known:
                raise UserError(f"unknown option {name}{training_options.nearest(name, known)}")
        found, extra = self.parse_known_args(argv)
        if extra:
            raise UserError(f"unexpected argument {extra[0]} (--help lists the options)")
        return found

    def add_options(self, *names, **defaults):
        """Flags for these options of training; {name: default} for one that is not theirs."""
        for name in names:
            self._add_option(name, training_options.OPTIONS[name], defaults.get(name))

    def _add_option(self, name, known, default):
        default = known.default if default is None else default
        self.add(name, known.metadata["help"], default)

    def add(self, name, text, default=None):
        """A flag for what `configuration` has a rule of."""
        rule = configuration.RULES[name]
        choices = "|".join([*rule.choices, *([rule.metavar] if rule.pattern else [])])
        if len(choices) > LONGEST:
            text, choices = f"{text}: {choices.replace('|', ', ')}", "NAME"
        self.add_argument(
            training_options.flag(name),
            type=lambda value: check_value(rule, value, training_options.flag(name), text=True),
            metavar=choices or {int: "N", float: "X"}[rule.kind],
            help=f"{text} ({'none' if default is None else default})",
            default=argparse.SUPPRESS,
        )


def train(argv=None, quiet=False):
    """{name: value} of what was typed: options, network, data, test_data, validation_data, out,
    resume, overwrite, config.

    `quiet`: --help ends the program without printing, as it must on all ranks but one. Raises
    UserError.
    """
    parser = Parser(
        "mpidl.train",
        "Train a network on all ranks that mpirun or srun started. Without options: the digits\n"
        "network on the embedded digit images, by its recipe.",
        quiet,
        usage="python -m mpidl.train [OPTION VALUE] ...",
        epilog="In parentheses: the default, where the network's recipe has no other.\n"
        f"{textwrap.fill(_recipe('digits'), 88)}\n"
        "A value comes from the command line, else --config, else the run that is resumed, else\n"
        f"the recipe, else the default.\n\n{EXIT_CODES}",
        argument_default=argparse.SUPPRESS,
    )
    _add_data(parser)
    parser.add_argument(
        "--test-data",
        metavar="DATA",
        help="test images (those that --data brings, else --test-fraction of it)",
    )
    parser.add(
        "test_fraction",
        "share of --data, of each class, that is kept for the test where it brings no test images; "
        "0: no test",
        training_options.RUN["test_fraction"],
    )
    parser.add_argument(
        "--validation-data",
        metavar="DATA|test",
        help="images to validate on while training; test: those of the test (none)",
    )
    add_preprocess(parser)
    parser.add_options(*training_options.NAMES)
    parser.add_argument(
        "--preview",
        type=_picture,
        metavar="FILE.png",
        help="draw images as they are and as they will be augmented, and end",
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="folder for the results; not one that holds a run, unless it goes on or is "
        "overwritten (the first of runs/NETWORK, runs/NETWORK-2, ... that does not exist)",
    )
    parser.add_argument("--resume", metavar="DIR", help="go on from the checkpoint in DIR")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the run that the folder of --out holds"
    )
    parser.add_argument("--config", metavar="FILE.toml", help="file of options")
    return vars(parser.parse(argv))


def predict(argv=None, quiet=False):
    """Namespace of model, data, out, top_k, confusion, activations, of options of training,
    `PREDICT`, and of preprocess: {name: value} of what was typed of the `PREPROCESS`."""
    parser = Parser("mpidl.predict", "Classify images with a trained network.", quiet)
    parser.add_argument("--model", metavar="FILE.h5", required=True, help="model.h5 of a run")
    parser.add_argument("--data", metavar="DATA", required=True, help=DATA_HELP)
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="write FILE.csv, a row an image: name, class, a score a class, or of a model of "
        "numbers these and the targets; of --activations and of a model of other outputs than "
        "classes FILE.npy or FILE.h5, an array",
    )
    parser.add_argument(
        "--top-k",
        type=count("--top-k"),
        metavar="K",
        help="print the share of the images whose class is among the K with the largest scores",
    )
    parser.add_argument(
        "--confusion",
        metavar="FILE",
        help="write which class was taken for which: FILE.csv, or FILE.png, a picture",
    )
    parser.add_argument(
        "--activations",
        metavar="LAYER",
        help="write what the layer of this name computes for each image to --out",
    )
    add_preprocess(parser, instead="; in place of what the model does to images")
    parser.add_options(*PREDICT)
    found = {name: training_options.OPTIONS[name].default for name in PREDICT} | vars(
        parser.parse(argv)
    )
    typed = {name: found.pop(name) for name in PREPROCESS if name in found}
    return argparse.Namespace(**found, preprocess=typed)


def verify(argv=None, quiet=False):
    """Namespace of ranks (a list) and given, {name: value} of a short training run.

    given holds what was typed, for `configuration.resolve`, and a max_iterations in any case.
    """
    parser = Parser(
        "mpidl.verify",
        "Train briefly on each number of ranks and compare the weights: they must be the same,\n"
        "byte for byte.",
        quiet,
        epilog="exit codes: 0 all the same; 1 they differ, or a fault; 2 unusable options",
    )
    parser.add_argument(
        "--ranks",
        type=rank_counts,
        default=[1, 2, 3, 4],
        metavar="N,N,...",
        help="numbers of ranks to compare (1,2,3,4)",
    )
    _add_data(parser)
    add_preprocess(parser)
    parser.add_options(
        *("max_iterations", "batch_size", "loss", "solver", "learning_rate", "momentum", "l2"),
        *("shuffle", "learn_rate_schedule", "gradient_threshold", "gradient_threshold_method"),
        *("device", "gpus", "graphs", "precision", "threads", "winograd", "batchnorm", "timeout"),
        "seed",
        max_iterations=5,
    )
    given = vars(parser.parse(argv))
    ranks = given.pop("ranks")
    return argparse.Namespace(ranks=ranks, given={"max_iterations": 5, **given})


def info(argv=None, quiet=False):
    """Namespace of network (None: the machine is asked for), input_shape, classes, batch_size."""
    parser = Parser(
        "mpidl.info",
        "Show what mpidl found on this machine and its ranks; with --network, a network's layers.",
        quiet,
    )
    parser.add_argument(
        "--network",
        metavar="NAME",
        help=f"{', '.join(zoo.NETWORKS)} or FILE.py:FUNCTION: its layers, with their learnables, "
        "memory and operations",
    )
    parser.add_argument(
        "--input-shape",
        type=image_shape,
        metavar="C,H,W",
        help="of an image, for --network (that of the network's own images)",
    )
    parser.add_argument(
        "--classes", type=count("--classes"), metavar="N", help="for --network (its own)"
    )
    parser.add_argument(
        "--batch-size",
        type=count("--batch-size"),
        metavar="N",
        help="images in a mini-batch, for --network (that of its recipe, else 128)",
    )
    found = parser.parse(argv)
    given = [n for n in ("input_shape", "classes", "batch_size") if getattr(found, n) is not None]
    if given and found.network is None:
        raise UserError(
            f"{training_options.flag(given[0])}: is for --network NAME, which is missing"
        )
    return found


DATA_HELP = (
    "digits; a folder with a sub-folder of images for each class, or one with train/ and test/; a "
    "folder of IDX files or of CIFAR's binary files; an HDF5 file, a .mat file, or one made by "
    "python -m mpidl.pack"
)


def as_flags(given):
    """The command line that means `given`: {"batch_size": 8} is ["--batch-size", "8"]."""
    texts = {name: "none" if value is None else str(value) for name, value in given.items()}
    return [text for name in texts for text in (training_options.flag(name), texts[name])]


def _add_data(parser):
    parser.add_argument(
        "--network",
        default=argparse.SUPPRESS,
        metavar="NAME",
        help=f"{', '.join(zoo.NETWORKS)}, or FILE.py:FUNCTION, called with input_shape and "
        "classes: its Network keeps its learnables, a list of layers gets them by --seed (digits)",
    )
    parser.add_argument(
        "--data",
        default=argparse.SUPPRESS,
        metavar="DATA",
        help=f"{DATA_HELP} (digits)",
    )


def add_preprocess(parser, instead=""):
    """What is done to each image of every set, in this order."""
    texts = (
        "make all images so",
        "resize images to this, bilinearly",
        "resize images, keeping their proportions, to the least size that holds this",
        "cut this from their centre",
    )
    for name, text in zip(PREPROCESS, texts, strict=True):
        parser.add(name, text + instead)


def count(spelled):
    def convert(text):
        return training_options.check("epochs", text, spelled, text=True)

    return convert


def _picture(text):
    if os.path.splitext(text)[1].lower() != ".png":
        raise UserError(f"--preview {text}: the picture is written as .png")
    return text


def image_shape(text):
    sides = [
        training_options.check("epochs", part, "--input-shape", text=True)
        for part in text.split(",")
    ]
    if len(sides) != 3:
        raise UserError(f"--input-shape must be C,H,W, such as 3,227,227, found {text}")
    return tuple(sides)


def rank_counts(text):
    try:
        return [
            training_options.check("epochs", part, "--ranks", text=True) for part in text.split(",")
        ]
    except UserError:
        raise UserError(f"--ranks must be numbers of ranks such as 1,2,3, found {text}") from None


def _recipe(name):
    words = (f"{key.replace('_', ' ')} {value}" for key, value in zoo.RECIPES[name].items())
    return f"The {name} recipe: {', '.join(words)}."


def check_output_folder(given):
    """UserError where --out holds a run that is neither resumed nor to be overwritten."""
    if "out" in given and not given.get("overwrite"):
        run_folder.refuse_a_run(given["out"], given.get("resume"))


def output_folder(given, network):
    """Make the folder for a run's results and return its path; `given` as from `train`.

    --out as it is, with an earlier run's results removed (see `check_output_folder`); else, for a
    resumed run, its own folder; else the first of runs/NETWORK, runs/NETWORK-2, ... that does not
    exist. Raises UserError.
    """
    out, resume = given.get("out"), given.get("resume")
    try:
        if out is None:
            return _next_folder(network) if resume is None else resume
        run_folder.make_folder(out, resume)
    except OSError as error:
        place = f"--out {out}" if out else error.filename
        raise UserError(f"{place}: cannot be written: {error.strerror or error}") from error
    if not os.access(out, os.W_OK):
        raise UserError(f"--out {out}: cannot be written: no permission")
    return out


def _next_folder(network):
    """Make and return the first folder of its name that does not exist; safe with two jobs."""
    name = os.path.basename(network.rpartition(":")[2]) or "run"
    os.makedirs("runs", exist_ok=True)
    number = 1
    while True:
        path = os.path.join("runs", name if number == 1 else f"{name}-{number}")
        try:
            os.mkdir(path)
            return path
        except FileExistsError:
            number += 1
