"""The world: this rank, how many there are, and what they do together."""

from __future__ import annotations

import functools
import html
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import numpy as np

from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.blocks import OneRank
from mpidl.comm import devices, failure, serial, thread_budget
from mpidl.comm.messaging import Messaging
from mpidl.comm.reducer import Reducer, is_on_host
from mpidl.comm.transport import Transport, allocate_shared, free_shared_bytes
from mpidl.errors import UserError
from mpidl.fold import Partial

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
# Reductions by MPI itself, whose results do not depend on the order. It has no minimum of booleans.
MPI_OF_INTEGERS: dict[object, str] = {"min": "MIN", "max": "MAX"}
MPI_OF_BOOLEANS: dict[object, str] = {"and": "LAND", "min": "LAND", "or": "LOR", "max": "LOR"}


class World(Messaging):
    """All ranks of the job.

    Every method is collective, except `send`, `report` and `progress`: all ranks call it, in the
    same order. From the start all ranks run the same kernels, the best that each of them can.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        Communicator; COMM_WORLD by default.
    timeout : float, optional
        Seconds after which a wait names the ranks that do not answer, and ends the job.
    plain : bool, optional
        Whether sums use MPI_Allreduce. Its result depends on the number of ranks; this is for
        measurements and negative controls.
    threads : int or None, optional
        Threads of each rank in the kernels. 0 divides the cores among the ranks that may use them,
        unless `dl.configure` or an earlier world has set a number. None leaves it to `use_threads`.

    Attributes
    ----------
    rank, size : int
        Rank of this process, and number of ranks.
    host : str
        Name of this rank's host.
    hosts : list of str
        Host of each rank.
    threads : list of int
        Threads of each rank; empty until they are set.
    device : CudaDevice or None
        GPU of this rank; None for the CPU.

    Notes
    -----
    Ranks are numbered in (host, rank) order, so that neighbours in the fold share a host; rank 0
    stays rank 0. If mpi4py is missing, the world is this process alone (`comm.serial`). MPI is
    initialized FUNNELED: only the main thread may call these methods.
    """

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        *,
        timeout: float = 300.0,
        plain: bool = False,
        threads: int | None = 0,
    ) -> None:
        mpi = serial.load()
        comm = mpi.COMM_WORLD if comm is None else comm
        failure.refuse_foreign_launcher(mpi.COMM_WORLD.size, mpi.Get_library_version())
        hosts = comm.allgather(mpi.Get_processor_name())
        order = sorted(range(comm.size), key=lambda rank: (hosts.index(hosts[rank]), rank))
        super().__init__(Transport(comm.Split(0, order.index(comm.rank)), timeout))
        self.plain = plain
        self.hosts: list[str] = self.transport.hosts
        self.host: str = self.hosts[self.rank]
        self.device: CudaDevice | None = None  # see `devices.use_gpu`, also for these two
        self.counts: Counts | None = None
        self.mover: NcclMover | MpiMover | None = None
        self.device_request: tuple[str, str | None] | None = None  # of the last `use_device`
        self._one_rank = OneRank()  # sums of one rank, without messages
        self._windows: dict[int, MPI.Win | None] = {}  # of shared arrays, by id
        failure.abort_on_exception(self.transport)
        builds.settle(self)
        self.threads: list[int] = []
        if threads or (threads == 0 and not settings.threads_chosen):
            for line in self.use_threads(threads):
                print(line, file=sys.stderr)

    def __repr__(self) -> str:
        threads = self.threads[self.rank] if self.threads else None
        return f"World(rank={self.rank}, size={self.size}, host={self.host!r}, threads={threads})"

    def _repr_html_(self) -> str:
        threads: Sequence[int | str] = self.threads or [""] * self.size
        rows = "".join(
            f"<tr><td>{rank}</td><td>{html.escape(host)}</td><td>{count}</td></tr>"
            for rank, (host, count) in enumerate(zip(self.hosts, threads, strict=True))
        )
        return f"<table><tr><th>rank</th><th>host</th><th>threads</th></tr>{rows}</table>"

    def use_threads(self, count: int) -> list[str]:
        """Set the number of threads in the kernels.

        Parameters
        ----------
        count : int
            Threads of each rank; 0 divides the cores among the ranks.

        Returns
        -------
        list of str
            On rank 0, lines to print if the threads do not fit the machine.
        """
        self.threads, lines = thread_budget.set_threads(self, count)
        return lines if self.rank == 0 else []

    def use_device(self, device: str, gpus: str | None = None) -> list[str]:
        """Compute on one GPU per rank, or on the CPU, and set `device`.

        Parameters
        ----------
        device : {"auto", "cpu", "gpu"}
            "auto" takes GPUs if every rank has one.
        gpus : str, optional
            Numbers of the GPUs to use, such as "0,2".

        Returns
        -------
        list of str
            On rank 0, lines to print.

        Raises
        ------
        UserError
            On all ranks, if a requested GPU cannot be used.
        """
        if self.device_request == (device, gpus):
            return []
        gpu, lines = devices.choose_device(self, device, gpus)
        devices.use_gpu(self, gpu)
        self.device_request = device, gpus
        return lines if self.rank == 0 else []

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
        """Add a value up over all ranks; every rank gets the same bytes.

        Parameters
        ----------
        value : Partial, array_like, dict, list or tuple
            The items of a dict, list or tuple are added up one by one, in one exchange if possible.

        Returns
        -------
        ndarray, number, dict, list or tuple
            The sum of a Partial does not depend on the number of ranks. A number or plain array is
            added in the order of the ranks: the result is repeatable, but depends on their number.
        """
        if isinstance(value, dict):
            reducer = Reducer(self, bucket_bytes=float("inf"))
            for name, item in value.items():
                # on one rank a copy: the Partial stays the caller's
                is_simple = not isinstance(item, Partial) or self._is_complete(item)
                reducer.push(name, self.gplus(item) if is_simple else item)
            return reducer.finish()
        if isinstance(value, (list, tuple)):
            return type(value)(self.gplus(dict(enumerate(value))).values())
        if isinstance(value, Partial):
            if self._is_complete(value):
                return self._one_rank.gplus(value)
            return self.gplus({"": value})[""]
        return self.gop("sum", value)

    def _is_complete(self, partial):
        """Whether this rank holds all nodes of a Partial in host memory."""
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
        """Combine the values of all ranks; every rank gets the result.

        Parameters
        ----------
        operation : {"and", "or", "min", "max", "sum", "prod"} or callable
            A function takes two arrays. It is applied from rank 0 upwards.
        value : array_like
            Number or array, of the same shape and dtype on all ranks.

        Returns
        -------
        ndarray or number
            An array for an array, a Python number for a number.

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
        combine = operation if callable(operation) else OPERATIONS[operation]
        if isinstance(value, Partial):
            raise TypeError("gop: got a Partial; world.gplus(value) is what folds it")
        # a copy, so that the result is never the argument itself; in C order on every rank
        array = np.array(value, order="C", ndmin=1)
        if array.dtype == object:
            raise TypeError(f"gop: expected numbers, got {value!r}")
        if operation in ("and", "or"):
            array = array.astype(bool)
        elif operation in ("sum", "prod") and array.dtype.kind in "biu":
            # as wide as NumPy's own sums: counts of true values, and no overflow of bytes
            array = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
        names = MPI_OF_BOOLEANS if array.dtype == bool else MPI_OF_INTEGERS
        if array.dtype.kind in "iub" and operation in names:
            result = np.empty_like(array)
            mpi_operation = getattr(self.transport.MPI, names[operation])
            request = self.transport.comm.Iallreduce(array, result, mpi_operation)
            self._wait_for([request], f"gop {operation}")
            return self._like(result, value)
        inbox = [np.empty_like(array) for _ in range(self.size)]
        inbox[self.rank] = array
        self.allgather_into(inbox, array, f"gop {getattr(operation, '__name__', operation)}")
        return self._like(np.asarray(functools.reduce(combine, inbox)), value)

    @staticmethod
    def _like(result, value):
        """Return the result in the shape of the value: a Python number for a number."""
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
        """Combine the values of all ranks, as MPI's allreduce; every rank gets the result.

        Parameters
        ----------
        value : Partial, array_like, dict, list or tuple
            All but numbers and arrays need the operation "sum".
        op : {"sum", "prod", "min", "max", "and", "or"} or callable, optional
            A function takes two arrays. It is applied from rank 0 upwards.

        Returns
        -------
        ndarray, number, dict, list or tuple
            `gplus(value)` for "sum", and `gop(op, value)` otherwise.
        """
        return self.gplus(value) if op == "sum" else self.gop(op, value)

    def reducer(self) -> Reducer:
        """Return the reducer to which `value_and_grad(f, reduce=world)` passes gradients."""
        return Reducer(self, kernel_hook=self.advance)

    # agreement and reports

    def barrier(self) -> None:
        """Wait for all ranks and, on rank 0, for all messages that they have sent."""
        sent_count = self.gop("sum", self._sent_count)
        if self.rank == 0 and self._handler:
            self.transport.wait_until(
                lambda: self._received_count == sent_count,
                "messages sent to rank 0",
                self.progress,
            )
        self._wait_for([self.transport.comm.Ibarrier()], "barrier")

    def raise_if_any(self, error: BaseException | None = None) -> None:
        """Raise a UserError on all ranks if any rank passes an error.

        So an error that only one rank can notice, such as a corrupt image or a full disk, ends all
        ranks at the same place.

        Parameters
        ----------
        error : BaseException, optional
            Error of this rank; None if there is none.

        Raises
        ------
        UserError
            With the text of the first rank's error.
        """
        if self.gop("max", int(error is not None)):
            texts = self.allgather(None if error is None else str(error))
            raise UserError(next(text for text in texts if text is not None))

    def report(self, **facts: Any) -> None:
        """Print named values from rank 0, such as `Epoch: 1, Loss: 0.3071`; not collective."""
        if self.rank == 0:
            print(", ".join(_labelled(name, fact) for name, fact in facts.items()), flush=True)

    # memory shared by a host

    def available_shared_bytes(self) -> int:
        """Return how many bytes `shared_array` can allocate on the host with the least memory."""
        return self.gop("min", free_shared_bytes(self.transport))

    def shared_array(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Allocate a zeroed array that the ranks of one host share.

        Each rank sees the writes of the others.

        Parameters
        ----------
        shape : sequence of int
        dtype : dtype_like

        Raises
        ------
        UserError
            If a host has not enough shared memory.
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
        """Free the memory of a shared array; no rank may use it afterwards."""
        window = self._windows.pop(id(array))
        if window is not None:
            self.barrier()  # MPI's own wait would hang if a rank is missing
            window.Free()


def _labelled(name, value):
    """Return "Learning rate: 0.0100" for ("learning_rate", 0.01)."""
    is_real = hasattr(value, "__float__") and not isinstance(value, (int, np.integer))
    return f"{name.replace('_', ' ').capitalize()}: {f'{float(value):.4f}' if is_real else value}"
