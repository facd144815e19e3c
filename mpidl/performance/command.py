"""`python -m mpidl.scaling`: measure and predict training speed by number of ranks."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpidl.cli import arguments, start
from mpidl.cli.parser import DESCRIBE, RUN, Parser, rank_counts, typed_command
from mpidl.comm.simulation import Link
from mpidl.data.urls import refuse_remote
from mpidl.errors import Fault, UserError
from mpidl.launcher import launcher
from mpidl.options.declaration import check_value, factor
from mpidl.performance import command_probe, figures, prediction, report, results, study
from mpidl.ranks import failure, thread_budget
from mpidl.ranks.thread_budget import available_cores
from mpidl.report.progress.rows import clock
from mpidl.text import printable
from mpidl.training.options import configuration

EXIT_CODES = """\
exit codes: 0 success; 1 a training run failed, or an error; 2 invalid options or data; 75 stopped
by a signal (USR1, TERM, INT), the file `stop` or the page of mpidl.monitor: run the same command
again
"""
# Arguments of mpidl.train that a study does not accept.
REFUSED = ("resume", "preview", "upload")
DEFAULT_SECONDS = 60
NUMBER = r"([0-9]+\.?[0-9]*|\.[0-9]+)"


@dataclass(frozen=True)
class Command:
    """A parsed command line.

    Attributes
    ----------
    parsed : Namespace
        Options of the study.
    words : tuple of str
        Arguments for mpidl.train.
    typed : dict
        The same arguments, parsed; see `arguments.train`.
    """

    parsed: argparse.Namespace
    words: tuple[str, ...]
    typed: dict[str, Any]


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> Command:
    """Parse the arguments of mpidl.scaling; `arguments.train` describes parameters and errors."""
    parser = _parser(quiet)
    if argv is DESCRIBE:
        parser.parse(argv)  # raises ParserReady
    study_words, words = _split(sys.argv[1:] if argv is None else argv, parser)
    parsed = parser.parse(study_words)
    typed = arguments.train(words, quiet)
    for name in REFUSED:
        if name in typed:
            raise UserError(f"--{name}: a study cannot use this option of mpidl.train")
    if parsed.table and (parsed.ranks or parsed.predict or parsed.overwrite):
        raise UserError("--table: expected no --ranks, --predict or --overwrite with it")
    if parsed.link is not None and not parsed.predict:
        raise UserError("--link: expected --predict with it, found none")
    if parsed.ranks_per_node is not None and not parsed.predict:
        raise UserError("--ranks-per-node: expected --predict with it, found none")
    if not parsed.ranks and not parsed.predict and not parsed.table and not parsed.probe:
        parsed.ranks = [1 << k for k in range(_cores().bit_length())]
    refuse_remote(parsed.out, "--out", "a folder")
    return Command(parsed, tuple(words), typed)


def _parser(quiet):
    parser = Parser(
        "mpidl.scaling",
        "Train on several numbers of ranks, and measure speed, efficiency and accuracy. With\n"
        "--predict, measure the parts of a training step for a minute, and predict the speed on\n"
        "any number of ranks. All other options, and those after --, are options of mpidl.train.\n"
        "The same command continues a study.",
        quiet,
        group="Study",
        usage=f"{typed_command('mpidl.scaling')} [OPTION VALUE] ... [OPTION OF mpidl.train] ...",
        epilog=EXIT_CODES,
    )
    parser.text(
        "--ranks",
        "N,N,...",
        "Numbers of ranks on which to train, one after another; default: 1, 2, 4, ... up to the "
        "number of cores, or none with --predict",
        type=rank_counts,
        group=RUN,
    )
    parser.switch(
        "--weak",
        "Weak scaling: fix the images per rank, so that the mini-batch grows with the ranks",
    )
    parser.number(
        "--repeat",
        "Training runs per number of ranks; the study reports medians; default: 1",
        default=1,
    )
    parser.text(
        "--accuracy",
        "A",
        "Report the time to this accuracy, from 0 to 1: of validations, or without them the "
        "smoothed accuracy of mini-batches; default: none",
        type=partial(check_value, factor(), spelled="--accuracy", text=True),
    )
    parser.switch("--srun", "Start the ranks with srun instead of mpirun", group=RUN)
    _add_prediction(parser)
    parser.text("--out", "DIR", "Folder of the study; default: runs/scaling-NETWORK", group=RUN)
    parser.switch("--overwrite", "Replace the study in the folder of --out", group=RUN)
    parser.switch("--table", "Write the table and figures again without training")
    return parser


def _add_prediction(parser):
    """Add the options of a prediction and its probe."""
    parser.text(
        "--predict",
        "N,N,...",
        "Predict the speed on these numbers of ranks; without a value, on all powers of two up to "
        "1024",
        type=partial(rank_counts, flag="--predict", limit=prediction.MOST_RANKS),
    )
    parser.text(
        "--link",
        "US,GBIT",
        "Assumed network between nodes: latency in microseconds, and Gbit/s; default: as "
        "measured, or the network inside the node if the probe runs on one node",
        type=_link,
    )
    parser.number(
        "--ranks-per-node", "Assumed ranks per node in the prediction; default: as in the probe"
    )
    parser.number(
        "--probe-ranks",
        "Ranks of the probe for --predict; default: all that fit on the cores, or all tasks of "
        "the Slurm job with --srun",
    )
    parser.number(
        "--probe-seconds",
        f"Approximate duration of the probe in seconds; default: {DEFAULT_SECONDS}",
        metavar="S",
        default=DEFAULT_SECONDS,
    )
    parser.text(
        "--probe",
        "FILE",
        "Only run the probe on the ranks that mpirun or srun started, and write its result as JSON",
    )


def _split(argv, parser):
    """Return (words of the study, words for mpidl.train)."""
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    study_words: list[str] = []
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        action = actions.get(word.partition("=")[0])
        if word == "--":
            words += rest
            break
        if action is None:
            words.append(word)
            continue
        if word == "--predict" and not (rest and re.match(r"\d", rest[0])):
            word = f"--predict={','.join(map(str, prediction.default_counts()))}"
        study_words.append(word)
        if action.nargs != 0 and "=" not in word and rest:
            study_words.append(rest.pop(0))
    return study_words, words


def _link(text):
    """Convert the value US,GBIT of --link to a Link."""
    match = re.fullmatch(f"{NUMBER},{NUMBER}", text)
    if match is None or float(match[2]) <= 0:
        raise UserError(f"--link must be US,GBIT, such as 2,100, found {text}")
    return Link(1e-6 * float(match[1]), 8e-9 / float(match[2]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    command = parse(argv, quiet=failure.launched_rank() > 0)
    parsed = command.parsed
    if parsed.probe is not None:
        return command_probe.main(parsed.probe, command.typed, float(parsed.probe_seconds))
    if failure.launched_ranks() is not None:
        raise UserError(
            "scaling starts the ranks itself: run it without mpirun, as "
            f"{typed_command('mpidl.scaling')}"
        )
    options = configuration.resolve(command.typed, config=command.typed.get("config"))
    out = parsed.out or os.path.join("runs", f"scaling-{_title(options.run)}")
    if parsed.table:
        return _table_only(out, parsed.accuracy)
    if parsed.predict and options.options.worker_load is not None:
        raise UserError(
            f"--worker-load {options.options.worker_load}: expected none with --predict, which "
            "assumes equal shares"
        )
    earlier = {} if parsed.overwrite else study.earlier_start(out)
    threads = _threads(command, options.options, earlier)
    words = [*_words_except(command.words, "--threads"), "--threads", str(threads)]
    is_weak = parsed.weak or options.options.batch_per_rank is not None
    defaults = {"threads": threads}
    if is_weak and options.options.batch_per_rank is None:
        per_rank = _batch_per_rank(parsed, options.options, earlier)
        words = _words_except(words, "--batch-size") + ["--batch-per-rank", str(per_rank)]
        defaults |= {"batch_size": options.options.batch_size, "batch_per_rank": per_rank}
    counts = tuple(sorted(set(parsed.ranks or ())))
    plan = study.Plan(out, counts, tuple(words), parsed.repeat, is_weak, parsed.srun, defaults)
    with failure.Signals() as signals:
        runs = study.Study(plan, signals, show=partial(print, flush=True))
        return _run(command, runs, threads)


def _title(run):
    return os.path.basename(str(run["network"] or "weights").rpartition(":")[2]) or "network"


def _cores():
    cores = available_cores()
    return min(len(cores.allowed), cores.quota or len(cores.allowed))


def _threads(command, options, earlier):
    """Return the number of threads per rank, which is the same in all runs.

    By default, a continued study keeps its number of threads. In a new study, the largest run uses
    all cores of this machine. With --srun, a rank uses all cores of its Slurm task.
    """
    if options.threads:
        return options.threads
    if earlier.get("threads"):
        return earlier["threads"]
    if command.parsed.srun:
        text = os.environ.get("SLURM_CPUS_PER_TASK", "")
        return int(text) if text.isdigit() else 1
    return max(1, _cores() // max(command.parsed.ranks)) if command.parsed.ranks else 1


def _batch_per_rank(parsed, options, earlier):
    if earlier.get("batch_size") == options.batch_size:
        return earlier["batch_per_rank"]
    smallest = min(parsed.ranks or [1])
    return max(1, options.batch_size // smallest)


def _words_except(words, flag):
    """Return the words without a flag and its value."""
    kept_words, skips = [], False
    for word in words:
        if not skips and word.partition("=")[0] != flag:
            kept_words.append(word)
        skips = word == flag
    return kept_words


def _run(command, runs, threads):
    """Probe, train and report; return the exit code."""
    parsed, plan = command.parsed, runs.plan
    runs.start(parsed.overwrite)
    for line in start.without_kernels():
        print(line)
    all_runs = plan.runs()
    due = [run for run in all_runs if not run.is_done()]
    if all_runs:
        kind, counts = "weak" if plan.is_weak else "strong", ", ".join(map(str, plan.counts))
        print(f"Study: {kind} scaling on {counts} ranks, {threads} thread(s) each")
        if len(due) < len(all_runs):
            print(f"Before: {len(all_runs) - len(due)} of {len(all_runs)} runs; {len(due)} to do")
    print(f"Results: {printable(plan.out)}", flush=True)
    content = _earlier_content(plan.out, parsed.overwrite)
    content |= {"format": 1, "study": plan.identity()}
    if parsed.accuracy is not None:
        content["accuracy"] = parsed.accuracy
    if (due or parsed.predict) and not plan.uses_srun:
        _warn_if_busy()
    if parsed.predict:
        record = _probe(parsed, runs, threads, content["probe"])
        if record is None:
            print(f"{runs.signals.name}: to continue, run the same command again")
            return arguments.STOPPED
        print("Simulating the exchanges", flush=True)
        measured = [run.ranks for run in runs.known_runs() if run.ranks <= prediction.MOST_RANKS]
        content["probe"] = record
        content["prediction"] = prediction.predict(
            record,
            sorted({*parsed.predict, *measured}),
            parsed.link,
            parsed.ranks_per_node,
            _print_sparsely(),
        )
        if record["is_oversubscribed"]:
            print("warning: the probe had more threads than cores, so its prediction is too slow")
        _write(plan.out, content, runs)
    is_stopped = runs.signals.name is not None
    while due and not is_stopped:
        run = due.pop(0)
        print(f"{run.name}: starts", flush=True)
        state = runs.run(run)
        is_stopped = state == results.STOPPED
        print(_end_line(run, state, runs.errors), flush=True)
        _write(plan.out, content, runs)
    _write(plan.out, content, runs)
    print()
    _show(plan.out, content)
    if is_stopped:
        print(f"{runs.signals.name or 'stopped'}: to continue, run the same command again")
        return arguments.STOPPED
    return 1 if runs.errors else 0


def _warn_if_busy():
    load = thread_budget.busy_share()
    if load > thread_budget.BUSY_SHARE:
        print(
            f"warning: other programs use {load:.0%} of the cores, so speeds will be too low; end "
            "these programs first",
            flush=True,
        )


def _print_sparsely():
    """Return a function that prints a line if ten seconds have passed since the previous line."""
    last = time.monotonic()

    def show(line):
        nonlocal last
        if time.monotonic() - last >= study.SHOW_SECONDS:
            print(f"simulation: {line}", flush=True)
            last = time.monotonic()

    return show


def _earlier_content(out, overwrite):
    """Return the probe, the prediction and the accuracy of an earlier start of the study."""
    path = os.path.join(out, report.JSON)
    earlier = {} if overwrite or not os.path.exists(path) else results.read_json(path)
    kept_results = {name: earlier.get(name) for name in ("probe", "prediction", "accuracy")}
    return {"rows": [], "checks": [], **kept_results}


def _end_line(run, state, errors):
    if state == results.COMPLETE:
        result = results.read_run(run)
        return (
            f"{run.name}: {result['images_per_second']:,.0f} images/s, "
            f"{clock(result['train_seconds'])}"
        )
    if state == results.FAILED:
        return f"{run.name}: failed: {errors[run.name]}"
    return f"{run.name}: stopped"


def _write(out, content, runs):
    """Update the rows, and write scaling.json and scaling.csv."""
    content["rows"] = runs.rows()
    results.add_time_to_accuracy(content["rows"], content["accuracy"])
    predicted = (content["prediction"] or {"rows": []})["rows"]
    content["checks"] = results.check_predictions(content["rows"], predicted)
    report.write(out, content)


def _show(out, content):
    """Print the table and the notes, and draw the figures."""
    print("\n".join(report.table_lines(content)))
    print()
    for line in report.notes(content):
        print(line)
    names = figures.draw(out, content)
    drawn = f", {figures.OVERVIEW}.png and {len(names) - 1} more figures" if names else ""
    print(f"Table: {printable(os.path.join(out, report.CSV))}, {report.JSON}{drawn}", flush=True)


def _table_only(out, accuracy):
    path = os.path.join(out, report.JSON)
    if not os.path.isfile(path):
        raise UserError(f"--out {out}: expected the folder of a study, found no {report.JSON}")
    content = results.read_json(path)
    if content.get("format") != 1 or not isinstance(content.get("rows"), list):
        raise UserError(f"{path}: expected the file of a study, format 1")
    try:
        if accuracy is not None:
            content["accuracy"] = accuracy
        results.add_time_to_accuracy(content["rows"], content.get("accuracy"))
        report.write(out, content)
        _show(out, content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path}: it is damaged ({type(error).__name__}: {error}); expected the file of a study"
        ) from None
    return 0


def _probe(parsed, runs, threads, earlier):
    """Run the probe on its ranks and return its record, or None if a signal asked to stop.

    `earlier` is the record of an earlier start of the study, or None.
    """
    plan, ranks = runs.plan, parsed.probe_ranks
    if ranks is None and plan.uses_srun:
        text = os.environ.get("SLURM_NTASKS", "")
        ranks = int(text) if text.isdigit() else 2
    ranks = ranks or max(2, _cores() // threads)
    if earlier and (earlier["ranks"], earlier["seconds"]) == (ranks, parsed.probe_seconds):
        print(f"Probe: as in {report.JSON}; change --probe-seconds to measure again")
        return earlier
    print(f"Probe: {ranks} ranks, about {parsed.probe_seconds} s", flush=True)
    log_path = os.path.join(plan.out, "probe.log")
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=plan.out) as folder:
        file = os.path.join(folder, "probe.json")
        words = [*launcher(ranks, plan.uses_srun), sys.executable, "-m", "mpidl.scaling"]
        words += ["--probe", os.path.abspath(file), "--probe-seconds", str(parsed.probe_seconds)]
        with open(log_path, "w") as log:
            code = runs.execute("probe", [*words, "--", *plan.words], log)
        if runs.signals.name is not None:
            return None
        if code:
            message = results.last_error(log_path) or "no message"
            if code == 2:
                raise UserError(message)
            raise Fault(
                f"the probe on {ranks} ranks ended with exit code {code}: {message}; see {log_path}"
            )
        with open(file) as content:
            return json.load(content)
