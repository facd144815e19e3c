"""Describe a hanging job: what each rank is doing, and the Python stacks of unresponsive ranks."""

from __future__ import annotations

import contextlib
import os
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpidl.errors import UserError
from mpidl.files import write_whole
from mpidl.ranks import acts

NAME = "hang-report.txt"  # name of the file in the folder of the run
MAX_RANKS = 16  # limit for silent and for waiting ranks in the message; the file lists all ranks


class Peer(NamedTuple):
    """The host of a rank, and the location of its act file for other ranks on this host."""

    host: str
    address: acts.Address


class Hang(NamedTuple):
    """The available information about a job that hangs.

    Attributes
    ----------
    peers : sequence of Peer
        All ranks.
    summary : str
        The operation that did not complete, with epoch and iteration.
    answers : mapping
        {rank: act} of the ranks that wait. An act describes a wait (see `acts`).
    sightings : mapping
        {rank: Sighting} of the ranks that do not answer, as seen by another rank on the same host.
        The value is None if no rank on that host answers.
    hint : str
        Text for the message if `sightings` is empty.
    """

    peers: Sequence[Peer]
    summary: str
    answers: Mapping[int, str]
    sightings: Mapping[int, acts.Sighting | None]
    hint: str = "all ranks respond, but they wait for different operations:"

    def report(self, folder: str | None) -> str:
        """Return the message for stderr, and write the complete report to a file.

        Parameters
        ----------
        folder : str or None
            Folder of the run. If there is no folder or writing fails, the message contains the
            stacks.
        """
        head = [f"mpidl: {self.summary}", *([] if self.sightings else [f"  {self.hint}"])]
        silent = [self._silent_line(rank) for rank in sorted(self.sightings)]
        waiting = [f"  rank {rank}, {act}" for rank, act in sorted(self.answers.items())]
        stacks = self._stacks()
        if folder is not None:
            path = os.path.join(folder, NAME)
            text = "\n".join([time.strftime("%FT%T%z"), *head, *silent, *waiting, *stacks, ""])
            with contextlib.suppress(UserError):
                write_whole(path, text.encode())
                stacks = [f"  {path} lists all ranks, with the Python stacks of the silent ranks"]
        return "\n".join([*head, *_first(silent), *_first(waiting), *stacks])

    def _silent_line(self, rank):
        host, address = self.peers[rank]
        text = f"  rank {rank} on host {host} (process {address.pid}) does not answer: "
        sighting = self.sightings[rank]
        if sighting is None:
            return f"{text}no rank on this host answers"
        act = f"; last activity: {sighting.act}" if sighting.act else ""
        return f"{text}its process {acts.STATES.get(sighting.state, 'is running')}{act}"

    def _stacks(self):
        lines = []
        for rank, sighting in sorted(self.sightings.items()):
            if sighting is not None and sighting.stacks:
                lines += [f"  Python stacks of rank {rank}:"]
                lines += [textwrap.indent(sighting.stacks, "    ")]
            elif sighting is not None and sighting.state in acts.STOPPED_STATES:
                lines.append(f"  rank {rank} is stopped, so it cannot show its Python stacks")
        return lines


def _first(lines):
    rest = len(lines) - MAX_RANKS
    return [*lines[:MAX_RANKS], *([f"  and {rest} more ranks"] if rest > 0 else [])]
