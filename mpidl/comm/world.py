"""The world: this rank, of how many, and what they do together."""

import functools
import pickle
import sys

import numpy as np

from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.blocks import OneRank
from mpidl.comm import devices, failure, serial, thread_budget
from mpidl.comm.reducer import Reducer, is_on_host, post
from mpidl.comm.transport import Net, node_array, node_room
from mpidl.errors import UserError
from mpidl.fold import Partial

OPERATIONS = {
    "and": np.logical_and,
    "or": np.logical_or,
    "min": np.minimum,
    "max": np.maximum,
    "sum": np.add,
    "prod": np.multiply,
}
GATHER, SEND, TAGS = 3, 4, 10  # control tags; exchanges take the tags from TAGS on


class World:
    """All ranks of the job. Every method is collective but `send`, `report` and `progress`.

    comm: an mpi4py communicator, COMM_WORLD by default. timeout: seconds until a wait names the
    ranks that do not answer and ends the job. plain: sums by MPI_Allreduce, whose result depends on
    the number of ranks (for measurements and negative controls). threads: of each rank, in the
    kernels; 0: the cores it may use, divided among the ranks that may use them, unless
    `dl.configure` or a world before has said how many; None: `use_threads` says it later.

    Ranks are numbered in (host, rank) order, so that neighbours in the fold share a host; rank 0
    stays rank 0. Where mpi4py is missing the world is this process alone (`comm.alone`). MPI is
    initialized FUNNELED: only the main thread may call these methods.
    From then on all ranks run the same kernels, the best that each of them can.
    """

    def __init__(self, comm=None, *, timeout=300.0, plain=False, threads=0):
        MPI = serial.load()
        comm = MPI.COMM_WORLD if comm is None else comm
        failure.refuse_foreign_launcher(MPI.COMM_WORLD.size, MPI.Get_library_version())
        hosts = comm.allgather(MPI.Get_processor_name())
        place = sorted(range(comm.size), key=lambda r: (hosts.index(hosts[r]), r))
        self.net = Net(comm.Split(0, place.index(comm.rank)), timeout)
        self.rank, self.size, self.plain = self.net.rank, self.net.size, plain
        self.hosts, self.host = self.net.hosts, self.net.hosts[self.rank]
        self.flying, self.next_tag, self.windows = [], 0, {}
        self.device = self.counts = self.mover = self.asked = None  # see `use_device`
        self._alone = OneRank()  # does without messages what one rank can
        self.handler, self.sent, self.received, self.outbox = None, 0, 0, []
        failure.watch(self.net)
        builds.settle(self)
        self.threads = []  # of each rank, once it is settled
        if threads or (threads == 0 and not settings.threads_chosen):
            for line in self.use_threads(threads):
                print(line, file=sys.stderr)

    def use_threads(self, count):
        """Run `count` threads a rank in the kernels (0: as the cores suggest); collective.

        Returns, on rank 0, the lines to show where that does not fit the machine.
        """
        self.threads, lines = thread_budget.settle(self, count)
        return lines if self.rank == 0 else []

    def use_device(self, wanted, gpus=None):
        """Compute on a GPU each, or on the CPU; collective.

        wanted: "cpu", "gpu", or "auto": GPUs where every rank has one. gpus: numbers of those to
        use, such as "0,2". `device` is this rank's then, None for the CPU. Returns, on rank 0, the
        lines to show. Raises UserError, on all ranks, where a GPU that is asked for cannot be used.
        """
        if self.asked == (wanted, gpus):
            return []
        gpu, lines = devices.settle(self, wanted, gpus)
        devices.take(self, gpu)
        self.asked = wanted, gpus
        return lines if self.rank == 0 else []

    # sums and other reductions

    def gplus(self, value):
        """Add up over all ranks; every rank gets the same bytes.

        A Partial is folded: the result does not depend on the number of ranks. A dict, list or
        tuple is done item by item, in one exchange where it can be. A number or plain array is
        added in a fixed order of the ranks: repeatable, but dependent on how many there are.
        """
        if isinstance(value, dict):
            reducer = Reducer(self, bucket_bytes=float("inf"))
            for name, item in value.items():
                # on one rank a copy: the Partial stays the caller's
                simple = not isinstance(item, Partial) or self._has(item)
                reducer.push(name, self.gplus(item) if simple else item)
            return reducer.finish()
        if isinstance(value, (list, tuple)):
            return type(value)(self.gplus(dict(enumerate(value))).values())
        if isinstance(value, Partial):
            return self._alone.gplus(value) if self._has(value) else self.gplus({"": value})[""]
        return self.gop("sum", value)

    def _has(self, partial):
        """Whether a Partial's sum is here already."""
        return self.size == 1 and is_on_host(partial)

    def gop(self, operation, value):
        """Combine a number or array of all ranks with an operation; every rank gets the result.

        operation: "and", "or", "min", "max", "sum", "prod", or a function of two arrays. Applied
        from rank 0 upwards.
        """
        if not callable(operation) and operation not in OPERATIONS:
            raise ValueError(
                f"gop: expected one of {', '.join(OPERATIONS)} or a function, got {operation!r}"
            )
        combine = OPERATIONS.get(operation, operation)
        if isinstance(value, Partial):
            raise TypeError("gop: got a Partial; world.gplus(value) is what folds it")
        # a copy, so that the result is never the argument itself; in C order on every rank
        array = np.array(value, order="C", ndmin=1)
        if array.dtype == object:
            raise TypeError(f"gop: expected numbers, got {value!r}")
        if operation in ("and", "or"):
            array = array.astype(bool)
        elif operation in ("sum", "prod") and array.dtype.kind in "biu":
            # as wide as NumPy's own sums: how many are true, and no overflow of bytes
            array = array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
        if array.dtype == bool:  # MPI has no least and greatest of these
            exact = {"and": "LAND", "min": "LAND", "or": "LOR", "max": "LOR"}.get(operation)
        else:
            exact = {"min": "MIN", "max": "MAX"}.get(operation)
        if exact and array.dtype.kind in "iub":  # the same in any order: MPI's own will do
            result = np.empty_like(array)
            request = self.net.comm.Iallreduce(array, result, getattr(self.net.MPI, exact))
            self._wait([request], f"gop {operation}")
            return self._as_given(result, value)
        inbox = [np.empty_like(array) for _ in range(self.size)]
        inbox[self.rank] = array
        self.swap(array, inbox, f"gop {getattr(operation, '__name__', operation)}")
        return self._as_given(np.asarray(functools.reduce(combine, inbox)), value)

    @staticmethod
    def _as_given(result, value):
        """An array for an array, a Python number for a number."""
        result = result.reshape(np.shape(value))
        return result if result.ndim or isinstance(value, np.ndarray) else result[()].item()

    def reducer(self):
        """What `value_and_grad(f, reduce=world)` hands gradients to."""
        return Reducer(self, watch=self.advance)

    # objects

    def broadcast(self, value, root=0):
        """rank `root`'s value (any object that can be pickled) on all ranks."""
        if self.size == 1:
            return value
        data = np.frombuffer(pickle.dumps(value) if self.rank == root else b"", np.uint8)
        size = np.array([data.size])
        self._wait([self.net.comm.Ibcast(size, root)], "broadcast")
        data = data if self.rank == root else np.empty(size[0], np.uint8)
        self._wait([self.net.comm.Ibcast(data, root)], "broadcast")
        return value if self.rank == root else pickle.loads(data)

    def gather(self, value):
        """The list of all ranks' values on rank 0, None elsewhere."""
        if self.rank:
            self._wait([self.net.control.isend(value, 0, GATHER)], "gather")
            return None
        found = [value]
        for source in range(1, self.size):
            message = None

            def arrived(source=source):
                nonlocal message
                message = self.net.control.improbe(source, GATHER)
                return message is not None

            self.net.until(arrived, f"gather from rank {source}", self.progress)
            found.append(message.recv())
        return found

    def barrier(self):
        """Wait for all ranks, and on rank 0 for what they have sent."""
        sent = self.gop("sum", self.sent)
        if self.rank == 0 and self.handler:
            self.net.until(lambda: self.received == sent, "messages sent to rank 0", self.progress)
        self._wait([self.net.comm.Ibarrier()], "barrier")

    def together(self, error=None):
        """Agree on an error: where any rank passes an exception, all ranks raise the first one's.

        What only one rank can notice (a corrupt image, a full disk) becomes one UserError that all
        ranks raise at the same place.
        """
        if self.gop("max", int(error is not None)):
            found = self.broadcast(self.gather(None if error is None else str(error)))
            raise UserError(next(text for text in found if text is not None))

    # messages to rank 0 while work goes on

    def after_each(self, handler):
        """On rank 0, call handler(data) for each `send` of any rank (MATLAB's afterEach)."""
        self.handler = handler

    def send(self, data):
        """Send data (anything that can be pickled) to the handler on rank 0, without waiting.

        Rank 0 takes it while it waits in any collective method, at `progress()` and, at the latest,
        at `barrier()`.
        """
        self.sent += 1
        if self.rank == 0:
            self._handle(data)
        else:
            # a message must be kept until it has left
            self.outbox = [request for request in self.outbox if not request.Test()]
            self.outbox.append(self.net.control.isend(data, 0, SEND))

    def _handle(self, data):
        self.received += 1
        if self.handler is None:
            raise RuntimeError("send: rank 0 has no handler; every rank calls after_each first")
        self.handler(data)

    def report(self, **facts):
        """Print `Epoch: 1, Loss: 0.3071` from rank 0."""
        if self.rank == 0:
            whole = int, np.integer
            words = (
                f"{name.replace('_', ' ').capitalize()}: "
                + (
                    f"{float(v):.4f}"
                    if hasattr(v, "__float__") and not isinstance(v, whole)
                    else str(v)
                )
                for name, v in facts.items()
            )
            print(", ".join(words), flush=True)

    # memory shared by a node

    def shared_room(self):
        """How many bytes of shared arrays the host with the least room may still take."""
        return self.gop("min", node_room(self.net))

    def shared_array(self, shape, dtype):
        """A zeroed array that the ranks of one host share; each sees the others' writes.

        Raises UserError where there is no room for it.
        """
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if nbytes > self.shared_room():
            raise UserError(
                f"/dev/shm: expected {nbytes >> 20} MB free for an array that the ranks of a host "
                f"share, found {self.shared_room() >> 20}; enlarge it (docker run --shm-size=2g)"
            )
        array, window = node_array(self.net, shape, dtype)
        self.windows[id(array)] = window
        return array

    def free(self, array):
        """Give a shared array's memory back; nobody may use it any more."""
        window = self.windows.pop(id(array))
        if window is not None:
            self.barrier()  # MPI's own wait would hang where a rank is missing
            window.Free()

    # exchanges under way

    def swap(self, mine, inbox, what):
        """Receive what every other rank has in inbox[rank], and send them `mine`, all of one size.

        They are arrays, or memory of a GPU where MPI takes that.
        """
        tag = self._tag()
        others = [r for r in range(self.size) if r != self.rank]
        requests = [self.net.irecv(inbox[r], r, tag) for r in others]
        requests += [self.net.isend(mine, r, tag) for r in others]
        self._wait(requests, what)

    def exchange(self, tree, matrix, combine):
        """The root, (width,), of all ranks' (nodes, width) matrices, which may be overwritten."""
        flight = self.fly(tree, matrix, combine)
        self.land(flight)
        return flight.root

    def fly(self, tree, matrix, combine):
        """Start folding a (nodes, width) matrix; see `land`."""
        flight = post(self.net, self._tag(), tree, matrix, combine)
        if not flight.done:
            self.flying.append(flight)
        return flight

    def land(self, flight):
        """Wait until a flight has its root."""

        def landed():
            self.progress()  # which alone advances flights, this one among them
            return flight.done

        self.net.until(landed, "a sum over the ranks")

    def progress(self):
        """Let exchanges under way go on, and hand messages to rank 0's handler; never waits."""
        self.advance()
        if self.handler and self.rank == 0 and self.size > 1:
            while (message := self.net.control.improbe(tag=SEND)) is not None:
                self._handle(message.recv())

    def advance(self):
        """Let exchanges under way go on; never waits."""
        testall = self.net.MPI.Request.Testall
        for flight in list(self.flying):
            if testall(flight.requests):
                flight.advance()
                if flight.done:
                    self.flying.remove(flight)

    def _wait(self, requests, what):
        self.net.wait(requests, what, self.progress if self.flying or self.handler else None)

    def _tag(self):
        self.next_tag = (self.next_tag + 1) % 16384  # MPI promises tags up to 32767
        return TAGS + self.next_tag
