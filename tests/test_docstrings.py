"""Test that docstrings of public names are complete: a summary, each parameter, and the result.

The public names are the names in the API reference (docs/extensions/api_pages.py), and the public
methods of each class. The sections of an overriding method may be in the base class.
"""

import inspect
import re

import api_pages
import pytest

import mpidl as dl

SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}$", re.M)
NO_RESULT = {"None", "NoReturn"}


def sections_of(documented):
    """Return {title: text} of the docstring of a function or class. The title "" is the summary."""
    parts = SECTION.split(inspect.cleandoc(documented.__doc__ or ""))
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))


def documented_names(documented):
    """Return the names of the parameters and attributes in a docstring."""
    sections, names = sections_of(documented), set()
    for title in ("Parameters", "Attributes"):
        for line in re.findall(r"^(\S[^:\n]*?)(?: :.*)?$", sections.get(title, ""), re.M):
            names |= {name.strip("* `") for name in line.split(",")}
    return names


def parameters_of(function):
    parameters = inspect.signature(function).parameters
    return [name for name in parameters if name not in ("self", "cls")]


def problems_of(path, definitions, parameters, has_result):
    """Return a line for each part that is missing from the docstrings of the definitions."""
    sections = [sections_of(definition) for definition in definitions]
    if not any(section[""].strip() for section in sections):
        return [f"{path}: no docstring"]
    names = set().union(*map(documented_names, definitions))
    problems = [f"{path}: parameter {name}" for name in parameters if name not in names]
    if has_result and not any({"Returns", "Yields"} & set(section) for section in sections):
        problems.append(f"{path}: the result")
    return problems


def function_problems(path, functions):
    """Return the problems of a function, or of a method and the methods that it overrides."""
    function = inspect.unwrap(functions[0])
    result = str(function.__annotations__.get("return", None))
    return problems_of(path, functions, parameters_of(function), result not in NO_RESULT)


def class_problems(name):
    bases = [base for base in name.target.__mro__ if base.__module__.startswith("mpidl")]
    is_error = issubclass(name.target, BaseException)
    parameters = [] if is_error else parameters_of(name.target)
    problems = problems_of(name.path, bases, parameters, False)
    if not name.target.__doc__:
        problems.append(f"{name.path}: no docstring")
    for method in api_pages.own_methods(name):
        members = [vars(base)[method] for base in bases if method in vars(base)]
        path = f"{name.path}.{method}"
        if isinstance(members[0], property):
            problems += problems_of(path, members, [], False)
        else:
            functions = [getattr(member, "__func__", member) for member in members]
            problems += function_problems(path, functions)
    return problems


def problems_of_name(name):
    return class_problems(name) if name.is_class else function_problems(name.path, [name.target])


def test_docstrings_of_public_names_are_complete():
    names = api_pages.public_names()
    assert len(names) > 150
    assert [problem for name in names for problem in problems_of_name(name)] == []


def test_every_public_name_stands_on_one_page():
    text = "\n".join(api_pages.pages().values())
    paths = re.findall(r"^\.\. auto(?:class|function):: (\S+)$", text, re.M)
    assert len(paths) == len(set(paths))
    public = {name for name in dir(dl) if not name.startswith("_")}
    objects = {name for name in public if inspect.isfunction(getattr(dl, name))}
    objects |= {name for name in public if isinstance(getattr(dl, name), type)}
    assert {f"mpidl.{name}" for name in objects} <= set(paths)


class Incomplete:
    """A class."""

    def method(self, size) -> int:
        """Return a number.

        Parameters
        ----------
        sizes : int
        """

    def silent(self) -> None:
        pass

    @property
    def size(self) -> int:
        return 1


@pytest.mark.parametrize("member", ["parameter size", "the result", "silent", "size: no doc"])
def test_what_is_missing_is_found(member, monkeypatch):
    """Negative control: missing parts of a docstring are reported."""
    monkeypatch.setattr(Incomplete, "__module__", "mpidl.example")
    problems = problems_of_name(api_pages.PublicName("mpidl.Incomplete", Incomplete))
    assert len(problems) == 4 and any(member in problem for problem in problems)
