"""`dl.pretrained`: a network with published weights, its normalization and its class names."""

from __future__ import annotations

import os

from mpidl.data import Preprocess
from mpidl.nn import Network, zoo
from mpidl.published import sources

COVERED = 0.875  # side of the network's images divided by the shorter side of the resized image


def pretrained(name: str, *, folder: str | os.PathLike[str] | None = None) -> Network:
    """Return a network of the zoo with weights that were published for ImageNet's 1000 classes.

    The weights come from a file on this machine; nothing is downloaded. On a machine with internet,
    such as the login node of a cluster, `mpidl fetch NAME` downloads them.

    Parameters
    ----------
    name : str
        Name of the network, such as "resnet18". `mpidl fetch --list` lists the names.
    folder : path, optional
        Folder with the file NAME.safetensors, NAME.pth, NAME.h5 or NAME.onnx. By default, mpidl
        looks in the folder that the environment variable MPIDL_WEIGHTS names, in installed packages
        with weights, in the cache of the Hugging Face hub, and in the cache of torchvision.

    Returns
    -------
    Network
        The network. `normalization` and `preprocess` describe how it expects its images, and
        `classes` has the names of the classes, or is None if no file with them is on this machine.

    Raises
    ------
    UserError
        If the network or its weights are unknown, or if no file has the weights. The message says
        how to get them.
    """
    from mpidl.interchange import network_files  # a wing

    file = sources.find(name, folder)
    create = zoo.NETWORKS[name]

    def build(input_shape, outputs):
        return create(input_shape, outputs, seed=None)

    usual = create(seed=None)
    net = network_files.load_into(file.path, build, usual.input_shape, usual.output_shape[0])
    if not net.preprocess:
        side = net.input_shape[1]
        resized = round(side / COVERED)
        net.preprocess = Preprocess((resized, resized), "rgb", cover=True, crop=(side, side))
    if not net.classes and net.output_shape == (sources.CLASSES,):
        net.classes = sources.class_names(folder)
    return net
