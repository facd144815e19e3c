"""Record a timeline of the first iterations of a run, as the option `timeline` requests."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from mpidl import phases
from mpidl.comm.clocks import compare_clocks, to_rank_0
from mpidl.errors import UserError
from mpidl.phases import SPAN, Seconds
from mpidl.report import timeline_table, trace_file
from mpidl.training.files.run_folder import TIMELINE
from mpidl.training.rank_times import device_name

if TYPE_CHECKING:
    from mpidl.comm.clocks import ClockOffset
    from mpidl.report.trace_file import RankSpans
    from mpidl.training.options.training_options import TrainingOptions
    from mpidl.training.progress import EpochSummary
    from mpidl.training.trainer import Trainer


class TimelineHook:
    """Stores the spans of the first iterations, and writes them to the folder of the run.

    A span is a named interval of time. This hook is the last hook, so that the span of an iteration
    contains the work of all other hooks.
    """

    def __init__(self, options: TrainingOptions) -> None:
        self.count, self.megabytes = options.timeline, options.timeline_mb
        self.is_recording, self.recorded = False, 0
        self.totals = [0.0] * len(phases.KINDS)

    def start(self, trainer: Trainer) -> None:
        if trainer.writer.out is None:
            raise UserError("timeline: expected a folder for its file; pass out= to dl.train")
        self.first = trainer.position.iteration + 1
        self.offsets = compare_clocks(trainer.world)
        self.is_recording, self.date = True, time.time()
        nbytes = self.megabytes << 20
        phases.store_spans(max(nbytes // SPAN.itemsize // trainer.world.size, 1))
        phases.iteration_ends()
        self.before = phases.seconds()

    def lost(self, trainer: Trainer) -> None:
        if trainer.world.gop("or", self.is_recording):  # start again with the remaining ranks
            self.totals = [0.0] * len(phases.KINDS)
            self.start(trainer)

    def step(self, trainer: Trainer) -> None:
        if not self.is_recording:
            return
        now = phases.seconds()
        self.totals = [
            total + end - begin
            for total, end, begin in zip(self.totals, now, self.before, strict=True)
        ]
        self.before = now
        phases.iteration_ends(trainer.position.iteration)
        self.recorded = trainer.position.iteration - self.first + 1
        if self.recorded >= self.count:
            self.write(trainer)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        if not self.is_recording:
            return
        spans = phases.spans()
        if trainer.world.gop("max", int(spans is not None and spans.is_full)):
            self.write(trainer)
        phases.iteration_ends()
        self.before = phases.seconds()

    def finish(self, trainer: Trainer) -> None:
        if self.is_recording:
            self.write(trainer)

    def write(self, trainer: Trainer) -> None:
        """Stop recording, and write the timeline on rank 0. Collective.

        If the file cannot be written, rank 0 prints a warning and the run continues.
        """
        trainer.wait()  # on a GPU, the last steps may still be running
        self.is_recording = False
        world, stored = trainer.world, phases.take_spans()
        if stored is None:
            return
        offsets = compare_clocks(world)
        rank_spans = trace_file.RankSpans(
            host=world.host,
            device=device_name(world),
            spans=stored.array(),
            labels=list(stored.labels),
            seconds=Seconds(*self.totals),
            iterations=self.recorded,
            is_full=stored.is_full,
        )
        ranks = world.gather(rank_spans)
        if ranks is not None and not trainer.session.lock.is_lost:
            for line in self._write(trainer, ranks, offsets):
                trainer.console.line(line)

    def _write(self, trainer, ranks: list[RankSpans], offsets: list[ClockOffset]) -> list[str]:
        """Write the timeline; return the lines to print."""
        for number, rank in enumerate(ranks):
            spans = rank.spans.copy()
            for edge in ("start", "end"):
                spans[edge] = to_rank_0(spans[edge], self.offsets[number], offsets[number])
            ranks[number] = rank._replace(spans=spans)
        ranks, last = trace_file.cut_to_common(ranks)
        path = os.path.join(trainer.writer.out, TIMELINE)
        lines = timeline_table.summary(ranks)
        errors = [max(a.error, b.error) for a, b in zip(self.offsets, offsets, strict=True)]
        facts = {
            "ranks": len(ranks),
            "first_iteration": self.first,
            "last_iteration": trainer.position.iteration if last is None else last,
            "cut": last is not None,
            "cut_reason": None if last is None else f"--timeline-mb {self.megabytes}",
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.date)),
            "clock_error_microseconds": [error / 1000 for error in errors],
            "coverage": [round(timeline_table.coverage(rank), 4) for rank in ranks],
            "summary": lines,
        }
        if last is not None:
            lines.append(
                f"The timeline was cut after iteration {last}: its memory was full (--timeline-mb "
                f"{self.megabytes})"
            )
        try:
            trace_file.write_timeline(path, ranks, facts)
        except UserError as error:
            return [*lines, f"warning: no timeline: {error}"]
        return [*lines, f"Timeline: {path} (open it in https://ui.perfetto.dev)"]
