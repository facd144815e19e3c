"""Define the hook that records a run for Weights & Biases."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mpidl.errors import UserError
from mpidl.report.trackers import tracking
from mpidl.report.trackers.tracking import Tracker
from mpidl.training.tracking_hooks.base import TrackingHook, folder_of_run, name_of_run

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer


class WandbHook(TrackingHook):
    """Records a run for Weights & Biases offline; ``wandb sync`` can upload the record later.

    Parameters
    ----------
    project : str
        Name of the project.
    name : str, optional
        Name of the run. The default is the name of the run's folder.
    folder : path, optional
        Folder in which the subfolder "wandb" is created. The default is the folder of the run.

    Raises
    ------
    UserError
        If wandb is not installed.
    """

    def __init__(
        self,
        project: str = "mpidl",
        name: str | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        if not project:
            raise UserError("--wandb: expected the name of a project, found an empty name")
        tracking.need("wandb", "--wandb", "wandb")
        self.project, self.name, self.folder = project, name, folder

    def open(self, trainer: Trainer) -> Tracker:
        """Create an offline run, or continue the stored run if the training is resumed."""
        from mpidl.report.trackers.wandb_run import WandbRun

        out, is_resumed = trainer.writer.out, trainer.position.iteration > 0
        folder = folder_of_run(trainer, "--wandb") if self.folder is None else self.folder
        name = self.name or name_of_run(out)
        return WandbRun(os.path.abspath(folder), self.project, name, out, is_resumed)
