"""Write a run for TensorBoard: event files with scalars, pictures, histograms and options."""

from __future__ import annotations

import glob
import io
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpidl.report.status import FINISHED
from mpidl.text import printable
from mpidl.trackers.base import Tracker, folder_of_run
from mpidl.trackers.records import Histogram, need, writing

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer

FOLDER, FILES = "tensorboard", "events.out.tfevents.*"
FLUSH_SECONDS = 5.0  # shortest time between two flushes, except before a checkpoint


class TensorBoardHook(Tracker):
    """Writes event files for TensorBoard. The option `tensorboard` adds this hook.

    Parameters
    ----------
    folder : path, optional
        Folder for the event files. The default is the subfolder "tensorboard" of the run's folder.

    Raises
    ------
    UserError
        If tensorboardX is not installed.
    """

    copied = (FOLDER,)

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        need("tensorboardX", "tensorboard")
        self.folder = "" if folder is None else os.fspath(folder)

    @classmethod
    def written(cls, folder: str) -> list[str]:
        """Return the paths of the event files in the folder of a run."""
        events = os.path.join(folder, FOLDER)
        is_link = os.path.islink(events)
        return [] if is_link else glob.glob(os.path.join(glob.escape(events), FILES))

    def open(self, trainer: Trainer) -> None:
        """Create a new event file.

        TensorBoard reads all files of the folder together, and ignores records of later iterations
        in older files.
        """
        from tensorboardX import summary
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto import event_pb2, summary_pb2

        if not self.folder:
            self.folder = os.path.join(folder_of_run(trainer, "--tensorboard"), FOLDER)
        self._first = trainer.position.iteration
        self._event, self._summary, self._text = event_pb2.Event, summary_pb2.Summary, summary.text
        self._histogram = summary.histogram_raw
        with writing(self.folder):
            os.makedirs(self.folder, exist_ok=True)
            # A run may resume within the same second, and TensorBoard sorts the files by name.
            self._writer = EventsWriter(os.path.join(self.folder, "events"), f".{self._first:012}")
        if self._first:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(self._first + 1, session_log=start)
        self.flush()

    def parameters(self, values: Mapping[str, Any]) -> None:
        """Write the options as a table, which TensorBoard shows under Text."""
        rows = (f"| {name} | {_cell(value)} |" for name, value in values.items())
        table = "\n".join(["| option | value |", "|---|---|", *rows])
        self._write(self._first, summary=self._text("options", table))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of an iteration as one event."""
        numbers = [self._summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        self._write(step, summary=self._summary(value=numbers))
        if time.monotonic() - self._flush_time > FLUSH_SECONDS:  # a flush waits for the disk
            self.flush()

    def picture(self, name: str, step: int, png: bytes) -> None:
        """Write a picture."""
        from PIL import Image

        with Image.open(io.BytesIO(png)) as image:
            size = {"width": image.width, "height": image.height}
        picture = self._summary.Image(**size, colorspace=3, encoded_image_string=png)
        value = self._summary.Value(tag=name, image=picture)
        self._write(step, summary=self._summary(value=[value]))

    def histogram(self, name: str, step: int, values: Histogram) -> None:
        """Write a histogram."""
        edges = values.edges.tolist()
        numbers = edges[0], edges[-1], int(values.counts.sum()), values.total, values.squares
        summary = self._histogram(name, *numbers, edges[1:], values.counts.tolist())
        self._write(step, summary=summary)

    def flush(self) -> None:
        """Write all events to the disk."""
        with writing(self.folder):
            self._writer.flush()
        self._flush_time = time.monotonic()

    def close(self, state: str = FINISHED) -> None:
        """Write all events and close the file."""
        with writing(self.folder):
            self._writer.close()

    def _write(self, step, **content):
        with writing(self.folder):
            self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))


def _cell(value):
    return printable("none" if value is None else str(value)).replace("|", "\\|")
