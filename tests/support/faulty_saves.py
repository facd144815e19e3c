"""Save checkpoints while a system call fails or kills the process, which preloads `faulty_calls`.

The arguments are a folder, the name of a kind of save, and the names of faults. For saves on a
small file system, the arguments are a folder and "disk". Each system call of the save fails once
with each error, or kills a child once (KILL). If the name of a fault begins with "lasting-", all
later calls fail, too. The result is a line of JSON.
"""

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import faulty_calls
import numpy as np

from mpidl.errors import UserError
from mpidl.training.files import checkpoint, model_file
from mpidl.training.files.background import BackgroundWriter

LASTING = "lasting-"
FACTS = {"network": [], "classes": None, "input_shape": [1, 2, 2], "normalization": "none"}
NAMES = (checkpoint.CURRENT, checkpoint.PREVIOUS)


def arguments(iteration):
    """Return the tables and facts of a checkpoint."""
    weights = np.random.default_rng(iteration).standard_normal(5000).astype(np.float32)
    return {"learnables": {"a.weight": weights}}, {**FACTS, "iteration": iteration}


def save(folder, iteration=9, keep=None):
    """Write a checkpoint as a training run does."""
    path = str(folder / "metrics.jsonl")
    BackgroundWriter().save(str(folder), *arguments(iteration), path, keep=keep)


def keep(folder, iteration=9):
    """Write a checkpoint that the run keeps."""
    save(folder, iteration, keep=iteration)


def careless(folder, iteration=9):
    """Overwrite the previous checkpoint. The tests must detect this unsafe way of saving."""
    tables, facts = arguments(iteration)
    content = model_file.pack(tables, checkpoint.attributes_of(facts))
    try:
        (folder / checkpoint.CURRENT).write_bytes(content)
    except OSError as problem:
        raise UserError(f"{folder}: cannot be written") from problem


SAVES = {"save": save, "keep": keep, "careless": careless}


class Walk:
    """Saves of iteration 9 in a folder with checkpoints of iterations 7 and 8."""

    def __init__(self, folder, function):
        self.folder, self.function = folder / "run", function
        self.folder.mkdir()
        (self.folder / "metrics.jsonl").touch()
        self.generations = {}
        for iteration in (7, 8, 9, 10):
            save(self.folder, iteration)
            self.generations[iteration] = (self.folder / checkpoint.CURRENT).read_bytes()
        self.problems, self.outcomes = [], {"old": 0, "new": 0, "no current": 0}

    def reset(self):
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        (self.folder / "metrics.jsonl").touch()
        for name, iteration in zip(NAMES, (8, 7), strict=True):
            (self.folder / name).write_bytes(self.generations[iteration])

    def run(self, number, error):
        """Save with a fault. Return the system calls and the exception."""
        self.reset()
        return self.save(number, error)

    def save(self, number, error):
        return faulty_calls.calls(lambda: self.function(self.folder), self.folder, number, error)

    def look(self, label, may_leave_part):
        """Record problems of the files after a fault, and after the next successful save."""
        files = {path.name: path.read_bytes() for path in self.folder.iterdir() if path.is_file()}
        current, previous = (files.get(name) for name in NAMES)
        lines: list = []
        try:
            iteration = checkpoint.load(str(self.folder), lines.append)[1]["iteration"]
        except UserError as problem:
            self.problems.append(f"{label}: {problem}")
            return
        outcomes = {self.generations[8]: "old", self.generations[9]: "new", None: "no current"}
        if current not in outcomes or previous not in (self.generations[7], self.generations[8]):
            self.problems.append(f"{label}: torn, {iteration} is loaded")
            return
        self.outcomes[outcomes[current]] += 1
        leftover = set(files) - {*NAMES, "metrics.jsonl"}
        if iteration not in (8, 9) or len(lines) > 1 or (leftover and not may_leave_part):
            self.problems.append(f"{label}: {iteration} is loaded, {lines}, {leftover}")
        self.look_at_kept(label, iteration, may_leave_part)
        save(self.folder, 10)
        left = sorted(path.name for path in self.folder.iterdir() if path.is_file())
        if left != sorted([*NAMES, "metrics.jsonl"]):
            self.problems.append(f"{label}: {left} after the next save")
        if (self.folder / checkpoint.CURRENT).read_bytes() != self.generations[10]:
            self.problems.append(f"{label}: the next save is wrong")

    def look_at_kept(self, label, iteration, may_leave_part):
        """Record problems of the kept checkpoint, which a run that resumes from it must have."""
        folder = self.folder / checkpoint.KEEP_FOLDER
        files = {path.name: path.read_bytes() for path in folder.glob("*")}
        leftover = {name for name in files if name.endswith(".part")}
        contents = [content for name, content in files.items() if name not in leftover]
        is_due = self.function is keep and iteration == 9
        if contents not in ([self.generations[9]], [] if not is_due else None):
            self.problems.append(f"{label}: {iteration} is loaded, and {list(files)} are kept")
        if leftover and not may_leave_part:
            self.problems.append(f"{label}: {leftover}")
        keep(self.folder)  # removes what is left over
        names = [path.name for path in folder.glob("*")]
        if names != ["00000009.h5"]:
            self.problems.append(f"{label}: {names} after the next save")

    def errors(self, name):
        """Make call 1, 2, ... of a save fail. Return the calls of the last save."""
        is_lasting, error = name.startswith(LASTING), getattr(errno, name.removeprefix(LASTING))
        for number in itertools.count(1):
            names, problem = self.run(-number if is_lasting else number, error)
            if len(names) < number:
                return names
            label = f"{names[number - 1]} {number}: {name}"
            if problem is not None and not (
                isinstance(problem, UserError)
                and "cannot be written" in str(problem)
                and "\n" not in str(problem)
            ):
                self.problems.append(f"{label}: {problem!r}")
            self.look(label, may_leave_part=is_lasting)

    def kills(self):
        """Make call 1, 2, ... of a save kill a child of this process, which runs no MPI."""
        names, _ = self.run(0, 0)
        for number in range(1, len(names) + 1):
            self.reset()
            checkpoint.load(str(self.folder))  # as a resumed run does
            child = os.fork()
            if not child:
                self.save(number, faulty_calls.KILL)
                os._exit(0)
            label = f"{names[number - 1]} {number}: killed"
            if not os.WIFSIGNALED(os.waitpid(child, 0)[1]):
                self.problems.append(f"{label}: it was not killed")
            self.look(label, may_leave_part=True)
        return names


def disk(folder):
    """Save on a small file system until it is full, with space again, and while it is read-only."""
    (folder / "metrics.jsonl").touch()
    lines, iterations = [], []

    def try_to_save(iteration):
        try:
            save(folder, iteration)
        except UserError as problem:
            lines.append(str(problem))
        iterations.append(checkpoint.load(str(folder))[1]["iteration"])
        names = {path.name for path in folder.iterdir()}
        assert names <= {*NAMES, "metrics.jsonl", "filler"}, names

    for iteration in (7, 8):
        save(folder, iteration)
    size = (folder / checkpoint.CURRENT).stat().st_size
    room = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - size // 2))
    try_to_save(9)
    (folder / "filler").unlink()
    try_to_save(9)
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
    try_to_save(10)
    print(json.dumps({"lines": lines, "iterations": iterations}))


def main():
    if sys.argv[2] == "disk":
        return disk(Path(sys.argv[1]))
    walk, names = Walk(Path(sys.argv[1]), SAVES[sys.argv[2]]), []
    for fault in sys.argv[3:]:
        names = walk.kills() if fault == "KILL" else walk.errors(fault)
    print(json.dumps({"calls": names, "problems": walk.problems, **walk.outcomes}))


if __name__ == "__main__":
    main()
