"""`python -m mpidl.verify`: compare weights across numbers of ranks, or check a run's files.

Run the command without mpirun; it starts mpirun or srun itself for each number of ranks. With the
folder of a run, the command trains nothing and needs no MPI. With --golden, it compares this
machine with the hashes in the package.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from mpidl import numerics
from mpidl.cli import arguments, start
from mpidl.cli.parser import RUN, Parser, rank_counts, typed_command
from mpidl.data.urls import check_url
from mpidl.errors import Fault, UserError
from mpidl.launcher import environment, launcher
from mpidl.options.declaration import declared, flag
from mpidl.ranks import failure
from mpidl.report import Console, run_files
from mpidl.text import aligned, printable
from mpidl.training import golden
from mpidl.training.files import generations
from mpidl.training.options.run_inputs import TransferInputs

# The ten most common options, in the order in which --help shows them.
COMMON = """
ranks network data max_iterations batch_size solver learning_rate device threads seed
""".split()
# Training options that the command also accepts.
OPTIONS = """
max_iterations batch_size loss solver learning_rate momentum l2 shuffle learn_rate_schedule
gradient_threshold gradient_threshold_method device gpus graphs precision threads winograd batchnorm
timeout seed
""".split()


def parse(argv: Sequence[str] | None = None, quiet: bool = False) -> argparse.Namespace:
    """Parse the arguments of mpidl.verify; `arguments.train` describes parameters and errors.

    The attribute run is the folder of a run to check, or None; golden tells whether to check the
    golden hashes; ranks is a list of int, or None if these are checked in this process; srun tells
    whether srun starts the ranks. The attribute options is a dict {name: value} of the training
    arguments that the user typed; it always contains max_iterations.
    """
    parser = Parser(
        "mpidl.verify",
        "Train briefly on each number of ranks and compare the weights, which must be the same,\n"
        "byte for byte. With RUN: check whether the checkpoints and the model of a run can be\n"
        "loaded, and show which numerics made them. With --golden: train briefly, and compare the\n"
        "weights with the hashes of this version of mpidl.",
        quiet,
        COMMON,
        RUN,
        epilog="exit codes: 0 the weights are equal, or the newest files of the run are complete; "
        "1 the weights differ, or an error; 2 invalid options, no hashes for the arithmetic of "
        "this machine, or a file of the run is damaged",
    )
    text = "The results folder of a run, or its model.h5, to check instead of training"
    parser.add_argument("run", metavar="RUN", nargs="?", help=text)
    parser.text(
        "--ranks",
        "N,N,...",
        "Numbers of ranks to compare; default: 1,2,3,4, and with --golden this process alone",
        type=rank_counts,
    )
    parser.switch(
        "--golden",
        "Compare short trainings with the golden hashes of this version (docs/numerics.md)",
    )
    parser.switch(
        "--srun",
        "Start the ranks with srun instead of mpirun, in a Slurm job; MPIDL_SRUN_MPI sets "
        "srun's option --mpi",
    )
    parser.add_options(
        "network",
        "weights",
        *declared(TransferInputs),
        "data",
        *arguments.PREPROCESS,
        *arguments.STORAGE,
        *OPTIONS,
        max_iterations=5,
    )
    options = vars(parser.parse(argv))
    switches = {name: options.pop(name) for name in ("golden", "ranks", "srun")}
    run, typed = options.pop("run"), [*(n for n in switches if switches[n]), *options]
    if run is not None and typed:
        raise UserError(f"{flag(typed[0])}: expected no RUN with it, found {run}")
    if switches["golden"] and options:
        raise UserError(f"{flag(next(iter(options)))}: expected no --golden with it")
    if not switches["golden"]:
        switches["ranks"] = switches["ranks"] or [1, 2, 3, 4]
    options = {"max_iterations": 5, **options}
    return argparse.Namespace(run=run, **switches, options=options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns
    -------
    int
        0 if all weights are equal, else 1. For a run, 0 if the newest files are complete, else 2.
    """
    parsed = parse(argv, quiet=failure.launched_rank() > 0)
    if failure.launched_ranks() is not None:
        raise UserError(
            "verify starts the ranks itself: run it without mpirun, as "
            f"{typed_command('mpidl.verify')}"
        )
    if parsed.run is not None:
        return check_run(parsed.run)
    if parsed.golden:
        return check_golden(parsed.ranks, parsed.srun)
    check_url(parsed.options.get("data", ""), "--data")
    words = ["mpidl.train", *arguments.as_flags(parsed.options), "--out"]
    hashes = {}
    for line in start.without_kernels():
        print(line)
    print("ranks  iterations  loss          seconds  weights_sha256", flush=True)
    with _folder(parsed.srun) as folder:
        for number, ranks in enumerate(parsed.ranks):
            out = os.path.join(folder, str(number))
            _train(ranks, parsed.srun, [*words, out])
            summary = run_files.read_summary(out)
            hashes[ranks] = summary["weights_sha256"]
            print(
                f"{ranks:5}  {summary['iterations']:10}  {summary['loss']:<12.8f}  "
                f"{summary['train_seconds']:7.1f}  {summary['weights_sha256']}",
                flush=True,
            )
    if len(set(hashes.values())) > 1:
        print("DIFFERENT: the weights depend on the number of ranks")
        return 1
    print(f"the same weights, byte for byte, on {', '.join(map(str, hashes))} ranks")
    return 0


def _folder(srun):
    """Return a temporary folder for the results of jobs, as a context manager."""
    # With srun, rank 0 may be on another node. All nodes can access the current folder.
    parent = os.getcwd() if srun else None
    return tempfile.TemporaryDirectory(prefix="mpidl-verify-", dir=parent)


def _train(ranks, srun, words):
    """Run `python -m` with the words on a number of ranks, and raise an error if that fails."""
    console = Console(stream=sys.stderr)
    with console.stage(f"training on {ranks} rank{'s' if ranks > 1 else ''}"):
        process = subprocess.run(
            [*launcher(ranks, srun), sys.executable, "-m", *words],
            env=None if srun else environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        text = next((x for x in lines if x.startswith("mpidl: ")), lines[-1])
        if process.returncode == 2:
            raise UserError(text.removeprefix("mpidl: "))
        print("\n".join(lines), file=sys.stderr)
        raise Fault(f"training on {ranks} ranks ended with exit code {process.returncode}")


def check_golden(counts: Sequence[int] | None, srun: bool = False) -> int:
    """Compare short trainings with the golden hashes of this mpidl; return the exit code.

    The trainings run in this process, or, if `counts` is given, on these numbers of ranks.
    """
    kind, trainings = golden.arithmetic(), golden.table().trainings
    print(f"numerics {numerics.VERSION}, arithmetic {kind}, {len(trainings)} trainings", flush=True)
    width, different = max(len(training.name) for training in trainings), set()
    for ranks, (name, expected, actual) in _outcomes(counts, srun):
        verdict = "equal"
        if actual != expected:
            different.add(name)
            verdict = f"DIFFERENT: expected {expected}, found {actual}"
        count = f"{ranks} rank{'s' if ranks > 1 else ''}"
        print(f"{count:>8}  {name:{width}}  {verdict}", flush=True)
    if different:
        print(
            f"DIFFERENT: {len(different)} of {len(trainings)} trainings: this machine or this "
            "installation computes other weights than mpidl's releases of these numerics"
        )
        return 1
    print("this machine computes the weights of the table, byte for byte")
    return 0


def _outcomes(counts, srun):
    """Yield (ranks, outcome) of all golden trainings."""
    if counts is None:
        yield from ((1, outcome) for outcome in golden.outcomes())
        return
    with _folder(srun) as folder:
        for number, ranks in enumerate(counts):
            path = os.path.join(folder, f"{number}.json")
            _train(ranks, srun, ["mpidl.cli.golden_ranks", path])
            with open(path) as file:
                yield from ((ranks, golden.Outcome(*values)) for values in json.load(file))


def check_run(run: str) -> int:
    """Print a table of the checkpoints and the model of a run; return the exit code."""
    files = generations.generations(run)
    head: list[object] = ["file", "iteration", "epoch", "written", "made by", "weights_sha256"]
    rows = [head]
    verdicts = [""]
    for file in files:
        numbers = ["" if n is None else n for n in (file.iteration, file.epoch)]
        origin = printable(file.origin)
        rows.append([printable(file.name), *numbers, file.date, origin, file.weights_sha256])
        verdicts.append("complete" if file.problem is None else printable(file.problem))
    lines = aligned(rows)
    width = max(map(len, lines))
    for line, verdict in zip(lines, verdicts, strict=True):
        print(f"{line:{width}}  {verdict}".rstrip())
    return 0 if generations.are_newest_complete(files) else 2
