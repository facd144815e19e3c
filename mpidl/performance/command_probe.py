"""The probe of `python -m mpidl.scaling`, on the ranks that mpirun or srun started."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from mpidl import data
from mpidl.cli import pretrained, remote, start
from mpidl.evaluation import validation
from mpidl.files import on_rank_0, write_whole
from mpidl.performance import probe
from mpidl.ranks.world import World
from mpidl.training import input_pipeline
from mpidl.training.options import configuration


def main(path: str, typed: Mapping[str, Any], seconds: float) -> int:
    """Measure the training steps that the arguments describe, and write the record. Collective.

    Parameters
    ----------
    path : str
        The JSON file to write.
    typed : mapping
        The result of `arguments.train`.
    seconds : float
        Approximate duration.
    """
    world = World(threads=None)
    resolved = on_rank_0(world, lambda: configuration.resolve(typed, config=typed.get("config")))
    options, run = resolved.options.for_ranks(world.size), resolved.run
    remote.configure(run, world)
    world.transport.timeout = options.timeout
    world.use_device(options.device, None if options.gpus is None else str(options.gpus))
    conversion = data.Preprocess.of_options(run)
    train_set, test_set = data.open_data(run["data"], world, preprocess=conversion)
    source = pretrained.load(resolved, None, train_set, world)
    if source is not None and not conversion:
        conversion = pretrained.conversion(source.net, train_set, options)
        train_set = data.preprocessed(train_set, conversion)
    train_set, _ = start.with_test(
        run, train_set, test_set, world, conversion, seed=options.seed, typed=typed
    )
    if run["validation_data"] is None:  # otherwise no training images are held out
        train_set, options = validation.held_out(train_set, options)
    if source is None:
        shape = input_pipeline.image_shape(options, train_set.image_shape)
        net = start.network_for(run["network"], shape, train_set, options)
    else:
        net, options, _ = pretrained.network(source, resolved, options, train_set)
    input_pipeline.check(net, train_set, options)
    show = partial(print, flush=True)
    record = probe.measure(world, net, train_set, options, seconds, show=show)
    on_rank_0(world, lambda: write_whole(path, json.dumps(record).encode()))
    return 0
