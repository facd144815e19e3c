"""What decoding, cropping and mirroring cost above Pillow's decoding: a part of `bench input`.

Where libjpeg's buffers happen to lie changes either by up to a half, for as long as a process runs.
So each round is a process of its own, whose heap has other holes.
"""

import json
import os
import subprocess
import sys
import time

import numpy as np

from benchmarks import machine
from mpidl import keyed
from mpidl.data import Augmenter, ImageFolder
from mpidl.data.formats.image_files import MEMORY_BLOCKS
from mpidl.data.loading.pipeline import fill_blocks
from mpidl.errors import Fault

MOST = 64  # files that are read
TURNS = 4  # of a round
HOLES, LARGEST = 200, 9000  # in the heap, and bytes of one


def run(chosen, folder, whole):
    """Microseconds of processor time an image, by what is done with it, of JPEG files in a folder;
    "ratio", "ratio_kept": what decoding, cropping and mirroring cost against Pillow's decoding, as
    it comes and with its memory kept as we have it kept. Raises Fault."""
    rounds = []
    code = "import sys; from benchmarks import decoding; decoding.main(*sys.argv[1:])"
    for number in range(2 * chosen.rounds + 1):
        command = [sys.executable, "-c", code, folder, str(chosen.side), str(number)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise Fault(f"decoding ended with {done.returncode}: {lines[-1]}")
        rounds.append(json.loads(done.stdout))
    found = {name: np.array([row[name] for row in rounds]) for name in rounds[0]}
    cost = found["ours"] + found["moved"] - found["plain"]
    ratios = {"ratio": cost / found["pillow"], "ratio_kept": cost / found["pillow_kept"]}
    size = f"{chosen.side}x{chosen.side}"
    print(
        f"JPEG {whole}x{whole}, us of CPU an image: Pillow's decoding "
        f"{machine.spread(found['pillow'], 1, 0)}, with its memory kept "
        f"{machine.spread(found['pillow_kept'], 1, 0)}, ours to planes "
        f"{machine.spread(found['ours'], 1, 0)}; to blocks of {size} whole "
        f"{machine.spread(found['plain'], 1, 0)}, cropped and mirrored "
        f"{machine.spread(found['moved'], 1, 0)}: decoding, crop and mirror "
        f"{machine.spread(ratios['ratio'], 1, 3)} of Pillow's decoding, "
        f"{machine.spread(ratios['ratio_kept'], 1, 3)} with its memory kept"
    )
    medians = {name: machine.median(values) for name, values in ratios.items()}
    return {name: machine.summary(values) for name, values in found.items()} | medians


def round_of(folder, side):
    """{what is done: microseconds an image, the median of its turns}, in this process."""
    from PIL import Image

    def keep(blocks):
        if hasattr(Image.core, "set_blocks_max"):
            Image.core.set_blocks_max(blocks)

    store = ImageFolder(folder)
    count, size = min(len(store), MOST), (side, side)
    indices = np.arange(count)
    paths = [os.path.join(store.folder, file) for file in store.files[:count]]
    pixels = store.read(indices)
    whole = np.ascontiguousarray(pixels[:, :, :side, :side])
    moves = Augmenter(reflect_x=True, crop=size).moves(0, 1, indices, store.image_shape)
    lanes = np.empty((-(-count // 16), 3, *size, 16), np.float32)

    def pillow():
        for path in paths:
            with Image.open(path) as image:
                image.load()

    def ours():
        for first in range(0, count, 16):
            store.read(indices[first : first + 16])

    def plain():
        fill_blocks(whole, {}, {}, lanes)

    def moved():
        fill_blocks(pixels, {"size": size, **moves}, {}, lanes)

    functions = {"pillow": pillow, "pillow_kept": pillow, "ours": ours}
    functions |= {"plain": plain, "moved": moved}
    times = {name: [] for name in functions}
    for i in range(TURNS):
        for name in list(functions) if i % 2 else reversed(functions):
            keep(0 if name == "pillow" else MEMORY_BLOCKS)
            functions[name]()  # its memory and its code as it leaves them
            began = time.process_time()
            functions[name]()
            times[name].append((time.process_time() - began) / count * 1e6)
    return {name: float(np.median(values)) for name, values in times.items()}


def main(folder, side, number):
    """A round, as JSON."""
    sizes = (keyed.uniform(0, "bench holes", HOLES, sample=int(number)) * LARGEST).astype(int)
    held = [bytearray(size) for size in sizes.tolist()]
    held = held[::2]  # the others leave holes
    print(json.dumps(round_of(folder, int(side))))
    held.clear()
