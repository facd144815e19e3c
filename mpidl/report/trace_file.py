"""Write a timeline of all ranks in the Chrome Trace Event format, which Perfetto can show."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidl import phases
from mpidl.files import write_whole

LINES = {phases.ITERATIONS: 0, phases.MAIN: 1, phases.SUMS: 2, phases.GPU: 3}  # order of tracks
TITLES = {
    phases.ITERATIONS: "iterations",
    phases.MAIN: "main thread",
    phases.SUMS: "pending sums",
    phases.GPU: "GPU",
}
# Perfetto identifies a thread by its number only, which must differ from the numbers of processes.
FIRST_LINE, MAX_LINES = 10_000_000, 1000
CHUNK = 4096  # number of events that are compressed together


class RankSpans(NamedTuple):
    """The spans of a rank."""

    host: str  # host and device of the rank
    device: str
    spans: np.ndarray
    # Labels of spans; the field `label` of a span is an index into this list.
    labels: list[tuple[str, str, str]]
    seconds: phases.Seconds  # seconds per phase in the recorded iterations
    iterations: int  # number of recorded iterations
    is_full: bool  # whether spans are missing because the memory for spans was full

    def select(self, track: str, *categories: str) -> np.ndarray:
        """Return the spans of a track by their start, of all or of the given categories."""
        numbers = [
            number
            for number, (name, category, _) in enumerate(self.labels)
            if name == track and (not categories or category in categories)
        ]
        return np.sort(self.spans[np.isin(self.spans["label"], numbers)], order="start")

    def name(self, span: np.void) -> str:
        """Return the name of a span."""
        return self.labels[span["label"]][2]


def cut_to_common(ranks: Sequence[RankSpans]) -> tuple[list[RankSpans], int | None]:
    """If a rank ran out of memory for spans, drop the iterations that are incomplete on any rank.

    Return the ranks and the last complete iteration, or None if no spans are missing.
    """
    if not any(rank.is_full for rank in ranks):
        return list(ranks), None
    last = min(int(rank.select(phases.ITERATIONS)["size"].max(initial=0)) for rank in ranks)
    shortened = []
    for rank in ranks:
        iterations = rank.select(phases.ITERATIONS)
        end = iterations["end"][iterations["size"] <= last].max(initial=0)
        shortened.append(rank._replace(spans=rank.spans[rank.spans["end"] <= end]))
    return shortened, last


def events(ranks: Sequence[RankSpans]) -> Iterator[str]:
    """Yield the events of a timeline as JSON.

    Each rank is a process of the trace. The earliest span of all ranks begins at time 0.
    """
    starts = [int(rank.spans["start"].min()) for rank in ranks if len(rank.spans)]
    origin = min(starts, default=0)
    for number, rank in enumerate(ranks):
        readers = sorted({track for track, *_ in rank.labels} - set(LINES))
        order = LINES | {track: len(LINES) + i for i, track in enumerate(readers)}
        lines = {track: FIRST_LINE + number * MAX_LINES + i for track, i in order.items()}
        main, title = lines[phases.MAIN], f"rank {number}, {rank.host}, {rank.device}"
        yield _metadata("process_name", number, main, name=title)
        yield _metadata("process_sort_index", number, main, sort_index=number)
        titles = TITLES | {track: f"reader {i + 1}" for i, track in enumerate(readers)}
        for track in {track: None for track, *_ in rank.labels}:
            yield _metadata("thread_name", number, lines[track], name=titles[track])
            yield _metadata("thread_sort_index", number, lines[track], sort_index=order[track])
        yield from _span_events(rank, number, lines, origin)


def _metadata(kind, rank, line, **arguments):
    event = {"ph": "M", "name": kind, "pid": rank, "tid": line, "args": arguments}
    return json.dumps(event)


def _span_events(rank, number, lines, origin):
    """Yield the events of the spans of a rank; times are in microseconds."""
    heads = []
    for track, category, name in rank.labels:
        head = {"name": name, "cat": category, "pid": number, "tid": lines[track]}
        heads.append(json.dumps(head)[:-1])
    columns = [rank.spans[field].tolist() for field in ("start", "end", "label", "size")]
    for i, (start, end, label, size) in enumerate(zip(*columns, strict=True)):
        track, time, head = rank.labels[label][0], (start - origin) / 1000, heads[label]
        if track == phases.SUMS:  # sums overlap, so they are asynchronous events
            key = f'"id2": {{"local": "{i}"}}, "ts": '  # an ID within the process
            yield f'{head}, "ph": "b", {key}{time:.3f}, "args": {{"bytes": {size}}}}}'
            yield f'{head}, "ph": "e", {key}{(end - origin) / 1000:.3f}}}'
            continue
        arguments = ""
        if track == phases.ITERATIONS:
            arguments = f', "args": {{"iteration": {size}}}'
            head = head.replace('"iteration"', f'"iteration {size}"', 1)
        duration = (end - start) / 1000
        yield f'{head}, "ph": "X", "ts": {time:.3f}, "dur": {duration:.3f}{arguments}}}'


def write_timeline(path: str, ranks: Sequence[RankSpans], facts: Mapping[str, Any]) -> None:
    """Write a timeline as compressed JSON to a path that ends in ".json.gz".

    The spans have times of a common clock, and `facts` are stored as "otherData". Raises UserError
    if the file cannot be written.
    """
    memory = io.BytesIO()
    with gzip.GzipFile(fileobj=memory, mode="wb", compresslevel=4, mtime=0) as file:
        head = {"displayTimeUnit": "ms", "otherData": facts}
        file.write(f'{json.dumps(head, allow_nan=False)[:-1]}, "traceEvents": [\n'.encode())
        pending, separator = [], ""
        for event in events(ranks):
            pending.append(event)
            if len(pending) == CHUNK:
                file.write((separator + ",\n".join(pending)).encode())
                pending, separator = [], ",\n"
        file.write((separator + ",\n".join(pending) + "\n]}\n").encode())
    write_whole(path, memory.getbuffer())
