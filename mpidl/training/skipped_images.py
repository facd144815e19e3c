"""Report the images that a run skipped, and store them in its checkpoints."""

from __future__ import annotations

import contextlib
import csv
import io
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpidl.data.datastore import Datastore
from mpidl.data.loading.bad_images import BadImages
from mpidl.files import write_whole
from mpidl.report.run_files import BAD_IMAGES
from mpidl.training.progress import EpochSummary

if TYPE_CHECKING:
    from mpidl.training.run import Run
    from mpidl.training.trainer import Trainer

MOST_LINES = 5  # largest number of images for which a line is printed
HEADINGS = ["set", "image", "reason"]


def write_list(folder: str | os.PathLike[str], sets: Mapping[str, Any]) -> None:
    """Write the skipped images of the given sets to bad-images.csv; keep the rows of other sets.

    Parameters
    ----------
    folder : path
        The folder of the run.
    sets : mapping
        {name of the set, such as "training": (Datastore, BadImages)}
    """
    path = os.path.join(folder, BAD_IMAGES)
    rows = [row for row in _read_rows(path) if row[0] not in sets]
    for name, (store, bad_images) in sets.items():
        reasons = sorted(bad_images.reasons.items())
        rows += [[name, store.located(i), reason] for i, reason in reasons]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([HEADINGS, *rows])
    write_whole(path, text.getvalue().encode("utf-8", "surrogateescape"))


def _read_rows(path):
    """Return the undamaged rows of a CSV file, without its headings."""
    rows: list[list[str]] = []
    if os.path.exists(path):
        with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            with contextlib.suppress(csv.Error):
                rows += csv.reader(file)
    return [row for row in rows if len(row) == len(HEADINGS) and row != HEADINGS]


def sets_of(trainer: Run) -> dict[str, tuple[Datastore, BadImages]]:
    """Return {set name: (images, skipped images)} of a run; {} if the run skips no images."""
    validation = trainer.validation
    sets = {"training": (trainer.datastore, trainer.bad_images)}
    sets["validation"] = validation.store, validation.bad_images
    return {
        name: (store, bad_images)
        for name, (store, bad_images) in sets.items()
        if store is not None and bad_images is not None
    }


def facts(trainer: Run) -> dict[str, Any]:
    """Return {"bad_images": {set name: {index: reason}}}; {} if no image was skipped."""
    reasons = {name: bad.reasons for name, (_, bad) in sets_of(trainer).items() if len(bad)}
    return {"bad_images": reasons} if reasons else {}


def restore(trainer: Run, saved: Mapping[str, Any]) -> None:
    """Restore the skipped images of a resumed run from the facts of its checkpoint."""
    for name, (_, bad_images) in sets_of(trainer).items():
        reasons = saved.get("bad_images", {}).get(name, {})
        bad_images.merge([{int(i): reason for i, reason in reasons.items()}])


class SkippedImagesHook:
    """Reports the first skipped images, and writes a list of all skipped images."""

    def __init__(self) -> None:
        self.reported: set[tuple[str, int]] = set()
        self.listed = 0

    def start(self, trainer: Trainer) -> None:
        self._tell(trainer)

    def step(self, trainer: Trainer) -> None:
        self._tell(trainer)

    def lost(self, trainer: Trainer) -> None:
        self.listed = 0  # after a loss, ranks may have listed different numbers of images

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        self._tell(trainer)
        counts = [f"{len(bad)} of {name}" for name, (_, bad) in sets_of(trainer).items() if bad]
        if counts:
            trainer.console.line(f"Epoch: {summary.epoch}, Skipped images: {', '.join(counts)}")
        self._list(trainer)

    def finish(self, trainer: Trainer) -> None:
        self._tell(trainer)
        self._list(trainer)

    def _tell(self, trainer):
        """Print messages about images that were skipped since the last call."""
        for name, (_, bad_images) in sets_of(trainer).items():
            for i, reason in bad_images.reasons.items():
                if (name, i) not in self.reported:
                    self.reported.add((name, i))
                    if len(self.reported) <= MOST_LINES:
                        trainer.console.line(f"warning: skipped an image: {reason}")

    def _list(self, trainer):
        """Write the list if images were skipped since the last call. Collective."""
        if trainer.writer.out is None or self.listed == len(self.reported):
            return
        self.listed = len(self.reported)

        def write():
            write_list(trainer.writer.out, sets_of(trainer))

        trainer.writer.write(write)
