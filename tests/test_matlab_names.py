"""Test that MATLAB's names and arguments raise one-line errors that name existing mpidl calls."""

import inspect
import re
from pathlib import Path

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
SET_BY_INIT = {"rank", "size", "confusion", "rmse"}  # instance attributes of a World and of results
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
        ("DataLoader", ""),
        ("_private", ""),
    ):
        with pytest.raises(AttributeError) as raised:
            getattr(dl, name)
        assert str(raised.value) == f"module 'mpidl' has no attribute '{name}'{end}"
    assert dl.comm.World is dl.World  # submodules are still attributes


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
        if ours not in parameters and remark is None:
            continue
        with pytest.raises(TypeError) as raised:
            function(**{name: 1})
        text = f"did you mean {ours}?" if ours in parameters else remark
        assert str(raised.value).endswith(f"unknown argument {name}: {text}")
