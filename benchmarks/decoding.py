"""Measure the cost of decoding, cropping and mirroring, relative to Pillow's decoding.

The command `python -m benchmarks input` calls this module. The memory addresses of libjpeg's
buffers change the times by up to 50 %, and the addresses stay the same while a process runs. Each
round therefore runs in a new process, whose heap has different holes.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import numpy as np

from benchmarks import report, turns
from mpidl.core import keyed
from mpidl.data import Augmenter, ImageFolder
from mpidl.data.formats.image_files import MEMORY_BLOCKS
from mpidl.data.loading.pipeline import fill_blocks
from mpidl.data.transforms.draws import SampleKeys
from mpidl.errors import Fault

FILES = 64  # maximum number of files to read
TURNS = 4  # turns per round
BUFFERS, LARGEST_BUFFER = 200, 9000  # number and largest size in bytes; half are freed


def run(options: argparse.Namespace, folder: str, file_side: int) -> dict:
    """Measure the cost of reading JPEG files and print it.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed command line of the sub-command.
    folder : str
        Folder that contains the files.
    file_side : int
        Height and width of the files, in pixels.

    Returns
    -------
    dict
        Summaries of the microseconds of processor time per image, by operation. "ratio" is the cost
        of decoding, cropping and mirroring divided by the cost of Pillow's decoding. In
        "ratio_kept", Pillow keeps its memory between images, as mpidl's reader does.

    Raises
    ------
    Fault
        If the process of a round fails.
    """
    rounds = []
    code = "import sys; from benchmarks import decoding; decoding.main(*sys.argv[1:])"
    for number in range(2 * options.rounds + 1):
        command = [sys.executable, "-c", code, folder, str(options.side), str(number)]
        job = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if job.returncode:
            message = turns.last_message(job.stderr)
            raise Fault(f"decoding ended with exit code {job.returncode}: {message}")
        rounds.append(json.loads(job.stdout))
    times = {name: np.array([row[name] for row in rounds]) for name in rounds[0]}
    cost = times["ours"] + times["moved"] - times["plain"]
    ratios = {"ratio": cost / times["pillow"], "ratio_kept": cost / times["pillow_kept"]}
    size = f"{options.side}x{options.side}"
    print(f"JPEG {file_side}x{file_side}, us of processor time per image:")
    texts = {
        "pillow": "Pillow's decoding",
        "pillow_kept": "the same, reusing its memory",
        "ours": "mpidl, to planes",
        "plain": f"planes to blocks of {size}, unchanged",
        "moved": f"planes to blocks of {size}, cropped and mirrored",
    }
    rows = [(f"  {text}", report.spread(times[name], 1, 0)) for name, text in texts.items()]
    texts = {"ratio": "Pillow's", "ratio_kept": "Pillow's, reusing its memory"}
    rows += [
        (
            f"  decoding, cropping and mirroring, divided by {text}",
            report.spread(ratios[name], 1, 3),
        )
        for name, text in texts.items()
    ]
    report.print_table(rows, left=2)
    medians = {name: report.median(values) for name, values in ratios.items()}
    return {name: report.summary(values) for name, values in times.items()} | medians


def measure_round(folder: str, side: int) -> dict[str, float]:
    """Return the microseconds per image by operation, as medians over the turns."""
    from PIL import Image

    def keep(blocks):
        if hasattr(Image.core, "set_blocks_max"):
            Image.core.set_blocks_max(blocks)

    store = ImageFolder(folder)
    count, size = min(len(store), FILES), (side, side)
    indices = np.arange(count)
    paths = [os.path.join(store.folder, file) for file in store.files[:count]]
    pixels = store.read(indices)
    corners = np.ascontiguousarray(pixels[:, :, :side, :side])
    moves = Augmenter(reflect_x=True, crop=size).moves(
        SampleKeys(indices, 1, 0), store.image_shape, store.dtype
    )
    lanes = np.empty((-(-count // 16), 3, *size, 16), np.float32)

    def pillow():
        for path in paths:
            with Image.open(path) as image:
                image.load()

    def ours():
        for first in range(0, count, 16):
            store.read(indices[first : first + 16])

    def plain():
        fill_blocks(corners, {}, {}, lanes)

    def moved():
        fill_blocks(pixels, moves, {}, lanes)

    functions = {"pillow": pillow, "pillow_kept": pillow, "ours": ours}
    functions |= {"plain": plain, "moved": moved}
    times = {name: [] for name in functions}
    for _, name in turns.alternate(functions, TURNS):
        keep(0 if name == "pillow" else MEMORY_BLOCKS)
        functions[name]()  # brings code and data into the cache
        start = time.process_time()
        functions[name]()
        times[name].append((time.process_time() - start) / count * 1e6)
    return {name: report.median(values) for name, values in times.items()}


def make_holes(number: int) -> list[bytearray]:
    """Make holes in the heap of this process, and return the buffers between them."""
    sizes = (keyed.uniform(0, "bench holes", BUFFERS, sample=number) * LARGEST_BUFFER).astype(int)
    buffers = [bytearray(size) for size in sizes.tolist()]
    return buffers[::2]  # the freed buffers leave holes


def main(folder, side, number):
    """Measure one round in this process and print its times as JSON."""
    buffers = make_holes(int(number))
    print(json.dumps(measure_round(folder, int(side))))
    buffers.clear()
