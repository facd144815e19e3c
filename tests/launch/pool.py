"""Run many commands in one job under mpirun, so that each test does not have to start a job.

A pool is one job `mpirun -n N python pooled.py FOLDER` that runs until the tests end. Its ranks
execute the commands that the tests send. Tests of signals, exit handlers or environment variables
that are read at the start need a separate process, which launcher.mpirun starts.
"""

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import launcher
import pytest

SERVER = Path(__file__).with_name("pooled.py")
_pools = {}  # {ranks: Pool}


def run(ranks, *args, env=None, check=None, cwd=None):
    """Run `python args...` on each rank of a pool, and return a Result like launcher.mpirun.

    Parameters
    ----------
    ranks : int or None
        Number of ranks. With None or 1, the pool is a process without mpirun.
    env : dict, optional
        Environment variables that the command reads while it runs. Variables that a process reads
        only when it starts keep the values that the pool started with.
    """
    words = [str(word) for word in args]
    ranks = None if ranks == 1 else ranks  # without mpirun, there is one process fewer to start
    pool = _pools.get(ranks)
    if pool is None or not pool.is_up():
        pool = _pools[ranks] = Pool(ranks)
    result = pool.run(words, env or {}, str(cwd or Path.cwd()))
    if check is not None and result.returncode != check:
        text = launcher.format_output(["pool of", ranks, *words], result.stdout, result.stderr)
        pytest.fail(f"exit code {result.returncode}, expected {check}: {text}")
    return result


class Pool:
    def __init__(self, ranks):
        self.size, self.count = ranks or 1, 0
        self.folder = Path(tempfile.mkdtemp(prefix="mpidl-pool-"))
        for rank in range(self.size):
            os.mkfifo(self.folder / f"commands-{rank}")
        places = [str(Path(__file__).with_name("no_plots")), str(launcher.ROOT)]
        env = {"PYTHONPATH": os.pathsep.join(places)}
        self.log = open(self.folder / "log", "w+")
        streams = {"stdout": self.log, "stderr": self.log}
        self.job = launcher.start(ranks, SERVER, self.folder, env=env, **streams)
        # Also open the pipes for reading, so that opening does not wait for ranks to start.
        paths = [self.folder / f"commands-{rank}" for rank in range(self.size)]
        self.pipes = [os.fdopen(os.open(path, os.O_RDWR), "w") for path in paths]
        atexit.register(self.close)

    def is_up(self):
        return self.job.poll() is None

    def run(self, words, env, cwd):
        number, self.count = self.count, self.count + 1
        for pipe in self.pipes:
            pipe.write(json.dumps([number, words, env, cwd]) + "\n")
            pipe.flush()
        paths = [self.folder / f"result-{number}-{rank}" for rank in range(self.size)]
        try:
            while not all(path.exists() for path in paths) and self.is_up():
                time.sleep(0.005)
        except pytest.fail.Exception as expired:
            self.job.print_stacks()
            self._fail(expired, words)
        if not all(path.exists() for path in paths):
            self._fail(f"the job ended with {self.job.returncode}", words)
        results = [json.loads(path.read_text()) for path in paths]
        codes, outputs, errors = zip(*results, strict=True)
        return launcher.Result(max(codes), "".join(outputs), "".join(errors))

    def _fail(self, reason, words):
        """End the job, and fail the test with the output of the ranks."""
        self.log.seek(0)
        text = launcher.format_output(words, "", self.log.read())
        self.close()
        pytest.fail(f"{reason}\n{text}")

    def close(self):
        launcher.kill(self.job)
        for file in (*self.pipes, self.log):
            with contextlib.suppress(BrokenPipeError):
                file.close()
        shutil.rmtree(self.folder, ignore_errors=True)
