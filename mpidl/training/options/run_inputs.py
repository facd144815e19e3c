"""The inputs of a run: its network, data, object stores and copies of the results.

The command line and the table [run] of a TOML file set them; in Python, they are arguments.
"""

from mpidl.data.transforms.options import PreprocessOptions
from mpidl.data.urls import Settings
from mpidl.nn.zoo import NETWORKS
from mpidl.options.declaration import (
    TEXT,
    declared,
    fraction,
    option,
    options_class,
    positive,
    text_or_none,
)

EMBEDDED = ("digits", "cells")  # names of embedded data sets
PACK = "{pack}"  # in a help text, the command that the user types for mpidl.pack
DATA_HELP = (
    "Images: digits or cells; or the path, or the URL such as s3://bucket/prefix, of one of these: "
    "a folder with one sub-folder of images per class, or with such "
    "folders, train/, validation/ and test/; a folder of IDX files or of CIFAR's binary files; "
    f"an HDF5 file, a .mat file, an .npz file, a .csv table, or a file made by {PACK}"
)


@options_class(group="Start from weights")
class NetworkInputs:
    """The network of a run."""

    network: str | None = option(
        text_or_none("NAME", *NETWORKS),
        f"Network to train: {', '.join(NETWORKS)}, or FILE.py:FUNCTION, which is called "
        "with input_shape and classes. A returned Network keeps its learnables; a list of layers "
        "is initialized from --seed",
        default="digits",  # None if weights are given: the weight file describes the network
        group="Run and results",
    )
    weights: str | None = option(
        text_or_none("FILE"),
        "Start from the weights in FILE (model.h5 of a run, ONNX, safetensors or PyTorch's .pth), "
        "or, with the word published, from the published weights of --network. A new layer for the "
        "classes of --data replaces the last layer with learnables, unless FILE has the same "
        "classes. Without --network, the network is the one that FILE describes",
        default=None,
    )


@options_class(group="Start from weights")
class TransferInputs:
    """The arguments of `dl.transfer`, which need a weight file."""

    new_layer_factor: float = option(
        positive(),
        "With --weights, factor by which the learning rate is multiplied for the new layer",
        default=1.0,
        default_help="1",
        python="it is an argument of dl.transfer",
    )
    freeze_up_to: str | None = option(
        text_or_none("LAYER"),
        "With --weights, keep the learnables of this layer and of all layers before it",
        default=None,
        python="it is an argument of dl.transfer",
    )


@options_class(group="Images")
class DataInputs:
    """The images of a run."""

    data: str = option(
        TEXT._replace(metavar="DATA", suggestions=EMBEDDED),
        DATA_HELP,
        default="digits",
    )
    test_data: str | None = option(
        text_or_none("DATA"),
        "Test images",
        default=None,
        default_help="the test images of --data, else --test-fraction of --data",
    )
    test_fraction: float = option(
        fraction(),
        "Fraction of --data, taken from each class, to hold out for testing if --data has no test "
        "images; 0 disables the test",
        default=0.1,
    )
    validation_data: str | None = option(  # in Python, the option `validation`
        text_or_none("DATA|test", "test"),
        "Images for validation during training; test selects the test images",
        default=None,
        group="Validation",
        default_help="the validation images in --data, such as a folder validation/",
    )


@options_class(group="Run and results")
class CopyInputs:
    """The places to which a run copies its results."""

    upload: str | None = option(
        text_or_none("URL"),
        "Copy model.h5, summary.json and options.toml to this prefix of an object store at the "
        "end, such as s3://bucket/run7",
        default=None,
        default_help="",
    )
    mlflow: str | None = option(
        text_or_none("DIR"),
        "Record the run in this MLflow file store, such as mlruns",
        default=None,
        python="pass dl.train(..., hooks=[dl.MLflowHook(FOLDER)])",
    )
    wandb: str | None = option(
        text_or_none("PROJECT"),
        "Record the run for this Weights & Biases project, offline in the results folder; wandb "
        "sync uploads it",
        default=None,
        python="pass dl.train(..., hooks=[dl.WandbHook(PROJECT)])",
    )


@options_class(group="Run and results")
class RunInputs(CopyInputs, Settings, PreprocessOptions, DataInputs, TransferInputs, NetworkInputs):
    """The inputs of a run, from the last group to the first."""


INPUTS = declared(RunInputs)
