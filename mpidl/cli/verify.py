"""`python -m mpidl.verify`: the same weights on every number of ranks, or the table that shows not.

Started without mpirun, it starts one for each number of ranks.
"""

import json
import os
import subprocess
import sys
import tempfile

from mpidl.cli import arguments, start
from mpidl.comm import failure
from mpidl.comm.launcher import environment, launcher
from mpidl.errors import Fault, UserError


def main(argv=None):
    """Run the command; returns its exit code: 0 all the same, 1 not."""
    given = arguments.verify(argv, quiet=failure.launched_rank() > 0)
    if any(int(os.environ.get(name) or 1) > 1 for name in failure.LAUNCHERS):
        raise UserError(
            "verify starts the ranks itself: run it without mpirun, as python -m mpidl.verify"
        )
    flags = arguments.as_flags(given.given)
    hashes = {}
    for line in start.without_kernels():
        print(line)
    print("ranks  iterations  loss          seconds  weights_sha256", flush=True)
    with tempfile.TemporaryDirectory(prefix="mpidl-verify-") as folder:
        for number, ranks in enumerate(given.ranks):
            out = os.path.join(folder, str(number))
            command = [*launcher(ranks), sys.executable, "-m", "mpidl.train", *flags, "--out", out]
            done = subprocess.run(
                command,
                env=environment(),
                capture_output=True,
                text=True,
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                text = next((x for x in lines if x.startswith("mpidl: ")), lines[-1])
                if done.returncode == 2:
                    raise UserError(text.removeprefix("mpidl: "))
                print("\n".join(lines), file=sys.stderr)
                raise Fault(f"training on {ranks} ranks ended with exit code {done.returncode}")
            with open(os.path.join(out, "summary.json")) as file:
                found = json.load(file)
            hashes[ranks] = found["weights_sha256"]
            print(
                f"{ranks:5}  {found['iterations']:10}  {found['loss']:<12.8f}  "
                f"{found['train_seconds']:7.1f}  {found['weights_sha256']}",
                flush=True,
            )
    if len(set(hashes.values())) > 1:
        print("DIFFERENT: the weights depend on the number of ranks")
        return 1
    print(f"the same weights, byte for byte, on {', '.join(map(str, hashes))} ranks")
    return 0
