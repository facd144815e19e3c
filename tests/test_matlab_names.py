"""Test that MATLAB's names and arguments raise one-line errors that name existing mpidl calls."""

import copy
import inspect
import pickle
import re
from pathlib import Path

import api_pages
import numpy as np
import pytest

import mpidl as dl
from mpidl import matlab_names
from mpidl.data.datastore import Datastore

# Objects for the variables in the calls, such as `net` in `net.predict(...)`.
VARIABLES = {
    "dl": dl,
    "images": Datastore,
    "world": dl.World,
    "net": dl.Network,
    "queue": dl.MinibatchQueue,
    "x": dl.Blocked,
}
# Instance attributes of a World, of results and of a Network.
SET_BY_INIT = {"rank", "size", "confusion", "rmse", "layers", "classes", "input_shape", "reads"}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "matlab.md"


@pytest.mark.parametrize("name", matlab_names.NAMES)
def test_a_name_of_matlab_names_a_call(name):
    assert not hasattr(dl, name)
    with pytest.raises(AttributeError) as raised:
        getattr(dl, name)
    text = str(raised.value)
    assert text == f"mpidl.{name}: MATLAB's {name} is {matlab_names.NAMES[name]}"
    assert "\n" not in text
    assert missing_attributes(text) == []


def test_names_outside_the_page_have_answers():
    names = "denoisingImageDatastore pixelLabelImageDatastore animatedline parcluster setenv"
    assert {*names.split(), "gradCAM", "lstmLayer"} <= matlab_names.NAMES.keys()


def missing_attributes(text):
    """Return the calls in a text whose attributes do not exist, such as "dl.trian"."""
    missing = []
    for variable, names in re.findall(r"\b(dl|images|world|net|queue|x)((?:\.\w+)+)", text):
        value = VARIABLES[variable]
        for name in names.split(".")[1:]:
            if not hasattr(value, name) and name not in SET_BY_INIT:
                missing.append(variable + names)
            value = getattr(value, name, None)
    return missing


@pytest.mark.parametrize("name", matlab_names.LIBRARY_NAMES)
def test_a_name_of_pytorch_or_keras_names_a_call(name):
    assert not hasattr(dl, name) and name not in matlab_names.NAMES
    with pytest.raises(AttributeError) as raised:
        getattr(dl, name)
    text = str(raised.value)
    assert text.startswith(f"module 'mpidl' has no attribute '{name}': ") and "\n" not in text
    assert text.endswith(matlab_names.LIBRARY_NAMES[name])
    assert missing_attributes(text) == []


@pytest.fixture(scope="module")
def net():
    return dl.Network([dl.Conv2D(3, 4), dl.ReLU(), dl.Dense(3)], (1, 8, 8))


@pytest.mark.parametrize("name", matlab_names.NETWORK_ATTRIBUTES)
def test_an_attribute_of_another_library_names_a_call(net, name):
    assert not hasattr(dl.Network, name) and not hasattr(net, name)
    with pytest.raises(AttributeError) as raised:
        getattr(net, name)
    text = str(raised.value)
    assert text.startswith(f"Network has no attribute '{name}': ") and "\n" not in text
    assert text.endswith(matlab_names.NETWORK_ATTRIBUTES[name])
    assert missing_attributes(text) == []


def test_habits_with_networks(net):
    """Habits of users of Keras, PyTorch and scikit-learn work, or an error says how."""
    assert len(net) == 3 and net and [layer.name for layer in net.layers] == net.layer_names
    hints = {
        "fit": "use dl.train(net, images, dl.TrainingOptions(...))",
        "eval": "not needed: only training uses dropout",
        "summary": "use print(net), or dl.analyze(net)",
        "state_dict": "dl.save_weights(net, path)",
        "score": "use dl.evaluate(net, images)",
        "Layers": "did you mean layers?",
    }
    for name, hint in hints.items():
        with pytest.raises(AttributeError, match=re.escape(hint)):
            getattr(net, name)
    with pytest.raises(AttributeError, match="^Network has no attribute '_private'$"):
        _ = net._private
    for use in (lambda: net[0], lambda: list(net)):
        with pytest.raises(KeyError, match="expected the name of a layer, got 0; net.layers is"):
            use()
    for device in ("cuda", "cpu"):
        with pytest.raises(TypeError, match=f"world.use_device.*got '{device}'"):
            net.to(device)
    store = dl.ArrayDatastore(np.zeros((2, 1, 8, 8), np.uint8), [0, 1])
    with pytest.raises(TypeError, match=r"got ArrayDatastore; dl.predict\(net, images\) accepts"):
        net.predict(store)
    for copied in (copy.copy(net), copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert repr(copied) == repr(net)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda net, store: dl.SGDM(lr=0.1), "SGDM: unknown argument lr: did you mean learning_r"),
        (lambda net, store: dl.AdamW(weight_decay=0.1), "weight_decay: did you mean l2"),
        (lambda net, store: dl.Adam(params=[]), "the optimizer receives the learnables in each"),
        (lambda net, store: dl.SGDM(net.parameters), "positive, found a dict"),
        (lambda net, store: dl.train(net, store, epochs=3), "epochs: dl.TrainingOptions and the"),
        (lambda net, store: dl.train(net, store, batch_size=32), "batch_size: dl.TrainingOption"),
        (lambda net, store: dl.train(net, store, certify=True), "certify: dl.TrainingOptions and"),
        (
            lambda net, store: dl.Network([dl.ReLU], (1, 8, 8)),
            "ReLU'> in it: write ReLU(...)",
        ),
        (lambda net, store: dl.Network(net.layers, 784), "expected input_shape=(C, H, W), got 784"),
        (
            lambda net, store: dl.Network([dl.Conv2D(3, 4, padding="SAME")], (1, 8, 8)),
            "((top, bottom), (left, right)) or 'same', got 'SAME'",
        ),
        (lambda net, store: dl.save_model(net, "model.h5"), "expected a network, found str"),
    ],
)
def test_other_habits_are_explained_in_one_line(net, use, text):
    store = dl.ArrayDatastore(np.zeros((2, 1, 8, 8), np.uint8), [0, 1])
    net.parameters = dict(net.parameters)
    with pytest.raises((TypeError, ValueError, dl.UserError)) as raised:
        use(net, store)
    assert text in str(raised.value) and "\n" not in str(raised.value)


def test_the_package_lists_its_public_names():
    public = {name.path.split(".")[1] for name in api_pages.public_names()}
    names = {name for name in dir(dl) if not name.startswith("__")}
    assert public - {"training"} <= names
    modules = {name for name in names if inspect.ismodule(getattr(dl, name))}
    assert modules == {"data", "keyed", "nn", "ops"}
    assert names - modules - public == set()


def test_a_call_that_does_not_exist_is_found():
    """Negative control: calls that do not exist are reported."""
    assert missing_attributes("dl.trian(net), world.gplus(x), images.split(0.9)") == ["dl.trian"]
    assert missing_attributes("dl.nn.zoo.resnet51(), net.fold()") == [
        "dl.nn.zoo.resnet51",
        "net.fold",
    ]


def test_the_page_has_no_name_without_an_answer():
    """Each name in the first columns of docs/matlab.md is in mpidl or in matlab_names.NAMES."""
    unanswered = []
    for line in PAGE.read_text().splitlines():
        first = line.split("|")[1] if line.startswith("| ") else ""
        for name in re.findall(r"`([A-Za-z]\w+)[`(]", first):
            answered = hasattr(dl, name) or name in {*matlab_names.NAMES, "layers"}
            if name[0].islower() and not answered:
                unanswered.append(name)
    assert unanswered == []


def test_other_names_get_the_nearest():
    for name, end in (
        ("Conv2d", ": did you mean Conv2D?"),
        ("softmax_crossentropy", ": did you mean softmax_cross_entropy?"),
        ("DataLoaders", ""),
        ("DataLoader", ": use dl.MinibatchQueue(images, batch_size)"),
        ("no_grad", ": not needed: only dl.value_and_grad computes gradients"),
        ("_private", ""),
    ):
        with pytest.raises(AttributeError) as raised:
            getattr(dl, name)
        assert str(raised.value) == f"module 'mpidl' has no attribute '{name}'{end}"
    assert dl.ranks.world.World is dl.World  # submodules are still attributes


def test_a_function_explains_unknown_arguments():
    @matlab_names.explain_arguments
    def load(folder, *, batch_size=1, preprocess=None):
        """Load."""
        return folder, batch_size

    assert load("a", batch_size=3) == ("a", 3) and load.__doc__ == "Load."
    for name, text in (
        ("MiniBatchSize", ": did you mean batch_size?"),
        ("ReadFcn", ": did you mean preprocess?"),
        ("IncludeSubfolders", ": sub-folders are always included"),
        ("xyz", ""),
    ):
        with pytest.raises(TypeError) as raised:
            load("a", **{name: 1})
        assert str(raised.value).endswith(f"load: unknown argument {name}{text}")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        load()


@pytest.mark.parametrize(
    "function", [dl.ImageFolder, dl.ArrayDatastore, dl.MinibatchQueue, dl.predict]
)
def test_arguments_of_matlab_in_the_functions(function):
    """A MATLAB argument is not mistaken for an argument with a similar name, such as `labelled`."""
    parameters = inspect.signature(function).parameters
    for name in {**matlab_names.ARGUMENTS, **matlab_names.REMARKS}:
        ours, remark = matlab_names.ARGUMENTS.get(name), matlab_names.REMARKS.get(name)
        if ours not in parameters and (remark is None or name == "momentum"):
            continue  # the remark about momentum is for BatchNorm
        with pytest.raises(TypeError) as raised:
            function(**{name: 1})
        same_name = next((p for p in parameters if p.replace("_", "") == name), ours)
        text = f"did you mean {same_name}?" if same_name in parameters else remark
        assert str(raised.value).endswith(f"unknown argument {name}: {text}")
