"""Define `World`, which provides collective operations over all ranks of a job."""

from __future__ import annotations

import contextlib
import functools
import html
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np

from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.comm import devices, failure, serial, thread_budget, ulfm, watchdog
from mpidl.comm.messaging import Messaging
from mpidl.comm.reducer import Reducer, is_on_host, total_of
from mpidl.comm.transport import START_SECONDS, Transport, allocate_shared, free_shared_bytes
from mpidl.core.blocks import OneRank
from mpidl.core.fold import Partial
from mpidl.errors import FolderInUse, LostLock, StorageFault, UserError

if TYPE_CHECKING:
    from mpi4py import MPI
    from numpy.typing import DTypeLike

    from mpidl.backends.gpu.cuda_device import CudaDevice
    from mpidl.backends.gpu.sums import Counts
    from mpidl.comm.groups import Neighbours
    from mpidl.comm.host_memory import HostMemory
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


class LostRank(NamedTuple):
    """The original number and the host of a rank that ended while other ranks continued."""

    rank: int
    host: str


class World(Messaging):
    """A communicator of all ranks of the job.

    Every method except `send`, `report` and `progress` is collective: all ranks must call these
    methods in the same order. The constructor selects the best build of the kernels that all ranks
    can run.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm, optional
        MPI communicator. The default is COMM_WORLD or, inside a sweep, the communicator of the
        group.
    timeout : float, optional
        Longest wait for other ranks in seconds. After this time, the job ends with a message that
        names the ranks that do not respond.
    plain : bool, optional
        Whether sums use MPI_Allreduce, whose results depend on the number of ranks. Set this option
        only for measurements and negative controls.
    threads : int or None, optional
        Number of threads that the kernels use on each rank. 0 divides the cores among the ranks
        that may use them, unless `dl.configure` or an earlier world has set a number. None leaves
        the number to a later call to `use_threads`.
    neighbours : Neighbours, optional
        The ranks of all groups of the job, if this world is one of several groups. By default, the
        job has no groups.

    Attributes
    ----------
    rank, size : int
        Rank of this process, and number of ranks.
    host : str
        Name of this rank's host.
    hosts : list of str
        Host name of each rank.
    threads : list of int
        Number of threads of each rank; empty until `use_threads` is called.
    device : CudaDevice or None
        GPU of this rank; None if the rank computes on the CPU.
    outlives_ranks : bool
        Whether the world continues if ranks are lost; see `outlive_ranks`.
    first_ranks : list of int
        For each rank, its number before the first loss of ranks.
    lost_ranks : list of LostRank
        The lost ranks, in the order in which they were lost.
    listeners : list of functions
        Functions that receive the values of each `report` on rank 0, to record or draw them, and
        return the names of the values that they record.
    signals : Signals or None
        Requests to stop, on which `stop_requested` lets the ranks agree; None until the first call
        of that method.

    Notes
    -----
    Ranks are renumbered by host, then by their rank in `comm`, so that consecutive ranks, which are
    close in the reduction tree, are on the same host. Rank 0 keeps its number. Without mpi4py, this
    process is the only rank of the world (see `comm.serial`). MPI is initialized with thread level
    FUNNELED: only the main thread may call the methods of a World.
    """

    # Arguments `comm` and `neighbours` of `World()` during a task of a `groups.Group`.
    default_group: tuple[MPI.Comm, Neighbours] | None = None

    def __init__(
        self,
        comm: MPI.Comm | None = None,
        *,
        timeout: float = 300.0,
        plain: bool = False,
        threads: int | None = 0,
        neighbours: Neighbours | None = None,
    ) -> None:
        mpi = serial.load(timeout)
        if comm is None and World.default_group is not None:
            comm, neighbours = World.default_group
        comm = mpi.COMM_WORLD if comm is None else comm
        failure.refuse_foreign_launcher(mpi.COMM_WORLD.size, mpi.Get_library_version())
        if comm.size > 1:
            watchdog.start(comm.rank)
        with watchdog.guard("the start of a world", timeout + START_SECONDS):
            hosts = comm.allgather(mpi.Get_processor_name())
            order = sorted(range(comm.size), key=lambda rank: (hosts.index(hosts[rank]), rank))
            by_host = comm.Split(0, order.index(comm.rank))
        super().__init__(Transport(by_host, timeout))
        self.plain, self.neighbours = plain, neighbours
        self.hosts: list[str] = self.transport.hosts
        self.host: str = self.hosts[self.rank]
        self.outlives_ranks = False
        self.first_ranks = list(range(self.size))
        self.lost_ranks: list[LostRank] = []
        self.listeners: list[Callable[[dict[str, object]], set[str]]] = []
        self.signals: failure.Signals | None = None
        # `devices.use_gpu` sets the next three attributes.
        self.device: CudaDevice | None = None
        self.counts: Counts | None = None
        self.mover: NcclMover | MpiMover | None = None
        # the arguments of the last call to `use_device`
        self.device_request: tuple[str, str | None] | None = None
        self._one_rank = OneRank()  # sums values on a single rank without messages
        self._windows: dict[int, MPI.Win | None] = {}  # {id(shared array): window}
        self._abandoned_windows: list[MPI.Win | None] = []  # arrays shared with lost ranks
        self._abandoned_memory: list[HostMemory | None] = []
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
        """Set the number of threads that the kernels use.

        Parameters
        ----------
        count : int
            Number of threads of each rank; 0 divides the cores among the ranks.

        Returns
        -------
        list of str
            Warnings to print, for example about more threads than cores. The list is empty on
            ranks other than 0.
        """
        self.threads, lines = thread_budget.set_threads(self, count)
        if count == 0:
            lines += thread_budget.ignored_variable(self.threads[self.rank])
        return lines if self.rank == 0 else []

    def use_device(self, device: str, gpus: str | None = None) -> list[str]:
        """Choose whether to compute on one GPU per rank or on CPUs, and set `device`.

        Parameters
        ----------
        device : {"auto", "cpu", "gpu"}
            "auto" uses GPUs if every rank has one, and CPUs otherwise.
        gpus : str, optional
            Indices of the GPUs to use, such as "0,2". The default is all GPUs.

        Returns
        -------
        list of str
            Messages to print. The list is empty on ranks other than 0.

        Raises
        ------
        UserError
            If a requested GPU cannot be used. All ranks raise it.
        """
        if self.device_request == (device, gpus):
            return []
        gpu, lines = devices.choose_device(self, device, gpus)
        devices.use_gpu(self, gpu)
        self.device_request = device, gpus
        return lines if self.rank == 0 else []

    def outlive_ranks(self, spelled: str = "outlive_ranks") -> None:
        """Let `survival.attempt` shrink this world and continue if ranks are lost.

        Parameters
        ----------
        spelled : str
            The option that requests this behaviour, for the error message.

        Raises
        ------
        UserError
            On all ranks, if the MPI library, the launcher or the device does not support it.
        """
        problem = ulfm.refusal(self.transport.MPI, self.size)
        if problem is None and self.device is not None:
            problem = "expected --device cpu, found GPUs, whose sums do not survive lost ranks"
        if problem is None and self.neighbours is not None:
            problem = "expected one run per job, found several at a time"
        if problem is not None:
            raise UserError(f"{spelled}: {problem}")
        self.outlives_ranks = True

    def continue_with(self, transport: Transport, survivors: Sequence[int]) -> None:
        """Shrink the world to the remaining ranks after other ranks were lost.

        Collective over the remaining ranks. Shared arrays stay valid, but their memory is not freed
        before the process ends.

        Parameters
        ----------
        transport : Transport
            The transport of the remaining ranks.
        survivors : sequence of int
            The current numbers of the remaining ranks, in the order of their new numbers.
        """
        for rank, host in enumerate(self.hosts):
            if rank not in survivors:
                self.lost_ranks.append(LostRank(self.first_ranks[rank], host))
        self.first_ranks = [self.first_ranks[rank] for rank in survivors]
        self.threads = [self.threads[rank] for rank in survivors] if self.threads else []
        self.leave_memory()
        self._abandoned_memory.append(self._host_memory)
        self._use(transport)
        self.hosts = transport.hosts
        self._abandoned_windows += self._windows.values()
        self._windows = dict.fromkeys(self._windows)

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
        return self.gop("sum", value)

    def _is_complete(self, partial):
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
            self._wait_for([request], f"gop {operation}")
            return self._like(result, value)
        inbox = [np.empty_like(array) for _ in range(self.size)]
        inbox[self.rank] = array
        self.allgather_into(inbox, array, f"gop {getattr(operation, '__name__', operation)}")
        return self._like(np.asarray(functools.reduce(combine, inbox)), value)

    @staticmethod
    def _like(result, value):
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
        self._wait_for([self.transport.comm.Ibarrier()], "barrier")

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
            kind = type(error) if type(error) in SHARED_ERRORS else UserError
            raise self.allgather(kind)[lowest](texts[lowest])

    def report(self, **facts: Any) -> None:
        """Print named values on rank 0, such as `Epoch: 1, Loss: 0.3071`, and record them.

        This method is not collective. Within `dl.report_to`, and in a notebook with
        ``dl.launch(..., plots="live")``, the values are also recorded and drawn. They are `loss`,
        `accuracy`, `learning_rate`, `images_per_second`, `validation_loss` and
        `validation_accuracy`, at the position that `epoch` and `iteration` give. Of a report
        with `iteration`, only the values that are not recorded are then printed.

        Parameters
        ----------
        **facts
            Names and values, in the order in which they are printed. A name such as `test_accuracy`
            is printed as "Test accuracy".

        Raises
        ------
        UserError
            If a value to record is not a number.
        """
        if self.rank:
            return
        recorded = {name for listener in self.listeners for name in listener(facts)}
        if "iteration" in facts:
            facts = {name: fact for name, fact in facts.items() if name not in recorded}
        if not recorded or facts.keys() - {"epoch", "iteration"}:
            print(", ".join(_labelled(name, fact) for name, fact in facts.items()), flush=True)

    def stop_requested(self) -> bool:
        """Return whether a stop has been requested on any rank. Collective.

        All ranks get the same answer, so a custom loop can end on all ranks in the same iteration.
        A stop is requested by the signals USR1, TERM and INT, which do not end the process from the
        first call on (a second INT does), by an interrupt of `dl.launch`, and within
        `dl.report_to` by the Stop buttons of the live page or the file `stop`.

        Returns
        -------
        bool
            Whether to stop. After the first True, the answer stays True. If the reason is a Stop
            button or the file, it stays True until the end of the block of `dl.report_to`.
        """
        signals = self.signals = (self.signals or failure.Signals()).__enter__()
        signals.agreed = self.gop("max", int(signals.agreed or signals.is_requested())) > 0
        return signals.agreed

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
            with watchdog.guard("shared memory", self.transport.timeout):
                window.Free()

    def close(self) -> None:
        """Free the GPU, the shared arrays and the communicators; the world is unusable afterwards.

        Collective. Calling this method is optional, but limits the memory of a process that creates
        many worlds.
        """
        if self.device is not None:
            devices.use_gpu(self, None)
        with watchdog.guard("shared memory", self.transport.timeout):
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


def _labelled(name, value):
    """Format a named value: ("learning_rate", 0.01) gives "Learning rate: 0.0100"."""
    is_real = hasattr(value, "__float__") and not isinstance(value, (int, np.integer))
    return f"{name.replace('_', ' ').capitalize()}: {f'{float(value):.4f}' if is_real else value}"
