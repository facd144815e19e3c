"""Check that all ranks have the same weights, and name the ranks that differ."""

import collections
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpidl.errors import Fault
from mpidl.options.declaration import at_least, option, options_class

if TYPE_CHECKING:
    from mpidl.ranks.world import World
    from mpidl.training.trainer import Trainer

MOST_NAMES = 3  # a message names at most this many ranks, and at most this many arrays


def compare_ranks(
    world: "World", tables: Mapping[str, Mapping[str, np.ndarray]], iteration: int
) -> None:
    """Raise Fault if arrays do not have the same bytes on all ranks. Collective.

    The ranks exchange a hash of all arrays. If the hashes differ, they exchange one hash per array.

    Parameters
    ----------
    world : World
        The ranks.
    tables : mapping
        {"learnables": {"conv1.weight": array, ...}, ...}
    iteration : int
        Number of iterations so far, for the error message.

    Raises
    ------
    Fault
        On all ranks, if an array differs. With three or more ranks, the message names the ranks
        that differ from the majority.
    """
    total = hashlib.sha256()
    for arrays in tables.values():
        for array in arrays.values():
            total.update(np.ascontiguousarray(array))
    digest = np.frombuffer(total.digest(), np.int64)
    if np.array_equal(world.gop("max", digest), world.gop("min", digest)):
        return
    digests = {
        name: hashlib.sha256(np.ascontiguousarray(array)).digest()
        for arrays in tables.values()
        for name, array in arrays.items()
    }
    text = difference(world.allgather(digests), world.hosts)
    raise Fault(
        f"the ranks' weights differ at iteration {iteration}: {text}; the memory or the processor "
        "of a host may be faulty (python -m mpidl.info shows what each rank runs on)"
    )


def difference(ranks: Sequence[Mapping[str, bytes]], hosts: Sequence[str]) -> str:
    """Describe which ranks differ from the majority, and in which arrays.

    Parameters
    ----------
    ranks : sequence of mapping
        For each rank, {array name: hash}.
    hosts : sequence of str
        Host name of each rank.

    Returns
    -------
    str
        A description, such as "rank 2 on host n3 differs from the other 3 ranks in conv1.weight".
    """
    keys = [tuple(sorted(digests.items())) for digests in ranks]
    (majority, count), *_ = collections.Counter(keys).most_common(1)
    if 2 * count <= len(ranks):
        names = _first_names(sorted({n for d in ranks for n in d if d[n] != ranks[0].get(n)}))
        all_ranks = _first_names([f"rank {rank} on host {host}" for rank, host in enumerate(hosts)])
        return f"{all_ranks} disagree in {names}, and no majority shows which of them is wrong"
    right = dict(majority)
    differing = [rank for rank, key in enumerate(keys) if key != majority]
    changed = {n for rank in differing for n in right if ranks[rank].get(n) != right[n]}
    names = _first_names(sorted(changed))
    places = _first_names([f"rank {rank} on host {hosts[rank]}" for rank in differing])
    verb = "differs" if len(differing) == 1 else "differ"
    return f"{places} {verb} from the other {count} ranks in {names}"


def _first_names(names):
    """Return the first names as text, followed by the number of remaining names."""
    rest = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


@options_class(group="Run and results")
class RankComparisonOptions:
    """The option of `TrainingOptions` for comparisons of weights."""

    compare_ranks_every: int = option(
        at_least(0),
        "Iterations between comparisons of the weights of all ranks; a comparison reports any rank "
        "whose weights differ; 0 compares the weights only when a checkpoint is written",
        default=0,
    )


class RankComparisonHook:
    """Compares the weights of all ranks every `compare_ranks_every` iterations."""

    def step(self, trainer: "Trainer") -> None:
        if trainer.position.iteration % trainer.options.compare_ranks_every == 0:
            trainer.compare_ranks()
