"""Define the hook that writes event files for TensorBoard."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpidl.report.trackers import tracking
from mpidl.report.trackers.tracking import Tracker
from mpidl.training.files.run_folder import TENSORBOARD
from mpidl.training.tracking_hooks.base import TrackingHook, folder_of_run

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer


class TensorBoardHook(TrackingHook):
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

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        tracking.need("tensorboardX", "--tensorboard", "tensorboard")
        self.folder = folder

    def open(self, trainer: Trainer) -> Tracker:
        """Create a new event file, and return it."""
        from mpidl.report.trackers.tensorboard_files import EventFile

        folder = self.folder
        if folder is None:
            folder = os.path.join(folder_of_run(trainer, "--tensorboard"), TENSORBOARD)
        return EventFile(os.fspath(folder), trainer.position.iteration)
