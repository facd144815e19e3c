"""Send objects between ranks, and sum values over ranks while other work continues."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidl import phases
from mpidl.backends.cpu import builds
from mpidl.comm.exchange import choose_algorithm
from mpidl.comm.host_memory import HostMemory
from mpidl.comm.recorded_sum import RecordedSum
from mpidl.comm.reducer import PendingExchange, Piece, packed
from mpidl.comm.transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidl.comm.exchange import Combine
    from mpidl.core.fold import Tree

T = TypeVar("T")

GATHER, SEND, FIRST_TAG = 3, 4, 10  # tags of two kinds of control messages; first tag of exchanges
TAGS = 16384  # number of tags of exchanges; MPI guarantees tags up to 32767


class Messaging:
    """Base class of `World` that sends objects and nodes of the reduction tree between ranks.

    Parameters
    ----------
    transport : Transport
        The object that sends and receives the messages.

    Attributes
    ----------
    transport : Transport
        The object that sends and receives the messages.
    rank, size : int
        Rank of this process, and number of ranks.
    pending_exchanges : list of PendingExchange
        Exchanges that have started but are not complete.
    """

    def __init__(self, transport: Transport) -> None:
        self._handler: Callable[[Any], object] | None = None
        self._use(transport)

    def _use(self, transport: Transport) -> None:
        """Use a transport, and forget the exchanges and messages of the previous transport."""
        self.transport = transport
        self.rank, self.size = transport.rank, transport.size
        self.pending_exchanges: list[PendingExchange] = []
        self._next_tag = 0
        self._sent_count = self._received_count = 0
        self._outbox: list[MPI.Request] = []
        self._host_memory: HostMemory | None = None
        self._has_host_memory: bool | None = None  # None before the first sum

    # objects

    def broadcast(self, value: T, root: int = 0) -> T:
        """Return the value of rank `root` on all ranks; collective.

        Parameters
        ----------
        value : object
            Any object that can be pickled; ignored on ranks other than `root`.
        root : int, optional
            Rank whose value is returned.

        Returns
        -------
        object
            The value of rank `root`.
        """
        if self.size == 1:
            return value
        data = np.frombuffer(pickle.dumps(value) if self.rank == root else b"", np.uint8)
        size = np.array([data.size])
        comm = self.transport.comm
        self.wait_for([comm.Ibcast(size, root)], "broadcast")
        data = data if self.rank == root else np.empty(size[0], np.uint8)
        self.wait_for([comm.Ibcast(data, root)], "broadcast")
        return value if self.rank == root else pickle.loads(data)

    def gather(self, value: T) -> list[T] | None:
        """Return a list of all ranks' values on rank 0, and None on other ranks; collective.

        Parameters
        ----------
        value : object
            Any object that can be pickled.

        Returns
        -------
        list or None
            One value per rank, in rank order; None on ranks other than 0.
        """
        control = self.transport.control
        if self.rank:
            self.wait_for([control.isend(value, 0, GATHER)], "gather")
            return None
        values = [value]
        arrived: list[MPI.Message] = []
        for source in range(1, self.size):

            def has_arrived(source: int = source) -> bool:
                message = control.improbe(source, GATHER)
                arrived.extend([] if message is None else [message])
                return bool(arrived)

            self.transport.wait_until(has_arrived, f"gather from rank {source}", self.progress)
            with self.transport.blocking(f"gather from rank {source}"):
                values.append(arrived.pop().recv())
        return values

    def allgather(self, value: T) -> list[T]:
        """Return a list of the values of all ranks, in rank order, on every rank; collective.

        Parameters
        ----------
        value : object
            Any object that can be pickled, such as a number, string or array.

        Returns
        -------
        list
            One value per rank, in rank order.

        See Also
        --------
        gather : Return the same list, but only on rank 0.
        """
        values: Any = self.gather(value)  # None on ranks other than 0, which receive the list
        gathered: list[T] = self.broadcast(values)
        return gathered

    # messages to rank 0 while other work continues

    def after_each(self, handler: Callable[[Any], object]) -> None:
        """Set the function that rank 0 calls for each object sent, like MATLAB's afterEach.

        Parameters
        ----------
        handler : callable
            Rank 0 calls ``handler(data)`` for each object, and ignores the result.
        """
        self._handler = handler

    def send(self, data: Any) -> None:
        """Send data to the handler on rank 0 without waiting; not collective.

        Rank 0 calls the handler in `progress` and while rank 0 waits in a collective method. When
        `barrier` returns, the handler has processed all messages that were sent before the barrier.

        Parameters
        ----------
        data : object
            Any object that can be pickled.

        Raises
        ------
        RuntimeError
            If no handler is set. The error is raised on rank 0 only.
        """
        self._sent_count += 1
        if self.rank == 0:
            self._handle(data)
        else:
            # Keep each request until its message has been sent.
            self._outbox = [request for request in self._outbox if not request.Test()]
            self._outbox.append(self.transport.control.isend(data, 0, SEND))

    def _handle(self, data: Any) -> None:
        self._received_count += 1
        if self._handler is None:
            raise RuntimeError("send: rank 0 has no handler: call after_each on every rank first")
        self._handler(data)

    # exchanges

    def allgather_into(self, inbox: Sequence[Any], buffer: Any, operation: str) -> None:
        """Send a buffer to all other ranks and receive their buffers; collective.

        Parameters
        ----------
        inbox : sequence
            Buffers to receive into, one per rank. The entry of this rank is not changed.
        buffer : ndarray or DeviceBytes
            Data to send, of the same size on all ranks. The buffer may be in GPU memory if the MPI
            library supports that.
        operation : str
            Name of the awaited operation, for messages about a time-out.
        """
        peers = [rank for rank in range(self.size) if rank != self.rank]
        sends = [(rank, buffer) for rank in peers]
        requests = self.start_messages(sends, [(rank, inbox[rank]) for rank in peers])
        self.wait_for(requests, operation)

    def start_messages(
        self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]
    ) -> list[MPI.Request]:
        """Start to send buffers to other ranks and to receive buffers from them; collective.

        Parameters
        ----------
        sends, receives : sequence of (int, buffer)
            The other rank of each message, and the buffer, which may be in GPU memory if the MPI
            library supports that. A rank receives the messages of another rank in the order in
            which that rank lists them.

        Returns
        -------
        list of mpi4py.MPI.Request
            Requests for `wait_for`.
        """
        tag = self._new_tag()
        requests = [self.transport.irecv(buffer, rank, tag) for rank, buffer in receives]
        return requests + [self.transport.isend(buffer, rank, tag) for rank, buffer in sends]

    def exchange(self, tree: Tree, matrix: np.ndarray, combine: Combine) -> np.ndarray:
        """Combine the tree nodes of all ranks, and return the root (the total); collective.

        Parameters
        ----------
        tree : fold.Tree
            Reduction tree over the blocks of 16 images.
        matrix : ndarray, shape (nodes, width)
            Values of the tree nodes that this rank holds. The method may overwrite the values.
        combine : callable
            Function that combines two nodes: `fold.add` or `fold.merge_moments`.

        Returns
        -------
        ndarray, shape (width,)
            Value of the root of the tree.
        """
        pieces = [(matrix.shape[1], list(matrix))]
        pending = self.start_sum(tree, pieces, combine, matrix.dtype)
        self.wait(pending)
        root: np.ndarray = pending.root
        return root

    def start_sum(
        self,
        tree: Tree,
        pieces: Sequence[Piece],
        combine: Combine,
        dtype: np.dtype,
        name: str = "",
        out: np.ndarray | None = None,
    ) -> PendingExchange | RecordedSum:
        """Start to sum several values in one exchange, without waiting; collective.

        While a step is recorded, the sum is recorded and does not start.

        Parameters
        ----------
        tree : Tree
            Reduction tree over the blocks.
        pieces : sequence of (int, sequence of ndarray)
            For each value, its size and this rank's nodes.
        combine : callable
            Function that combines two nodes: ``combine(left, right)`` returns their parent.
        dtype : dtype
            Data type of the nodes.
        name : str
            Name of the sum in a timeline. The default is the current part of the training step.
        out : ndarray, optional
            Memory for the root if the sum is computed in shared memory. By default, new memory is
            allocated.

        Returns
        -------
        PendingExchange or RecordedSum
            The exchange, to pass to `wait`.
        """
        if (recorder := builds.recorder()) is not None:
            return RecordedSum(self, recorder, tree, pieces, combine, dtype)
        width, rows = sum(size for size, _ in pieces), len(tree.nodes[tree.rank])
        memory = self.host_memory() if HostMemory.supports(tree, combine, dtype) else None
        # A replayed step computes sums in shared memory without calling this method. To keep the
        # tags of all ranks equal, such sums use no tag.
        has_messages = memory is None or not memory.has_all_ranks
        tag = self._new_tag() if has_messages else 0
        if memory is not None:
            out = np.empty(width, dtype) if out is None else out
            steps = memory.exchange(tag, tree, pieces, combine, out)
        else:
            with phases.Phase(phases.SUM, "pack"):
                matrix = packed(pieces, rows, dtype)
            algorithm = choose_algorithm(tree, width * dtype.itemsize, combine)
            steps = algorithm(self.transport, tag, tree, matrix, combine)
        nbytes = rows * width * dtype.itemsize
        pending = PendingExchange(steps, name or phases.place(), nbytes)
        if not pending.is_complete:
            self.pending_exchanges.append(pending)
        return pending

    def host_memory(self) -> HostMemory | None:
        """Return the shared memory for sums over the ranks of a host. Collective.

        The first call allocates the memory.

        Returns
        -------
        HostMemory or None
            The memory. None if the compiled kernels are missing, if no ranks share a host, or if
            /dev/shm is too small.
        """
        if self._has_host_memory is None:
            if self.size > 1 and builds.kernels() is not None:  # the same on all ranks
                # The MPI calls in `allocate` cannot be cancelled. This exchange ensures that all
                # ranks reach these calls.
                inbox = [np.zeros(1, np.uint8) for _ in range(self.size)]
                self.allgather_into(inbox, inbox[self.rank], "the start of sums in shared memory")
                self._host_memory = HostMemory.allocate(self.transport)
            self._has_host_memory = self._host_memory is not None
        return self._host_memory

    def leave_memory(self) -> None:
        """Stop kernels from accessing the shared memory, and leave its sums incomplete."""
        if self._host_memory is not None:
            self._host_memory.leave()

    @property
    def is_exchanging(self) -> bool:
        """Whether any sum has started but is not complete."""
        memory = self._host_memory
        return bool(self.pending_exchanges) or (memory is not None and memory.is_busy)

    def wait(self, pending: PendingExchange | RecordedSum) -> None:
        """Wait until an exchange is complete.

        Parameters
        ----------
        pending : PendingExchange or RecordedSum
            The exchange that `start_sum` returned.
        """
        if isinstance(pending, RecordedSum):
            pending.wait(builds.recorder())
            return
        if pending.is_complete:
            return
        wait_in_library = getattr(pending.requests, "wait", None)

        def is_complete() -> bool:
            nonlocal wait_in_library
            if wait_in_library is not None:  # waiting in the library is faster than polling
                wait_in_library()
                wait_in_library = None
            self.progress()  # advances all exchanges, including this one
            return pending.is_complete

        self.transport.wait_until(is_complete, "a sum over the ranks")

    def count_waits(self) -> None:
        """Count the time that kernels of replayed steps have waited for other ranks."""
        if self._host_memory is not None:
            waited = self._host_memory.up.take_waited()
            phases.move(phases.WAIT, waited)
            self.transport.wait_seconds += waited * 1e-9

    def progress(self) -> None:
        """Advance pending exchanges and handle messages on rank 0, without waiting."""
        self.advance()
        if self._handler and self.rank == 0 and self.size > 1:
            while (message := self.transport.control.improbe(tag=SEND)) is not None:
                self._handle(message.recv())

    def advance(self) -> None:
        """Advance pending exchanges, without waiting."""
        testall = self.transport.MPI.Request.Testall
        for pending in list(self.pending_exchanges):
            if pending.is_ready(testall):
                pending.advance()
                if pending.is_complete:
                    self.pending_exchanges.remove(pending)

    def wait_for(self, requests: Sequence[MPI.Request], operation: str) -> None:
        """Wait until all requests are complete.

        Parameters
        ----------
        requests : sequence of mpi4py.MPI.Request
            The requests.
        operation : str
            Name of the awaited operation, for messages about a time-out.
        """
        progress = self.progress if self.pending_exchanges or self._handler else None
        self.transport.wait(requests, operation, progress)

    def _new_tag(self) -> int:
        self._next_tag = (self._next_tag + 1) % TAGS
        return FIRST_TAG + self._next_tag
