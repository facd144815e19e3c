"""Create torchvision's networks, the reference for those of `mpidl.nn.zoo`.

The wheels of torchvision need a GPU build of PyTorch for a few operators, such as non-maximum
suppression. No network here uses these operators, so with a CPU build it is enough to declare them.
"""

import numpy as np
import torch
from torch import library, nn

OPERATORS = ("nms", "qnms")  # that torchvision describes while it is imported
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
# Arguments of torchvision's functions, beside `weights` and `num_classes`.
ARGUMENTS = {
    "inception_v3": {"aux_logits": False, "init_weights": True},
    "deeplabv3_resnet50": {"aux_loss": False, "weights_backbone": None},
}


def torchvision_models():
    """Import torchvision.models, with any build of PyTorch."""
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"torchvision::{name}", SIGNATURE)
    import torchvision.models.segmentation

    return torchvision.models


def scores(net: nn.Module, images: np.ndarray) -> np.ndarray:
    """Return the scores of a network, also of one that returns a dictionary."""
    with torch.no_grad():
        result = net(torch.tensor(images))
    return (result["out"] if isinstance(result, dict) else result).numpy()


def create(name: str, classes: int = 1000) -> nn.Module:
    """Return a network in evaluation mode whose weights and statistics are random."""
    models = torchvision_models()
    torch.manual_seed(1)
    name = name.removesuffix("_torchvision")
    family = models if hasattr(models, name) else models.segmentation
    net = getattr(family, name)(weights=None, num_classes=classes, **ARGUMENTS.get(name, {}))
    draw_statistics(net)
    return net.eval()


def draw_statistics(net: nn.Module) -> None:
    """Set the arrays of all batch normalizations to random numbers."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            with torch.no_grad():
                for array, low, high in (
                    (module.weight, 0.5, 1.5),
                    (module.bias, -0.2, 0.2),
                    (module.running_mean, -0.2, 0.2),
                    (module.running_var, 0.5, 1.5),
                ):
                    array.uniform_(low, high)
