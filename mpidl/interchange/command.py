"""`python -m mpidl.convert`: convert a network between model.h5, ONNX and safetensors."""

import argparse
import inspect
from collections.abc import Sequence

from mpidl.cli import arguments, start, user_files
from mpidl.cli.parser import Parser, image_shape
from mpidl.errors import Fault, UserError
from mpidl.interchange import network_files, weight_names, weights
from mpidl.interchange.onnx_import import load_onnx
from mpidl.nn import Network, zoo
from mpidl.ranks import failure
from mpidl.training.files.model_file import weights_sha256

LIMIT = 1e-5  # largest accepted difference between scores, relative to the largest score


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.convert; `arguments.train` describes parameters and errors."""
    parser = Parser(
        "mpidl.convert",
        "Convert a network with its weights between the formats model.h5, ONNX (*.onnx) and\n"
        "safetensors, and compare the scores of both files.",
        quiet,
        epilog="exit codes: 0 success; 1 the scores differ, or an error; 2 invalid options or data",
    )
    parser.add_argument("source", metavar="SRC", help="The file to read")
    parser.add_argument("target", metavar="DST", help="The file to write")
    parser.text(
        "--network",
        "NAME",
        "Network for the weights in SRC, if SRC does not describe the network: "
        f"{', '.join(zoo.NETWORKS)} or FILE.py:FUNCTION",
        zoo.NETWORKS,
    )
    parser.text(
        "--input-shape",
        "C,H,W",
        "Shape of an image; default: the shape in SRC, or the usual shape of --network",
        type=image_shape,
    )
    parser.number(
        "--classes", "Number of classes for --network; default: the network's usual number"
    )
    parser.text(
        "--names",
        "LIBRARY",
        "Library that defines the names of the arrays in a safetensors file: "
        f"{', '.join(weight_names.LIBRARIES)}; default: mpidl",
        default="mpidl",
        choices=weight_names.LIBRARIES,
    )
    arguments.add_normalization(parser, "the normalization that SRC describes")
    parser.text("--layers", "FILE.py", "Python file with the model's custom layer classes")
    parsed = parser.parse(argv)
    if parsed.classes is not None and parsed.network is None:
        raise UserError("--classes: expected --network NAME with it, found none")
    describes_itself = parsed.network is None and not parsed.source.lower().endswith(".onnx")
    if parsed.input_shape is not None and describes_itself:
        raise UserError("--input-shape: expected an ONNX file or --network NAME with it")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    if failure.launched_ranks() is not None:
        raise UserError("convert uses one process: run it without mpirun")
    network_files.suffix_of(parsed.target)
    net = _source(parsed)
    net.normalization.need_known()
    learnables = sum(count for *_, count in net.table())
    print(f"{parsed.source}: {len(net.layers)} layers, {learnables:,} learnables")
    names = parsed.names if parsed.names in ("mpidl", "torchvision") else "mpidl"
    network_files.save(net, parsed.target, names if parsed.network is None else "mpidl")
    difference = network_files.score_difference(net, _target(parsed))
    print(f"weights_sha256: {weights_sha256(net)}")
    print(f"{parsed.target}: scores differ by at most {difference:.1e} of the largest score")
    if not difference <= LIMIT:
        raise Fault(f"{parsed.target}: expected differences of at most {LIMIT:g}")
    return 0


def _source(parsed) -> Network:
    """Load the source file."""
    layers = user_files.user_layers(parsed.layers)
    if parsed.network is None:
        return network_files.load(parsed.source, layers, parsed.input_shape, parsed.normalization)
    shape, classes = parsed.input_shape, parsed.classes
    if parsed.network in zoo.NETWORKS:
        defaults = inspect.signature(zoo.NETWORKS[parsed.network]).parameters
        shape = shape or defaults["input_shape"].default
        classes = classes or defaults["classes"].default
    for flag, value in (("input-shape", shape), ("classes", classes)):
        if value is None:
            raise UserError(f"--network {parsed.network}: expected --{flag} with it, found none")
    net = start.network(parsed.network, shape, classes, seed=0)
    return weights.load_weights(net, parsed.source, parsed.names, parsed.normalization)


def _target(parsed) -> Network:
    """Load the written file, but ignore mpidl's description in an ONNX file."""
    if network_files.suffix_of(parsed.target) == ".onnx":
        return load_onnx(parsed.target, graph_alone=True)
    return network_files.load(parsed.target, user_files.user_layers(parsed.layers))
