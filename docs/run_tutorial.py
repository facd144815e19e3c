"""Run the commands of docs/tutorial.md, and write their output to the page.

    python docs/run_tutorial.py

Each block of commands (`sh`) is followed by a block with the output. The commands run in a
temporary folder, and the times in the output are from this machine. The pictures that the commands
write are copied to docs/pictures. The program needs `pip install 'mpidl[plots]'`.
"""

import csv
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "tutorial.md"
PICTURES = DOCS / "pictures"
MACHINE = re.compile(
    r"^(warning: |Iteration: \d+, Epoch: ).*\n", re.M
)  # printed only on slow machines
BLOCKS = re.compile(r"^```sh\n(.*?)^```\n\n```\n(.*?)^```$", re.M | re.S)
# {picture on the page: file that the commands write}
WRITTEN = {
    "progress.png": "runs/first/progress.png",
    "augmentation.png": "seen.png",
    "confusion.png": "confusion.png",
}


def outputs(text, folder):
    """Run the blocks of commands in order. Yield (commands, output on the page, new output)."""
    (Path(folder) / "examples").symlink_to(DOCS.parent / "examples")
    for commands, output in BLOCKS.findall(text):
        result = subprocess.run(
            ["bash", "-ec", commands], cwd=folder, capture_output=True, text=True
        )
        if result.returncode:
            raise RuntimeError(f"{commands}exit code {result.returncode}\n{result.stderr}")
        yield commands, output, MACHINE.sub("", result.stdout)


def renew(page, folder):
    """Run the commands of a page in a folder, write their outputs to the page, and print times."""
    text, start = page.read_text(), time.monotonic()
    for commands, output, printed in outputs(text, folder):
        block = f"```sh\n{commands}```\n\n```\n"
        text = text.replace(f"{block}{output}```", f"{block}{shortened(printed, output)}```")
        print(commands, printed, f"{time.monotonic() - start:.1f} s\n", sep="\n", flush=True)
        start = time.monotonic()
    page.write_text(text)


def shortened(printed, output):
    """Return the last lines of an output, as many as the page shows below a line with "..."."""
    first, *rest = output.splitlines()
    if first != "...":
        return printed
    return "\n".join([first, *printed.splitlines()[-len(rest) :], ""])


def draw_predictions(folder):
    """Draw every second of the new images with its predicted class and score."""
    import make_pictures
    from PIL import Image

    with open(folder / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))[::2]
    figure = make_pictures.new_figure(9, 1.5)
    for i, row in enumerate(rows):
        axes = figure.add_subplot(1, len(rows), i + 1)
        axes.imshow(Image.open(folder / row["image"]), cmap="gray")
        score = 100 * float(row[row["predicted"]])
        axes.set_title(f"{row['predicted']}: {score:.1f} %", fontsize=9)
        axes.set_axis_off()
    make_pictures.save(figure, "predictions")


def main():
    with tempfile.TemporaryDirectory() as folder:
        renew(PAGE, folder)
        for picture, file in WRITTEN.items():
            shutil.copy(Path(folder) / file, PICTURES / picture)
        draw_predictions(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
