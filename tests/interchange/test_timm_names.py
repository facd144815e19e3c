"""Check that networks with weights by timm's names have the scores of timm's networks.

timm is installed without its requirements: it needs only PyTorch and torchvision to create a
network. benchmarks/torch_networks.py declares the operators that a CPU build of PyTorch lacks.
"""

import importlib.util

import numpy as np
import pytest
import safetensors.numpy

import mpidl as dl
from mpidl.core import keyed
from mpidl.nn import zoo

MISSING = [n for n in ("torch", "torchvision", "timm") if importlib.util.find_spec(n) is None]
CLASSES = 10
# {name in timm: name in the zoo, side of the images}. timm's VGG reads images of one size only.
NETWORKS = {
    "resnet18": ("resnet18", 64),
    "mobilenetv2_100": ("mobilenet_v2", 64),
    "mobilenetv3_large_100": ("mobilenet_v3_large", 64),
    "efficientnet_b0": ("efficientnet_b0", 64),
    "densenet121": ("densenet121", 64),
    "convnext_tiny": ("convnext_tiny", 64),
    "inception_v3": ("inception_v3", 96),
    "vgg11_bn": ("vgg11_bn", 224),
}


def timm_network(name):
    """Return a network of timm in evaluation mode whose weights and statistics are random."""
    import torch

    from benchmarks import torch_networks

    torch_networks.torchvision_models()  # with any build of PyTorch
    import timm

    torch.manual_seed(1)
    options = {"aux_logits": False} if name == "inception_v3" else {}
    net = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
    torch_networks.draw_statistics(net)
    with torch.no_grad():
        for key, array in net.named_parameters():
            if key.endswith(".gamma"):  # ConvNeXt's initial scale of 1e-6 would hide the blocks
                array.uniform_(0.5, 1.5)
    return net.eval()


@pytest.mark.slow("ranks")
@pytest.mark.timeout(240)
@pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install --no-deps timm)"
)
@pytest.mark.parametrize("name", NETWORKS)
def test_weights_by_the_names_of_timm_give_its_scores(name, monkeypatch, tmp_path):
    from benchmarks import torch_networks

    reference, path = timm_network(name), tmp_path / "weights.safetensors"
    arrays = {key: array.numpy() for key, array in reference.state_dict().items()}
    safetensors.numpy.save_file(arrays, path)
    zoo_name, side = NETWORKS[name]
    images = np.random.default_rng(2).standard_normal((2, 3, side, side), np.float32)
    expected = torch_networks.scores(reference, images)
    limit = 1e-5 * max(1, np.abs(expected).max())

    # Drawing a hundred million initial weights takes seconds.
    monkeypatch.setattr(keyed, "uniform", lambda seed, key, count: np.zeros(count, np.float32))
    blocked = dl.from_images(images, dl.share(len(images), dl.OneRank()))

    def difference():
        net = getattr(zoo, zoo_name)((3, side, side), CLASSES)
        scores = dl.load_weights(net, path, names="timm")(blocked).local()
        return np.abs(scores - expected).max()

    assert difference() <= limit
    largest = max(arrays, key=lambda key: arrays[key].size)  # negative control
    arrays[largest] = np.roll(arrays[largest], 1)
    safetensors.numpy.save_file(arrays, path)
    assert difference() > 100 * limit
