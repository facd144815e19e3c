"""Test that the documents are correct: Python blocks run; commands, options, names and links exist.

The Python blocks of a document share a namespace. A small data set replaces the digits, `photos` is
a small folder of images, and runs of more than MOST_EPOCHS epochs end after one iteration.
"""

import ast
import dataclasses
import json
import re
from pathlib import Path

import documented_commands
import numpy as np
import pytest
import suite
from image_sets import grow

import mpidl as dl
from mpidl.data.storage import settings
from mpidl.sweeps import sweep_file
from mpidl.training.options import configuration

ROOT = documented_commands.ROOT
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "kernels" / "README.md"]
PAGES += [*sorted(ROOT.glob("mpidl/*/README.md")), ROOT / "tests" / "README.md"]
MOST_EPOCHS = 5
# Options of other programs that the documents mention.
FOREIGN = {
    *("--nodes", "--ntasks-per-node", "--cpus-per-task", "--gpus-per-node", "--gpus-per-task"),
    *("--shm-size", "--array", "--constraint", "--cpu-bind", "--map-by", "--bind-to"),
    *("--use-hwthread-cpus", "--ntasks", "--logdir", "--backend-store-uri", "--no-kill"),
    *("--with-ft", "--nproc-per-node"),
}


def blocks(path):
    """Return (number of the first line, source) of each Python block in a document."""
    fences = documented_commands.fences(path.read_text())
    return [(line, source) for line, language, source in fences if language == "python"]


def swallowed_code(source):
    """Yield comments of a Python block that end in a statement, as after lines were joined.

    A comment may consist of code, or name a call after a word such as "for".
    """
    for comment in re.findall(r"(?:^|\s)#\s+(.*)", source):
        words = comment.split(" ")
        for i in range(1, len(words)):
            follows_prose = re.fullmatch("[a-z-]+[.,;]?", words[i - 1]) is not None
            if follows_prose and words[i - 1] not in ("for", "of", "or", "with", "as", "by", "in"):
                if is_statement(" ".join(words[i:])):
                    yield comment
                    break


def is_statement(text):
    """Return whether a text is an assignment, perhaps cut off after "=", an import or a call."""
    try:
        (node,) = ast.parse(re.sub("(?<= =)$", " 0", text)).body
    except (SyntaxError, ValueError):
        return False
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return is_call or isinstance(node, ast.Assign | ast.AugAssign | ast.Import | ast.ImportFrom)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_no_comment_swallows_code(path):
    assert [comment for _, source in blocks(path) for comment in swallowed_code(source)] == []


def test_swallowed_code_is_found():
    """Negative control: joined lines are found, but not comments about code."""
    lines = [
        "print(loss)      # loss of each mini-batch print(accuracy)",
        "# mean of each epoch print(history.iteration, history.loss)",
        "counts = world.allgather(1)   # the share of each rank largest =",
        "# the packages import mpidl as dl",
        "net = f()        # a network net.parameters = arrays",
    ]
    assert [len(list(swallowed_code(line))) for line in lines] == [1] * len(lines)
    fine = [
        'net = f()        # pretrained = dl.load_onnx("alexnet.onnx")',
        "# also for dl.TrainingOptions(loss=modest); in a notebook: dl.launch(size, ranks=4)",
        "images           # (len(indices), *image_shape)",
        "# print(accuracy)",
    ]
    assert [comment for line in fine for comment in swallowed_code(line)] == []


def test_the_white_paper_is_quoted_correctly():
    """The paper has 96,000 images in 55 classes, and 95 % is the accuracy of a mini-batch."""
    cells = json.loads((ROOT / "docs" / "notebooks" / "white_paper.ipynb").read_text())["cells"]
    texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
    paper = [" ".join(text.split()) for text in texts if "paper" in text]
    assert any("The paper uses 96,000 images in 55 classes." in text for text in paper)
    goals = [text for text in paper if "the time until" in text]
    assert len(goals) == 2 and all(
        "the time until the accuracy of the training mini-batch is 95 %" in text for text in goals
    )
    assert not any("five kinds" in text or "to 95 % of the accuracy" in text for text in paper)


def without_precision(text):
    """Return the paragraphs and table rows that compare times with PyTorch, but name no dtype."""
    blocks = re.split(r"\n\n|\n(?=\|)", text)
    speed = re.compile(r"of PyTorch's time|than PyTorch|PyTorch's \w*\s?time")
    return [block for block in blocks if speed.search(block) and "float32" not in block]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_comparisons_with_pytorch_name_the_precision(path):
    assert without_precision(path.read_text()) == []


def test_a_comparison_without_precision_is_found():
    """Negative control: a time relative to PyTorch's needs a precision in its paragraph or row."""
    text = "In float32.\n\n| a |\n| a step takes half of PyTorch's time |\n| float32 |"
    assert without_precision(text) == ["| a step takes half of PyTorch's time |"]
    assert without_precision(text.replace("a step", "in float32, a step")) == []


def small_digits(world=None):
    pixels = np.arange(80 * 784).reshape(80, 28, 28) * 31 % 251
    return dl.ArrayDatastore(pixels.astype(np.uint8), np.arange(80) % 10)


def short_training(net, images, options=None, *, train=dl.train, **keywords):
    options = options or dl.TrainingOptions()
    if options.epochs > MOST_EPOCHS:
        options = dataclasses.replace(options, max_iterations=1)
    return train(net, images, options, **keywords)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=[pytest.mark.slow_on_ranks] * (p.name != "guide.md"))
        for p in DOCUMENTS
        if blocks(p)
    ],
    ids=lambda p: p.name,
)
def test_python_blocks_run(path, world, tmp_path, monkeypatch, without_plots):
    folder = Path(world.broadcast(str(tmp_path)))  # one folder for all ranks
    if world.rank == 0:
        grow(folder / "photos", per_class=10, shape=(3, 8, 8))
    world.barrier()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(dl.data, "digits", small_digits)
    monkeypatch.setattr(dl, "train", short_training)
    # At the end, undo the documents' changes to the settings of object stores.
    monkeypatch.setattr(settings.ACCESS, "settings", settings.current())
    if world.size > 1:  # dl.launch cannot start ranks from a rank

        def launch(function, *arguments, ranks):
            return function(world, *arguments)

        monkeypatch.setattr(dl, "launch", launch)
    namespace = {"__name__": "__main__"}
    for line, source in blocks(path):
        # Empty lines before the block: a traceback then names the document and its line.
        exec(compile("\n" * line + source, str(path), "exec"), namespace)
    world.barrier()


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_blocks_are_in_languages_that_are_checked(path):
    languages = {language for _, language, _ in documented_commands.fences(path.read_text())}
    assert languages <= documented_commands.FENCES


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(path):
    problems = [
        f"{path.name}:{line}: {command}: {problem}"
        for line, command in documented_commands.commands(path.read_text())
        if (problem := documented_commands.problem(command))
    ]
    assert problems == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("./run/tran --epochs 3", "no program ./run/tran"),
        ("./run/train --epoch 3  # a comment", "unknown option --epoch: did you mean --epochs"),
        ("mpirun -n 4 python -m mpidl.train --epochs many", "--epochs must be a whole number"),
        ("python -m mpidl.tran", "no command mpidl.tran"),
        ("mpirun -n 4 mpidl tran", "no command tran"),
        ("MPIDL_CPU=numpy python -m mpidl.predict --data a", "arguments are required: --model"),
        ("python examples/none.py", "no file examples/none.py"),
        ("sbatch --nodes 4 run/train.slurm --dat /a", "unknown option --dat"),
        ("sbatch --array=1-8 run/sweep.slurm a.toml --trails 3", "unknown option --trails"),
        ("sbatch --wrap 'python -m mpidl.verify --rank 2'", "unknown option --rank"),
        ("srun --ntasks 4 python -m mpidl.verify --ranks 4", "verify runs without srun"),
        ("mpirun -n 2 mpidl report runs/a", "report runs without mpirun"),
        ("pip install '.[mpich,none]'", "no extra none"),
    ],
)
def test_a_wrong_command_is_found(command, problem):
    """Negative control: a wrong command in a document is reported."""
    assert documented_commands.is_command(command)
    assert problem in documented_commands.problem(command)


def test_options_and_variables_exist():
    flags, variables = documented_commands.flags() | FOREIGN, documented_commands.variables()
    flags |= {flag for action in suite.parser()._actions for flag in action.option_strings}
    unknown = []
    for path in PAGES:
        text = path.read_text()
        inline = re.findall(r"`([^`\n]+)`", text)
        options = {flag for words in inline for flag in re.findall(r"(?<!\S)--[a-z][\w-]+", words)}
        names = set(re.findall(r"\bMPIDL_[A-Z_]+\b", text))
        unknown += [f"{path.name}: {name}" for name in sorted(options - flags | names - variables)]
    assert unknown == []


def test_files_of_options_can_be_read(tmp_path):
    for path in PAGES:
        for line, language, source in documented_commands.fences(path.read_text()):
            if language == "toml":
                file = tmp_path / f"{path.stem}-{line}.toml"
                file.write_text(source)
                if any(f"[{table}]" in source for table in sweep_file.TABLES):
                    sweep_file.read(file)
                else:
                    configuration.resolve({}, config=str(file))


def test_public_names_exist():
    """Every `dl.name` in a document exists in mpidl."""
    unknown = []
    for path in PAGES:
        for name in sorted(set(re.findall(r"\bdl((?:\.[A-Za-z_]\w*)+)", path.read_text()))):
            target = dl
            for part in name[1:].split("."):
                target = getattr(target, part, None)
                if not isinstance(target, type(dl)):
                    break  # attributes of classes and functions are not checked
            if target is None:
                unknown.append(f"{path.name}: dl{name}")
    assert unknown == []


def test_every_row_of_the_matlab_tables_is_complete():
    rows = [line for line in (ROOT / "docs" / "matlab.md").read_text().splitlines() if "|" in line]
    cells = [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]
    assert [row for row in cells if not row[0] or not row[-1]] == [] and len(cells) > 60


def test_linked_files_exist():
    """Linked files exist. run/site checks the links to API pages."""
    missing = [
        f"{path.name}: {target}"
        for path in [*PAGES, ROOT / "CHANGELOG.md"]
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text())
        if not (target.startswith("api/") or (path.parent / target).exists())
    ]
    assert missing == []
