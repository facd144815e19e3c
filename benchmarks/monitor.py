"""`python -m benchmarks monitor`: compare epochs with and without an open live page.

The two sides, with and without the page, take turns, each in a separate job. A client replaces the
browser: it opens the page, and receives all updates without drawing them. The benchmark also
measures the share of a core that the page's process uses, because the noise of the epochs hides
this cost.
"""

import argparse
import asyncio
import contextlib
import glob
import html
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import numpy as np

from benchmarks import machine, report, turns
from mpidl.errors import Fault
from mpidl.launcher import environment, launcher
from mpidl.training.options import configuration

SIDES = ("with the page", "without")
OPTIONS = ("network", "ranks", "epochs", "rounds", "also")


def main(options: argparse.Namespace) -> dict:
    """Run the benchmark and return its results for the JSON file. Raise Fault if a job fails."""
    machine.refuse_launcher("monitor")
    print(
        f"{options.epochs} epochs of {options.network} after the first one, "
        f"{options.ranks} ranks, {machine.arithmetic()}"
    )
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    shares: list[float] = []
    with tempfile.TemporaryDirectory(prefix="mpidl-bench-") as folder:
        for number, side in turns.alternate(SIDES, options.rounds):
            out = os.path.join(folder, f"{number}-{SIDES.index(side)}")
            frames, share = _train(options, out, side == SIDES[0])
            times[side].append(_seconds(out) / options.epochs)
            note = ""
            if side == SIDES[0]:
                shares.append(share)
                note = f", {frames} frames, {share:.2%} of a core"
            print(f"round {number + 1}, {side}: {times[side][-1]:.3f} s{note}", flush=True)
    rows = [["", "s per epoch", "min", "max"]]
    for side in SIDES:
        numbers = report.summary(times[side])
        rows.append([side, *(f"{numbers[key]:.3f}" for key in ("median", "min", "max"))])
    report.print_table(rows)
    ratio = report.summary(np.divide(times[SIDES[0]], times[SIDES[1]]))
    low, middle, high = (ratio[key] for key in ("min", "median", "max"))
    print(f"{SIDES[0]} / {SIDES[1]}: {middle:.4f} ({low:.4f} to {high:.4f})")
    print(f"the page's process used {report.median(shares):.2%} of a core")
    record = report.header(options, configuration.versions_of("mpirun"), *OPTIONS)
    return record | {"seconds_per_epoch": times, "ratio": ratio, "page_shares": shares}


def _train(options, out, has_page):
    """Train. Return the number of received frames, and the page process's share of a core."""
    words = ["--network", options.network, "--epochs", str(options.epochs + 1), "--out", out]
    words += ["--plots", "none", "--threads", "1", "--test-fraction", "0"]
    words += ["--monitor", *shlex.split(options.also)] if has_page else []
    command = [*launcher(options.ranks), sys.executable, "-m", "mpidl.train", *words]
    process = subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    client, page, lines = Client(), PageProcessor(out), []
    try:
        for line in process.stdout:
            lines.append(line)
            if match := re.match(r"Monitor: (\S+)", line):
                client.start(match[1])
                page.start()
        code = process.wait()
    finally:
        if process.poll() is None:  # interrupted
            process.terminate()
            process.wait()
    if code:
        message = turns.last_message("".join(lines))
        raise Fault(f"mpidl.train ended with exit code {code}: {message}")
    client.join()
    if has_page and not client.frames:
        raise Fault("the page received no update")
    return client.frames, page.share()


def _seconds(out):
    """Return the seconds from the end of the first epoch to the end of the last epoch."""
    with open(os.path.join(out, "metrics.jsonl")) as file:
        records = [json.loads(line) for line in file]
    ends = [record["seconds"] for record in records if record["kind"] == "epoch"]
    return ends[-1] - ends[0]


class PageProcessor(threading.Thread):
    """Reads the processor time of a page's process twice a second, while the process exists.

    Parameters
    ----------
    out : str
        The folder of the run that the page shows.
    """

    def __init__(self, out: str) -> None:
        super().__init__(daemon=True)
        self.out = out
        self.samples: list[tuple[float, float]] = []  # (time, processor seconds)

    def run(self) -> None:
        process = None
        while process is None:
            time.sleep(0.5)
            process = next(filter(self._is_page, glob.glob("/proc/[0-9]*")), None)
        with contextlib.suppress(OSError):
            while True:
                with open(f"{process}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])  # user and system
                self.samples.append((time.monotonic(), ticks / os.sysconf("SC_CLK_TCK")))
                time.sleep(0.5)

    def _is_page(self, process):
        try:
            with open(f"{process}/cmdline") as file:
                words = file.read().split("\0")
        except OSError:
            return False
        return "mpidl.report.live.page_process" in words and self.out in words

    def share(self) -> float:
        """Return the share of a core in the last two thirds of the run, without the start."""
        later_samples = self.samples[len(self.samples) // 3 :]
        if len(later_samples) < 2:
            return float("nan")
        (start, before), (end, after) = later_samples[0], later_samples[-1]
        return (after - before) / (end - start)


class Client:
    """Opens a page in a thread, and counts the frames of its server until the server ends."""

    def __init__(self) -> None:
        self.frames = 0
        self.thread: threading.Thread | None = None

    def start(self, url: str) -> None:
        self.thread = threading.Thread(target=self._run, args=[url])
        self.thread.start()

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def _run(self, url):
        # The page is created once the server has started. The job may end earlier.
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(url) as answer:
                page = html.unescape(answer.read().decode())
            token = re.search(r'"token":"([^"]+)"', page)[1]
            asyncio.run(self._receive(url, token))

    async def _receive(self, url, token):
        from tornado.httpclient import HTTPRequest
        from tornado.websocket import websocket_connect

        origin = url.partition("/?")[0]
        address = url.replace("http://", "ws://").replace("/?", "/ws?")
        request = HTTPRequest(address, headers={"Origin": origin})
        socket = await websocket_connect(request, subprotocols=["bokeh", token])
        while await socket.read_message() is not None:
            self.frames += 1
