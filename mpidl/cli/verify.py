"""`python -m mpidl.verify`: compare weights across numbers of ranks, or check a run's files.

Run the command without mpirun; it starts mpirun or srun itself for each number of ranks. With the
folder of a run, the command trains nothing and needs no MPI.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from mpidl.cli import arguments, start
from mpidl.cli.parser import typed_command
from mpidl.data.storage.settings import check_url
from mpidl.errors import Fault, UserError
from mpidl.launcher import environment, launcher
from mpidl.ranks import failure
from mpidl.report import Console, run_files
from mpidl.text import aligned, printable
from mpidl.training.files import generations


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns
    -------
    int
        0 if all weights are equal, else 1. For a run, 0 if the newest files are complete, else 2.
    """
    parsed = arguments.verify(argv, quiet=failure.launched_rank() > 0)
    if any(int(os.environ.get(name) or 1) > 1 for name in failure.LAUNCHERS):
        raise UserError(
            "verify starts the ranks itself: run it without mpirun, as "
            f"{typed_command('mpidl.verify')}"
        )
    if parsed.run is not None:
        return check_run(parsed.run)
    check_url(parsed.options.get("data", ""), "--data")
    flags = arguments.as_flags(parsed.options)
    hashes = {}
    for line in start.without_kernels():
        print(line)
    console = Console(stream=sys.stderr)
    print("ranks  iterations  loss          seconds  weights_sha256", flush=True)
    # With srun, rank 0 may be on another node. All nodes can access the current folder.
    parent = os.getcwd() if parsed.srun else None
    with tempfile.TemporaryDirectory(prefix="mpidl-verify-", dir=parent) as folder:
        for number, ranks in enumerate(parsed.ranks):
            out = os.path.join(folder, str(number))
            command = [*launcher(ranks, parsed.srun), sys.executable, "-m", "mpidl.train"]
            with console.stage(f"training on {ranks} rank{'s' if ranks > 1 else ''}"):
                process = subprocess.run(
                    [*command, *flags, "--out", out],
                    env=None if parsed.srun else environment(),
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


def check_run(run: str) -> int:
    """Print a table of the checkpoints and the model of a run; return the exit code."""
    files = generations.generations(run)
    rows: list[list[object]] = [["file", "iteration", "epoch", "written", "weights_sha256"]]
    verdicts = [""]
    for file in files:
        numbers = ["" if n is None else n for n in (file.iteration, file.epoch)]
        rows.append([printable(file.name), *numbers, file.date, file.weights_sha256])
        verdicts.append("complete" if file.problem is None else printable(file.problem))
    lines = aligned(rows)
    width = max(map(len, lines))
    for line, verdict in zip(lines, verdicts, strict=True):
        print(f"{line:{width}}  {verdict}".rstrip())
    return 0 if generations.are_newest_complete(files) else 2
