"""Define the `World` of a job, which starts MPI and gives each rank threads and a GPU."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidl import backends
from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.comm import world
from mpidl.comm.transport import START_SECONDS
from mpidl.errors import UserError
from mpidl.ranks import failure, foreign_launcher, serial, thread_budget, ulfm, watchdog
from mpidl.ranks.job_guard import JobTransport

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidl.comm.host_memory import HostMemory
    from mpidl.ranks.groups import Neighbours


class LostRank(NamedTuple):
    """The original number and the host of a rank that ended while other ranks continued."""

    rank: int
    host: str


class World(world.World):
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
    process is the only rank of the world (see `ranks.serial`). MPI is initialized with thread level
    FUNNELED: only the main thread may call the methods of a World.
    """

    transport: JobTransport
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
        foreign_launcher.refuse_single_ranks(mpi.COMM_WORLD.size, mpi.Get_library_version())
        if comm.size > 1:
            watchdog.start(comm.rank)
        with watchdog.guard("the start of a world", timeout + START_SECONDS):
            hosts = comm.allgather(mpi.Get_processor_name())
            order = sorted(range(comm.size), key=lambda rank: (hosts.index(hosts[rank]), rank))
            by_host = comm.Split(0, order.index(comm.rank))
        super().__init__(JobTransport(by_host, timeout), plain)
        self.neighbours = neighbours
        self.outlives_ranks = False
        self.first_ranks = list(range(self.size))
        self.lost_ranks: list[LostRank] = []
        self.listeners: list[Callable[[dict[str, object]], set[str]]] = []
        self.signals: failure.Signals | None = None
        # the arguments of the last call to `use_device`
        self.device_request: tuple[str, str | None] | None = None
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
            If a requested GPU cannot be used, or if the chosen device does not have the precision
            that `dl.configure` has set. All ranks raise it.
        """
        if self.device_request == (device, gpus):
            return []
        from mpidl.ranks import devices

        gpu, lines = devices.choose_device(self, device, gpus)
        backends.check_precision(settings.precision, on_gpu=gpu is not None)
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

    def continue_with(self, transport: JobTransport, survivors: Sequence[int]) -> None:
        """Shrink the world to the remaining ranks after other ranks were lost.

        Collective over the remaining ranks. Shared arrays stay valid, but their memory is not freed
        before the process ends.

        Parameters
        ----------
        transport : JobTransport
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

    def close(self) -> None:
        """Free the GPU, the shared arrays and the communicators; the world is unusable afterwards.

        Collective. Calling this method is optional, but limits the memory of a process that creates
        many worlds.
        """
        if self.device is not None:
            from mpidl.ranks import devices

            devices.use_gpu(self, None)
        super().close()


def _labelled(name, value):
    """Format a named value: ("learning_rate", 0.01) gives "Learning rate: 0.0100"."""
    is_real = hasattr(value, "__float__") and not isinstance(value, (int, np.integer))
    return f"{name.replace('_', ' ').capitalize()}: {f'{float(value):.4f}' if is_real else value}"
