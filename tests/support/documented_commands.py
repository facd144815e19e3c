"""Check that commands in the documents exist and accept their options, without running them."""

import configparser
import importlib
import re
import shlex
from pathlib import Path

import mpidl_command
from benchmarks import arguments as bench_arguments
from mpidl.cli import arguments
from mpidl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def parser_of(command):
    """Return the function that parses a command's arguments, from its module or `arguments`."""
    module = importlib.import_module(mpidl_command.load(command).__module__)
    return getattr(module, "parse", None) or getattr(arguments, command)


PARSERS = {command: parser_of(command) for command in mpidl_command.commands()}
PARSERS["benchmarks"] = bench_arguments.parse
STARTERS = {"mpirun", "srun", "sbatch"}  # their arguments are options followed by a command
# Commands that run in one process and refuse to run on several ranks.
SINGLE = {"verify", "scaling", "monitor", "report", "pack", "convert", "completion"}
# Programs of other projects, which are not checked.
EXTERNAL = {"apt-get", "source", "module", "ruff", "mypy", "git", "cd", "sudo", "docker"}
EXTERNAL |= {"export", "squeue", "cat", "head", "ls", "tensorboard", "mlflow", "wandb"}
# Programs in `py` are for other libraries than mpidl.
FENCES = {"", "sh", "python", "py", "toml", "json", "matlab", "{toctree}"}
PROGRAM = re.compile(r"(\./)?run/[\w.-]+|\.ci/run")


def fences(text):
    """Yield the (line number, language, content) of each fenced block."""
    for match in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.M | re.S):
        yield text[: match.start()].count("\n") + 1, match[1], match[2]


def commands(text):
    """Yield the (line number, command) of each command in a block or between backquotes."""
    for line, language, content in fences(text):
        if language in ("", "sh"):
            for i, words in enumerate(content.replace("\\\n", " ").splitlines()):
                if is_command(words.strip()):
                    yield line + 1 + i, words.strip()
    outside = re.sub(r"^```.*?^```$", lambda f: "\n" * f[0].count("\n"), text, flags=re.M | re.S)
    for match in re.finditer(r"`([^`]+)`", outside):
        words = " ".join(match[1].split())
        if is_command(words) and " " in words:
            yield outside[: match.start()].count("\n") + 1, words


def is_command(text):
    first = re.sub(r"^(\w+=\S* )+", "", text).partition(" ")[0]
    return first in STARTERS | EXTERNAL | {"python", "pip", "mpidl"} or bool(
        PROGRAM.fullmatch(first)
    )


def problem(command):
    """Return the error in a command line, or None if there is no error."""
    for part in re.split(r" *(?:&&|;|\|) *", re.sub(r"\s#.*|\s>\s\S+", "", command)):
        words = shlex.split(part)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        text = _problem(words)
        if text:
            return text
    return None


def _problem(words):
    """Return the error in the command line of one program, or None if there is no error."""
    if not words:
        return None
    first, *rest = words
    if first in STARTERS:
        while rest and not (rest[0] in ("python", "mpidl") or PROGRAM.fullmatch(rest[0])):
            if rest.pop(0) == "--wrap":
                return _problem(shlex.split(rest[0]))
        command = re.match(r"(?:python -m mpidl\.|mpidl )(\w+)", " ".join(rest))
        if first != "sbatch" and command and command[1] in SINGLE:
            return f"{command[1]} runs without {first}"
        return _problem(rest)
    if PROGRAM.fullmatch(first):
        if not (ROOT / first).is_file():
            return f"no program {first}"
        name = Path(first).name.removesuffix(".slurm")
        return _options(name, rest) if name in ("train", "sweep", "scaling") else None
    if first == "pip":
        return _extras(rest)
    if first == "mpidl" and rest[:1] in ([], ["help"], ["COMMAND"]):
        return None
    if first == "mpidl":
        return _options(rest[0], rest[1:]) if rest[0] in PARSERS else f"no command {rest[0]}"
    if first != "python":
        return None if first in EXTERNAL else f"{first} is not a known program"
    if rest[:1] == ["-m"]:
        package, _, name = rest[1].partition(".")
        if rest[1] == "benchmarks":
            return _options("benchmarks", rest[2:])
        if package != "mpidl":
            paths = [word.replace("tests.", "tests/") for word in rest if word.startswith("tests")]
            return next((f"no {path}" for path in paths if not _exists(path)), None)
        return _options(name, rest[2:]) if name in PARSERS else f"no command {rest[1]}"
    folder = rest[0].partition("/")[0] if rest and "/" in rest[0] else ""
    if folder and (ROOT / folder).is_dir() and not _exists(rest[0]):
        return f"no file {rest[0]}"
    return None


def _exists(path):
    return (ROOT / path).exists()


def _options(name, words):
    """Return the error of the command's parser for these options, or None if there is no error."""
    words = [word for word in words if not word.startswith("$")]  # the shell replaces a variable
    if not words or {"...", "--help", "--help-all"} & set(words):
        return None  # the text names the command and shows no options
    try:
        PARSERS[name](["1" if re.fullmatch("[A-Z]|%a", w) else w for w in words])  # --seed S
    except UserError as error:
        return str(error)
    return None


def _extras(words):
    """Return an error if setup.cfg lacks one of pip's extras, or None."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    groups = re.findall(r"\[([\w,]+)\]", " ".join(words))
    extras = config["options.extras_require"]
    names = [name for group in groups for name in group.split(",")]
    return next((f"no extra {name}" for name in names if name not in extras), None)


def flags():
    """Return every option of mpidl's commands and programs."""
    names = {"--help"}
    for path in (ROOT / "run").iterdir():
        names |= set(re.findall(r"--[a-z][\w-]+", path.read_text()))
    sources = [*(ROOT / "mpidl" / "cli").rglob("*.py"), ROOT / "kernels" / "build.py"]
    sources += (ROOT / "mpidl").rglob("command*.py")  # of wings
    sources += [*(ROOT / "benchmarks").rglob("*.py"), ROOT / "tests" / "backends" / "conftest.py"]
    sources += [ROOT / "tests" / "soak" / "__main__.py", *(ROOT / "examples").glob("*.py")]
    for path in sources:
        names |= set(re.findall(r"[\"'](--[a-z][\w-]+)[\"']", path.read_text()))
    counts = (ROOT / "benchmarks" / "arguments.py").read_text()  # entries (name, default, help)
    names |= {f"--{name}" for name in re.findall(r"\(\"([a-z-]+)\", \d", counts)}
    from mpidl.training.options import configuration, training_options

    return names | {training_options.flag(name) for name in configuration.DECLARED}


def variables():
    """Return every variable MPIDL_... that mpidl's programs read."""
    names = set()
    for folder in ("mpidl", "benchmarks", "run", "kernels"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".slurm", ".sh", "", ".c", ".h"):
                names |= set(re.findall(r"\bMPIDL_[A-Z_]+\b", path.read_text(errors="replace")))
    return names
