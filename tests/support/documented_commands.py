"""The commands that the documents show, checked without being run: they exist, and take these
options."""

import configparser
import re
import shlex
from pathlib import Path

from benchmarks import arguments as bench_arguments
from mpidl.cli import arguments, pack
from mpidl.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {
    "train": arguments.train,
    "predict": arguments.predict,
    "verify": arguments.verify,
    "info": arguments.info,
    "pack": pack.parse,
    "benchmarks": bench_arguments.parse,
}
STARTERS = {"mpirun", "srun", "sbatch"}  # options, then a command
# What is not ours, and taken as it is.
OTHERS = {"apt-get", "source", "module", "ruff", "mypy", "git", "cd", "sudo", "docker"}
FENCES = {"", "sh", "python", "toml", "json"}
OURS = re.compile(r"(\./)?run/[\w.-]+|\.ci/run")


def fences(text):
    """(line number, language, content) of each fenced block."""
    for found in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.M | re.S):
        yield text[: found.start()].count("\n") + 1, found[1], found[2]


def commands(text):
    """(line number, command) of each command in the blocks and the code between back quotes."""
    for line, language, content in fences(text):
        if language in ("", "sh"):
            for i, words in enumerate(content.replace("\\\n", " ").splitlines()):
                if is_command(words.strip()):
                    yield line + 1 + i, words.strip()
    outside = re.sub(r"^```.*?^```$", lambda f: "\n" * f[0].count("\n"), text, flags=re.M | re.S)
    for found in re.finditer(r"`([^`]+)`", outside):
        words = " ".join(found[1].split())
        if is_command(words) and " " in words:
            yield outside[: found.start()].count("\n") + 1, words


def is_command(text):
    first = re.sub(r"^(\w+=\S* )+", "", text).partition(" ")[0]
    return first in STARTERS | OTHERS | {"python", "pip"} or bool(OURS.fullmatch(first))


def problem(command):
    """What is wrong with a command, or None."""
    for part in re.split(r" *(?:&&|;|\|) *", re.sub(r"\s#.*", "", command)):
        words = shlex.split(part)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words.pop(0)
        wrong = _wrong(words) if words else None
        if wrong:
            return wrong
    return None


def _wrong(words):
    first, *rest = words
    if first in STARTERS:
        while rest and not (rest[0] == "python" or OURS.fullmatch(rest[0])):
            rest.pop(0)
        return _wrong(rest) if rest else None
    if OURS.fullmatch(first):
        if not (ROOT / first).is_file():
            return f"no program {first}"
        return _options("train", rest) if Path(first).name in ("train", "train.slurm") else None
    if first == "pip":
        return _extras(rest)
    if first != "python":
        return None if first in OTHERS else f"{first} is not a known program"
    if rest[:1] == ["-m"]:
        package, _, name = rest[1].partition(".")
        if rest[1] == "benchmarks":
            return _options("benchmarks", rest[2:])
        if package != "mpidl":
            return next((f"no {w}" for w in rest if w.startswith("tests") and not _is(w)), None)
        return _options(name, rest[2:]) if name in PARSERS else f"no command {rest[1]}"
    folder = rest[0].partition("/")[0] if rest and "/" in rest[0] else ""
    return (
        f"no file {rest[0]}" if (ROOT / folder).is_dir() and folder and not _is(rest[0]) else None
    )


def _is(path):
    return (ROOT / path).exists()


def _options(name, words):
    if not words or "..." in words or "--help" in words:
        return None  # the command's name, and no more
    try:
        PARSERS[name](["1" if re.fullmatch("[A-Z]", w) else w for w in words])  # --seed S
    except UserError as error:
        return str(error)
    return None


def _extras(words):
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = [name for w in words for name in re.findall(r"\[([\w,]+)\]", w)]
    known = config["options.extras_require"]
    return next(
        (f"no extra {n}" for group in named for n in group.split(",") if n not in known), None
    )


def flags():
    """Every option that a command or a program of ours has."""
    found = {"--help"}
    for path in (ROOT / "run").iterdir():
        found |= set(re.findall(r"--[a-z][\w-]+", path.read_text()))
    sources = [*(ROOT / "mpidl" / "cli").rglob("*.py"), ROOT / "kernels" / "build.py"]
    sources += [*(ROOT / "benchmarks").rglob("*.py"), ROOT / "tests" / "backends" / "conftest.py"]
    for path in sources:
        found |= set(re.findall(r"[\"'](--[a-z][\w-]+)[\"']", path.read_text()))
    from mpidl.training.options import configuration, training_options

    return found | {training_options.flag(name) for name in configuration.RULES}


def variables():
    """Every MPIDL_... variable that a program of ours reads."""
    found = set()
    for folder in ("mpidl", "benchmarks", "run", "kernels"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix in (".py", ".slurm", ".sh", "", ".c", ".h"):
                found |= set(re.findall(r"\bMPIDL_[A-Z_]+\b", path.read_text(errors="replace")))
    return found
