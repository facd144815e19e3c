"""Refuse changes of a run since its checkpoint that would prevent it from continuing as before."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpidl.errors import UserError
from mpidl.options.declaration import flag
from mpidl.training.options.training_options import OPTIONS, TrainingOptions
from mpidl.training.schedules import ENDING

if TYPE_CHECKING:
    from mpidl.data.datastore import Datastore
    from mpidl.nn import Network

Facts = Mapping[str, Any]


def resumable(
    options: TrainingOptions, net: "Network", datastore: "Datastore", ranks: int
) -> dict[str, Any]:
    """Return the facts of a run that `refuse_changes` compares with a checkpoint."""
    store = options.validation
    return {
        "options": options.as_dict(),
        "network": net.spec(),
        "fingerprint": datastore.fingerprint(),
        "validation": {"fingerprint": None if store is None else store.fingerprint()},
        "shares": shares(options, ranks),
    }


def shares(options: TrainingOptions, ranks: int) -> dict[str, Any]:
    """Return {"ranks": ..., "load": ...}, which determine the share of the data for each rank."""
    load = options.load(ranks)
    return {"ranks": ranks, "load": None if load is None else list(load)}


def refuse_changes(saved: Facts, now: Facts, run_name: str = "the resumed run") -> None:
    """Raise UserError, with all changes, if a run cannot continue from its checkpoint.

    `saved` has the facts of the checkpoint, and `now` the result of `resumable`. The number of
    ranks may change, except in the middle of an epoch with --sampling partition.
    """
    if refused := [*_changed_options(saved, now), *_changed_data(saved, now)]:
        raise UserError(f"--resume: {run_name} cannot continue: {'; '.join(refused)}")


def _changed_options(saved: Facts, now: Facts) -> Iterator[str]:
    # Options that did not exist when the checkpoint was written had their default values.
    defaults = TrainingOptions(solver=saved["options"].get("solver", "sgdm")).as_dict()
    old, new = defaults | saved["options"], now["options"]
    for name, declaration in OPTIONS.items():
        change, rule = (
            f"{flag(name)} was {old[name]}, is {new[name]}",
            declaration.metadata["resume"],
        )
        if rule == "fixed" and old[name] != new[name]:
            per_rank = name == "batch_size" and new["batch_per_rank"]
            yield change + (f" (--batch-per-rank {per_rank}; none keeps it)" if per_rank else "")
        if rule == "up" and new[name] < old[name]:
            yield f"{change} (it may only increase)"
    if new["epochs"] > old["epochs"]:
        change = f"--epochs was {old['epochs']}, is {new['epochs']}; it cannot increase with "
        if new["learn_rate_schedule"] in ENDING:
            schedule = f"--learn-rate-schedule {new['learn_rate_schedule']}"
            yield f"{change}{schedule}, which ends with the last epoch"
        if new["average"] == "swa" and new["average_start"] is None:
            yield (
                f"{change}--average swa without --average-start: the average starts after three "
                "quarters of the epochs"
            )


def _changed_data(saved: Facts, now: Facts) -> Iterator[str]:
    """Yield the changes of the network, of the images and of their partition."""
    network = json.loads(json.dumps(now["network"]))  # tuples become lists, as in the checkpoint
    if saved["network"] != network:
        yield f"--network: {_difference(saved['network'], network)}"
    images = {"--data": [facts["fingerprint"] for facts in (saved, now)]}
    stored = saved.get("validation", {}).get("fingerprint")
    if stored is not None:
        images["--validation-data"] = [stored, now.get("validation", {}).get("fingerprint")]
    for option, (old, new) in images.items():
        if old != new:
            yield (
                f"{option}: the images are not those of the run (fingerprint was {old[:12]}, is "
                f"{(new or 'none')[:12]})"
            )
    old, new = saved.get("shares"), now.get("shares")
    in_partitions = now["options"].get("sampling") == "partition" and saved["position"]["batch"]
    if in_partitions and old is not None and old != new:
        yield (
            "--sampling partition in the middle of an epoch: the images were partitioned among "
            f"{_describe_ranks(old)}, now among {_describe_ranks(new)}"
        )


def _describe_ranks(facts):
    load = facts["load"]
    by = "" if load is None else " by --worker-load " + ",".join(f"{n / 1000:g}" for n in load)
    return f"{facts['ranks']} rank(s){by}"


def _difference(saved, now):
    """Describe the first difference between two lists of layers."""
    for old, new in zip(saved, now, strict=False):
        if old != new:
            changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
            return f"layer {new.get('name', '?')} differs in {', '.join(changed)}"
    return f"the run has {len(saved)} layers, this network has {len(now)}"
