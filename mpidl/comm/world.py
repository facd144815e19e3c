"""Define `World`, which provides collective operations over ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import numpy as np

from mpidl.backends.cpu import builds
from mpidl.comm.messaging import Messaging
from mpidl.comm.reducer import Reducer, is_on_host, total_of
from mpidl.comm.transport import Transport, allocate_shared, free_shared_bytes
from mpidl.core.blocks import OneRank
from mpidl.core.fold import Partial
from mpidl.errors import FolderInUse, LostLock, StorageFault, UserError

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

    from mpidl.backends.gpu.cuda_device import CudaDevice
    from mpidl.backends.gpu.sums import Counts
    from mpidl.comm.nccl import MpiMover, NcclMover

Key = TypeVar("Key")
Number = TypeVar("Number", int, float, np.ndarray)
Operation: TypeAlias = Literal["min", "max", "sum", "prod"] | Callable[[Any, Any], Any]

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "min": np.minimum,
    "max": np.maximum,
    "sum": np.add,
    "prod": np.multiply,
}
# Reductions that MPI performs itself, because their results do not depend on the order of the
# ranks. MPI has no minimum or maximum of booleans; logical AND and OR are used instead.
MPI_OF_INTEGERS: dict[object, str] = {"min": "MIN", "max": "MAX"}
MPI_OF_BOOLEANS: dict[object, str] = {"and": "LAND", "min": "LAND", "or": "LOR", "max": "LOR"}

# Error types other than UserError that `raise_if_any` raises on all ranks.
SHARED_ERRORS = (FolderInUse, StorageFault, LostLock)


class World(Messaging):
    """The ranks that a transport connects, and their sums.

    `ranks.world.World`, which is `dl.World`, is the world of a job, and documents the attributes
    and the argument `plain`.
    """

    def __init__(self, transport: Transport, plain: bool = False) -> None:
        super().__init__(transport)
        self.plain = plain
        self.hosts: list[str] = transport.hosts
        self.host: str = self.hosts[self.rank]
        # `ranks.devices.use_gpu` sets the next three attributes.
        self.device: CudaDevice | None = None
        self.counts: Counts | None = None
        self.mover: NcclMover | MpiMover | None = None
        self._one_rank = OneRank()  # sums values on a single rank without messages
        self._windows: dict[int, MPI.Win | None] = {}  # {id(shared array): window}

    # sums and other reductions

    @overload
    def gplus(self, value: Partial) -> np.ndarray: ...
    @overload
    def gplus(self, value: Number) -> Number: ...
    @overload
    def gplus(self, value: dict[Key, Partial]) -> dict[Key, np.ndarray]: ...
    @overload
    def gplus(self, value: dict[Key, Number]) -> dict[Key, Number]: ...
    @overload
    def gplus(self, value: list[Partial]) -> list[np.ndarray]: ...
    @overload
    def gplus(self, value: list[Number]) -> list[Number]: ...
    @overload
    def gplus(self, value: tuple[Partial, ...]) -> tuple[np.ndarray, ...]: ...
    @overload
    def gplus(self, value: tuple[Number, ...]) -> tuple[Number, ...]: ...
    def gplus(self, value: Any) -> Any:
        """Sum a value over all ranks, and return the sum, with the same bytes on every rank.

        Parameters
        ----------
        value : Partial, array_like, dict, list or tuple
            The value of this rank. The items of a dict, list or tuple are summed separately, but if
            possible in one exchange.

        Returns
        -------
        ndarray, number, dict, list or tuple
            The sum. The sum of a Partial does not depend on the number of ranks. Numbers and plain
            arrays are added in rank order. Their sum is reproducible, but depends on the number of
            ranks.
        """
        if isinstance(value, dict):
            reducer = Reducer(self, bucket_bytes=float("inf"))
            for name, item in value.items():
                # On one rank, push a copy of the sum, so that the caller's Partial stays valid.
                is_simple = not isinstance(item, Partial) or self._is_complete(item)
                reducer.push(name, self.gplus(item) if is_simple else item)
            return reducer.finish()
        if isinstance(value, (list, tuple)):
            return type(value)(self.gplus(dict(enumerate(value))).values())
        if isinstance(value, Partial):
            if not self._is_complete(value):
                return self.gplus({"": value})[""]
            if builds.recorder() is None:
                return self._one_rank.gplus(value)
            return total_of(value, [term.nodes[0] for term in value.terms])
        if (recorder := builds.recorder()) is not None:
            recorder.refuse("it sums a value that is not a Partial over the ranks")
            return value
        return self.gop("sum", value)

    def _is_complete(self, partial: Partial) -> bool:
        """Return whether all nodes of a Partial's reduction tree are in this rank's host memory."""
        return self.size == 1 and is_on_host(partial)

    @overload
    def gop(self, operation: Literal["and", "or"], value: float) -> bool: ...
    @overload
    def gop(self, operation: Literal["and", "or"], value: np.ndarray) -> np.ndarray: ...
    @overload
    def gop(self, operation: Operation, value: Number) -> Number: ...
    @overload
    def gop(self, operation: Operation, value: Sequence[float]) -> np.ndarray: ...
    def gop(self, operation: Any, value: Any) -> Any:
        """Combine the values of all ranks, and return the result on every rank.

        Parameters
        ----------
        operation : {"and", "or", "min", "max", "sum", "prod"} or callable
            The reduction. A callable receives two arrays and returns the combined array. mpidl
            applies the callable in rank order.
        value : array_like
            Number or array, with the same shape and dtype on all ranks.

        Returns
        -------
        ndarray or number
            The result: a Python number if `value` is a number, otherwise an array.

        Raises
        ------
        ValueError
            If the operation is unknown.
        TypeError
            If the value is a Partial or not numeric.
        """
        if not callable(operation) and operation not in OPERATIONS:
            raise ValueError(
                f"gop: expected one of {', '.join(OPERATIONS)} or a function, got {operation!r}"
            )
        if self.size == 1 and operation in ("min", "max") and type(value) is int:
            if -(1 << 63) <= value < 1 << 63:
                return value  # without NumPy, because the training loop calls gop in each iteration
        combine = operation if callable(operation) else OPERATIONS[operation]
        if isinstance(value, Partial):
            raise TypeError("gop: got a Partial; use world.gplus(value) to fold it")
        # Copy the value, so that the result is never the argument itself, and use C order.
        array = np.array(value, order="C", ndmin=1)
        if array.dtype == object:
            raise TypeError(f"gop: expected numbers, got {value!r}")
        if operation in ("and", "or"):
            array = array.astype(bool)
        elif operation in ("sum", "prod") and array.dtype.kind in "biu":
            # Widen like NumPy's sum, so that booleans are counted and small integers do not
            # overflow.
            array = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
        if self.size == 1:
            return self._like(array, value)
        names = MPI_OF_BOOLEANS if array.dtype == bool else MPI_OF_INTEGERS
        if array.dtype.kind in "iub" and operation in names:
            result = np.empty_like(array)
            mpi_operation = getattr(self.transport.MPI, names[operation])
            request = self.transport.comm.Iallreduce(array, result, mpi_operation)
            self.wait_for([request], f"gop {operation}")
            return self._like(result, value)
        inbox = [np.empty_like(array) for _ in range(self.size)]
        inbox[self.rank] = array
        self.allgather_into(inbox, array, f"gop {getattr(operation, '__name__', operation)}")
        return self._like(np.asarray(functools.reduce(combine, inbox)), value)

    @staticmethod
    def _like(result: np.ndarray, value: Any) -> Any:
        """Return the result with the shape of the value, as a Python number if it is a number."""
        result = result.reshape(np.shape(value))
        return result if result.ndim or isinstance(value, np.ndarray) else result[()].item()

    @overload
    def allreduce(self, value: Partial, op: Literal["sum"] = "sum") -> np.ndarray: ...
    @overload
    def allreduce(
        self, value: dict[Key, Partial], op: Literal["sum"] = "sum"
    ) -> dict[Key, np.ndarray]: ...
    @overload
    def allreduce(self, value: Number, op: Operation = "sum") -> Number: ...
    @overload
    def allreduce(self, value: float, op: Literal["and", "or"]) -> bool: ...
    @overload
    def allreduce(self, value: np.ndarray, op: Literal["and", "or"]) -> np.ndarray: ...
    def allreduce(self, value: Any, op: Any = "sum") -> Any:
        """Combine the values of all ranks like MPI's Allreduce; return the result on every rank.

        Parameters
        ----------
        value : Partial, array_like, dict, list or tuple
            The value of this rank. A Partial, dict, list or tuple requires the operation "sum".
        op : {"sum", "prod", "min", "max", "and", "or"} or callable, optional
            The reduction. A callable receives two arrays and returns the combined array. mpidl
            applies the callable in rank order.

        Returns
        -------
        ndarray, number, dict, list or tuple
            `gplus(value)` for "sum", and `gop(op, value)` otherwise.
        """
        return self.gplus(value) if op == "sum" else self.gop(op, value)

    def sends_messages(self) -> bool:
        """Return whether sums need messages, as if not all ranks share memory. Collective.

        Returns
        -------
        bool
            Whether sums of this world send messages.
        """
        memory = self.host_memory()
        return self.plain or memory is None or not memory.has_all_ranks

    def reducer(self) -> Reducer:
        """Return a new `Reducer`. `value_and_grad(f, reduce=world)` calls this method.

        Returns
        -------
        Reducer
            An object that sums gradients in buckets while the backward pass runs.
        """
        return Reducer(self, kernel_hook=self.advance)

    # agreement and reports

    def barrier(self) -> None:
        """Wait until all ranks have called this method and rank 0 has handled all sent messages.

        The sent messages are those that any rank passed to `send` before the barrier.
        """
        sent_count = self.gop("sum", self._sent_count)
        if self.rank == 0 and self._handler:
            self.transport.wait_until(
                lambda: self._received_count == sent_count,
                "messages sent to rank 0",
                self.progress,
            )
        self.wait_for([self.transport.comm.Ibarrier()], "barrier")

    def raise_if_any(self, error: BaseException | None = None) -> None:
        """Raise an error on all ranks if any rank passes an error.

        If only one rank can detect an error, such as a corrupt image or a full disk, this method
        ends all ranks at the same point of the program.

        Parameters
        ----------
        error : BaseException, optional
            The error of this rank. By default, this rank has no error.

        Raises
        ------
        UserError
            If any rank passes an error. The message comes from the lowest such rank.
        FolderInUse, StorageFault, LostLock
            Raised instead of UserError if that rank passes an error of one of these types.
        """
        if self.gop("max", int(error is not None)):
            texts = self.allgather(None if error is None else str(error))
            lowest = next(rank for rank, text in enumerate(texts) if text is not None)
            kind: type[BaseException] = UserError
            if error is not None and type(error) in SHARED_ERRORS:
                kind = type(error)
            raise self.allgather(kind)[lowest](texts[lowest])

    # memory shared by a host

    def available_shared_bytes(self) -> int:
        """Return the number of bytes that `shared_array` can allocate on every host.

        Returns
        -------
        int
            The number of bytes on the host with the least free shared memory.
        """
        return self.gop("min", free_shared_bytes(self.transport))

    def shared_array(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Allocate a zeroed array that the ranks of one host share.

        Each rank sees the values that the other ranks on the host write.

        Parameters
        ----------
        shape : sequence of int
            Shape of the array.
        dtype : dtype_like
            Data type of the array.

        Returns
        -------
        ndarray
            The array, in memory that all ranks of the host address.

        Raises
        ------
        UserError
            If a host does not have enough shared memory.
        """
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if nbytes > self.available_shared_bytes():
            raise UserError(
                f"/dev/shm: expected {nbytes >> 20} MB free for an array that the ranks of a host "
                f"share, found {self.available_shared_bytes() >> 20}; enlarge it (docker run "
                "--shm-size=2g)"
            )
        array, window = allocate_shared(self.transport, shape, dtype)
        self._windows[id(array)] = window
        return array

    def free(self, array: np.ndarray) -> None:
        """Free the memory of a shared array; no rank may use it afterwards.

        Parameters
        ----------
        array : ndarray
            An array that `shared_array` returned.
        """
        window = self._windows.pop(id(array), None)
        if window is not None:
            self.barrier()  # unlike MPI's Free, the barrier times out if a rank is missing
            with self.transport.blocking("shared memory"):
                window.Free()

    def close(self) -> None:
        """Free the shared arrays and the communicators; the world is unusable afterwards.

        Collective. Calling this method is optional, but limits the memory of a process that creates
        many worlds.
        """
        with self.transport.blocking("shared memory"):
            for window in self._windows.values():
                if window is not None:
                    window.Free()
            if self._host_memory is not None:
                # After an exception, there may be incomplete sums, which kernels and other ranks
                # still advance.
                if self.transport.comm.allreduce(self.is_exchanging, self.transport.MPI.LOR):
                    self.leave_memory()
                    with contextlib.suppress(BaseException):
                        builds.watch(None)
                else:
                    self._host_memory.close()
        self._windows.clear()
        self._host_memory = None
        self.transport.close()
