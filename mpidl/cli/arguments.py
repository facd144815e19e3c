"""Parse the arguments of the commands. Parsing needs no MPI and prints nothing except --help.

`training.options` defines the training options; this module adds a flag for each option. `train`
returns only the options that the user typed, so that `configuration.resolve` knows the source of
each value.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mpidl.cli.parser import PORT, RUN, Parser, typed_command
from mpidl.data.transforms import normalize
from mpidl.data.transforms.options import PreprocessOptions
from mpidl.data.urls import Settings
from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.options.declaration import declared, flag
from mpidl.training.options import training_options
from mpidl.training.options.run_inputs import INPUTS, PACK

STOPPED = 75  # exit code of a stopped run; the batch system should run it again
EXIT_CODES = """\
exit codes: 0 success; 1 error; 2 invalid options or data; 75 stopped after writing a checkpoint, by
a signal (USR1, TERM, INT), the file `stop` or the page of mpidl.monitor: run again with --resume
"""

# The ten most common options of a command, in the order in which --help shows them.
TRAIN_COMMON = """
data network weights epochs batch_size solver learning_rate device out resume
""".split()
STORAGE = tuple(declared(Settings))
PREPROCESS = tuple(declared(PreprocessOptions))


def train(argv: Sequence[str] | None = None, quiet: bool = False) -> dict[str, Any]:
    """Parse the arguments of mpidl.train, and return those that the user typed.

    `argv` is by default sys.argv[1:]. If `quiet`, as on all ranks except rank 0, --help exits
    without printing. An invalid argument raises UserError. The keys are the training options, the
    names in `INPUTS`, and preview, out, resume, overwrite, monitor and config.
    """
    parser = Parser(
        "mpidl.train",
        "Train a network on all ranks that mpirun or srun started. Without options, train the\n"
        "digits network on the embedded digit images with its recipe.",
        quiet,
        TRAIN_COMMON,
        RUN,
        epilog="A default applies unless the network's recipe sets the option.\n"
        f"{_recipe('digits')}\n\n"
        "The first of these sources that has a value wins: the command line, --config, the\n"
        f"resumed run, the recipe, the default.\n\n{EXIT_CODES}",
        argument_default=argparse.SUPPRESS,
    )
    parser.add_options(*INPUTS, *training_options.NAMES)
    parser.text(
        "--preview",
        "FILE.png",
        "Draw images before and after augmentation, and exit without training",
        type=_png_path,
    )
    parser.text(
        "--out",
        "DIR",
        "Folder for the results; it must not contain a run unless --resume or --overwrite is "
        "given; default: the first of runs/NETWORK, runs/NETWORK-2, ... that does not exist",
    )
    parser.text(
        "--resume",
        "DIR",
        "Resume training from the checkpoint in DIR; or, with another --out, from a kept one, "
        "DIR/checkpoints/N.h5",
    )
    parser.switch("--overwrite", "Replace the run in the folder of --out")
    parser.text("--config", "FILE.toml", "Read options from this file")
    parser.add_argument(
        "--monitor",
        nargs="?",
        const=0,
        type=PORT,
        group="Progress",
        metavar="PORT",
        help="Serve a page with the curves of the run and a button that stops it, as mpidl.monitor "
        "does, and print its URL; default without PORT: a free port",
    )
    return vars(parser.parse(argv))


def parsed_evaluation(
    parser: Parser, argv: Sequence[str] | None, names: Sequence[str]
) -> argparse.Namespace:
    """Parse a command line that evaluates a network.

    The training options `names` have values even if they were not typed. The attributes preprocess
    and storage are dicts {name: value} of the typed options in `PREPROCESS` and `STORAGE`.
    """
    defaults = {name: training_options.OPTIONS[name].default for name in names}
    values = defaults | vars(parser.parse(argv))
    groups = {
        group: {name: values.pop(name) for name in options if name in values}
        for group, options in (("preprocess", PREPROCESS), ("storage", STORAGE))
    }
    return argparse.Namespace(**values, **groups)


MODEL_HELP = (
    "Trained network: model.h5 of a run, an ONNX file (*.onnx), or a safetensors file that mpidl "
    "wrote (*.safetensors)"
)
DATA_HELP = INPUTS["data"].metadata["help"].replace(PACK, typed_command("mpidl.pack"))


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Convert options to flags: {"batch_size": 8} gives ["--batch-size", "8"]."""
    texts = {name: "none" if value is None else str(value) for name, value in options.items()}
    return [text for name in texts for text in (flag(name), texts[name])]


def add_normalization(parser: Parser, default: str) -> None:
    """Add the flag for the normalization that the network of a file expects."""
    parser.text(
        "--normalization",
        "NAME",
        "How to normalize images for the network of a file that does not describe it: "
        f"{normalize.CHOICES}; default: {default}",
        normalize.FIXED,
        type=_fixed_normalization,
        group="Images",
    )


def _fixed_normalization(text):
    if text not in normalize.FIXED and not normalize.is_numbers(text):
        raise UserError(f"--normalization must be {normalize.CHOICES}, found {text}")
    return text


def _png_path(text):
    if os.path.splitext(text)[1].lower() != ".png":
        raise UserError(f"--preview {text}: the picture is written as .png")
    return text


def _recipe(name):
    words = (f"{key.replace('_', ' ')} {value}" for key, value in zoo.RECIPES[name].items())
    return f"The recipe of {name}: {', '.join(words)}."
