"""Packages that import a module when a program uses one of its names.

The stub `__init__.pyi` of such a package is the only list of its public names. Type checkers read
`from mpidl.core.grad import value_and_grad as value_and_grad`, and so does `LazyPackage`. A line
`from mpidl.ops.conv import *` stands for all names in the module's `__all__`.
"""

import ast
import functools
import importlib
import importlib.util
import os
import re
from types import ModuleType
from typing import Any, NamedTuple


class Stub(NamedTuple):
    """The public names of a package."""

    origins: dict[str, str]  # {public name: module that defines it}
    families: tuple[str, ...]  # modules that export all names in their `__all__`


@functools.cache
def read_stub(folder: str) -> Stub:
    """Read the stub of the package in a folder."""
    with open(os.path.join(folder, "__init__.pyi"), encoding="utf-8") as file:
        imports = [node for node in ast.parse(file.read()).body if isinstance(node, ast.ImportFrom)]
    pairs = [(alias.name, node.module or "") for node in imports for alias in node.names]
    families = tuple(module for name, module in pairs if name == "*")
    return Stub({name: module for name, module in pairs if name != "*"}, families)


@functools.cache
def read_exports(folder: str, module: str) -> tuple[str, ...]:
    """Read the `__all__` of a module without importing it; `folder` contains the outer package."""
    with open(os.path.join(folder, *module.split(".")) + ".py", encoding="utf-8") as file:
        lists = re.findall(r"^__all__ \+?= (\[.*?\])", file.read(), re.M | re.S)
    return tuple(name for text in lists for name in ast.literal_eval(text))


class LazyPackage(ModuleType):
    """A package that imports the public names of its stub at their first use.

    A package becomes lazy by `sys.modules[__name__].__class__ = LazyPackage` in its `__init__`.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":  # for `from package import *`
            return self._public_names()
        owner, value = (None, None) if name.startswith("_") else self._find(name)
        if owner is None:
            return self.missing(name)
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute, but not a submodule, such as `dense`, in place of a public name."""
        is_submodule = getattr(value, "__name__", "") == f"{self.__name__}.{name}"
        if not (is_submodule and isinstance(value, ModuleType) and self._hides(value, name)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Return the public names, for completion in editors and notebooks."""
        return sorted({*self._public_names(), *(name for name in vars(self) if name[:2] == "__")})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the package by its name, as cloudpickle does for other modules."""
        return importlib.import_module, (self.__name__,)

    def missing(self, name: str) -> Any:
        """Raise AttributeError for a name that the package does not have."""
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name)

    def _find(self, name: str) -> tuple[ModuleType | None, Any]:
        """Return the module that defines a name, and the value; (None, None) for other names."""
        origins, families = read_stub(self.__path__[0])
        if name in origins:
            owner = importlib.import_module(origins[name])
            if owner is self or not hasattr(owner, name):  # the name of a module
                importlib.import_module(f"{origins[name]}.{name}")
            return owner, getattr(owner, name)
        if importlib.util.find_spec(f"{self.__name__}.{name}"):
            submodule = importlib.import_module(f"{self.__name__}.{name}")
            return submodule, getattr(submodule, name) if self._hides(
                submodule, name
            ) else submodule
        for module in families:
            if name in read_exports(self._folder(), module):
                family = importlib.import_module(module)
                return family, getattr(family, name)
        return None, None

    def _folder(self) -> str:
        """The folder that contains the outer package."""
        return self.__path__[0].removesuffix(os.path.join(*self.__name__.split(".")))

    def _hides(self, submodule: ModuleType, name: str) -> bool:
        """Whether a public name hides the submodule of the same name."""
        origins, families = read_stub(self.__path__[0])
        if submodule.__name__ in families and name in submodule.__all__:
            return True
        return origins.get(name, self.__name__) != self.__name__

    def _public_names(self) -> list[str]:
        origins, families = read_stub(self.__path__[0])
        names = {name for module in families for name in read_exports(self._folder(), module)}
        return sorted(names | {name for name, module in origins.items() if _exists(module)})


def _exists(module: str) -> bool:
    """Whether a module exists; the wings of mpidl can be removed."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False
