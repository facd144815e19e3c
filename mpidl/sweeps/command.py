"""`python -m mpidl.sweep`: train many networks at the same time, each on a group of ranks."""

import argparse
import os
import time
from collections.abc import Sequence

from mpidl.cli import arguments, train_run
from mpidl.cli.parser import Parser
from mpidl.data.urls import refuse_remote
from mpidl.errors import Fault, FolderInUse, LostLock, UserError, describe
from mpidl.files import on_rank_0, reason
from mpidl.ranks import failure
from mpidl.ranks.groups import Group
from mpidl.ranks.world import World
from mpidl.report import stop_file
from mpidl.report.progress.rows import clock
from mpidl.sweeps import search as searches
from mpidl.sweeps import sweep as dispatch
from mpidl.sweeps import sweep_file, trial_folder
from mpidl.sweeps import sweep_table as report
from mpidl.sweeps.trial_folder import (
    COMPLETE,
    FAILED,
    FINAL_STATES,
    PRUNED,
    RUNNING,
    STOPPED,
    WAITING,
    TrialFolder,
)
from mpidl.text import printable
from mpidl.training.files import checkpoint
from mpidl.training.files.folder_lock import FolderLock
from mpidl.training.options import training_options

EXIT_CODES = """\
exit codes: 0 success; 1 a trial failed, or an error; 2 invalid options or file; 75 trials were
stopped by a signal (USR1, TERM, INT) or by stop files, after writing checkpoints: run the same
command again
"""


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.sweep; `arguments.train` describes parameters and errors."""
    parser = Parser(
        "mpidl.sweep",
        "Train many networks in one job. The training of one network is a trial. The ranks work\n"
        "in groups, and a group takes the next trial as soon as it is free. The same command\n"
        "continues a sweep that was stopped or killed.",
        quiet,
        epilog=EXIT_CODES,
    )
    parser.add_argument(
        "file",
        metavar="FILE.toml",
        help="Options of the trials, or ranges of a search (docs/sweep.md)",
    )
    parser.text(
        "--out",
        "DIR",
        "Folder of the sweep, for table.csv and a folder per trial; default: runs/FILE without "
        ".toml",
    )
    parser.number(
        "--ranks-per-model",
        "Ranks that train a model together; N must divide the number of ranks; default: 1",
    )
    parser.number("--trial", "Train only trial I, counted from 1, on all ranks", metavar="I")
    parser.switch("--table", "Write and print the table of the trials so far, without training")
    parser.switch("--retry-failed", "Train failed trials again, which are skipped otherwise")
    parsed = parser.parse(argv)
    modes = {"--trial": parsed.trial, "--table": parsed.table}
    modes |= {"--ranks-per-model": parsed.ranks_per_model}
    used = [flag for flag, value in modes.items() if value]
    if parsed.table and parsed.retry_failed:
        used = ["--table", "--retry-failed"]
    if len(used) > 1:
        raise UserError(f"{' and '.join(used)}: expected at most one of them")
    refuse_remote(parsed.out, "--out", "a folder")
    return parsed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    if parsed.table:
        return _table_only(parsed) if failure.launched_rank() == 0 else 0
    world = World(timeout=training_options.TrainingOptions().timeout, threads=None)
    with failure.Signals() as signals:
        sweep = on_rank_0(world, lambda: sweep_file.read(parsed.file))
        world.transport.timeout = sweep.train.get("timeout", world.transport.timeout)
        command = Command(sweep, _out(parsed), parsed.retry_failed)
        if parsed.trial is not None:
            command.select(parsed.trial)
        size = parsed.ranks_per_model or (world.size if parsed.trial else 1)
        group = Group(world, size, "--ranks-per-model")
        on_rank_0(world, command.check)
        with FolderLock(world) as lock:
            if parsed.trial is None:  # with --trial, other jobs may train other trials
                lock.take(command.out, "--out {}")
            code = command.run(group, signals)
    group.close()
    return code


def _out(parsed):
    name = os.path.basename(parsed.file).removesuffix(".toml")
    return parsed.out or os.path.join("runs", name)


def _table_only(parsed):
    sweep, out = sweep_file.read(parsed.file), _out(parsed)
    if not os.path.isdir(out):
        raise UserError(f"--out {out}: expected the folder of a sweep, found none")
    Command(sweep, out).finish(None)
    return 0


PATIENCE = 45.0  # seconds until the files of a trial on another host are visible


class Command:
    """The work of one run of the command.

    Parameters
    ----------
    sweep : Sweep
        The trials.
    out : str
        Folder of the sweep.
    retry_failed : bool
        Whether to train failed trials again.
    """

    def __init__(self, sweep: sweep_file.Sweep, out: str, retry_failed: bool = False) -> None:
        self.sweep, self.out, self.retry_failed = sweep, out, retry_failed
        self.all = self.folders = trial_folder.folders_of(sweep, out)
        self.writes_table = True
        self.search = None if sweep.search is None else searches.Proposer(sweep, out)
        self.score = None if sweep.search is None else sweep.search.metric  # that ranks the trials
        self.skipped_code = 0  # the exit code if another job trains a trial of this group

    def select(self, number: int) -> None:
        """Train only the trial with this number. Other jobs may train the other trials."""
        if number > len(self.all):
            raise UserError(
                f"--trial {number}: expected at most {len(self.all)}, the number of trials in "
                f"{self.sweep.path}"
            )
        self.folders, self.writes_table = [self.all[number - 1]], False

    def check(self) -> None:
        """Make the folder; raise UserError if the sweep file has changed since an earlier start."""
        try:
            os.makedirs(self.out, exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {self.out}: cannot be created: {reason(error)}") from error
        if not os.access(self.out, os.W_OK):
            raise UserError(f"--out {self.out}: cannot be written: no permission")
        if self.search is not None:
            self._check_search(self.search)
        for folder in self.folders:
            is_retried = self.retry_failed and folder.state() == FAILED
            if not is_retried and (changes := folder.changes()):
                ways = "another --out"
                if folder.state() == FAILED:
                    ways += ", or --retry-failed"
                raise UserError(
                    f"{self.sweep.path}: {folder.name} has begun with other options: "
                    f"{'; '.join(changes)}; expected the same file, or {ways}"
                )

    def _check_search(self, search):
        search.check()
        first = self.folders[0]
        if not self.writes_table and (names := search.unended(first.number)):
            raise UserError(
                f"--trial {first.number}: expected that the trials before it have ended, up to "
                f"trial {len(search.known_trials(first.number))}, found {names[0]}, which has not"
            )

    def is_due(self, folder: TrialFolder) -> bool:
        """Return whether to train this trial."""
        state = folder.state()
        return state not in FINAL_STATES or (state == FAILED and self.retry_failed)

    def run(self, group: Group, signals: failure.Signals) -> int:
        """Train the trials and return the exit code. Collective over the job."""
        job, start_time = group.job, time.monotonic()
        due = on_rank_0(job, lambda: [i for i, f in enumerate(self.folders) if self.is_due(f)])
        if job.rank == 0:
            self._announce(group, len(due))
        trained = 0

        def attempt(index):
            return self._attempt(group, self.folders[due[index]], signals)

        def needs(index):
            if self.search is None:
                return ()
            numbers = self.search.known_trials(self.folders[due[index]].number)
            return [i for i in range(index) if self.folders[due[i]].number in numbers]

        for _, code in dispatch.run(len(due), attempt, group, signals, self.out, needs):
            trained += code == 0 and group.is_leader
        trained = job.gop("sum", trained)
        skipped_code = job.gop("max", self.skipped_code)
        is_stopped = job.gop("max", int(signals.agreed or signals.name is not None))
        name = next((n for n in job.allgather(signals.name) if n), "stopped")
        states = on_rank_0(job, lambda: [folder.state() for folder in self.folders])
        if job.rank == 0:
            if self.writes_table:
                self.finish((trained, time.monotonic() - start_time))
            if is_stopped or STOPPED in states:
                waiting = f", {states.count(WAITING) + states.count(RUNNING)} not trained"
                print(
                    f"{name if is_stopped else stop_file.REASON}: {states.count(STOPPED)} trial(s) "
                    f"stopped with a checkpoint{waiting if is_stopped else ''}; to continue, run "
                    "the same command again",
                    flush=True,
                )
        if is_stopped and any(state not in FINAL_STATES for state in states):
            return arguments.STOPPED
        if FAILED in states or skipped_code:
            return 1 if FAILED in states else skipped_code
        return arguments.STOPPED if STOPPED in states else 0

    def _announce(self, group, due):
        states = [folder.state() for folder in self.folders]
        ranks = group.job.size // group.count
        print(f"Sweep: {printable(self.sweep.path)}, {len(self.all)} trials")
        print(f"Ranks: {group.job.size}, {group.count} group(s) of {ranks}")
        earlier = [f"{states.count(s)} {s}" for s in (*FINAL_STATES, STOPPED) if s in states]
        if self.sweep.search is not None:
            self._announce_search(self.sweep.search, group)
        if earlier:
            print(f"Before: {', '.join(earlier)}; {due} to train")
            if FAILED in states and not self.retry_failed:
                print("To train failed trials again, add --retry-failed")
        print(f"Results: {printable(self.out)}", flush=True)

    @staticmethod
    def _announce_search(search, group):
        verb = "highest" if search.is_maximized else "lowest"
        pruner = "" if search.pruner == "none" else f", pruner {search.pruner}"
        metric = search.metric.replace("_", " ")
        print(
            f"Search: {search.sampler} for the {verb} {metric}, parallel {search.parallel}{pruner}"
        )
        if group.count > search.parallel:
            print(
                f"note: only {search.parallel} of the {group.count} groups work at the same time, "
                f"because [search] has parallel = {search.parallel}"
            )

    def _propose(self, search, group, folder):
        """Return the folder of a trial with its options; None if the trial cannot start."""
        number = folder.number
        patience = PATIENCE if len(set(group.job.hosts)) > 1 else 0.0
        names = options = None
        if group.is_leader:
            names = search.unended(number, patience)
            options = None if names else search.options(number)
            if names:
                self._print(group, folder, f"not trained: {names[0]} has not ended")
        options = group.ranks.broadcast(options)
        return None if options is None else folder._replace(options=options)

    def _attempt(self, group, folder, signals):
        """Train a trial on a group; return the exit code that mpidl.train would return."""
        hooks = []
        if self.search is not None:
            if (folder := self._propose(self.search, group, folder)) is None:
                return arguments.STOPPED
            hooks.append(searches.SearchHook(self.search, folder.number))

        def train_alone(world):
            with FolderLock(world) as lock:
                lock.take(folder.path, "{}")
                typed = on_rank_0(world, lambda: self._prepare(group, folder))
                # A stop file ends only this trial. A signal also reaches the outer `Signals`.
                with folder.log(), failure.Signals() as trial_signals:
                    trial_signals.name = signals.name
                    try:
                        return train_run.train(typed, world, trial_signals, lock, hooks)
                    except Exception as error:
                        dispatch.print_traceback(error)
                        if isinstance(error, (UserError, Fault)) and world.rank == 0:
                            print(f"mpidl: {error}")
                        raise

        outcome = group.attempt(train_alone, lambda e: folder.write(FAILED, describe(e)))
        if isinstance(outcome.error, FolderInUse | LostLock):  # another job writes to the folder
            code = 2 if isinstance(outcome.error, FolderInUse) else 1
            self.skipped_code = max(self.skipped_code, code)
            if group.is_leader:
                self._print(group, folder, f"skipped: {outcome.error}")
            return code
        code = outcome.value if outcome.error is None else 1
        if group.is_leader:
            pruned_after = hooks[0].pruned_after if hooks else None
            self._record_end(group, folder, code, outcome.error, pruned_after)
        return code

    def _prepare(self, group, folder):
        """Record and print the start of a trial, and return the arguments for mpidl.train."""
        typed = {**folder.options, "out": folder.path}
        typed["sweep"] = {
            "file": self.sweep.sha256,
            "trial": folder.number,
            "trials": len(self.all),
        }
        verb = "starts"
        if folder.can_resume():
            typed["resume"], verb = folder.path, "continues"
        elif checkpoint.exists(folder.path) and folder.changes():
            typed["overwrite"] = True  # the options of a failed trial have changed
        if typed.get("upload") is not None:
            typed["upload"] = f"{typed['upload'].rstrip('/')}/{folder.name}"
        folder.write(RUNNING)
        names = self.sweep.trials[folder.number - 1] or (self.search and self.sweep.varied) or ()
        varied = {name: folder.options[name] for name in names}
        values = ", ".join(
            f"{name} {'none' if value is None else report.cell(report.column_of(name), value)}"
            for name, value in varied.items()
        )
        self._print(group, folder, f"{verb}: {values}" if values else verb)
        return typed

    def _record_end(self, group, folder, code, error, pruned_after=None):
        """Record and print the end of a trial, and write the table."""
        if error is None and code == 0 and self.score is not None:
            error = searches.missing_score(folder.path, self.score)
        if error is not None:
            folder.write(FAILED, describe(error))
            self._print(group, folder, f"failed: {describe(error)}")
        elif pruned_after is not None and self.score is not None:
            folder.write(PRUNED, validations=pruned_after)
            text = report.describe_score(folder.row(), self.score)
            self._print(group, folder, f"pruned: {text} after {pruned_after} validation(s)")
        elif code == arguments.STOPPED:
            folder.write(STOPPED)
            self._print(group, folder, "stopped, checkpoint written")
        else:
            folder.write(COMPLETE)
            row = folder.row()
            texts = [
                report.describe_score(row, name)
                for name in sorted(report.shown_scores([row], self.score))
            ]
            scores = [text.replace("validation accuracy", "validation") for text in texts]
            self._print(group, folder, f"done: {', '.join([*scores, clock(row['seconds'])])}")
        if self.writes_table:
            report.write_csv(self.out, self._rows(), self._columns(), writer=group.index)

    @staticmethod
    def _print(group, folder, text):
        prefix = f"Group {group.index + 1}: " if group.count > 1 else ""
        # The newline is part of one write: print() writes it separately if Python does not buffer,
        # and the lines of two groups could mix.
        print(f"{prefix}{folder.name} {text}\n", end="", flush=True)

    def _columns(self):
        return [report.column_of(name) for name in self.sweep.varied]

    def _rows(self):
        return [
            {report.column_of(name): folder.options.get(name) for name in self.sweep.varied}
            | folder.row()
            for folder in trial_folder.folders_of(self.sweep, self.out)
        ]

    def finish(self, speed: tuple[int, float] | None) -> None:
        """Write table.csv and table.png, and print the table and the best trial.

        `speed` is a pair: the number of completed models, and the time in seconds.
        """
        rows, varied = self._rows(), self._columns()
        report.write_csv(self.out, rows, varied)
        has_picture = report.draw(self.out, rows, varied, self.score)
        print()
        report.print_table(rows, varied, self.score)
        for row, folder in zip(rows, self.all, strict=True):
            if row["state"] == FAILED:
                print(f"Failed: {folder.name}: {printable(str(row['error']))}")
        if folds := self.sweep.folds:
            self._finish_folds(rows, varied, folds)
        elif (choice := report.best_of(rows, score=self.score)) is not None:
            path = printable(self.all[choice[0]["trial"] - 1].path)
            print(f"Best: {path}, {report.describe_score(*choice)}")
        if speed is not None and speed[0]:
            count, seconds = speed
            rate = 60 * count / max(seconds, 1e-9)
            print(f"Models: {count} in {clock(seconds)}, {rate:.3g} per minute")
        pictures = f", {report.PNG}" if has_picture else ""
        print(f"Table: {printable(os.path.join(self.out, report.CSV))}{pictures}", flush=True)

    def _finish_folds(self, rows, varied, folds):
        """Write folds.csv, and print the mean scores over the folds and the best setting."""
        summaries = report.fold_rows(rows, varied, folds)
        report.write_folds(self.out, summaries)
        print(f"\nMean over {folds} folds ± standard deviation:")
        report.print_folds(summaries)
        if len(summaries) > 1 and (choice := report.best_of(summaries, folds)) is not None:
            print(f"Best: trials {choice[0]['trials']}, mean {report.describe_score(*choice)}")
