"""Collect the state of a training run for a checkpoint, and restore it."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidl import numerics
from mpidl.errors import UserError
from mpidl.evaluation.validation import BEST
from mpidl.training import batchnorm_moving, input_pipeline, skipped_images
from mpidl.training.files import checkpoint, model_file
from mpidl.training.progress import Position

if TYPE_CHECKING:
    from mpidl.training.run import Run


def progress(trainer: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (tables, facts) of everything that training changes, except the position."""
    net, validation = trainer.net, trainer.validation
    tables = {
        "learnables": {name: np.asarray(a) for name, a in net.parameters.items()},
        "state": {name: np.asarray(a) for name, a in net.state.items()},
        "optimizer": trainer.optimizer.state(),
        **validation.tables(),
    }
    return tables, {"validation": validation.facts()}


def tables(trainer: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arrays of a checkpoint by table, and the facts that belong to some of them."""
    tables, facts = progress(trainer)
    kept_tables = {}
    if trainer.rollback is not None:
        kept_tables, kept_facts = trainer.rollback.stored(trainer.position)
        facts |= kept_facts
    tables |= input_pipeline.tables(trainer.net) | kept_tables
    updates = trainer.position.statistics_updates
    if initial := batchnorm_moving.relevant(trainer.net, trainer.initial_state, updates):
        tables["initial_state"] = initial
    return tables, facts


def collect(trainer: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of a checkpoint: arrays by table, and facts for JSON.

    The facts do not include the position, which `RunWriter.save` adds.
    """
    from mpidl.training.files.resume_changes import shares

    net, options = trainer.net, trainer.options
    arrays, state = tables(trainer)
    facts = {
        "network": net.spec(),
        "input_shape": net.input_shape,
        "classes": net.classes,
        "normalization": net.normalization.name,
        "crop": net.crop,
        "preprocess": net.preprocess,
        "loss": net.loss,
        **numerics.current(),
        "options": options.as_dict(),
        "optimizer": trainer.optimizer_spec,
        **state,
        "fingerprint": trainer.datastore.fingerprint(),
        "shares": shares(options, trainer.world.size),
        **input_pipeline.facts(options),
        **skipped_images.facts(trainer),
        **trainer.facts,
    }
    return arrays, facts


def restore(trainer: Run, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
    """Set the trainer's network, optimizer, validation and position from a checkpoint.

    Raises
    ------
    UserError
        If the options, the network, the optimizer or the images have changed in a way that
        prevents resuming.
    """
    # Only a resumed run needs these modules.
    from mpidl.training.files.resume_changes import refuse_changes, resumable
    from mpidl.training.optimizers.checks import describe_spec

    net, options = trainer.net, trainer.options
    now = resumable(options, net, trainer.datastore, trainer.world.size)
    refuse_changes(facts, now, "the run of this checkpoint")
    input_pipeline.check_unchanged(facts, options)
    before = facts.get("optimizer")  # missing in older checkpoints
    if before != json.loads(json.dumps(trainer.optimizer_spec)):
        raise UserError(
            f"optimizer: expected {describe_spec(before)}, as in the run of this checkpoint, "
            f"found {describe_spec(trainer.optimizer_spec)}"
        )
    set_progress(trainer, arrays, facts)
    trainer.initial_state = arrays.get("initial_state", {})
    skipped_images.restore(trainer, facts)


def snapshot(
    trainer: Run, into: Mapping[str, Mapping[str, np.ndarray]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return copies of everything that training changes, for `set_progress`.

    Copies are necessary because the optimizer overwrites arrays in place. They reuse the memory of
    `into`, an earlier snapshot, if the shapes are equal.
    """
    tables, facts = progress(trainer)
    for table, arrays in tables.items():
        if table not in BEST:  # arrays of the best network are never changed in place
            tables[table] = _copy_into(into.get(table, {}), arrays)
    return tables, {"position": asdict(trainer.position), **copy.deepcopy(facts)}


def _copy_into(copies, arrays):
    if {k: a.shape for k, a in copies.items()} != {k: np.shape(a) for k, a in arrays.items()}:
        return {name: np.array(array) for name, array in arrays.items()}
    for name, array in arrays.items():
        np.copyto(copies[name], array)
    return copies


def copied(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """Return copies of all arrays, because optimizers overwrite arrays in place."""
    return {
        table: {name: np.array(array) for name, array in arrays.items()}
        for table, arrays in tables.items()
    }


def set_progress(trainer: Run, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
    """Set the trainer's network, optimizer, validation and position without any checks."""
    net = trainer.net
    learnables, state = arrays["learnables"], arrays["state"]
    net.parameters = model_file.matching(net.parameters, learnables, checkpoint.CURRENT)
    net.state = model_file.matching(net.state, state, checkpoint.CURRENT)
    net.unwhitened = []
    try:
        trainer.optimizer.load_state(arrays["optimizer"])
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from error
    trainer.validation.restore(arrays, facts)
    trainer.position = Position(**facts["position"])
