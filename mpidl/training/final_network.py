"""Finalize the network of a run after the last iteration and the last checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidl.blocks import LANES
from mpidl.comm.failure import Signals
from mpidl.data import MinibatchQueue
from mpidl.data.parts import part_blocks
from mpidl.training.batchnorm_population import population_state

if TYPE_CHECKING:
    from mpidl.training.trainer import Trainer


def finalize_network(trainer: Trainer, signals: Signals | None) -> None:
    """Choose the final weights, and compute population statistics if the options request them.

    If a signal arrives during the validation or the computation, the remaining work is skipped.
    Collective.
    """
    net, options, world = trainer.net, trainer.options, trainer.world
    validation, iteration = trainer.validation, trainer.position.iteration
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
        queue_options = {"prefetch": options.prefetch, **net.input_transform()}
        queue_options["bad_images"] = trainer.bad_images
        batch_size = options.batch_size
        if options.accumulate > 1:  # as in training, compute statistics over parts of a mini-batch
            batch_size = part_blocks(batch_size, options.accumulate) * LANES
        arguments = trainer.datastore, batch_size, options.seed, world, "never"
        # Replacing the training queue frees its memory.
        trainer.queue = MinibatchQueue(*arguments, **queue_options)
        with trainer.console.stage("batch-norm statistics", len(trainer.datastore)) as progress:
            state = population_state(net.on(world.device), trainer.queue, world, signals, progress)
        net.state = net.state if state is None else state
