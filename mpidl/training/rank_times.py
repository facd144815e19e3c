"""Record how each rank spends its time, in the `ranks` records of metrics.jsonl."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from mpidl import phases
from mpidl.data import partition
from mpidl.report.metrics import Metrics
from mpidl.training.late_ranks import LateRanks

if TYPE_CHECKING:
    from mpidl.ranks.world import World
    from mpidl.training.progress import EpochSummary
    from mpidl.training.trainer import Trainer

SECONDS = 2.0  # shortest time between two records within an epoch


class RankTimesHook:
    """Writes `ranks` records about every two seconds and at the end of each epoch.

    At the end of an epoch, the hook also prints a line that names the ranks that were always late.

    The ranks cannot agree on the time without a message. Rank 0 therefore decides at which
    iteration the ranks will exchange their times next. Until that iteration, the hook sends no
    messages.
    """

    def start(self, trainer: Trainer) -> None:
        self.recorded = trainer.position.iteration
        if trainer.writer.out is None:
            return
        self.devices = trainer.world.gather(device_name(trainer.world))
        self.late = LateRanks(trainer.world.hosts)
        self.previous, self.start_time = phases.seconds(), time.monotonic()
        self.meeting_time, self.meeting = self.start_time, self.recorded
        self.next_meeting = self.recorded + 1

    lost = start

    def step(self, trainer: Trainer) -> None:
        iteration = trainer.position.iteration
        if trainer.writer.out is None or iteration != self.next_meeting:
            return
        if trainer.leaves_epoch:  # `epoch` or `finish` writes the record
            self.next_meeting += 1
            return
        now = time.monotonic()
        rest = SECONDS - (now - self.start_time)
        pace = (now - self.meeting_time) / (iteration - self.meeting)
        self.meeting_time, self.meeting = now, iteration
        is_due = rest <= 0
        count = max(1, int((SECONDS if is_due else rest) / max(pace, 1e-6)))
        is_due, self.next_meeting = trainer.world.broadcast((is_due, iteration + count))
        if is_due:
            self._record(trainer, trainer.position.epoch)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        self._record(trainer, summary.epoch)
        if trainer.writer.out is not None and (text := self.late.message()) is not None:
            trainer.console.line(text)

    def finish(self, trainer: Trainer) -> None:
        if trainer.position.batch and trainer.position.iteration != self.recorded:
            self._record(trainer, trainer.position.epoch)

    def _record(self, trainer, epoch):
        """Write a record of the time since the last record. Collective."""
        if trainer.writer.out is None:
            return
        self.recorded = trainer.position.iteration
        totals = phases.seconds()
        spent = [new - old for new, old in zip(totals, self.previous, strict=True)]
        self.start_time, self.previous = time.monotonic(), totals
        ranks = trainer.world.gather((phases.Seconds(*spent), resident_bytes()))
        if ranks is not None:
            self._judge([seconds for seconds, _ in ranks], trainer)
            times = {
                kind: [round(getattr(seconds, kind), 6) for seconds, _ in ranks]
                for kind in phases.KINDS
            }
            fields = {"seconds": trainer.position.seconds, **times}
            fields |= {"memory": [nbytes for _, nbytes in ranks], "device": self.devices}
            trainer.writer.add(Metrics.record_ranks, epoch, self.recorded, fields)

    def _judge(self, times, trainer):
        """Add an interval to the statistics about late ranks."""
        count = min(trainer.options.batch_size, len(trainer.datastore))
        shares = partition.image_shares(count, trainer.world.size, trainer.queue.load)
        self.late.add(times, [stop - first for first, stop in shares])


def device_name(world: World) -> str:
    """Return the device on which this rank computes, such as "cpu, 2 threads"."""
    if world.device is not None:
        return world.device.name
    threads = world.threads[world.rank] if world.threads else 1
    return f"cpu, {threads} thread{'s' if threads > 1 else ''}"


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
