"""Test that imports go in one direction, from commands to kernels, by checking the sources."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from mpidl.wings import WINGS

PACKAGE = Path(__file__).resolve().parents[1] / "mpidl"

# The packages and top-level modules that each package or module may import. The modules TAPE of
# core are called "tape" here, because the backends, comm and data may not import them.
TAPE = ("mpidl.core.tape", "mpidl.core.op", "mpidl.core.grad")
BASE = {"startup", "errors", "text", "files", "matlab_names", "listed_folders", "side_process"}
BASE |= {"docstrings", "launcher", "lazy", "numerics", "options", "phases", "wings"}
BACKENDS = BASE | {"core", "kernels"}
OPS = BASE | {"core", "tape", "backends"}
NN = OPS | {"ops"}
SERVICES = {"comm", "ranks", "data", "report", "jobs"}
LOSSES = NN | {"nn", "data"}
EVALUATION = LOSSES | SERVICES | {"losses"}
TRAINING = EVALUATION | {"evaluation"}
INTERCHANGE = TRAINING | {"training"}
PERFORMANCE = TRAINING | {"training"}
CLI = INTERCHANGE | {"certificates", "explanations", "interchange"}
CLI |= {"performance", "published", "sweeps", "tiles", "trackers"}
MAY_IMPORT = dict.fromkeys(BASE, BASE | {"core"}) | {
    "core": set(),
    "tape": {"core"},
    "kernels": set(),
    "backends": BACKENDS,
    "ops": OPS,
    "nn": NN,
    # comm sums: it receives MPI and the guard of a job from ranks, and knows nothing of them.
    "comm": {"errors", "phases", "core", "backends"},
    "ranks": BACKENDS | {"backends", "comm"},
    "jobs": BACKENDS | {"backends", "comm", "ranks", "report"},  # dl.launch shows a run's progress
    "data": BACKENDS | {"backends"},
    "report": {"errors", "text", "files", "phases", "core", "side_process", "lazy"},
    "losses": LOSSES,
    "evaluation": EVALUATION | {"tiles"},  # predictions with tiles
    # The options of a run name its trackers and ask for its certificate.
    "training": TRAINING | {"trackers", "certificates"},
    "interchange": INTERCHANGE,
    "performance": PERFORMANCE,
    "published": INTERCHANGE | {"interchange"},
    "sweeps": TRAINING | {"training"},
    "trackers": TRAINING | {"training"},
    "certificates": TRAINING | {"training"},
    "explanations": TRAINING,
    "tiles": TRAINING,
    "cli": CLI,
}
COMMANDS = CLI | {"cli"}  # train.py, predict.py, ... and the public names of __init__.py

# Modules that may import a third-party package, except for types, and packages imported only
# inside functions.
ONLY_IN = {
    "mpi4py": ("mpidl.ranks",),
    "cupy": ("mpidl.backends.gpu", "mpidl.backends.discovery", "mpidl.comm.nccl"),
    "fsspec": ("mpidl.data.storage.store",),
}
ONLY_LATE = {"cupy", "h5py", "matplotlib", "ml_dtypes", "onnx", "rich", "safetensors", "torch"}
ONLY_LATE |= {"huggingface_hub"}
ONLY_LATE |= {"aiohttp", "asyncio", "bokeh", "fsspec", "jinja2", "ssl", "tornado", "yarl"}
ONLY_LATE |= {"mlflow", "tensorboardX", "tifffile", "wandb"}
# Modules that others import only inside functions, on ranks with a GPU. They use the wing.
GPU_ALONE = ("mpidl.data.loading.device_queue", "mpidl.training.gpu_step")
# Modules that may import these packages at the top. Other modules import them inside functions.
LATE_MODULES = (
    *(f"mpidl.report.live.{name}" for name in ("figures", "page", "ranks_panel", "server")),
    *(f"mpidl.data.storage.{name}" for name in ("hdf5_rows", "objects", "retries", "store")),
)
EARLY, LATE, TYPING = "when imported", "when called", "for a type checker"


def read_package():
    """Return {dotted name: source} of the modules of the package.

    The stub of a lazy package is the module "__init__" in it.
    """
    texts = {}
    for path in sorted(PACKAGE.rglob("*.py*")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if path.suffix == ".py" and parts[-1] == "__init__":
            parts = parts[:-1]
        if path.suffix in (".py", ".pyi"):
            texts[".".join(parts)] = path.read_text()
    return texts


def imports_of(module, text, modules):
    """Return (imported module, line, time of the import) for each import in the text.

    `from mpidl.core import fold` imports mpidl.core.fold; `from mpidl import World` imports mpidl.
    `from mpidl.comm.world import World` imports mpidl.comm and mpidl.comm.world.
    """
    is_package = any(name.startswith(module + ".") for name in modules)

    def names(node):
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = node.module or ""
        if node.level:
            up = module.split(".")[: len(module.split(".")) - node.level + is_package]
            base = ".".join([*up, base] if base else up)
        targets = [f"{base}.{alias.name}" for alias in node.names]
        sources = [target if target in modules else base for target in targets]
        if base in sources and base != "mpidl" and f"{base}.__init__" in modules:
            imported = {"*", *(alias.name for alias in node.names)}
            for line, _ in import_nodes(modules[f"{base}.__init__"]):
                sources += [line.module for alias in line.names if alias.name in imported]
        return sources

    return [(name, node.lineno, time) for node, time in import_nodes(text) for name in names(node)]


@functools.cache  # most tests change only one or two lines of the package
def import_nodes(text):
    """Return (import statement, time) for each import in a text. The times are:

    EARLY: when the module is imported; LATE: when a function runs; TYPING: only for a type checker.
    """

    def walk(node, time):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, time
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from walk(child, TYPING)
            else:
                yield from walk(child, LATE if inner and time == EARLY else time)

    return list(walk(ast.parse(text), EARLY))


def group(module):
    """Return the key of a module in MAY_IMPORT."""
    return "tape" if module in TAPE else (module.split(".") + [""])[1]


def wing_of(module):
    """Return the wing that a module belongs to, or None."""
    parts = module.split(".")[1:]
    wings = (".".join(parts[:depth]) for depth in (1, 2))
    return next((wing for wing in wings if wing in WINGS), None)


def violations(texts):
    """Return a line for each import that breaks a rule. `texts` is {dotted module name: source}."""
    errors, graph = [], {}
    for module, text in texts.items():
        package = group(module)
        # such as mpidl.report.__main__, which is python -m mpidl.report
        is_command = module.endswith((".__main__", ".command", ".command_probe"))
        allowed = (COMMANDS if is_command else MAY_IMPORT.get(package, COMMANDS)) | {package}
        for name, line, time in imports_of(module, text, texts):
            position, top = f"{module}:{line} imports {name}", name.split(".")[0]
            if top == "mpidl":
                target = group(name)
                if target == "" and package in MAY_IMPORT:
                    errors.append(f"{position}: only commands may import public names")
                elif target not in allowed and target != "":
                    errors.append(f"{position}: {package or 'mpidl'} may not import {target}")
                if time != TYPING and name != module:  # includes imports inside functions
                    graph.setdefault(module, set()).add(name)
            if top in ONLY_IN and time != TYPING and not module.startswith(ONLY_IN[top]):
                errors.append(f"{position}: only {' and '.join(ONLY_IN[top])} may")
            if time == EARLY and wing_of(name) not in (None, wing_of(module)):
                # the names of a stub are imported when used
                if not module.endswith(".__init__") and module not in GPU_ALONE:
                    errors.append(f"{position}: a wing, only inside a function")
            is_late = top in ONLY_LATE or name in LATE_MODULES + GPU_ALONE
            if is_late and time == EARLY and module not in LATE_MODULES + GPU_ALONE:
                errors.append(f"{position}: only inside a function")
    return errors + [f"cycle: {' -> '.join(cycle)}" for cycle in cycles(graph)]


def cycles(graph):
    """Return cycles of a graph {node: set of nodes}, found by a traversal in sorted order."""
    paths, visited, path = [], set(), []

    def visit(node):
        if node in path:
            paths.append([*path[path.index(node) :], node])
        elif node not in visited:
            path.append(node)
            for following in sorted(graph.get(node, ())):
                visit(following)
            visited.add(path.pop())

    for node in sorted(graph):
        visit(node)
    return paths


def test_the_package_follows_the_rules():
    texts = read_package()
    assert {"mpidl.core.fold", "mpidl.comm", "mpidl.ops.conv"} <= set(texts)
    assert violations(texts) == []


BROKEN = {
    "ops may not import comm": {
        "mpidl.ops.bad": "def f():\n    from mpidl.comm.world import World\n"
    },
    "backends may not import tape": {"mpidl.backends.bad": "import mpidl.core.tape\n"},
    "core may not import tape": {"mpidl.core.fold": "import mpidl.core.tape\n"},
    "core may not import errors": {"mpidl.core.fold": "from mpidl.errors import UserError\n"},
    "core may not import phases": {"mpidl.core.spans": "from mpidl import phases\n"},
    "tape may not import backends": {"mpidl.core.tape": "from mpidl import backends\n"},
    "data may not import comm": {"mpidl.data.bad": "from ..comm import world\n"},
    "nn may not import training": {"mpidl.nn.bad": "from mpidl import training\n"},
    "core may not import ops": {"mpidl.core.fold": "from mpidl.ops import conv2d\n"},
    "cli may not import train": {"mpidl.cli.bad": "import mpidl.train\n"},
    "only commands may import public names": {"mpidl.ops.bad": "from mpidl import World\n"},
    "comm may not import ranks": {
        "mpidl.comm.bad": "def f():\n    from mpidl.ranks import watchdog\n"
    },
    "comm may not import files": {"mpidl.comm.bad": "from mpidl.files import write_whole\n"},
    "ranks may not import report": {"mpidl.ranks.bad": "from mpidl.report import status\n"},
    "only mpidl.ranks may": {"mpidl.comm.bad": "def f():\n    from mpi4py import MPI\n"},
    "only mpidl.backends.gpu": {"mpidl.ops.bad": "def f():\n    import cupy\n"},
    "imports h5py: only inside": {
        "mpidl.data.bad": "try:\n    import h5py\nexcept ImportError: 0\n"
    },
    "imports mpidl.report.live.server: only inside": {
        "mpidl.cli.bad": "from mpidl.report.live import server\n"
    },
    "mpidl.comm.transport -> mpidl.comm.world": {  # through the name of a lazy package
        "mpidl.comm.transport": "from mpidl.comm.world import World\n"
    },
    "cycle: mpidl.nn.a -> mpidl.nn.b -> mpidl.nn.a": {
        "mpidl.nn.a": "import mpidl.nn.b\n",
        "mpidl.nn.b": "from mpidl.nn.a import x\n",
    },
    "cycle: mpidl.data.a -> mpidl.data.b -> mpidl.data.a": {
        "mpidl.data.a": "import mpidl.data.b\n",
        "mpidl.data.b": "def f():\n    from mpidl.data.a import x\n",
    },
}


@pytest.mark.parametrize("expected", BROKEN)
def test_a_broken_rule_is_found(expected):
    """Negative control: a module that breaks a rule is found among the real modules."""
    lines = violations(read_package() | BROKEN[expected])
    assert any(expected in line for line in lines), lines


def test_an_import_of_a_wing_by_another_room_is_found():
    """Negative control: the core rooms import wings only inside functions."""
    early = "".join(f"import mpidl.{wing}\n" for wing in WINGS)
    late = "def f():\n    import mpidl.performance.command\n"
    lines = violations(read_package() | {"mpidl.cli.bad": early, "mpidl.cli.good": late})
    expected = [f"imports mpidl.{wing}: a wing, only inside a function" for wing in WINGS]
    imports = [line.partition(" ")[2] for line in lines if ": a wing, only inside" in line]
    assert imports == expected and not any("mpidl.cli.good" in line for line in lines)


def test_imports_for_typing_and_inside_functions_are_allowed():
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import b\n"
    text += "def f():\n    import h5py, rich\n"
    allowed = {"mpidl.training.a": text, "mpidl.training.b": "from mpidl.training import a\n"}
    assert violations(read_package() | allowed) == []


OPTIONAL = {
    *("mpidl.backends.gpu.launching", "mpidl.comm.nccl", "mpidl.data.storage.store"),
    *("mpidl.data.formats.mat", "mpidl.data.formats.packed", "mpidl.data.formats.table"),
    *("mpidl.report.plots", "mpidl.report.progress.notebook", "mpidl.training.accumulation"),
    *("mpidl.training.batchnorm_population", "mpidl.training.notebook_hook"),
    *("mpidl.trackers", "mpidl.training.timeline", "mpidl.training.whitening"),
}


def test_a_plain_training_loads_no_module_of_an_option_that_is_not_set(tmp_path):
    """A training with an option loads its modules; see the negative control in the same run."""
    program = f"""
import sys
from mpidl.cli.train import main

options = ["--max-iterations", "1", "--device", "cpu", "--plots", "none", "--verbose", "off"]
main([*options, "--out", {str(tmp_path / "plain")!r}])
print("LOADED", *sorted({OPTIONAL!r} & set(sys.modules)), "END")
main([*options, "--timeline", "1", "--accumulate", "2", "--out", {str(tmp_path / "extended")!r}])
print("LOADED", *sorted({OPTIONAL!r} & set(sys.modules)), "END")
"""
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    plain, extended = (line.split()[1:-1] for line in output.splitlines() if "LOADED" in line)
    assert plain == []
    assert extended == ["mpidl.training.accumulation", "mpidl.training.timeline"]
