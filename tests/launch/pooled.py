"""Run as a rank of a pool (see pool.py), which executes the commands that it receives."""

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

import mpidl_command
from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.ranks import failure


def serve(folder):
    """Run commands until the tests end."""
    rank, defaults = failure.launched_rank(), dict(vars(settings))
    with open(folder / f"commands-{rank}") as commands:
        for line in commands:
            number, words, env, cwd = json.loads(line)
            failure.job.transport = None  # each command gets a new world
            vars(settings).update(defaults)
            if builds.kernels() is not None:
                builds.kernels().set_threads(settings.threads)
            result = _run(words, env, cwd)
            part = folder / f"part-{rank}"
            part.write_text(json.dumps(result))
            part.rename(folder / f"result-{number}-{rank}")


def _run(words, env, cwd):
    """Run a command and return (exit code, stdout, stderr)."""
    out, err, before = io.StringIO(), io.StringIO(), dict(os.environ)
    os.environ.update(env)
    os.chdir(cwd)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = _call(words)
        except SystemExit as end:
            code = end.code or 0
    os.environ.clear()
    os.environ.update(before)
    return code, out.getvalue(), err.getvalue()


def _call(words):
    if words[0] == "-m":
        package, _, name = words[1].rpartition(".")
        sys.argv = [words[1], *words[2:]]
        is_command = package == "mpidl"  # otherwise a package such as benchmarks
        main = mpidl_command.load(name) if is_command else importlib.import_module(name).main
        failure.run(main)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
