"""Set up and check the input of a network: augmentation, normalization, crop and classes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import losses
from mpidl.data import balanced
from mpidl.data.queue import need_full_batch
from mpidl.data.transforms import normalize
from mpidl.data.transforms.options import changed_augmentation
from mpidl.errors import UserError
from mpidl.losses import CrossEntropy

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.data.loading.bad_images import BadImages
    from mpidl.data.transforms.augment import Augmenter
    from mpidl.data.transforms.mixing import Mixing
    from mpidl.nn import Network
    from mpidl.training.options.training_options import TrainingOptions


def augmenter_of(options: TrainingOptions) -> Augmenter | None:
    """Return the Augmenter that the options describe, or None if images are not augmented."""
    if options.augmenter is None and not changed_augmentation(options):
        return None
    from mpidl.data.transforms.augment import Augmenter

    return Augmenter.of_options(options)


def mixing_of(options: TrainingOptions) -> Mixing | None:
    """Return the Mixing that the options describe, or None if images are not mixed.

    Raises
    ------
    UserError
        If the images are not shuffled in every epoch.
    """
    if not (options.mixup or options.cutmix):
        return None
    from mpidl.data.transforms.mixing import Mixing

    if options.shuffle != "every-epoch":
        raise UserError(
            "--mixup and --cutmix: expected --shuffle every-epoch, because images are mixed with "
            f"their neighbours in the shuffled order, found {options.shuffle}"
        )
    return Mixing.of_options(options)


def _check_mixing(options, loss, datastore):
    """Raise UserError if labels cannot be mixed."""
    if mixing_of(options) is None:
        return
    rules = [
        name
        for name in ("class_weights", "ignore_label", "focal_gamma")
        if getattr(loss, name, None) not in (None, 0)
    ]
    named_loss = losses.label_loss(loss)
    is_ours = named_loss is not None or not callable(loss)
    if is_ours and not isinstance(named_loss, CrossEntropy):
        rules.append(f"loss {loss}")
    if rules:
        raise UserError(
            "--mixup and --cutmix: expected --loss crossentropy without class_weights, "
            f"ignore_label and focal_gamma, found {', '.join(rules)}"
        )
    if datastore.labels is None or datastore.targets_shape is not None:
        raise UserError(
            f"{datastore.describe()}: --mixup and --cutmix: expected one label per image, found "
            "none"
        )


def image_shape(options: TrainingOptions, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape (C, P, Q) of images after augmentation, given the datastore's (C, H, W)."""
    augmenter = augmenter_of(options)
    if augmenter is None:
        return tuple(shape)
    label = "crop" if options.augmenter is not None else "--random-crop"
    label = label if options.resized_crop is None else "--resized-crop"
    return augmenter.image_shape(shape, label)


def _layers_to_whiten(net):
    """Call `whitening.layers_to_whiten` if there may be such layers."""
    if not net.unwhitened:
        return []
    from mpidl.training import whitening

    return whitening.layers_to_whiten(net)


def check(net: Network, datastore: Datastore, options: TrainingOptions) -> None:
    """Raise UserError if the network cannot be trained or validated on these images."""
    if not len(datastore):
        raise UserError(f"{datastore.describe()}: expected training images, found none")
    if options.sampling == "balanced":
        balanced.check(datastore)
    if options.partial_minibatch == "discard":
        need_full_batch(datastore, options.batch_size, options.sampling)
    normalization = net.normalization
    is_known = normalization is not None and normalization.is_known
    if normalization is not None and options.normalization == normalize.USUAL:
        normalization.need_known()  # the default is not a choice of the caller
    if normalization is not None and not is_known and options.normalization == "caffe":
        raise UserError(
            f"{normalization.reason}; --normalization caffe: expected this choice when the weights "
            'are loaded, which reverses their channels: dl.load_onnx(path, normalization="caffe")'
        )
    if is_known and normalization.name != options.normalization:
        raise UserError(
            f"--normalization {options.normalization}: expected {normalization.name}, with "
            "which the network was trained (in Python "
            f'TrainingOptions(normalization="{normalization.name}")); '
            "to use another normalization, set net.normalization = None first"
        )
    shape = image_shape(options, datastore.image_shape)
    if shape != net.input_shape:
        crop = "" if shape == datastore.image_shape else " after random_crop or resized_crop"
        raise UserError(
            f"{datastore.describe()}: expected images of shape {net.input_shape}, which the "
            f"network expects, found {shape}{crop}"
        )
    store = options.validation
    if store is not None and not len(store):
        raise UserError(f"validation: {store.describe()}: expected images, found none")
    augmenter, trained = augmenter_of(options), copy.copy(net)
    trained.crop = None if augmenter is None else augmenter.window
    if store is not None and not trained.takes(store.image_shape):
        raise UserError(
            f"validation: {store.describe()}: expected images of shape {net.input_shape}, which "
            f"the network expects, found {store.image_shape}"
        )
    _layers_to_whiten(net)  # raises UserError
    loss = options.loss_with_options()
    if options.metrics:
        from mpidl.evaluation import class_metrics

        class_metrics.requested(options.metrics, loss, net)
    _check_mixing(options, loss, datastore)
    for images in (datastore, store):
        if images is not None:
            losses.check(loss, trained, images, training=images is datastore)
    if store is not None:
        names = losses.output_class_names(loss, net, datastore)
        losses.check_names(names, loss, net, store, "the training set")


def prepare(
    net: Network,
    datastore: Datastore,
    options: TrainingOptions,
    world: Any,
    checkpoint_tables: dict[str, dict[str, np.ndarray]] | None = None,
    bad_images: BadImages | None = None,
) -> dict[str, Any]:
    """Set the input transforms and the classes of the network for a training run. Collective.

    Parameters
    ----------
    net : Network
        The network. The function sets its crop, preprocessing and classes. It also sets the
        normalization unless the network already has one, and the filters of whitening layers that
        still have their initial weights.
    datastore : Datastore
        The training set.
    options : TrainingOptions
        The options of the run.
    world : World
        The ranks of the run.
    checkpoint_tables : dict, optional
        Tables of a checkpoint, including the statistics of the normalization. The network must
        already have the learnables of this checkpoint. By default, the statistics and the filters
        are computed from `datastore`.
    bad_images : BadImages, optional
        Receives the images that cannot be read. The queue and the statistics skip these images. By
        default, an unreadable image is an error.

    Returns
    -------
    dict
        Keyword arguments of the `MinibatchQueue` for training.
    """
    augmenter = augmenter_of(options)
    is_new = checkpoint_tables is None
    if net.normalization is not None and not net.normalization.is_known:
        net.normalization = None  # `check` has made sure that the caller chose one
    needs_filters = is_new and bool(_layers_to_whiten(net))
    needs_statistics = is_new and net.normalization is None
    if needs_statistics:
        needs_statistics = normalize.needs_statistics(options.normalization, datastore)
    images = datastore
    if bad_images is not None and (needs_filters or needs_statistics):
        bad_images.search(datastore, world)
        images = bad_images.usable(datastore)
    if checkpoint_tables is not None:
        arrays, channels = checkpoint_tables.get("normalization", {}), datastore.image_shape[0]
        normalization = normalize.read(options.normalization, arrays, channels)
    elif net.normalization is not None:  # the network is trained; `check` has compared the name
        normalization = net.normalization
    else:
        normalization = normalize.normalization(options.normalization, images, world)
    normalization = normalization.window(image_shape(options, datastore.image_shape)[1:])
    net.normalization = normalization
    net.crop = None if augmenter is None else augmenter.window
    if needs_filters:
        from mpidl.training import whitening

        whitening.whiten(net, images, world)
    net.preprocess = datastore.preprocess or net.preprocess
    net.input_function = None
    net.trained_precision = None if options.precision == "fp32" else options.precision
    net.set_origin()
    loss = options.loss_with_options()
    net.classes = losses.trained_classes(loss, net, datastore)
    net.loss = losses.trained_loss(loss, net, datastore)
    return {
        "augmenter": augmenter,
        "mixing": mixing_of(options),
        "normalization": normalization,
        **losses.label_range(loss, net),
        "bad_images": bad_images,
        "workers": options.workers,
        "prefetch": options.prefetch,
    }


def facts(options: TrainingOptions) -> dict[str, Any]:
    """Return {"augmenter": spec} for a checkpoint, or {} if the option `augmenter` is not set."""
    return {} if options.augmenter is None else {"augmenter": options.augmenter.spec()}


def check_unchanged(saved: dict[str, Any], options: TrainingOptions) -> None:
    """Raise UserError if the option `augmenter` of a resumed run differs from the checkpoint's."""
    old = saved.get("augmenter", {})
    new = {} if options.augmenter is None else options.augmenter.spec()
    if old != new:
        raise UserError(f"--resume: the augmenter was {old or 'none'}, is {new or 'none'}")


def tables(net: Network) -> dict[str, dict[str, np.ndarray]]:
    """Return {"normalization": arrays} for a checkpoint or model; {} if there are no arrays."""
    arrays = {} if net.normalization is None else net.normalization.arrays()
    return {"normalization": arrays} if arrays else {}
