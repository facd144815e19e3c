"""Compare packed JPEG files with the folder of the files: speed, measured in turns, and size.

`python -m benchmarks input --packs` calls this module. An epoch of the folder and of each pack
reads, decodes and crops all images in threads, without training. The addresses of libjpeg's buffers
change the times, as in `decoding`, so each round runs in a process whose heap has different holes.
Other work on the machine disturbs the ratios of processor times less than the ratios of rates.
"""

import argparse
import json
import os
import subprocess
import sys
import time

import numpy as np

from benchmarks import report, turns
from benchmarks.decoding import make_holes
from mpidl.data import Augmenter, ImageFolder, MinibatchQueue, PackedDatastore
from mpidl.data.formats import pack_contents, packing
from mpidl.errors import Fault

FOLDER, PACK, SHARDS = "folder", "pack", 4
TURNS = 12  # turns per round, after a warm-up turn


def run(options: argparse.Namespace, folder: str, file_side: int) -> dict:
    """Measure a folder of JPEG files and packs of it, print the results and return them.

    Parameters
    ----------
    options : argparse.Namespace
        Parsed command line of the sub-command.
    folder : str
        Folder of the JPEG files, with sub-folders of classes.
    file_side : int
        Height and width of the files, in pixels.

    Returns
    -------
    dict
        By number of workers, and then by pack: a summary of the images per second, and two ratios
        to the folder (medians over all turns). The ratios compare images per second of elapsed
        time and of processor time. "size" has the bytes of the packs divided by the bytes of
        decoded pixels.

    Raises
    ------
    Fault
        If the process of a round fails.
    """
    files = ImageFolder(folder)
    paths, size = {FOLDER: folder}, {}
    for name, shards in ((PACK, None), (f"{SHARDS} shards", SHARDS)):
        paths[name] = os.path.join(os.path.dirname(folder), f"packed-{shards or 0}.h5")
        packing.pack({"train": files}, paths[name], images="encoded", shards=shards)
        total = sum(map(os.path.getsize, pack_contents.files_of(paths[name])))
        size[name] = total / (len(files) * 3 * file_side**2)
    record, rows = {"size": size}, [["images/s", "workers", *paths, "ratio", "CPU ratio", "size"]]
    for workers in options.workers:
        facts = {"paths": paths, "workers": workers, "side": options.side}
        facts |= {"batch_size": options.batch_size}
        rounds = [_round(facts, number) for number in range(options.rounds)]
        # Arrays (turns of all rounds, 2): images per second, and per second of processor time
        rates = {name: np.concatenate([r[name] for r in rounds]) for name in paths}
        figures = {name: {"rate": report.summary(pairs[:, 0])} for name, pairs in rates.items()}
        for name in size:
            ratios = np.median(rates[name] / rates[FOLDER], axis=0)
            figures[name] |= {"rate_ratio": ratios[0], "processor_rate_ratio": ratios[1]}
            rows.append(
                [name, workers]
                + [f"{figures[other]['rate']['median']:.0f}" for other in paths]
                + [f"{figures[name][f'{key}_ratio']:.3f}" for key in ("rate", "processor_rate")]
                + [f"{size[name]:.3f}"]
            )
        record[str(workers)] = figures
    report.print_table(rows)
    return record


def _round(facts, number):
    """Run a round in a new process and return {set: rates of its turns}."""
    code = "import sys; from benchmarks import packs; packs.main(*sys.argv[1:])"
    command = [sys.executable, "-c", code, json.dumps(facts), str(number)]
    job = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if job.returncode:
        raise Fault(
            f"a round ended with exit code {job.returncode}: {turns.last_message(job.stderr)}"
        )
    return json.loads(job.stdout)


def main(facts: str, number: str) -> None:
    """Measure one round in this process and print its rates as JSON."""
    options = json.loads(facts)
    holes = make_holes(int(number))
    augmenter = Augmenter(reflect_x=True, crop=(options["side"], options["side"]))
    queues = {}
    for name, path in options["paths"].items():
        store = ImageFolder(path) if name == FOLDER else PackedDatastore(path)
        queues[name] = MinibatchQueue(
            store, options["batch_size"], workers=options["workers"], augmenter=augmenter
        )
    times: dict[str, list] = {name: [] for name in queues}
    for turn, name in turns.alternate(queues, TURNS + 1):
        start, used = time.perf_counter(), time.process_time()
        for images, labels in queues[name].epoch(turn):
            del images, labels
        if turn:  # the first turn brings code and data into the cache
            times[name].append((time.perf_counter() - start, time.process_time() - used))
    holes.clear()
    count = len(queues[FOLDER].datastore)
    print(json.dumps({name: (count / np.array(pairs)).tolist() for name, pairs in times.items()}))
