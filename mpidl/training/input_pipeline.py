"""What a network sees of images: augmented in training, and normalized."""

import copy
from dataclasses import fields

from mpidl import losses
from mpidl.data.datastore import need_datastore
from mpidl.data.transforms import normalize
from mpidl.data.transforms.augment import Augmenter
from mpidl.errors import UserError
from mpidl.training.options.option_types import size_of
from mpidl.training.options.training_options import TrainingOptions

OPTIONS = ("flip", "translate", "rotation", "scale", "shear", "fill", "random_crop")


def augmenter_of(options):
    """The Augmenter of these TrainingOptions, None where they leave images as they are.

    Raises UserError where they have an augmenter and options in its place.
    """
    said = [name for name in OPTIONS if getattr(options, name) != _default(options, name)]
    if options.augmenter is not None:
        if not isinstance(options.augmenter, Augmenter):
            raise UserError(f"augmenter: expected an Augmenter, found {options.augmenter!r}")
        if said:
            raise UserError(f"augmenter and {', '.join(said)}: expected one of them")
        return options.augmenter
    if not said:
        return None
    scale = (1, 1) if options.scale is None else tuple(map(float, options.scale.split(",")))
    try:
        return Augmenter(
            reflect_x="x" in options.flip,
            reflect_y="y" in options.flip,
            rotation=options.rotation,
            scale=scale,
            shear_x=options.shear,
            shear_y=options.shear,
            translate_x=options.translate,
            translate_y=options.translate,
            fill=options.fill,
            crop=size_of(options.random_crop),
        )
    except UserError as error:  # of what the options' own rules let through: a scale
        raise UserError(f"--{error}") from None


def image_shape(options, shape):
    """(C, P, Q) of the images that a network is trained on, of a set's (C, H, W)."""
    augmenter = augmenter_of(options)
    if augmenter is None:
        return tuple(shape)
    called = "crop" if options.random_crop is None else "--random-crop"
    return augmenter.image_shape(shape, called)


def check_kinds(net, datastore, options):
    """A UserError where `dl.train` was given something else than it takes."""
    losses.need_network(net)
    need_datastore(datastore, "images to train on")
    if not isinstance(options, TrainingOptions):
        hint = ": TrainingOptions(**options)" if isinstance(options, dict) else ""
        raise UserError(f"expected TrainingOptions, found {type(options).__name__}{hint}")


def check(net, datastore, options):
    """A UserError where a network cannot be trained, or validated, on these images."""
    if not len(datastore):
        raise UserError(f"{datastore.describe()}: expected images to train on, found none")
    known = net.normalization
    if known is not None and known.name != options.normalization:
        raise UserError(
            f"--normalization {options.normalization}: expected {known.name}, as the network was "
            f'trained with (in Python TrainingOptions(normalization="{known.name}")); where '
            "net.normalization = None is set before, another will do"
        )
    shape = image_shape(options, datastore.image_shape)
    if shape != net.input_shape:
        raise UserError(
            f"{datastore.describe()}: expected images of shape {net.input_shape}, which the "
            f"network takes, found {shape}"
        )
    store = options.validation
    if store is not None:
        need_datastore(store, "validation")
    if store is not None and not len(store):
        raise UserError(f"validation: {store.describe()}: expected images, found none")
    augmenter, shown = augmenter_of(options), copy.copy(net)
    shown.crop = None if augmenter is None else augmenter.crop
    if store is not None and not shown.takes(store.image_shape):
        raise UserError(
            f"validation: {store.describe()}: expected images of shape {net.input_shape}, which "
            f"the network takes, found {store.image_shape}"
        )
    for images in (datastore, store):
        if images is not None:
            losses.check(options.loss, net, images, training=images is datastore)
    if store is not None:
        named = losses.output_class_names(options.loss, net, datastore)
        losses.check_names(named, options.loss, net, store, "the training set")


def prepare(net, datastore, options, world, kept=None):
    """Have the network know what it will see; returns what a training `MinibatchQueue` is told.

    The statistics are those of `datastore`, or of the tables of a checkpoint, `kept`. Collective.
    """
    augmenter = augmenter_of(options)
    if kept is not None:
        arrays, channels = kept.get("normalization", {}), datastore.image_shape[0]
        found = normalize.read(options.normalization, arrays, channels)
    else:
        found = normalize.normalization(options.normalization, datastore, world)
    found = found.window(image_shape(options, datastore.image_shape)[1:])
    net.normalization = found
    net.crop = None if augmenter is None else augmenter.crop
    net.preprocess = datastore.preprocess or net.preprocess
    net.classes = losses.trained_classes(options.loss, net, datastore)
    return {
        "augmenter": augmenter,
        "normalization": found,
        "classes": losses.label_limit(options.loss, net),
        "workers": options.workers,
        "prefetch": options.prefetch,
    }


def facts(options):
    """What a checkpoint keeps of an augmenter that no option tells of."""
    return {} if options.augmenter is None else {"augmenter": options.augmenter.spec()}


def changed(saved, options):
    """A UserError where a run that goes on has another augmenter than its checkpoint says."""
    old = saved.get("augmenter", {})
    new = {} if options.augmenter is None else options.augmenter.spec()
    if old != new:
        raise UserError(f"--resume: the augmenter was {old or 'none'}, is {new or 'none'}")


def tables(net):
    """The tables of a model file or a checkpoint: {} where they are the usual."""
    found = {} if net.normalization is None else net.normalization.arrays()
    return {"normalization": found} if found else {}


def _default(options, name):
    return next(f.default for f in fields(options) if f.name == name)
