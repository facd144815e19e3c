"""Run the commands of docs/tutorial.md and write what they print into the page.

    python docs/run_tutorial.py

Each block of commands (`sh`) is followed by a block that holds its output. The commands run in a
temporary folder, and their times are those of this machine.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "tutorial.md"
MACHINE = re.compile(r"^(warning|Iteration): .*\n", re.M)  # lines that only slow machines print
BLOCKS = re.compile(r"^```sh\n(.*?)^```\n\n```\n(.*?)^```$", re.M | re.S)


def outputs(text, folder):
    """Run the blocks of commands in order and yield (commands, output on the page, new output)."""
    (Path(folder) / "examples").symlink_to(DOCS.parent / "examples")
    for commands, output in BLOCKS.findall(text):
        result = subprocess.run(
            ["bash", "-ec", commands], cwd=folder, capture_output=True, text=True
        )
        if result.returncode:
            raise RuntimeError(f"{commands}exit code {result.returncode}\n{result.stderr}")
        yield commands, output, MACHINE.sub("", result.stdout)


def main():
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for commands, output, printed in outputs(text, folder):
            block = f"```sh\n{commands}```\n\n```\n"
            text = text.replace(f"{block}{output}```", f"{block}{printed}```")
            print(commands, printed, sep="\n", flush=True)
    PAGE.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
