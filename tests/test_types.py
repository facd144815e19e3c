"""Test the types of the public API, as type checkers and editors see them in users' programs."""

import ast
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import mpidl as dl
from mpidl import comm, data, nn, ops, report
from mpidl.data.datastore import Subset, Transformed
from mpidl.training import hooks, optimizers, progress, steps, trainer
from mpidl.training.options.training_options import OPTIONS

pytestmark = pytest.mark.timeout(180)  # mypy reads the whole package
ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "tests/support/user_program.py"
PACKAGES = (dl, comm, data, nn, nn.layers, ops, report, optimizers)
MORE_CLASSES = (
    *(trainer.Trainer, progress.Progress, progress.EpochSummary, progress.Result),
    *(progress.Position, steps.StepInfo, steps.StepResult, Subset, Transformed),
    *(member for name, member in vars(hooks).items() if name.endswith("Hook")),
)
CONFIG = """
[mypy]
strict = True
python_version = 3.12
ignore_missing_imports = True
[mypy-mpidl.*]
ignore_errors = True
"""
# A type checker reports an error for each call.
WRONG_CALLS = """
import numpy as np
import mpidl as dl
dl.TrainingOptions(epoch=3)
dl.TrainingOptions(epochs="many")
dl.TrainingOptions(solver="sgd")
dl.TrainingOptions().epochs.upper()
dl.relu(np.ones(3))
dl.conv2d(dl.Var(np.ones(3)), np.ones(3), np.ones(3), strides=2)
dl.World().gplus("text")
dl.Network([], (1, 2, 3)).predict([1])
dl.SGDM(0.1, momentun=0.9)
dl.trainNetwork
dl.ImageFolder("photos", include_subfolders=True)
"""

# Attributes and results that may be Any, grouped by reason.
OPAQUE = {
    "values of JSON": "as_dict facts input_transform optimizer_spec spec",
    "a World, which mpidl.data may not import": "MinibatchQueue.world NodeCache.world",
    "an object of a GPU or of its world": "Batch.device MinibatchQueue.device",
    "objects of mpidl.data, unknown to mpidl.nn": "Network.normalization Network.preprocess",
    "a function of the user": "TrainingOptions.loss loss_for loss_with_options Trainer.loss "
    "Transformed.function",
    "overloads define the types": "add divide gop gplus allreduce multiply negative op subtract "
    "value_and_grad",
    "takes the arguments of any function": "Var.vjp",
    "the type depends on the argument": "value_of backward",
    "an object of rich, which is imported late": "Console.bar Console.task Console.stream",
}
MAY_BE_ANY = {name for names in OPAQUE.values() for name in names.split()}


def public_objects():
    """Return the public functions and classes, with the names that programs use."""
    objects = {}
    for package in PACKAGES:
        for name in dir(package):
            member = getattr(package, name)
            if name.startswith("_"):
                continue
            if isinstance(member, type) or inspect.isfunction(member):
                objects.setdefault(id(member), (name, member))
    for member in MORE_CLASSES:
        objects.setdefault(id(member), (member.__name__, member))
    return list(objects.values())


def own_bases(cls):
    return [base for base in cls.__mro__ if base.__module__.startswith("mpidl")]


def functions_of(name, member):
    """Return (name, function) of a public function, or of the methods of a public class."""
    if not isinstance(member, type):
        return [(name, inspect.unwrap(member))]
    methods = [
        (f"{base.__name__}.{attribute}", getattr(method, "fget", method))
        for base in own_bases(member)
        for attribute, method in vars(base).items()
        if not attribute.startswith("_") or attribute in ("__init__", "__call__", "__getitem__")
    ]
    methods = [(method, getattr(function, "__func__", function)) for method, function in methods]
    # functions that a dataclass generates have no file
    return [
        (method, inspect.unwrap(function))
        for method, function in methods
        if inspect.isfunction(function) and os.path.exists(function.__code__.co_filename)
    ]


def incomplete_annotations(name, function):
    """Return a line for each parameter without a type, and if the result has no type or is Any."""
    lines = [
        f"{name}: {parameter.name}"
        for parameter in inspect.signature(function).parameters.values()
        if parameter.annotation is parameter.empty and parameter.name not in ("self", "cls")
    ]
    result = function.__annotations__.get("return")
    if result is None and "return" not in function.__annotations__ and "__init__" not in name:
        lines.append(f"{name}: the result")
    if "Any" in str(result) and not {name, name.rpartition(".")[2]} & MAY_BE_ANY:
        lines.append(f"{name}: the result is {result}")
    return lines


def attributes_of(cls):
    """Return the names of the public attributes and properties of a class and its bases."""
    names = set(getattr(cls, "_fields", ()))
    for base in own_bases(cls):
        names |= set(vars(base).get("__annotations__", ()))
        names |= {name for name, member in vars(base).items() if isinstance(member, property)}
        body = ast.parse(textwrap.dedent(inspect.getsource(base)))
        names |= {
            node.attr
            for node in ast.walk(body)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        }
    return sorted(name for name in names if not name.startswith("_"))


def attribute_program():
    """Return a program that reveals the types of all public attributes."""
    classes = [(name, cls) for name, cls in public_objects() if isinstance(cls, type)]
    lines = ["from typing_extensions import reveal_type"]
    lines += [f"import {module}" for module in sorted({cls.__module__ for _, cls in classes})]
    for i, (name, cls) in enumerate(classes):
        if attributes := attributes_of(cls):
            qualified = f"{cls.__module__}.{cls.__qualname__}"
            lines.append(f"def check_{i}_{name}({name}: {qualified}) -> None:")
            lines += [f"    reveal_type({name}.{attribute})" for attribute in attributes]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def messages(tmp_path_factory, request):
    """Run mypy once in strict mode. Return {program: [(source line, message)]}."""
    cache = getattr(request.config, "cache", None)
    cache = cache.mkdir("mypy") if cache else "cache"
    folder = tmp_path_factory.mktemp("types")
    texts = {
        "user.py": PROGRAM.read_text(),
        "public.py": attribute_program(),
        "wrong.py": WRONG_CALLS,
    }
    for name, text in {**texts, "mypy.ini": CONFIG}.items():
        (folder / name).write_text(text)
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", cache, "--no-error-summary", *texts],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.stderr == ""
    lines = {name: [] for name in texts}
    for line in run.stdout.splitlines():
        program, number, message = re.fullmatch(r"(\w+\.py):(\d+): (.*)", line).groups()
        lines[program].append((texts[program].splitlines()[int(number) - 1].strip(), message))
    return lines


def revealed_types(lines):
    """Return pairs (expression, revealed type), without the Any in the types of NumPy's arrays."""
    pairs = []
    for source, message in lines:
        if match := re.fullmatch(r'note: Revealed type is "(.*)"', message):
            text = match[1].replace("numpy.dtype[Any]", "numpy.dtype")
            text = re.sub(r"numpy\.ndarray\[tuple\[Any, \.\.\.\], [^]]*\]+", "numpy.ndarray", text)
            pairs.append((source.removeprefix("reveal_type(").removesuffix(")"), text))
    return pairs


def test_a_strict_check_of_a_users_program_passes(messages):
    lines = messages["user.py"] + messages["public.py"]
    assert [line for line in lines if "Revealed type" not in line[1]] == []


def test_no_type_in_a_users_program_is_any(messages):
    types = revealed_types(messages["user.py"])
    assert len(types) == PROGRAM.read_text().count("reveal_type(") > 100
    assert [pair for pair in types if re.search(r"\bAny\b", pair[1])] == []


def test_no_public_attribute_is_any(messages):
    types = revealed_types(messages["public.py"])
    assert ("TrainingOptions.epochs", "int") in types
    opaque = {name for name, text in types if re.search(r"\bAny\b", text)}
    assert {name for name in opaque if not {name, name.rpartition(".")[2]} & MAY_BE_ANY} == set()


def test_wrong_calls_are_errors(messages):
    lines = [line for line in WRONG_CALLS.splitlines() if line.startswith("dl.")]
    assert [line for line in lines if line not in dict(messages["wrong.py"])] == []


def test_public_functions_are_annotated():
    functions = [pair for member in public_objects() for pair in functions_of(*member)]
    lines = {line for pair in functions for line in incomplete_annotations(*pair)}
    assert sorted(lines) == []


def test_options_have_their_defaults_in_the_signature():
    """The signature has the types and defaults of options, such as `epochs: int = 30`."""
    parameters = inspect.signature(dl.TrainingOptions).parameters
    for name, declared in OPTIONS.items():
        assert parameters[name].annotation == declared.type
        assert parameters[name].default == declared.default
    assert str(parameters["epochs"]) == "epochs: int = 30"
