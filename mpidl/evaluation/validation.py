"""Validation while training: when, whether to go on, and the network of the least loss."""

import math
from dataclasses import replace

import numpy as np

from mpidl.errors import UserError
from mpidl.evaluation.evaluate import Evaluation, evaluate

BEST = {"best_learnables": "parameters", "best_state": "state"}  # tables of a checkpoint


def held_out(datastore, options):
    """(images to train on, options that validate on the others), by `validation_fraction`.

    Both as they are where it is 0, or where the options have a validation set already. Raises
    UserError where the options ask for what cannot be without validation.
    """
    if options.validation is not None:
        return datastore, options
    if not options.validation_fraction:
        _check_needs(options)
        return datastore, options
    kept, others = datastore.split(1 - options.validation_fraction, seed=options.seed)
    if not len(kept) or not len(others):
        raise UserError(
            f"--validation-fraction {options.validation_fraction}: expected images to train on and "
            f"to validate on, found {len(kept)} and {len(others)}"
        )
    return kept, replace(options, validation=others)


def _check_needs(options):
    needs = {
        "--output-network best-validation": options.output_network == "best-validation",
        f"--validation-patience {options.validation_patience}": options.validation_patience
        < math.inf,
    }
    for text, said in needs.items():
        if said:
            raise UserError(
                f"{text}: expected images to validate on "
                "(--validation-data, --validation-fraction, or validation= in Python)"
            )


class Validation:
    """What validation has shown so far.

    A checkpoint keeps all of it (`facts`, `tables`), so that a run that goes on decides as one that
    was never stopped. The least loss counts, of equal ones the first.
    """

    def __init__(self, options, world):
        self.store, self.world, self.minimized = options.validation, world, options.loss
        self.fingerprint = None if self.store is None else self.store.fingerprint()
        self.every, self.patience = options.validation_frequency, options.validation_patience
        self.prefetch = options.prefetch
        self.keeps = options.output_network == "best-validation"
        self.last, self.at = None, 0  # the Evaluation of iteration `at`
        self.loss, self.iteration = math.inf, 0  # the least, and where
        self.accuracy = None  # there, where the loss classifies
        self.waited = 0  # validations since then
        self.owed = False  # whether a signal ended that of the present iteration
        self.best = {}  # {table: {name: array}} of that iteration, where it is kept

    def due(self, iteration):
        """Whether to validate after this iteration, which may be the last of an epoch."""
        return self.store is not None and self.every > 0 and iteration % self.every == 0

    def due_at_end(self):
        """Whether to validate at the end of each epoch."""
        return self.store is not None and self.every == 0

    def run(self, net, iteration, signals=None):
        """The Evaluation of the network of this iteration, which is taken note of. Collective.

        None where signals ended it: it is owed then, for a run that goes on from here.
        """
        how = {"world": self.world, "signals": signals, "loss": self.minimized}
        found = evaluate(net, self.store, prefetch=self.prefetch, **how)
        self.owed = signals is not None and signals.agreed
        if self.owed:
            return None
        self.last, self.at = found, iteration
        if self.last.loss < self.loss:
            self.loss, self.accuracy = self.last.loss, self.last.accuracy
            self.iteration, self.waited = iteration, 0
            if self.keeps:
                self.best = {
                    table: {name: np.array(a) for name, a in getattr(net, of).items()}
                    for table, of in BEST.items()
                }
        else:
            self.waited += 1
        return self.last

    @property
    def exhausted(self):
        """Whether the loss has not come below its least for as long as was to be waited."""
        return self.waited >= self.patience

    def facts(self):
        """What a checkpoint keeps beside the tables."""
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "iteration": self.iteration,
            "waited": self.waited,
            "fingerprint": self.fingerprint,
            "owed": self.owed,
            "at": self.at,
            "last": None if self.last is None else self.last[:3],
        }

    def tables(self):
        """The tables of a checkpoint that hold the best network."""
        return dict(self.best)

    def restore(self, arrays, facts):
        """Take what a checkpoint kept."""
        found = facts.get("validation", {})
        self.loss, self.iteration = found.get("loss", math.inf), found.get("iteration", 0)
        self.accuracy, self.waited = found.get("accuracy"), found.get("waited", 0)
        self.owed = self.store is not None and found.get("owed", False)
        if self.store is not None and found.get("last"):
            self.last, self.at = Evaluation(*found["last"]), found["at"]
        self.best = {table: arrays[table] for table in BEST if table in arrays}

    def of_the_result(self):
        """(loss, accuracy) of the network that the run ends with, each None where not known."""
        if self.best:
            return self.loss, self.accuracy
        return (None, None) if self.last is None else (self.last.loss, self.last.accuracy)

    def give_best(self, net):
        """Have the network, in host memory, be that of the least loss, where it is kept."""
        if self.best:
            for table, of in BEST.items():
                old = getattr(net, of)
                setattr(net, of, {name: self.best[table][name] for name in old})
