"""Show the progress of a run in the notebook that launched its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpidl.report.progress.notebook_records import Recorder
    from mpidl.training.progress import EpochSummary
    from mpidl.training.steps import StepResult
    from mpidl.training.trainer import Trainer


class NotebookHook:
    """Sends the progress of the run from rank 0 to the notebook that launched the ranks."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.validated = recorder, 0

    def start(self, trainer: Trainer) -> None:
        self.validated = trainer.validation.last_iteration
        position, total = trainer.position, trainer.total_iterations
        self.recorder.write(
            "start", epochs=trainer.options.epochs, iterations=total, iteration=position.iteration
        )

    def iteration(self, trainer: Trainer, result: StepResult) -> None:
        info = result.info
        self.recorder.write(
            "iteration",
            epoch=info.epoch,
            iteration=info.iteration,
            loss=result.loss,
            accuracy=result.accuracy,
            learning_rate=info.learning_rate,
            images_per_second=result.images_per_second,
        )

    def step(self, trainer: Trainer) -> None:
        validation = trainer.validation
        if validation.last is not None and validation.last_iteration != self.validated:
            self.validated = validation.last_iteration
            self._write("validation", validation.last, self.validated)

    def _write(self, kind, evaluation, iteration):
        metrics = {} if evaluation.metrics is None else evaluation.metrics.values
        numbers = {"loss": evaluation.loss, "accuracy": evaluation.accuracy}
        self.recorder.write(kind, metrics, iteration=iteration, **numbers)

    def epoch(self, trainer: Trainer, summary: EpochSummary) -> None:
        self.step(trainer)
        self.recorder.write(
            "epoch", iteration=summary.iteration, loss=summary.loss, accuracy=summary.accuracy
        )

    def finish(self, trainer: Trainer) -> None:
        self.recorder.write("state", state="finishing")

    def end(self, trainer: Trainer) -> None:
        self.step(trainer)
        if (final := trainer.validation.final) is not None:
            self._write("final_validation", final, trainer.returned_iteration)
        is_stopped = trainer.signals.agreed or trainer.signals.name is not None
        self.recorder.write("state", state="stopped" if is_stopped else "finished")
