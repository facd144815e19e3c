"""Write the pages of the API reference: every public name, grouped by the package that defines it.

The pages are written before Sphinx looks for its sources. A new public name needs no edit here.
`tests/test_docstrings.py` checks the docstrings of the same names.
"""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parents[1]


class Group(NamedTuple):
    """A page of the reference: its title, a summary, and the modules of its public names."""

    title: str
    summary: str
    modules: tuple
    has_methods: bool = True


GROUPS = {
    "training": Group(
        "Training",
        "Train a network, and observe or change a run.",
        ("mpidl.training", "mpidl.sweeps"),
    ),
    "networks": Group(
        "Networks",
        "Build, inspect, edit and store networks.",
        ("mpidl.nn", "mpidl.training.files.model_file"),
    ),
    "layers": Group(
        "Layers",
        "The layers of a network. Each layer is a dataclass whose fields are its options.",
        ("mpidl.nn.layers",),
        has_methods=False,
    ),
    "zoo": Group(
        "Named networks",
        "Functions that build the networks in MATLAB's documents and in torchvision.",
        ("mpidl.nn.zoo",),
    ),
    "ops": Group(
        "Ops",
        "Differentiable functions of blocked values, for custom losses, layers and loops.",
        ("mpidl.ops",),
    ),
    "differentiation": Group(
        "Differentiation and values",
        "Gradients, custom ops, and values of a mini-batch that is divided among the ranks.",
        ("mpidl.core", "mpidl.backends"),
    ),
    "optimizers": Group(
        "Optimizers",
        "Solvers, and the transforms for built-in and custom solvers.",
        ("mpidl.training.optimizers",),
    ),
    "data": Group(
        "Data",
        "Data sets, preprocessing, augmentation and mini-batches.",
        ("mpidl.data",),
    ),
    "evaluation": Group(
        "Evaluation and prediction",
        "Scores, classes, activations, accuracy and errors, computed on all ranks.",
        ("mpidl.evaluation", "mpidl.losses"),
    ),
    "ranks": Group(
        "Ranks",
        "The ranks of a job, their sums and messages, and ranks started in a notebook.",
        ("mpidl.comm", "mpidl.ranks", "mpidl.jobs"),
    ),
    "exchange": Group(
        "Files of other libraries",
        "Weights and networks as safetensors and ONNX.",
        ("mpidl.interchange",),
    ),
    "errors": Group("Errors", "The exceptions that mpidl raises.", ("mpidl.errors",)),
    "results": Group("Results", "Records of runs, and functions that read them.", ("mpidl",)),
}
# The modules through which users access names, in the order of lookup.
PUBLIC = ("mpidl", "mpidl.data", "mpidl.nn", "mpidl.nn.zoo", "mpidl.keyed")
PUBLIC += ("mpidl.training.optimizers",)
# Classes of the objects that hooks and output functions receive.
RECEIVED = {
    "mpidl.training.run": ("Run",),
    "mpidl.training.steps": ("StepInfo", "StepResult"),
    "mpidl.training.progress": ("EpochSummary", "Position", "Progress", "Result"),
}


class PublicName(NamedTuple):
    """A public function or class, and the dotted name by which users access it."""

    path: str
    target: object

    @property
    def is_class(self):
        return isinstance(self.target, type)


def public_names():
    """Return every public function and class of mpidl once, with its shortest name."""
    names = {}
    for module_name in PUBLIC:
        module = pkgutil.resolve_name(module_name)  # `mpidl.keyed` is an attribute
        for name in getattr(module, "__all__", None) or sorted(vars(module)):
            target = getattr(module, name)
            is_public = isinstance(target, type) or inspect.isfunction(target)
            if is_public and not name.startswith("_") and target.__module__.startswith("mpidl"):
                names.setdefault(id(target), PublicName(f"{module_name}.{name}", target))
    for module_name, received in RECEIVED.items():
        module = importlib.import_module(module_name)
        for name in received:
            path = f"{module_name}.{name}"
            names.setdefault(id(getattr(module, name)), PublicName(path, getattr(module, name)))
    return list(names.values())


def group_of(name):
    """Return the key of the name's group: the group with the longest matching module."""
    origin = name.target.__module__ + "."
    return max(
        (len(module), key)
        for key, group in GROUPS.items()
        for module in group.modules
        if origin.startswith(module + ".")
    )[1]


def summary_of(target):
    """Return the first sentence of a docstring, on one line."""
    paragraph = (inspect.getdoc(target) or "").partition("\n\n")[0]
    return re.sub(r"([*|])", r"\\\1", " ".join(paragraph.split()))


def own_methods(name):
    """Return the public methods and properties of a class in the order of the source.

    Methods of a public base class are documented only with the base class.
    """
    members = {}
    for base in name.target.__mro__:
        if not base.__module__.startswith("mpidl") or (members and base.__name__ in BASES):
            continue
        for attribute, member in vars(base).items():
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            is_own = inspect.isfunction(function) and not function.__name__.startswith("_")
            if is_own and not attribute.startswith("_"):
                members.setdefault(attribute, member)
    return list(members)


BASES = {"Layer", "Weighted", "Optimizer", "Solver", "Transform", "Datastore"}


def page(group, names):
    """Return the text of a page in Markdown."""
    lines = [f"# {group.title}", "", group.summary, "", "| name | |", "|---|---|"]
    for name in names:
        kind = "class" if name.is_class else "func"
        written = name.path.replace("mpidl", "dl", 1)
        role = f"{{py:{kind}}}`{written} <{name.path}>`"
        lines.append(f"| {role} | {summary_of(name.target)} |")
    for name in names:
        lines += ["", "```{eval-rst}"]
        lines += [f".. auto{'class' if name.is_class else 'function'}:: {name.path}"]
        if name.is_class and (group.has_methods or name.target.__name__ in BASES):
            methods = own_methods(name)
            if methods:
                lines += [f"   :members: {', '.join(methods)}", "   :inherited-members:"]
        lines += ["```"]
    return "\n".join(lines) + "\n"


def pages():
    """Return {path in docs/: text} of all pages, including the index."""
    members = {key: [] for key in GROUPS}
    for name in public_names():
        members[group_of(name)].append(name)
    texts = {}
    rows = ["# API reference", "", "Programs write `import mpidl as dl`; the names follow.", ""]
    rows += ["| page | content |", "|---|---|"]
    for key, group in GROUPS.items():
        names = sorted(members[key], key=lambda name: (name.path.count("."), name.path.lower()))
        if names:
            texts[f"api/{key}.md"] = page(group, names)
            rows.append(f"| [{group.title}]({key}.md) | {group.summary} |")
    rows += ["", "```{toctree}", ":hidden:", ""]
    rows += [Path(path).stem for path in texts] + ["```"]
    texts["api/index.md"] = "\n".join(rows) + "\n"
    return texts


def write(app):
    """Write the pages that have changed, and remove the pages of groups that no longer exist."""
    texts = pages()
    folder = DOCS / "api"
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.md"):
        if f"api/{path.name}" not in texts:
            path.unlink()
    for name, text in texts.items():
        path = DOCS / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def escape_stars(app, what, name, target, options, lines):
    """Escape stars and bars outside backticks, because `(n, *shape)` is not emphasis."""
    for i, line in enumerate(lines):
        if not re.match(r"\*{1,2}\w+( :|$)", line):  # numpydoc escapes the names of parameters
            parts = re.split(r"(`[^`]*`)", line)
            parts[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in parts[::2]]
            lines[i] = "".join(parts)


def setup(app):
    app.connect("builder-inited", write)
    app.connect("autodoc-process-docstring", escape_stars, priority=400)  # before numpydoc
    return {"parallel_read_safe": True, "parallel_write_safe": True}
