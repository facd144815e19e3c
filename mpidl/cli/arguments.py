"""Parse the arguments of the commands. Parsing needs no MPI and prints nothing except --help.

`training.options` defines the training options; this module adds a flag for each option. `train`
returns only the options that the user typed, so that `configuration.resolve` knows the source of
each value.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mpidl.cli.parser import PORT, RUN, Parser, image_shape, rank_counts, typed_command
from mpidl.data.storage.settings import Settings
from mpidl.data.transforms import normalize
from mpidl.data.transforms.options import PreprocessOptions
from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.options.declaration import declared, flag
from mpidl.training.options import training_options
from mpidl.training.options.run_inputs import EMBEDDED, INPUTS, PACK, TransferInputs

STOPPED = 75  # exit code of a stopped run; the batch system should run it again
EXIT_CODES = """\
exit codes: 0 success; 1 error; 2 invalid options or data; 75 stopped after writing a checkpoint, by
a signal (USR1, TERM, INT), the file `stop` or the page of mpidl.monitor: run again with --resume
"""

# The ten most common options of a command, in the order in which --help shows them.
TRAIN_COMMON = """
data network weights epochs batch_size solver learning_rate device out resume
""".split()
PREDICT_COMMON = """
model data out top_k confusion activations resize colour batch_size device
""".split()
VERIFY_COMMON = """
ranks network data max_iterations batch_size solver learning_rate device threads seed
""".split()
# Training options that mpidl.predict also accepts.
PREDICT = ("batch_size", "device", "gpus", "precision", "threads", "winograd", "timeout")
PREDICT += ("on_bad_image", "test_flips")
# Training options that mpidl.verify also accepts.
VERIFY = """
max_iterations batch_size loss solver learning_rate momentum l2 shuffle learn_rate_schedule
gradient_threshold gradient_threshold_method device gpus graphs precision threads winograd batchnorm
timeout seed
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
    parser.text("--resume", "DIR", "Resume training from the checkpoint in DIR")
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


def predict(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.predict, as `train` does.

    The attributes preprocess and storage are dicts {name: value} of the options in `PREPROCESS` and
    `STORAGE` that the user typed. All other arguments are attributes.
    """
    parser = Parser(
        "mpidl.predict",
        "Classify images with a trained network.",
        quiet,
        PREDICT_COMMON,
        RUN,
        epilog=(
            "--colour, --resize, --cover and --centre-crop replace all of the model's own\n"
            "preprocessing, even if only one of these options is given."
        ),
    )
    parser.text("--model", "FILE", MODEL_HELP, required=True)
    parser.text("--layers", "FILE.py", "Python file with the model's custom layer classes")
    text = f"{DATA_HELP}. If the data have a training and a test part, the test part is used"
    parser.text("--data", "DATA", text, EMBEDDED, required=True)
    parser.text(
        "--out",
        "FILE",
        "Write the results. FILE.csv has one row per image: its name, its class and a score per "
        "class; for a regression model, its name, its outputs and its targets. FILE.npy or "
        "FILE.h5 stores an array, for --activations and models without classes",
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
    parser.add_options(*PREPROCESS, **dict.fromkeys(PREPROCESS, "the model's preprocessing"))
    add_normalization(parser, "the normalization that FILE describes")
    parser.add_options(*STORAGE, *PREDICT)
    defaults = {name: training_options.OPTIONS[name].default for name in ("metrics", *PREDICT)}
    values = defaults | vars(parser.parse(argv))
    groups = {
        group: {name: values.pop(name) for name in names if name in values}
        for group, names in (("preprocess", PREPROCESS), ("storage", STORAGE))
    }
    return argparse.Namespace(**values, **groups)


def verify(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.verify, as `train` does.

    The attribute run is the folder of a run to check, or None; ranks is a list of int; srun tells
    whether srun starts the ranks. The attribute options is a dict {name: value} of the training
    arguments that the user typed; it always contains max_iterations.
    """
    parser = Parser(
        "mpidl.verify",
        "Train briefly on each number of ranks and compare the weights, which must be the same,\n"
        "byte for byte. With RUN: check whether the checkpoints and the model of a run can be\n"
        "loaded.",
        quiet,
        VERIFY_COMMON,
        RUN,
        epilog="exit codes: 0 the weights are equal, or the newest files of the run are complete; "
        "1 the weights differ, or an error; 2 invalid options, or a file of the run is damaged",
    )
    text = "The results folder of a run, or its model.h5, to check instead of training"
    parser.add_argument("run", metavar="RUN", nargs="?", help=text)
    parser.text(
        "--ranks",
        "N,N,...",
        "Numbers of ranks to compare; default: 1,2,3,4",
        type=rank_counts,
    )
    parser.switch(
        "--srun",
        "Start the ranks with srun instead of mpirun, in a Slurm job; MPIDL_SRUN_MPI sets "
        "srun's option --mpi",
    )
    parser.add_options(
        "network",
        "weights",
        *declared(TransferInputs),
        "data",
        *PREPROCESS,
        *STORAGE,
        *VERIFY,
        max_iterations=5,
    )
    options = vars(parser.parse(argv))
    run, ranks, srun = options.pop("run"), options.pop("ranks"), options.pop("srun")
    typed = [*(["ranks"] if ranks else []), *(["srun"] if srun else []), *options]
    if run is not None and typed:
        raise UserError(f"{flag(typed[0])}: expected no RUN with it, found {run}")
    options = {"max_iterations": 5, **options}
    return argparse.Namespace(run=run, ranks=ranks or [1, 2, 3, 4], srun=srun, options=options)


def info(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.info, as `train` does.

    An attribute is None if the user did not type it. Without a network or a model, the command
    shows the machines of all ranks.
    """
    parser = Parser(
        "mpidl.info",
        "Show what mpidl found on this machine and its ranks, or the layers of a network.",
        quiet,
    )
    parser.text(
        "--network",
        "NAME",
        "Show the layers of this network with their learnables, memory and operations: "
        f"{', '.join(zoo.NETWORKS)} or FILE.py:FUNCTION",
        zoo.NETWORKS,
    )
    parser.text("--model", "FILE", f"Show the layers of a file. {MODEL_HELP}")
    parser.text("--layers", "FILE.py", "Python file with the custom layer classes of --model")
    parser.text(
        "--input-shape",
        "C,H,W",
        "Shape of an image for --network; default: the network's usual shape",
        type=image_shape,
    )
    parser.number(
        "--classes", "Number of classes for --network; default: the network's usual number"
    )
    parser.number(
        "--batch-size",
        "Images per mini-batch for --network or --model; default: the value in the recipe of "
        "--network, else 128",
    )
    parser.number(
        "--threads",
        "Threads per rank that the report assumes; default: the cores divided among the ranks",
    )
    text = "Print the facts about each rank and the warnings as JSON"
    parser.add_argument("--json", action="store_const", const=True, help=text)
    namespace = parser.parse(argv)
    if namespace.model is not None and namespace.network is not None:
        raise UserError("--model and --network: expected at most one of them")
    if namespace.layers is not None and namespace.model is None:
        raise UserError("--layers: expected --model FILE with it, found none")
    if namespace.batch_size is not None and namespace.model is None and namespace.network is None:
        raise UserError("--batch-size: expected --network NAME with it, found none")
    for name in ("threads", "json"):
        if getattr(namespace, name) and (namespace.network or namespace.model):
            raise UserError(f"--{name}: expected neither --network nor --model with it")
    sizes = ("input_shape", "classes")
    typed = [name for name in sizes if getattr(namespace, name) is not None]
    if typed and namespace.network is None:
        raise UserError(f"{flag(typed[0])}: expected --network NAME with it, found none")
    return namespace


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
