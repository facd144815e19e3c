"""Count the bytes that each of several ranks with GPUs sends in a training step, without a GPU.

The ranks are simulated one after another: each records its step in a world of several ranks, whose
mover counts the bytes of the messages and sends nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpidl.backends.gpu.program import Operation, Program
from mpidl.ranks.world import World

BACKWARD, GRADIENTS = "backward", ("backward", "sums of gradients")  # places of operations


class CountingMover:
    """A mover that counts the bytes of messages to other ranks, in `sent`."""

    captured = True  # as NcclMover

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.sent = rank, size, 0

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[Any]) -> None:
        """Count the bytes of messages to other ranks."""
        self.sent += sum(array.nbytes for rank, array in sends if rank != self.rank)

    def allgather(self, source: Any, target: Any) -> None:
        """Count the bytes of a message to each other rank."""
        self.sent += (self.size - 1) * source.nbytes


class Sent(NamedTuple):
    """The bytes that a rank sends in a step, and how many of them during backward."""

    gradients: int
    during_backward: int  # started before the last kernel of backward
    statistics: int  # sums that layers and the loss need


def simulated_world(rank: int, size: int) -> World:
    """Return a world in which this process is one of several ranks, for recording a GPU's step."""
    world: Any = World(threads=None)
    world.rank, world.size, world.mover = rank, size, CountingMover(rank, size)
    return world


def sent_by(program: Program, world: Any) -> Sent:
    """Start the messages of a recorded step, and return the bytes that its rank sends."""
    operations, counts = program.operations(), dict.fromkeys(Sent._fields, 0)
    last = max(i for i, operation in enumerate(operations) if _is_backward(operation))
    for i, operation in enumerate(operations):
        before = world.mover.sent
        if operation.launch is None:
            operation.play(program.device)
        nbytes, is_gradient = world.mover.sent - before, operation.place in GRADIENTS
        counts["gradients" if is_gradient else "statistics"] += nbytes
        counts["during_backward"] += nbytes * (is_gradient and i < last)
    return Sent(**counts)


def _is_backward(operation: Operation) -> bool:
    return operation.launch is not None and operation.place.split(" / ")[0] == BACKWARD


def summary(ranks: Sequence[Sent], gradient_bytes: int) -> dict[str, Any]:
    """Return the entry "messages" of a step in the JSON file: the figures of the worst rank."""
    shares = [sent.during_backward / max(sent.gradients, 1) for sent in ranks]
    return {
        "ranks": len(ranks),
        "gradient_bytes": gradient_bytes,
        "bytes_sent": max(sent.gradients for sent in ranks),
        "share_during_backward": min(shares),
        "statistics_bytes_sent": max(sent.statistics for sent in ranks),
    }


def in_words(messages: dict[str, Any]) -> str:
    """Return a sentence about the figures of `summary`."""
    gradients, sent = messages["gradient_bytes"], messages["bytes_sent"]
    return (
        f"Each of {messages['ranks']} ranks sends {sent / 1e6:.2f} MB for {gradients / 1e6:.2f} MB "
        f"of gradients ({sent / gradients:.2f} times), of which "
        f"{messages['share_during_backward']:.1%} before the last kernel of backward, and "
        f"{messages['statistics_bytes_sent'] / 1e6:.2f} MB for other sums."
    )
