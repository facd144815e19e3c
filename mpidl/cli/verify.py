"""`python -m mpidl.verify`: train with different numbers of ranks and compare the weights.

The command is run without mpirun; it starts mpirun or srun itself for each number of ranks.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from mpidl.cli import arguments, start
from mpidl.cli.parser import typed_command
from mpidl.comm import failure
from mpidl.comm.launcher import environment, launcher
from mpidl.data.storage.settings import check_url
from mpidl.errors import Fault, UserError
from mpidl.report import Console


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0 if all weights are equal, else 1."""
    parsed = arguments.verify(argv, quiet=failure.launched_rank() > 0)
    if any(int(os.environ.get(name) or 1) > 1 for name in failure.LAUNCHERS):
        raise UserError(
            "verify starts the ranks itself: run it without mpirun, as "
            f"{typed_command('mpidl.verify')}"
        )
    check_url(parsed.options.get("data", ""), "--data")
    flags = arguments.as_flags(parsed.options)
    hashes = {}
    for line in start.without_kernels():
        print(line)
    console = Console(stream=sys.stderr)
    print("ranks  iterations  loss          seconds  weights_sha256", flush=True)
    # Rank 0 of a step of Slurm may be on another node, which sees the current folder.
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
            with open(os.path.join(out, "summary.json")) as file:
                summary = json.load(file)
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
