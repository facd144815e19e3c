"""Start training from a weight file: --weights, --new-layer-factor and --freeze-up-to."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mpidl.cli import start, user_files
from mpidl.data import ImageFolder
from mpidl.data.datastore import Datastore
from mpidl.data.transforms import normalize
from mpidl.data.transforms.preprocess import AS_IT_IS, COLOURS, Preprocess
from mpidl.data.urls import is_remote
from mpidl.errors import UserError
from mpidl.files import on_rank_0, sha256_of_file
from mpidl.nn import Network, zoo
from mpidl.nn.transfer import is_kept, last_layer, transfer
from mpidl.options.declaration import declared, flag
from mpidl.ranks.world import World
from mpidl.text import printable
from mpidl.training import input_pipeline
from mpidl.training.files import model_file
from mpidl.training.options.configuration import WEIGHTS, Resolved
from mpidl.training.options.run_inputs import INPUTS, TransferInputs
from mpidl.training.options.training_options import TrainingOptions

PUBLISHED = "published"  # a value of --weights: those of the network of the zoo
RUN = tuple(declared(TransferInputs))  # inputs of a run that need a weight file


class Pretrained(NamedTuple):
    """The network at the start of a training run.

    Attributes
    ----------
    net : Network
        The network of the weight file or, in a resumed run, the network of the checkpoint.
    file : dict
        {"path": ..., "sha256": ...} of the weight file. `network` adds "normalization", the source
        of the normalization.
    is_resumed : bool
        Whether `net` is the network of the checkpoint, whose last layer has already been replaced.
    """

    net: Network
    file: dict[str, str]
    is_resumed: bool


def load(
    resolved: Resolved,
    resume: tuple[Any, Any] | None,
    images: Datastore,
    world: World,
) -> Pretrained | None:
    """Return the network that --weights names, or None without a weight file. Collective.

    A resumed run needs the file only if its checkpoint `resume`, (arrays, facts), does not describe
    the network, because the network has custom layers. If the file still exists, its content must
    be unchanged. The shape and the number of classes of the training images are used if neither the
    file nor --network determines them. Raises UserError if the file cannot be read or does not fit
    the network, or if the resumed run started from another file.
    """
    run, (arrays, facts) = resolved.run, resume or ({}, {})
    saved: dict[str, str] | None = facts.get("weights_file")
    path, typed = run["weights"], resolved.sources["weights"] != "resumed run"
    if resume is not None:
        _check_resumed(resolved, facts)
    if path is None:
        for name in RUN:
            if run[name] != INPUTS[name].default:
                raise UserError(f"{flag(name)} {run[name]}: expected --weights FILE with it")
        if run["network"] is None:
            raise UserError("--network none: expected --weights FILE with it, found none")
        return None
    if typed and is_remote(path):
        raise UserError(
            f"--weights {printable(path)}: expected a file on a file system, found a URL"
        )
    if path == PUBLISHED:
        path, typed = _published_path(run["network"], saved, world), typed and saved is None
    net = None if saved is None else _described(arrays, facts)
    if saved is not None and net is not None:
        if typed and path == saved["path"]:  # a job script repeats --weights
            typed = on_rank_0(world, lambda: os.path.lexists(path))
        if not typed:
            return Pretrained(net, saved, True)
    file = {"path": path, "sha256": on_rank_0(world, lambda: sha256_of_file(path))}
    if saved is not None:
        _check_file(file, saved)
        file = saved | file
    if net is not None:
        return Pretrained(net, file, True)
    network = run["network"]
    if network is not None and ".py:" in network:
        # Every rank needs the custom layers, because rank 0 sends the network to all ranks.
        user_files.load_user_function(network, "--network")
    name = _chosen_normalization(resolved)
    is_fixed = name is not None and not normalize.needs_statistics(name, images)
    net = on_rank_0(world, lambda: _load(path, network, images, name if is_fixed else None))
    on_rank_0(world, lambda: last_layer(net))
    if saved is not None:
        try:
            name, arrays = facts["normalization"], arrays.get("normalization", {})
            net.normalization = normalize.read(name, arrays, net.input_shape[0])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"--resume: expected a checkpoint with the normalization of the images: {error}"
            ) from None
    elif name is None:
        net.normalization.need_known()
    return Pretrained(net, file, False)


def _published_path(network, saved, world):
    """Return the path of the published weights; in a resumed run, the path when it started."""
    if saved is not None:
        return saved["path"]
    if network is None:
        raise UserError(f"--weights {PUBLISHED}: expected --network NAME with it, found none")
    from mpidl.published import sources

    try:
        return on_rank_0(world, lambda: sources.find(network).path)
    except UserError as error:
        raise UserError(f"--weights {PUBLISHED}: {error}") from None


def _chosen_normalization(resolved):
    """Return the normalization that the user chose, or None."""
    origin = resolved.sources["normalization"]
    is_chosen = origin == "command line" or origin.startswith("config ")
    return resolved.options.normalization if is_chosen else None


def _load(path, network, images, normalization):
    if network is None:
        return start.load_network(path, normalization=normalization)
    shape, outputs = images.image_shape, _classes_of(images)
    outputs = outputs if isinstance(outputs, int) else len(outputs)
    if network in zoo.NETWORKS:
        defaults = inspect.signature(zoo.NETWORKS[network]).parameters
        shape, outputs = defaults["input_shape"].default, defaults["classes"].default

    def build(input_shape, count):
        return start.network(network, input_shape, count, seed=None)

    from mpidl.interchange import network_files

    return network_files.load_into(path, build, shape, outputs, normalization)


def _described(arrays, facts):
    """Return the network that a checkpoint describes, or None if it has custom layers."""
    try:
        return model_file.network_of(facts, arrays.get("normalization", {}))
    except ValueError:
        return None


def _check_resumed(resolved, facts):
    """Raise UserError if a resumed run has a new weight file or changed transfer options."""
    saved, run = facts.get("run", {}), resolved.run
    if run["weights"] is not None and facts.get("weights_file") is None:
        raise UserError(
            f"--resume: --weights {printable(run['weights'])}: the run did not start from a "
            "weight file"
        )
    names = RUN if run["weights"] is None else ("network", *RUN)
    for name in names:
        old = saved.get(name, INPUTS[name].default)
        if run[name] != old:
            raise UserError(
                f"--resume: the run cannot continue: {flag(name)} was "
                f"{_or_none(old)}, is {_or_none(run[name])}"
            )


def _or_none(value):
    return "none" if value is None else value


def _check_file(file, saved):
    """Raise UserError if the resumed run started from a different weight file."""
    if file["sha256"] != saved["sha256"]:
        raise UserError(
            f"--weights {printable(file['path'])}: expected {printable(saved['path'])}, with which "
            f"the resumed run started (sha256 {saved['sha256'][:12]}), found another file "
            f"({file['sha256'][:12]})"
        )


def conversion(net: Network, images: Datastore, options: TrainingOptions) -> Preprocess:
    """Return the default conversion of images to a network's input.

    The default applies unless the user requests a conversion. If the weight file specifies
    preprocessing, the conversion is this preprocessing. Otherwise, images are resized to cover the
    input and cropped, because image files may differ in size. With --random-crop or --resized-crop,
    only the colour of images is converted.
    """
    if net.preprocess:
        return net.preprocess
    channels, height, width = net.input_shape
    colour = next((name for name, count in COLOURS.items() if count == channels), None)
    if options.random_crop is not None or options.resized_crop is not None:
        is_same = images.image_shape[0] == channels
        return AS_IT_IS if is_same else Preprocess(colour=colour)
    shape = input_pipeline.image_shape(options, images.image_shape)
    if shape == net.input_shape and not isinstance(images, ImageFolder):
        return AS_IT_IS
    return Preprocess((height, width), colour, cover=True, crop=(height, width))


def check_shape(source: Pretrained, images: Datastore, options: TrainingOptions) -> None:
    """Raise UserError if the images do not have the shape of the network's input."""
    shape = input_pipeline.image_shape(options, images.image_shape)
    expected = source.net.input_shape
    if shape != expected:
        raise UserError(
            f"--weights {printable(source.file['path'])}: expected images of shape {expected}, "
            f"found {shape} after --colour, --resize, --cover, --centre-crop and --random-crop; "
            "without these options, mpidl converts the images"
        )


def network(
    source: Pretrained, resolved: Resolved, options: TrainingOptions, images: Datastore
) -> tuple[Network, TrainingOptions, Resolved]:
    """Return the network to train, and the options and inputs with the network's normalization.

    The new layer has an output for each class of the training images. Raises UserError if the last
    layer cannot be replaced, or if --freeze-up-to does not name a layer before the last layer.
    """
    run, net = resolved.run, source.net
    origin = resolved.sources["normalization"]
    if "normalization" in source.file:  # the run is resumed
        origin = source.file["normalization"]
        net.normalization = net.normalization if origin == WEIGHTS else None
    elif _chosen_normalization(resolved) is not None:
        if normalize.needs_statistics(options.normalization, images):
            net.normalization = None
    elif net.normalization is not None:
        origin = WEIGHTS
        options = replace(options, normalization=net.normalization.name)
    source.file["normalization"] = origin
    resolved = resolved._replace(sources=resolved.sources | {"normalization": origin})
    if not source.is_resumed:
        net = transfer(
            net,
            _classes_of(images),
            new_layer_factor=run["new_layer_factor"],
            freeze_up_to=run["freeze_up_to"],
            seed=options.seed,
        )
        net = start.with_sigmoid(net, options.loss)
    return net, options, resolved


def _classes_of(images):
    """Return the class names or, if the data have targets, the number of outputs."""
    if images.targets_shape is None:
        return images.classes
    outputs = start.outputs_of(images)
    if not isinstance(outputs, int):
        raise UserError(
            f"--weights: expected images with labels, or targets that are numbers, found targets "
            f"of shape {'x'.join(map(str, outputs))}"
        )
    return outputs


def describe(
    source: Pretrained, run: Mapping[str, Any], net: Network, images: Datastore
) -> dict[str, str]:
    """Return lines about the weight file and the new layer for the head of a run's output."""
    facts = {"weights": f"{printable(source.file['path'])}, sha256 {source.file['sha256']}"}
    if source.is_resumed:
        return facts
    head, outputs = last_layer(net).name, net.output_shape[0]
    if is_kept(source.net, _classes_of(images)):
        noun = "classes" if images.targets_shape is None else "outputs"
        facts["last_layer"] = f"{head} is kept, because the weights have the {outputs} {noun}"
    else:
        factor = f"learning rate times {run['new_layer_factor']:g}"
        facts["new_layer"] = f"{head}, {outputs} outputs instead of "
        facts["new_layer"] += f"{source.net.output_shape[0]}, {factor}"
    if run["freeze_up_to"] is not None:
        facts["frozen"] = f"the layers up to {run['freeze_up_to']}"
    if images.preprocess:
        facts["images"] = f"converted: {images.preprocess}"
    if net.normalization is not None:
        facts["normalization"] = net.normalization.describe()
    return facts


def title(run: Mapping[str, Any]) -> str:
    """Return the name of a run's network: --network, or the name of the weight file."""
    return run["network"] or os.path.splitext(os.path.basename(run["weights"]))[0]
