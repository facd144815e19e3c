"""Test that versions and dependencies in packaging/ match setup.cfg, and that module files load."""

import configparser
import re
import subprocess
import sys
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path

import environments
import pytest
import yaml

import mpidl

ROOT = Path(__file__).resolve().parents[1]
PACKAGING = ROOT / "packaging"
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def requirements(text):
    """Return {package: oldest version} of a list in setup.cfg."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.partition(";")[0].split(">=") for line in lines]
    return {name.strip().lower().replace("_", "-"): version.strip() for name, version in pairs}


REQUIRED = requirements(SETUP["options"]["install_requires"])
PYTHON = SETUP["options"]["python_requires"].removeprefix(">=")


class SpackRecipe:
    """The content of a Spack recipe, executed with replacements for Spack's functions."""

    def __init__(self, path):
        self.versions, self.dependencies, self.variants = [], defaultdict(dict), set()
        defaults = {}

        @contextmanager
        def default_args(**keywords):
            defaults.update(keywords)
            yield
            defaults.clear()

        def depends_on(spec, type=None, when=""):
            name, _, version = spec.partition("@")
            kinds = type or defaults.get("type", ())
            key = "build" if kinds == "build" else when
            self.dependencies[key][name.removeprefix("py-")] = version.removesuffix(":")

        names = {
            "version": self.versions.append,
            "variant": lambda name, **keywords: self.variants.add(name),
            "depends_on": depends_on,
            "default_args": default_args,
            "license": lambda name: None,
            "PythonPackage": object,
        }
        source = re.sub(r"^from .*import .*$", "", path.read_text(), flags=re.MULTILINE)
        exec(compile(source, path, "exec"), names)


def test_spack():
    recipe = SpackRecipe(PACKAGING / "spack/spack_repo/mpidl/packages/mpidl/package.py")
    assert recipe.versions == [mpidl.__version__]
    always = recipe.dependencies[""] | recipe.dependencies["^python@:3.10"]
    assert always == REQUIRED | {"python": PYTHON}
    assert recipe.dependencies["build"] == {"c": "", "setuptools": setuptools_version()}
    optional = {key[1:]: value for key, value in recipe.dependencies.items() if key[:1] == "+"}
    extras = SETUP["options.extras_require"]
    assert optional == {name: requirements(extras[name]) for name in recipe.variants}


def setuptools_version():
    """Return the oldest setuptools that pyproject.toml allows."""
    return re.search(r"setuptools >= ([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]


def test_conda():
    text = (PACKAGING / "conda/recipe.yaml").read_text()
    recipe = yaml.safe_load(text)
    assert recipe["context"]["version"] == mpidl.__version__
    run = dict(line.split(" >=") for line in recipe["requirements"]["run"])
    assert run == REQUIRED | {"python": PYTHON}
    assert f"setuptools >={setuptools_version()}" in recipe["requirements"]["host"]
    command = SETUP["options.entry_points"]["console_scripts"].strip()
    assert recipe["build"]["python"]["entry_points"] == [command]


def test_easybuild():
    """The versions of the toolchain's modules are new enough for setup.cfg."""
    (path,) = (PACKAGING / "easybuild").glob("*.eb")
    recipe: dict = {}
    exec(compile(path.read_text(), path, "exec"), recipe)
    assert (recipe["name"], recipe["version"]) == ("mpidl", mpidl.__version__)
    toolchain = "{name}-{version}".format(**recipe["toolchain"])
    assert path.name == f"mpidl-{mpidl.__version__}-{toolchain}.eb"
    modules = {name.lower(): numbers(version) for name, version in recipe["dependencies"]}
    bundles = {"numpy": "scipy-bundle"}
    bundles |= dict.fromkeys(("rich", "threadpoolctl", "tomli-w"), "python-bundle-pypi")
    for name, oldest in (REQUIRED | {"python": PYTHON}).items():
        if name in bundles:
            assert bundles[name] in modules
        elif name != "tomli":  # needed for Python 3.10 only
            assert modules[name] >= numbers(oldest), name


def numbers(version):
    return tuple(map(int, version.split(".")))


def test_apptainer():
    text = (PACKAGING / "apptainer/mpidl.def").read_text()
    assert f"    Version {mpidl.__version__}\n" in text
    sections = re.findall(r"^%(\w+)$", text, re.MULTILINE)
    assert sections == ["files", "post", "environment", "runscript", "test", "labels"]
    for name in ("post", "environment", "runscript", "test"):
        script = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL)[1]
        subprocess.run(["sh", "-n", "-c", script], check=True)


@pytest.mark.parametrize("system", environments.MODULE_SYSTEMS, ids=lambda case: "-".join(case[:2]))
def test_module_files(tmp_path, system):
    """`module load` makes the command available, and `module unload` undoes all changes."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / ".venv").symlink_to(sys.prefix)
    environments.copy_module_files(tmp_path / "modules", checkout)
    script = (
        environments.use_modules(system, tmp_path / "modules")
        + """
        module -t avail mpidl 2>&1 | grep -x mpidl/.*
        module whatis mpidl 2>&1 | grep -o "Deep learning on MPI"
        module help mpidl 2>&1 | grep -o "sbatch .*"
        path=$PATH
        module load mpidl
        type -P mpidl && mpidl --version && echo "$MPIDL_VENV"
        module unload mpidl
        type -P mpidl || echo "${MPIDL_VENV-unset}"
        [ "$PATH" = "$path" ] && echo restored
    """
    )
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    result = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True)
    available = [f"mpidl/{mpidl.__version__}", "Deep learning on MPI"]
    available += [f"sbatch {checkout}/run/train.slurm"]
    loaded = [f"{checkout}/.venv/bin/mpidl", f"mpidl {mpidl.__version__}", f"{checkout}/.venv"]
    expected = [*available, *loaded, "unset", "restored"]
    assert result.stdout.splitlines() == expected, result.stderr


def test_the_readme_names_each_recipe():
    text = (PACKAGING / "README.md").read_text()
    names = set(re.findall(r"^\| `([\w/]+)` \|", text, re.MULTILINE))
    folders = {path.name for path in PACKAGING.iterdir() if path.is_dir()} - {"modulefiles"}
    assert names == folders | {"modulefiles/lua", "modulefiles/tcl"}
