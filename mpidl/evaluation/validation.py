"""Validate during training: decide when to validate, when to stop, and which network is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl.data.datastore import Datastore, Subset
from mpidl.data.loading.bad_images import BadImages
from mpidl.errors import UserError

if TYPE_CHECKING:
    from mpidl.evaluation.evaluate import Evaluation
    from mpidl.nn import Network
    from mpidl.ranks.failure import Signals
    from mpidl.ranks.world import World

# {table of a checkpoint for the best network: attribute of the network that the table stores}
BEST = {"best_learnables": "parameters", "best_state": "state"}


class HeldOut(Subset):
    """Validation images that `held_out` has split from a training set."""


def held_out(datastore: Datastore, options) -> tuple[Datastore, Any]:
    """Split a validation set from the training set if `validation_fraction` or `fold` is set.

    Return the images to train on, and options with the remaining images as the validation set.
    Otherwise, and for the results of an earlier call, both arguments are returned unchanged. Raises
    UserError if one of the two sets would be empty, if an option requires a validation set but
    there is none, or if the options have both a validation set and an option that splits one off.
    """
    if isinstance(options.validation, HeldOut):
        return datastore, options
    if options.validation is not None:
        refuse_second_validation(options, "validation=")
        return datastore, options
    if options.fold is not None:
        number, count = map(int, options.fold.split("/"))
        if count > len(datastore):
            raise UserError(
                f"--fold {options.fold}: expected at least {count} training images, found "
                f"{len(datastore)}"
            )
        training, validation = datastore.kfold(count, seed=options.seed)[number - 1]
        return training, _with_held_out(options, validation)
    if not options.validation_fraction:
        _check_options(options)
        return datastore, options
    training, validation = datastore.split(1 - options.validation_fraction, seed=options.seed)
    if not len(training) or not len(validation):
        raise UserError(
            f"--validation-fraction {options.validation_fraction}: expected training and "
            f"validation images, found {len(training)} and {len(validation)}"
        )
    return training, _with_held_out(options, validation)


def refuse_second_validation(options, source: str) -> None:
    """Raise a UserError if an option would split off a second validation set.

    `source` is the option that provides the first one.
    """
    if option := held_out_by(options):
        raise UserError(f"{source} and {option}: expected at most one of them")


def held_out_by(options) -> str | None:
    """Return the option that holds out training images, such as "--fold 1/3", or None."""
    for name in ("validation_fraction", "fold"):
        if value := getattr(options, name):
            return f"--{name.replace('_', '-')} {value}"
    return None


def _with_held_out(options, images):
    return replace(options, validation=HeldOut(images.parent, images.indices))


def _check_options(options):
    """Raise a UserError if an option requires a validation set."""
    in_use = {
        "--output-network best-validation": options.output_network == "best-validation",
        f"--validation-patience {options.validation_patience}": options.validation_patience
        < math.inf,
    }
    for text, is_set in in_use.items():
        if is_set:
            raise UserError(
                f"{text}: expected validation images (--validation-data, --validation-fraction, "
                "--fold, or validation= in Python)"
            )


class Validation:
    """The state of validation during a run.

    A checkpoint stores the whole state (`facts` and `tables`), so a resumed run makes the same
    decisions as a run that never stopped. The best network is the network with the lowest
    validation loss; the earliest of several such networks wins. `loss` and `iteration` are those of
    the best network; inf and 0 before the first validation.
    """

    def __init__(self, options, world: World, loss: str | Callable[..., Any] = "crossentropy"):
        self.store, self.world, self.loss_function = options.validation, world, loss
        self.fingerprint = None if self.store is None else self.store.fingerprint()
        self.frequency, self.patience = options.validation_frequency, options.validation_patience
        self.prefetch, self.metrics = options.prefetch, options.metrics or ()
        # Skipped validation images; None if unreadable images raise an error.
        self.bad_images = BadImages.of_options(options)
        self.keeps_best = options.output_network == "best-validation"
        # The result of the last validation; None before the first validation.
        self.last: Evaluation | None = None
        # The iteration of the last validation; 0 before the first validation.
        self.last_iteration = 0
        self.loss, self.iteration = math.inf, 0
        # The accuracy of the validation with the lowest loss; None if the loss has no
        # classes.
        self.accuracy: float | None = None
        self.waited = 0  # number of validations since the validation with the lowest loss
        self.owed = False  # whether a signal interrupted the validation of the current iteration
        # Evaluation of the returned network; None before the end of the run.
        self.final: Evaluation | None = None
        # Whether `final` includes the confusion matrix. Hooks set this attribute on all
        # ranks.
        self.counts_confusions = False
        # The best network as {table: {name: array}}. Empty unless the option
        # `output_network` is "best-validation".
        self.best: dict[str, dict[str, np.ndarray]] = {}

    def due(self, iteration: int) -> bool:
        """Return whether the validation frequency requires a validation after this iteration."""
        return self.store is not None and self.frequency > 0 and iteration % self.frequency == 0

    def due_at_end(self) -> bool:
        """Return whether to validate at the end of each epoch."""
        return self.store is not None and self.frequency == 0

    def run(
        self,
        net: Network,
        iteration: int,
        signals: Signals | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Evaluation | None:
        """Validate the network after an iteration, and record the result.

        Collective. Return None if a signal interrupted the validation; a resumed run then starts
        with this validation. `progress` receives the number of images evaluated so far.
        """
        evaluation = self._evaluate(net, signals, progress)
        self.owed = signals is not None and signals.agreed
        if self.owed:
            return None
        self.last, self.last_iteration = evaluation, iteration
        if evaluation.loss < self.loss:
            self.loss, self.accuracy = evaluation.loss, evaluation.accuracy
            self.iteration, self.waited = iteration, 0
            if self.keeps_best:
                self.best = {
                    table: {name: np.array(a) for name, a in getattr(net, attribute).items()}
                    for table, attribute in BEST.items()
                }
        else:
            self.waited += 1
        return evaluation

    def run_final(
        self,
        net: Network,
        signals: Signals | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Evaluation | None:
        """Evaluate the returned network, and keep the result as `final`. Collective.

        The parameters are those of `run`. Return None if a signal interrupted the evaluation.
        """
        confusion = self.counts_confusions
        evaluation = self._evaluate(net, signals, progress, confusion=confusion)
        if signals is None or not signals.agreed:
            self.final = evaluation
        return self.final

    def _evaluate(self, net, signals, progress, **options):
        from mpidl.evaluation.evaluate import evaluate  # only runs with a validation set

        return evaluate(
            net,
            self.store,
            world=self.world,
            prefetch=self.prefetch,
            metrics=self.metrics,
            bad_images=self.bad_images,
            signals=signals,
            loss=self.loss_function,
            progress=progress,
            **options,
        )

    @property
    def exhausted(self) -> bool:
        """Whether the number of validations without a lower loss has reached the limit."""
        return self.waited >= self.patience

    def facts(self) -> dict[str, Any]:
        """Return the part of the state that a checkpoint stores as JSON; see also `tables`."""
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "iteration": self.iteration,
            "waited": self.waited,
            "fingerprint": self.fingerprint,
            "owed": self.owed,
            "at": self.last_iteration,
            "last": None if self.last is None else self.last[:3],
        }

    def tables(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the checkpoint tables of the best network, or {} if no network is kept."""
        return dict(self.best)

    def restore(self, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        """Restore the state from the arrays and facts of a checkpoint."""
        saved = facts.get("validation", {})
        self.loss, self.iteration = saved.get("loss", math.inf), saved.get("iteration", 0)
        self.accuracy, self.waited = saved.get("accuracy"), saved.get("waited", 0)
        self.owed = self.store is not None and saved.get("owed", False)
        self.last, self.last_iteration, self.final = None, 0, None
        if self.store is not None and saved.get("last"):
            from mpidl.evaluation.evaluate import Evaluation

            self.last, self.last_iteration = Evaluation(*saved["last"]), saved["at"]
        self.best = {table: arrays[table] for table in BEST if table in arrays}

    def of_the_result(self) -> tuple[float | None, float | None]:
        """Return the loss and accuracy of the final or else of the last validation, or Nones."""
        evaluation = self.final or self.last
        return (None, None) if evaluation is None else (evaluation.loss, evaluation.accuracy)

    def give_best(self, net: Network) -> None:
        """If a best network is kept, assign its arrays to a network in host memory."""
        if self.best:
            for table, attribute in BEST.items():
                old = getattr(net, attribute)
                setattr(net, attribute, {name: self.best[table][name] for name in old})
