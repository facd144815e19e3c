"""`python -m mpidl.launch`: start a training run, and restart it from its checkpoint if it dies.

This command is a single process outside the MPI job. (`dl.launch` is unrelated: it starts ranks
from a notebook.)
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpidl import startup
from mpidl.cli import arguments
from mpidl.cli.parser import DESCRIBE, Parser, typed_command
from mpidl.errors import Fault, UserError
from mpidl.files import reason
from mpidl.jobs.job_process import POLL_SECONDS, JobProcess
from mpidl.jobs.job_words import JobCommand
from mpidl.options.declaration import at_least
from mpidl.ranks import failure
from mpidl.report import status
from mpidl.training.files import checkpoint, run_folder

RESTARTS = 3
LOG = "restarts.log"  # in the folder of the run
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 120.0  # seconds before a restart


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.launch; `arguments.train` describes parameters and errors.

    Returns
    -------
    Namespace
        The attribute restarts is an int, and words is the command line of the training run.
    """
    command = typed_command("mpidl.launch")
    parser = Parser(
        "mpidl.launch",
        "Start a training run, and restart it from its last checkpoint if it dies because a rank\n"
        "or a node is lost or hangs. Write this command and -- before any command line that\n"
        "starts a training run under mpirun or srun.",
        quiet,
        usage=f"{command} [--restarts N] -- mpirun -n 4 python\n"
        "           -m mpidl.train [OPTION VALUE] ...",
        epilog="Without --out, the results are in a new folder in runs, as with mpidl.train.\n"
        f"{LOG} in that folder lists the causes. A restart leaves out hosts on which the launcher "
        "cannot start a program.\n\n"
        "exit codes: 0, 2 or 75 if the training ends with this code; 1 if it dies more often than\n"
        "--restarts allows",
    )
    parser.text(
        "--restarts",
        "N",
        f"Maximum number of restarts; 0: no restart; default: {RESTARTS}",
        type=at_least(0),
        default=RESTARTS,
    )
    if argv is DESCRIBE:
        return parser.parse(argv)
    words = sys.argv[1:] if argv is None else list(argv)
    end = words.index("--") if "--" in words else len(words)
    parsed = parser.parse(words[:end])
    parsed.words = words[end + 1 :]
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    if failure.launched_ranks() is not None:
        raise UserError(
            "launch uses one process: write mpirun after it, as in "
            f"{typed_command('mpidl.launch')} -- mpirun -n 4 python -m mpidl.train"
        )
    command = JobCommand.parse(parsed.words)
    with failure.Signals() as signals:
        return Supervisor(command, parsed.restarts, signals).run()


class Supervisor:
    """Starts a training run, and restarts it if it dies.

    Parameters
    ----------
    command : JobCommand
        The command line of the training run.
    restarts : int
        Maximum number of restarts.
    signals : Signals
        Requests to stop.

    Raises
    ------
    UserError
        If the options of the training run are invalid.
    """

    def __init__(self, command: JobCommand, restarts: int, signals: failure.Signals) -> None:
        self.command, self.restarts, self.signals = command, restarts, signals
        typed = arguments.train(command.options)
        self.options = list(command.options)
        self.out = typed.get("out") or typed.get("resume") or self._new_folder(typed)
        # With --overwrite, the folder may hold a checkpoint of another run. That run must not be
        # resumed.
        self.foreign = None if typed.get("resume") == self.out else self._checkpoint()
        self.environment, self._token = dict(os.environ), secrets.token_hex(8)

    def _new_folder(self, typed: Mapping[str, Any]) -> str:
        name = typed.get("network", "digits" if "weights" not in typed else "run")
        folder = run_folder.next_folder(name)
        self.options += ["--out", folder]
        return folder

    def run(self) -> int:
        """Train to the end, and return the exit code of the training run.

        Raises
        ------
        Fault
            If the training run dies and no restart remains.
        """
        pause = FIRST_PAUSE
        for count in range(self.restarts + 1):
            before, begin = self._checkpoint(), time.monotonic()
            words = [*self.command.start, *self._options()]
            environment = {**self.environment, startup.JOB_START: str(count + 1)}
            job = JobProcess(words, environment, self._token)
            command = self.command
            is_local = bool(command.launcher) and not command.hosts and not command.uses_srun
            code = job.wait(self.signals, is_local)
            is_refused = code == 2 and job.has_message
            is_complete = code == 0 and not self._is_unfinished()
            if is_complete or is_refused or code == arguments.STOPPED:
                return code
            cause = job.cause(code)
            self._log(f"start {count + 1} ended after {time.monotonic() - begin:.0f} s: {cause}")
            if self.signals.name is not None:
                raise Fault(f"{self.signals.name}: the training died instead of stopping: {cause}")
            if count == self.restarts:
                break
            pause = FIRST_PAUSE if self._checkpoint() != before else pause
            if not self._pause(pause):
                return arguments.STOPPED
            pause = min(2 * pause, LONGEST_PAUSE)
            self._leave_out_lost_hosts()
            self._log(f"start {count + 2}: {self._state()}")
        raise Fault(
            f"the training has died {self.restarts + 1} time(s) (--restarts {self.restarts}); the "
            f"last cause: {cause}; {os.path.join(self.out, LOG)} has all causes"
        )

    def _is_unfinished(self):
        """Return whether status.json says that the run is still running.

        If Open MPI's mpirun --with-ft loses a host, it ends the job with exit code 0.
        """
        try:
            with open(os.path.join(self.out, status.NAME), "rb") as file:
                content = status.parse(file.read())
        except OSError:
            return False
        return content is not None and content.state == status.RUNNING

    def _options(self):
        """Return the options of the next start, which resumes the run if it has a checkpoint."""
        if self._checkpoint() == self.foreign:
            return self.options
        options = [word for word in self.options if word != "--overwrite"]
        return [*options, "--resume", self.out]  # a later option overrides an earlier one

    def _checkpoint(self):
        """Return the inode and the time of the current checkpoint; None if there is none."""
        for name in (checkpoint.CURRENT, checkpoint.PREVIOUS):
            try:
                facts = os.stat(os.path.join(self.out, name))
            except OSError:
                continue
            return facts.st_ino, facts.st_mtime_ns
        return None

    def _state(self):
        written = self._checkpoint()
        if written is None or written == self.foreign:
            return "from the beginning, because there is no checkpoint"
        return f"from the checkpoint of {time.strftime('%T', time.localtime(written[1] / 1e9))}"

    def _pause(self, seconds):
        """Wait; return False if a signal has requested a stop."""
        self._log(f"next start in {seconds:g} s")
        deadline = time.monotonic() + seconds
        while (rest := deadline - time.monotonic()) > 0 and self.signals.name is None:
            time.sleep(min(rest, POLL_SECONDS))
        return self.signals.name is None

    def _leave_out_lost_hosts(self):
        lost = self.command.lost_hosts(self.environment)
        if lost == set(self.command.hosts):
            lost = set()  # no host works: the launcher has a problem, perhaps a temporary one
        if lost:
            self.command = self.command.without_hosts(lost)
            self._log(f"without {', '.join(sorted(lost))}, which cannot start a program")

    def _log(self, text):
        _say(text)
        try:
            os.makedirs(self.out, exist_ok=True)
            with open(os.path.join(self.out, LOG), "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%FT%T')} {text}\n")
        except OSError as error:
            _say(f"{self.out}: {reason(error)}")


def _say(text):
    with contextlib.suppress(OSError):  # restart the job even if nobody reads the messages
        print(f"mpidl launch: {text}", file=sys.stderr, flush=True)
