"""Compute sums with kernels/cpu/sums.c, in memory that the ranks of a host share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidl.backends.cpu import builds
from mpidl.backends.cpu.arenas import address_of
from mpidl.comm.reducer import Piece
from mpidl.comm.sum_plans import NOUNS, SLOT_BYTES
from mpidl.errors import Fault

SLOTS = 8  # number of slots per rank in each set
COUNTS_BYTES = 256  # size of a rank's counts
PATIENCE = 0.002  # longest wait for other ranks inside a kernel call, in seconds
QUEUE_WORDS, SUM_WORDS = 19, 7  # sizes of the structs `queue` and `sum` in sums.c
PATIENCE_WORD, WAITED_WORD, FOLDED_WORD = 5, 6, 8  # indices in the struct `queue`
LAST_WORD, DIFFERS_WORD = 16, 17  # indices in the struct `queue`
IDENTITIES = slice(16, 16 + SLOTS)  # in a rank's counts: the hash of the plan in each slot
WIDTHS = slice(24, 24 + SLOTS)  # in a rank's counts: for each slot, 4 * width + kind of the sum
TAKEN_WORD = 6  # index in the struct `sum`

# Queues with incomplete sums, whose memory kernels may still use.
_busy: list[SumQueue] = []


class HostSum:
    """A sum that a `SumQueue` computes, as the struct `sum` of sums.c.

    Parameters
    ----------
    plan : ndarray
        The result of `plan_of` or `broadcast_plan`.
    pieces : sequence of Piece
        This rank's nodes of one or more values, which are summed together as one vector. The nodes
        stay allocated until the sum is complete.
    out : ndarray or None
        Contiguous memory for the results; None if this rank does not need the results.

    Attributes
    ----------
    words : ndarray
        The content of the struct.
    """

    __slots__ = ("words", "_chunks", "_owners")

    def __init__(self, plan: np.ndarray, pieces: Sequence[Piece], out: np.ndarray | None) -> None:
        table, flat = [len(pieces)], []
        for size, nodes in pieces:
            flat.append([np.ascontiguousarray(node) for node in nodes])
            table += [size, *map(address_of, flat[-1])]
        addresses = np.array(table, np.int64)
        self.words = np.zeros(SUM_WORDS, np.int64)
        self.words[:2] = address_of(plan), address_of(addresses)
        self.words[2] = 0 if out is None else address_of(out)
        self._chunks, self._owners = int(plan[3]), (plan, flat, addresses, out)

    @property
    def is_complete(self) -> bool:
        """Whether this rank has the results, and other ranks no longer need its nodes."""
        return bool(self.words[TAKEN_WORD] == self._chunks)


class SumQueue:
    """The queue of a rank's incomplete sums, with the slots through which they are computed.

    Parameters
    ----------
    memory : ndarray of uint8, shape (queue_bytes(ranks),)
        The slots of all ranks, initially zero, and aligned to 64 bytes.
    rank, ranks : int
        Number of this rank among the ranks that share the memory, and number of these ranks.
    patience : float
        Longest wait inside a call to the kernel library, in seconds.
    first : int
        Rank in the world of the first rank that shares the memory, for error messages.

    Raises
    ------
    Fault
        If the ranks have started different sums. The constructor does not raise this error, but
        `start`, `advance` and `wait` do, also in all later calls: the ranks have not agreed on
        which sums they give up. They can continue with the queue of another world.

    Attributes
    ----------
    words : ndarray
        The content of the struct `queue` of sums.c.
    """

    def __init__(
        self,
        memory: np.ndarray,
        rank: int,
        ranks: int,
        patience: float = PATIENCE,
        first: int = 0,
    ) -> None:
        self.rank, self.ranks, self.first = rank, ranks, first
        self._library = builds.kernels()
        self._scratch = np.empty(2 * SLOT_BYTES, np.uint8)
        self._memory = memory
        self._sums: list[HostSum] = []  # incomplete sums, and possibly some complete sums
        self.words = np.zeros(QUEUE_WORDS, np.int64)
        self.words[:5] = address_of(memory), rank, ranks, SLOTS, SLOT_BYTES
        self.words[PATIENCE_WORD] = int(patience * 1e9)
        self.words[-1] = address_of(self._scratch)

    def start(self, host_sum: HostSum) -> None:
        """Start a sum. All ranks must start the same sums in the same order."""
        self.release()
        self._sums.append(host_sum)
        _busy[:] = [queue for queue in _busy if queue.is_busy and queue is not self]
        _busy.append(self)
        self._library.sums_start(self.words, host_sum.words)
        self._check()

    def advance(self) -> None:
        """Advance all sums without waiting."""
        self._library.sums_advance(self.words)
        self._check()
        self.release()

    def _check(self) -> None:
        """Raise a Fault if the ranks have started different sums, which will never complete."""
        if not self.words[DIFFERS_WORD]:
            return
        counts = self._memory[: self.ranks * COUNTS_BYTES].view(np.int64)
        counts = counts.reshape(self.ranks, -1)
        slot = int(self.words[FOLDED_WORD]) % SLOTS
        identities, widths = counts[:, IDENTITIES][:, slot], counts[:, WIDTHS][:, slot]
        sums: dict[tuple[int, int], list[str]] = {}
        for rank, sum_of_rank in enumerate(zip(identities.tolist(), widths.tolist(), strict=True)):
            sums.setdefault(sum_of_rank, []).append(str(self.first + rank))
        texts = [
            f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} {width // 4} "
            f"{NOUNS[width % 4]}"
            for (_, width), ranks in sums.items()
        ]
        raise Fault(
            f"the ranks sum different values at the same time: {'; '.join(texts)}: all ranks must "
            "call the same functions in the same order, with values of the same shapes"
        )

    def release(self) -> None:
        """Drop the references to sums that are complete."""
        if self._sums:
            self._sums = [host_sum for host_sum in self._sums if not host_sum.is_complete]

    def wait(self, host_sum: HostSum) -> None:
        """Wait for a sum inside the kernel library, for at most `patience` seconds."""
        waited = self.words[WAITED_WORD]
        self._library.sums_wait(self.words, host_sum.words)
        self.words[WAITED_WORD] = waited  # exclude this wait, because the caller counts it
        self._check()
        self.release()

    @property
    def is_busy(self) -> bool:
        """Whether there are incomplete sums."""
        return bool(self.words[LAST_WORD])

    def take_waited(self) -> int:
        """Return how long replayed steps have waited since the last call, in nanoseconds."""
        waited, self.words[WAITED_WORD] = int(self.words[WAITED_WORD]), 0
        return waited

    def close(self) -> None:
        """Stop kernels from advancing the sums."""
        self._library.sums_leave(self.words)


def queue_bytes(ranks: int) -> int:
    """Return the size in bytes of the memory of a `SumQueue` for a number of ranks."""
    return ranks * (COUNTS_BYTES + SLOTS * SLOT_BYTES)


class Completion:
    """A function that returns whether a sum in shared memory is complete.

    The generator of an exchange yields this object instead of MPI requests.

    Parameters
    ----------
    queue : SumQueue
        The queue that computes the sum.
    host_sum : HostSum
        The sum.
    """

    def __init__(self, queue: SumQueue, host_sum: HostSum) -> None:
        self._queue, self._sum = queue, host_sum

    def __call__(self) -> bool:
        self._queue.advance()
        return self._sum.is_complete

    def wait(self) -> None:
        """Wait for the sum, for at most the queue's `patience` in seconds."""
        self._queue.wait(self._sum)
