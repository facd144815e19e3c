"""Compare the explanations of six networks with those of captum, which PyTorch computes."""

import importlib.util
from operator import attrgetter

import numpy as np
import pytest

import mpidl as dl
from mpidl.core import keyed
from mpidl.nn import zoo

captum = pytest.importorskip("captum.attr", reason="captum is not installed")
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

if importlib.util.find_spec("torchvision") is None:  # benchmarks/torch_networks.py imports it
    pytest.skip(
        "torchvision, the reference, is not installed: pip install 'mpidl[bench]'",
        allow_module_level=True,
    )

LIMIT = 1e-4  # largest difference, relative to the largest entry
CLASSES, IMAGES, CANDIDATES, STEPS = 10, 2, 8, 2
# {network: (height and width of the images, module whose output Grad-CAM weights by default)}.
NETWORKS = {
    "resnet18": (64, "layer4"),
    "squeezenet1_1": (64, "classifier.2"),
    "mobilenet_v2": (64, "features.18"),
    "alexnet_torchvision": (127, "features"),
    "vgg11": (64, "features"),
    "vgg11_bn": (64, "features"),
}
SLOW = pytest.mark.slow("jobs")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "squeezenet1_1" else SLOW) for name in NETWORKS],
)
def twins(request, tmp_path_factory):
    """Return a network of the zoo, PyTorch's in float64 with its weights, images and a module."""
    from benchmarks import torch_networks

    name = request.param
    side, module = NETWORKS[name]
    torch.manual_seed(1)
    twin = torch_networks.create(name, CLASSES)
    net = getattr(zoo, name)((3, side, side), CLASSES, seed=None)
    if name.startswith(
        ("alexnet", "vgg")
    ):  # their pooling layer is for images of 224 x 224; the zoo has no such layer
        twin.avgpool = torch.nn.Identity()
        (i, dense), *_ = ((i, m) for i, m in enumerate(twin.classifier) if hasattr(m, "weight"))
        inputs = net.parameters[f"classifier_{i}.weight"].shape[1]
        twin.classifier[i] = torch.nn.Linear(inputs, dense.out_features)
    for layer in twin.modules():  # PyTorch's initial weights let scores hardly depend on images
        if isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            torch.nn.init.kaiming_normal_(layer.weight)
    path = tmp_path_factory.mktemp(name) / "weights.safetensors"
    safetensors.save_file(twin.state_dict(), path)
    dl.load_weights(net, path, names="torchvision", normalization="none")
    candidates = keyed.uniform(0, "captum", CANDIDATES * 3 * side * side) * 4 - 2
    images = candidates.reshape(CANDIDATES, 3, side, side).astype(np.float32)
    twin = twin.double()
    return net, twin, images, attrgetter(module)(twin)


@pytest.fixture(autouse=True)
def direct_sums():
    """Compute convolutions directly; Winograd's error changes the signs of more activations."""
    dl.configure(winograd="off")


def differences(entries, expected):
    """Return the difference of each image, relative to its largest entry, in ascending order."""
    expected = expected.detach().numpy()
    axes = tuple(range(1, expected.ndim))
    largest = np.abs(expected).max(axes)
    assert entries.shape == expected.shape and largest.any()
    return np.sort(np.abs(entries - expected).max(axes) / np.maximum(largest, largest.max() / 1e3))


def assert_equal_gradients(entries, expected):
    """Check that gradients agree for at least `IMAGES` images, and roughly for all.

    In an image, an activation may be so close to 0 that float32 and float64 disagree on its sign.
    """
    values = differences(entries, expected)
    assert values[IMAGES - 1] <= LIMIT and values[-1] < 0.2, values


def of_captum(images, classes, method, **options):
    """Return captum's entries for the classes."""
    images = torch.from_numpy(images).double().requires_grad_()
    return method.attribute(images, target=torch.from_numpy(classes), **options)


def test_gradients_times_input(twins):
    net, twin, images, _ = twins
    result = dl.explain(net, images, method="gradient")
    expected = of_captum(images, result.classes, captum.InputXGradient(twin))
    assert_equal_gradients(result.attributions, expected)
    assert_equal_gradients(result.maps, expected.sum(1))


def test_integrated_gradients(twins):
    net, twin, images, _ = twins
    options = {"method": "integrated-gradients", "steps": STEPS}
    result = dl.explain(net, images, target=np.arange(len(images)), **options)
    method = captum.IntegratedGradients(twin)
    expected = of_captum(images, result.classes, method, n_steps=STEPS, baselines=0.0)
    assert_equal_gradients(result.attributions, expected)


def test_grad_cam(twins):
    net, twin, images, module = twins
    images = images[:IMAGES]
    result = dl.explain(net, images)
    method = captum.LayerGradCam(twin, module)
    maps = of_captum(images, result.classes, method, relu_attributions=True)
    size = images.shape[2:]
    expected = captum.LayerAttribution.interpolate(maps, size, interpolate_mode="bilinear")
    assert differences(result.maps, expected[:, 0])[-1] <= LIMIT


def test_occlusion(twins):
    net, twin, images, _ = twins
    images = images[:IMAGES]
    size = images.shape[-1] // 2
    window, stride = (size, size - 3), (size // 2 + 1, size - 5)
    result = dl.explain(
        net, images, method="occlusion", target=4, window=window, stride=stride, baseline=2.0
    )
    options = {"sliding_window_shapes": (3, *window), "strides": (3, *stride), "baselines": 2.0}
    expected = of_captum(images, np.array([4, 4]), captum.Occlusion(twin), **options)
    assert differences(result.maps, expected[:, 0])[-1] <= LIMIT


def test_other_entries_differ_from_captum(twins):
    """Negative control: the entries of another class are outside the limit."""
    net, twin, images, _ = twins
    images = images[:IMAGES]
    result = dl.explain(net, images, method="gradient", target=1)
    expected = of_captum(images, np.array([2, 2]), captum.InputXGradient(twin))
    assert differences(result.attributions, expected)[0] > 0.2
