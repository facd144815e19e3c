"""Prepare the networks that a run validates, and the network that it returns."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from mpidl.core.blocks import LANES
from mpidl.data import MinibatchQueue
from mpidl.data.parts import part_blocks
from mpidl.ranks import failure
from mpidl.training import batchnorm_moving
from mpidl.training.progress import OUTPUT_FUNCTION, PATIENCE

if TYPE_CHECKING:
    from mpidl.nn import Network
    from mpidl.ranks.failure import Signals
    from mpidl.training.run import Run


def validated_network(trainer: Run, signals: Signals | None) -> Network | None:
    """Return the network that a validation evaluates after the current iteration. Collective.

    With moving statistics, the result is the network that the run would return now. With population
    statistics, computing them takes a pass over the training set, so the result has them only if
    the validation chooses the network to return. Otherwise, the result has the moving statistics
    without their initial values.

    Returns
    -------
    Network or None
        A network that shares arrays with the trained network, or None if a signal ended the pass.
    """
    net, options = trainer.net, trainer.options
    if trainer.average.replaces_weights(trainer.position.iteration, len(trainer.queue)):
        net = trainer.average.network(net)
    if options.batchnorm_statistics == "moving" or not batchnorm_moving.trainable_norms(net):
        return net
    net = copy.copy(net).to(None)
    if trainer.validation.keeps_best:
        state = _population_state(trainer, net, _population_queue(trainer), signals)
        if state is None:
            return None
    else:
        updates = trainer.position.statistics_updates
        state = batchnorm_moving.debiased(net, trainer.initial_state, updates)
    net.state = state
    return net


def finish_network(trainer: Run) -> str | None:
    """Finalize the network, and return the reason why the run ended early, or None. Collective.

    The trainer calls this function after the last checkpoint, so a resumed run continues as if it
    had never stopped.
    """
    signals = trainer.signals
    reason = failure.agreed_signal(signals, trainer.world)
    if reason is None and signals.name == OUTPUT_FUNCTION:
        signals.name = None  # the stop came after the last step, so the run did not end early
    if reason is None and trainer.validation.exhausted:
        reason = PATIENCE
    if reason not in (None, OUTPUT_FUNCTION, PATIENCE):
        return reason
    finalize_network(trainer, None if reason == OUTPUT_FUNCTION else signals)
    return reason or failure.agreed_signal(signals, trainer.world)


def finalize_network(trainer: Run, signals: Signals | None) -> None:
    """Choose the weights, compute population statistics on request, and validate the result.

    If a signal arrives, the remaining work is skipped. Collective.
    """
    net, options, validation = trainer.net, trainer.options, trainer.validation
    iteration = trainer.position.iteration
    if validation.store is not None and validation.last_iteration != iteration:
        trainer.validate(interruptible=signals is not None)
        if validation.owed:
            return
    averages = {}
    if trainer.average.replaces_weights(iteration, len(trainer.queue)):
        trainer.wait()
        averages = trainer.average.arrays()
    trainer.step.close()
    net.parameters = {**net.parameters, **averages}
    validation.give_best(net)
    if options.batchnorm_statistics == "population" and iteration:
        # A best network already has these statistics, unless an older checkpoint contains it.
        # Replacing the training queue frees its memory.
        trainer.queue = _population_queue(trainer)
        state = _population_state(trainer, net, trainer.queue, signals)
        if state is None:
            return
        net.state = state
    if validation.store is not None:
        trainer.validate_final(signals)


def _population_queue(trainer):
    options = trainer.options
    queue_options = {"prefetch": options.prefetch, **trainer.net.input_transform()}
    queue_options["bad_images"] = trainer.bad_images
    batch_size = options.batch_size
    if options.accumulate > 1:  # as in training, compute statistics over parts of a mini-batch
        batch_size = part_blocks(batch_size, options.accumulate) * LANES
    arguments = trainer.datastore, batch_size, options.seed, trainer.world, "never"
    return MinibatchQueue(*arguments, **queue_options)


def _population_state(trainer, net, queue, signals) -> dict[str, np.ndarray] | None:
    from mpidl.training.batchnorm_population import population_state

    world = trainer.world
    with trainer.console.stage("batch-norm statistics", len(trainer.datastore)) as progress:
        return population_state(net.on(world.device), queue, world, signals, progress)
