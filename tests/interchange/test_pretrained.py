"""Test training runs that start from a weight file: their options and the conversion of images."""

import hashlib

import numpy as np
import pytest
import safetensors.numpy
from image_sets import grow, pixels_of, refusal

import mpidl as dl
from mpidl.cli import arguments, pretrained
from mpidl.interchange import network_files
from mpidl.nn import zoo
from mpidl.training.options import configuration
from mpidl.training.options.run_inputs import INPUTS


def resolve(**typed):
    return configuration.resolve(typed)


def test_the_network_of_a_run_with_weights():
    """Without --network, the file's network is used, and no recipe applies."""
    resolved = resolve(weights="a.onnx")
    assert resolved.run["network"] is None and pretrained.title(resolved.run) == "a"
    assert resolved.options == dl.TrainingOptions()
    resolved = resolve(weights="a.onnx", network="alexnet")
    assert resolved.options == dl.TrainingOptions.from_recipe("alexnet")
    assert resolve(weights=None).run["network"] == "digits"
    run = resolve(new_layer_factor=20).run
    assert (run["new_layer_factor"], run["freeze_up_to"]) == (20.0, None)
    assert "must be positive, found 0" in refusal(arguments.train, ["--new-layer-factor", "0"])
    for name in ("new_layer_factor", "freeze_up_to"):
        text = refusal(dl.TrainingOptions, **{name: 2})
        assert text == f"unknown option {name}: it is an argument of dl.transfer"


def test_options_toml_leaves_out_a_normalization_of_the_weights(tmp_path):
    """A normalization from the weights is not in options.toml, so --config does not fix it."""
    path = str(tmp_path / "options.toml")
    resolved = resolve(weights="a.h5", freeze_up_to="conv1")
    sources = resolved.sources | {"normalization": configuration.WEIGHTS}
    facts = {"path": "a.h5", "sha256": "0" * 64}
    configuration.write_options(path, resolved._replace(sources=sources), {}, facts)
    repeated = configuration.resolve({}, config=path)
    assert repeated.sources["normalization"] == "default"
    assert repeated.run == resolved.run and repeated.run["network"] is None
    configuration.write_options(path, resolved, {}, facts)
    assert configuration.resolve({}, config=path).sources["normalization"].startswith("config ")


def arrays(*shape):
    return dl.ArrayDatastore(pixels_of(0, 4, *shape), [0, 1, 0, 1])


def test_images_are_converted_to_the_input_of_the_network(tmp_path):
    net, options = zoo.digits((3, 12, 10), 2, seed=None), dl.TrainingOptions()
    expected = dl.Preprocess((12, 10), "rgb", cover=True, crop=(12, 10))
    for shape in ((1, 12, 10), (3, 30, 20), (1, 9, 9)):
        assert pretrained.conversion(net, arrays(*shape), options) == expected
        converted = dl.data.preprocessed(arrays(*shape), expected)
        assert converted.image_shape == net.input_shape
    assert not pretrained.conversion(net, arrays(3, 12, 10), options)
    gray = zoo.digits((1, 12, 10), 2, seed=None)
    assert pretrained.conversion(gray, arrays(3, 30, 20), options).colour == "gray"
    # images are converted even if the first file fits, because other files may have other sizes
    grow(tmp_path, shape=(3, 12, 10))
    assert pretrained.conversion(net, dl.ImageFolder(tmp_path), options) == expected
    # with a random crop, only the colour changes
    crop = dl.TrainingOptions(random_crop=(12, 10))
    assert pretrained.conversion(net, arrays(1, 30, 20), crop) == dl.Preprocess(colour="rgb")
    assert not pretrained.conversion(net, arrays(3, 30, 20), crop)
    net.preprocess = dl.Preprocess((12, 10))
    assert pretrained.conversion(net, arrays(3, 99, 99), options) is net.preprocess


def source_of(net):
    return pretrained.Pretrained(net, {"path": "a.h5", "sha256": "0" * 64}, False)


def test_images_of_other_shapes_are_refused():
    net = zoo.digits((3, 12, 10), 2, seed=None)
    text = refusal(pretrained.check_shape, source_of(net), arrays(3, 12, 11), dl.TrainingOptions())
    assert text.startswith(
        "--weights a.h5: expected images of shape (3, 12, 10), found (3, 12, 11)"
    )
    pretrained.check_shape(source_of(net), arrays(3, 12, 10), dl.TrainingOptions())


@pytest.mark.parametrize(
    ("typed", "origin", "name"),
    [({}, "weights", "zscore"), ({"normalization": "zerocenter"}, "command line", None)],
)
def test_the_normalization_of_the_weights_or_of_the_user(typed, origin, name):
    net = zoo.digits((3, 12, 10), 2, seed=None)
    net.normalization = dl.data.normalization("zscore", arrays(3, 12, 10))
    resolved = resolve(weights="a.h5", **typed)
    images = arrays(3, 12, 10)
    new_net, options, resolved = pretrained.network(
        source_of(net), resolved, resolved.options, images
    )
    assert resolved.sources["normalization"] == origin
    assert options.normalization == (name or "zerocenter")
    assert (new_net.normalization is None) == (name is None)


def test_the_weights_of_torchvision_expect_its_normalization(tmp_path):
    path, images = tmp_path / "a.safetensors", arrays(3, 9, 9)
    for classes in (4, 1000):
        net = zoo.squeezenet1_1(classes=classes, seed=None)
        tensors = {name.replace("_", "."): array for name, array in net.parameters.items()}
        safetensors.numpy.save_file(tensors, path)
        words = {"weights": str(path), "network": "squeezenet1_1"}
        if classes == 4:  # not the published weights: the user chooses
            text = refusal(pretrained.load, resolve(**words), None, images, None)
            assert text.startswith(f"{path}: the file does not say how to normalize the images; ")
            words["normalization"] = "imagenet"
        source = pretrained.load(resolve(**words), None, images, None)
        assert source.file["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
        assert (source.net.input_shape, source.net.output_shape) == ((3, 224, 224), (classes,))
        assert source.net.normalization.centre.tolist() == pytest.approx([123.675, 116.28, 103.53])
    net.normalization = dl.data.normalization("rescale-symmetric", images)
    dl.save_weights(net, path, names="torchvision")  # this file specifies its normalization
    resolved = resolve(weights=str(path), network="squeezenet1_1")
    source = pretrained.load(resolved, None, images, None)
    assert source.net.normalization.name == "rescale-symmetric"
    net.normalization = dl.data.normalization("none", images)
    for name in ("a.h5", "a.onnx"):
        network_files.save(net, tmp_path / name)
        resolved = resolve(weights=str(tmp_path / name), network="squeezenet1_1")
        source = pretrained.load(resolved, None, images, None)
        assert source.net.normalization.name == "none"
    text = refusal(pretrained.load, resolve(network=None), None, images, None)
    assert text == "--network none: expected --weights FILE with it, found none"


def test_targets_set_the_number_of_outputs():
    net, images = zoo.digits((1, 9, 9), 2, seed=None), pixels_of(0, 4, 1, 9, 9)
    resolved = resolve(weights="a.h5", loss="mse")

    def outputs(targets):
        store = dl.data.combined(dl.ArrayDatastore(images), targets)
        return pretrained.network(source_of(net), resolved, resolved.options, store)[0].output_shape

    assert outputs(np.zeros((4, 3), np.float32)) == (3,)
    assert outputs(np.zeros(4, np.float32)) == (1,)
    text = refusal(outputs, np.zeros((4, 3, 3), np.float32))
    assert text == (
        "--weights: expected images with labels, or targets that are numbers, found targets of "
        "shape 3x3"
    )


def test_every_input_of_a_run_is_an_option():
    assert {"weights", *pretrained.RUN} <= set(INPUTS)


def test_published_weights_that_are_missing(monkeypatch, tmp_path, world):
    for name in ("HF_HUB_CACHE", "TORCH_HOME", "MPIDL_WEIGHTS"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for network, text in (
        (None, "--weights published: expected --network NAME with it, found none"),
        ("digits", "--weights published: expected a network with published weights ("),
        ("resnet18", "--weights published: resnet18: expected its published weights on this"),
    ):
        resolved = resolve(weights="published", network=network)
        assert refusal(pretrained.load, resolved, None, arrays(1, 9, 9), world).startswith(text)
