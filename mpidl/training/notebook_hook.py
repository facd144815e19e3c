"""Show the progress of a run in the notebook that launched its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpidl.report.progress.notebook_records import Recorder
    from mpidl.training.trainer import Trainer


class NotebookHook:
    """Sends the records of the run from rank 0 to the notebook that launched the ranks."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def start(self, trainer: Trainer) -> None:
        numbers = {"epochs": trainer.options.epochs, "iterations": trainer.total_iterations}
        self.recorder.write({"kind": "start", **numbers, "iteration": trainer.position.iteration})
        trainer.writer.listeners.append(self.recorder.write)

    def finish(self, trainer: Trainer) -> None:
        self.recorder.write({"kind": "state", "state": "finishing"})

    def end(self, trainer: Trainer) -> None:
        is_stopped = trainer.signals.agreed or trainer.signals.name is not None
        self.recorder.write({"kind": "state", "state": "stopped" if is_stopped else "finished"})
