"""Which GPU each rank takes, on made-up hosts; how nodes move between GPUs; what is refused."""

import ctypes
import gc
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from mpidl.backends.gpu.discovery import Gpu, Visible
from mpidl.comm import devices, nccl
from mpidl.comm.devices import RankGpus, assign_gpus, parse_gpus, parse_ranges, slurm_gpus
from mpidl.comm.nccl import Capabilities, choose_transport
from mpidl.errors import UserError


def gpu(letter, index=0, name="NVIDIA H100", architecture="sm_90", processors=132):
    """The GPU `letter` of a host, that a rank sees under this number."""
    return Gpu(index, letter, name, architecture, processors, 80 << 30)


def seeing(letters, host="node0", **kind):
    """A rank that sees these GPUs of its host."""
    gpus = tuple(gpu(f"{host} {x}", i, **kind) for i, x in enumerate(letters))
    return RankGpus(host, gpus, "" if gpus else "no NVIDIA driver", len(gpus))


def taken(ranks, gpus=None, wanted="gpu"):
    """The letters and numbers of the GPUs that ranks take, "A0 B1"; None for the CPU."""
    found = assign_gpus(ranks, wanted, gpus).gpus
    return found and " ".join(f"{g.identity.split()[-1]}{g.index}" for g in found)


def refused(call, *args, **keywords):
    with pytest.raises(UserError) as caught:
        call(*args, **keywords)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "ranks, expected",
    [
        ([seeing("A")], "A0"),
        ([seeing("ABCD")] * 4, "A0 B1 C2 D3"),
        ([seeing("AB")] * 4, "A0 A0 B1 B1"),
        ([seeing("AB")] * 3, "A0 A0 B1"),
        ([seeing("A")] * 3, "A0 A0 A0"),
        ([seeing("ABCD")] * 2, "A0 B1"),
        ([seeing("AB")] * 2 + [seeing("ABC", "node1")] * 2, "A0 B1 A0 B1"),
    ],
)
def test_ranks_take_the_gpus_of_their_host_in_order(ranks, expected):
    assert taken(ranks) == taken(ranks, wanted="auto") == expected


def test_a_rank_that_slurm_binds_takes_its_own():
    """srun --gpus-per-task=1: each sees one, numbered 0; with 2 each, the first of its own."""
    assert taken([seeing("A"), seeing("B"), seeing("C")]) == "A0 B0 C0"
    assert taken([seeing("AB"), seeing("CD")]) == "A0 C0"
    assert assign_gpus([seeing("A"), seeing("B")], "gpu").lines == []


def test_gpus_are_told_apart_by_what_they_are():
    """The same two, which ranks see under other numbers."""
    assert taken([seeing("AB"), seeing("BA")]) == "A0 B0"
    (line,) = assign_gpus([seeing("A"), seeing("A"), seeing("B")], "gpu").lines
    assert "3 ranks share 2 GPU(s)" in line


def test_some_gpus_alone():
    assert taken([seeing("ABCD")] * 2, "2,0") == "C2 A0"
    assert taken([seeing("ABCD")] * 4, "3,1") == "D3 D3 B1 B1"
    assert assign_gpus([seeing("ABCD")] * 2, "gpu", "2,0").lines == []
    text = refused(assign_gpus, [seeing("AB")] * 2, "gpu", "0,2")
    assert text == ("--gpus 0,2: expected numbers among 0, 1, which rank 0 on node0 sees, found 2")
    assert "rank 1 on node1 sees" in refused(
        assign_gpus, [seeing("AB"), seeing("A", "node1")], "auto", "1"
    )


@pytest.mark.parametrize("text", ["", "x", "0,", "-1", "1,1", "0 1", "0-2"])
def test_wrong_numbers(text):
    assert refused(parse_gpus, text).startswith(
        "--gpus must be numbers of GPUs such as 0,2, each once"
    )


def test_what_is_said_of_the_mapping():
    assert assign_gpus([seeing("AB")] * 2, "gpu").lines == []
    (line,) = assign_gpus([seeing("AB")] * 4, "gpu").lines
    assert line == "warning: 4 ranks share 2 GPU(s) on node0: one rank a GPU is faster"
    (line,) = assign_gpus([seeing("ABCD"), seeing("ABCD", "node1")], "gpu").lines
    assert line == "note: 1 of 4 GPUs are used on node0, node1, one by each rank"


def test_other_gpus_are_told_by_host():
    ranks = [seeing("A"), seeing("A", "node1", name="NVIDIA A100", architecture="sm_80")]
    (line,) = assign_gpus(ranks, "auto").lines
    assert line.startswith("warning: the ranks run different GPUs")
    assert "node0 (NVIDIA H100 (sm_90, 132 processors)); node1 (NVIDIA A100 (sm_80, " in line
    (line,) = assign_gpus([seeing("A"), seeing("A", "node1", processors=114)], "auto").lines
    assert "114 processors" in line


def test_a_gpu_that_is_asked_for_and_not_there():
    text = refused(assign_gpus, [seeing("")] * 2, "gpu")
    assert text == (
        "--device gpu: expected a GPU that mpidl can train on, found none on node0 (no NVIDIA "
        "driver)"
    )
    text = refused(assign_gpus, [seeing("A"), seeing("", "node1")], "gpu")
    assert text.endswith("found none on node1 (no NVIDIA driver)")
    assert refused(assign_gpus, [seeing("")], "auto", "0").startswith("--gpus 0: expected a GPU")


def test_auto_takes_gpus_where_every_rank_has_one():
    assert taken([seeing("A"), seeing("A", "node1")], wanted="auto") == "A0 A0"
    assert assign_gpus([seeing("")] * 2, "auto") == (None, [])
    gpus, (line,) = assign_gpus([seeing("A"), seeing("", "node1")], "auto")
    assert gpus is None
    assert line == (
        "note: all ranks compute on CPUs: there are GPUs on node0, none on node1 (no NVIDIA driver)"
    )
    unusable = RankGpus("node0", (), "CuPy is not installed", driver_count=2)
    gpus, (line,) = assign_gpus([unusable], "auto")
    assert gpus is None and "node0 (CuPy is not installed)" in line


def test_what_slurm_gave_where_nothing_else_says_so():
    four = tuple(gpu(x, i) for i, x in enumerate("ABCD"))

    def letters(**environ):
        found, note = slurm_gpus(four, "node0", environ)
        return "".join(g.identity for g in found), note

    assert letters() == ("ABCD", "")
    assert letters(SLURM_STEP_GPUS="1,3") == ("BD", "")
    assert letters(SLURM_JOB_GPUS="0-2") == ("ABC", "")
    # CUDA counts only these already: by the variable, or because a cgroup hides the others
    assert letters(SLURM_STEP_GPUS="1,3", CUDA_VISIBLE_DEVICES="1,3,0,2") == ("ABCD", "")
    assert letters(SLURM_STEP_GPUS="4,5,6,7") == ("ABCD", "")
    assert letters(SLURM_JOB_GPUS="0,1,2,3,4,5,6,7") == ("ABCD", "")
    assert letters(SLURM_JOB_GPUS="gpu:2") == ("ABCD", "")
    assert letters(SLURM_GPUS_ON_NODE="4") == ("ABCD", "")
    found, note = letters(SLURM_GPUS_ON_NODE="2")
    assert found == "ABCD" and note.startswith("warning: Slurm gave this job 2 of the 4 GPUs")
    assert assign_gpus([RankGpus("node0", four, note=note)] * 4, "auto").lines == [note]


def test_numbers():
    assert parse_ranges("0-2,5") == [0, 1, 2, 5] and parse_ranges("") == []


def test_without_a_compiler_of_kernels_a_gpu_is_of_no_use(monkeypatch):
    def without(architecture):
        raise UserError(f"no NVRTC compiles for {architecture}")

    monkeypatch.setattr(devices, "visible", lambda: Visible((gpu("A"),), "", 1))
    monkeypatch.setattr(devices.nvrtc, "find", lambda architecture: None)
    assert devices.find_gpus("node0", {}).gpus == (gpu("A"),)
    monkeypatch.setattr(devices.nvrtc, "find", without)
    seen = devices.find_gpus("node0", {})
    assert seen == RankGpus("node0", (), "no NVRTC compiles for sm_90", 1)
    assert assign_gpus([seen], "auto").gpus is None


def test_this_machine(world, monkeypatch):
    """On the CPU nobody is asked for GPUs; what CUDA shows is told with the host."""
    monkeypatch.setattr(devices, "visible", None)
    assert world.use_device("cpu") == [] and world.device is None
    assert "--gpus 0: expected --device gpu" in refused(world.use_device, "cpu", "0")
    monkeypatch.setattr(devices, "visible", lambda: Visible((), "no NVIDIA driver"))
    assert world.use_device("auto") == [] and world.device is None
    assert "found none on" in refused(world.use_device, "gpu")


def able(*letters, version=22707, aware=False, host="node0"):
    return [Capabilities(host, letter, version, aware) for letter in letters]


@pytest.mark.parametrize(
    "ranks, expected",
    [
        (able("A"), "host"),
        (able("A", "B"), "nccl"),
        (able("A", "A"), "host"),
        (able("A") + able("A", host="node1"), "nccl"),  # whose driver tells no more than the slot
        (able("A", "B", version=0), "host"),
        (able("A", "B", version=0, aware=None), "host"),
        (able("A", "B", version=0, aware=True), "mpi"),
        (able("A", "A", aware=True), "host"),
        (able("A") + able("B", version=22304), "host"),
        (able("A") + able("B", version=0), "host"),
    ],
)
def test_how_nodes_travel(ranks, expected):
    assert choose_transport(ranks) == expected


@pytest.mark.parametrize(
    "wanted, ranks, text",
    [
        ("rdma", able("A", "B"), "MPIDL_TRANSPORT must be nccl, mpi or host, found rdma"),
        ("", able("A"), "MPIDL_TRANSPORT must be nccl, mpi or host, found "),
        ("nccl", able("A", "B", "B"), "ranks 1 and 2 are on one GPU, which NCCL refuses"),
        ("nccl", able("A") + able("B", version=0), "rank 1 on node0 finds no NCCL"),
        ("nccl", able("A") + able("B", version=1), "different versions of NCCL"),
        ("mpi", able("A", "B"), "the MPI of rank 0 on node0 is not CUDA-aware"),
    ],
)
def test_ways_to_travel_that_cannot_be(wanted, ranks, text):
    assert text in refused(choose_transport, ranks, wanted)


def test_ways_to_travel_that_are_asked_for():
    assert choose_transport(able("A", "B"), "host") == "host"
    assert choose_transport(able("A", "B"), "nccl") == "nccl"
    assert choose_transport(able("A", "A", aware=True), "mpi") == "mpi"
    assert (
        choose_transport(able("A", "B", aware=None), "mpi") == "mpi"
    )  # it does not say; the user does


def test_an_mpi_that_reads_no_device_memory_says_so():
    assert nccl.cuda_aware() in (False, None)
    assert nccl.cuda_aware(["/lib/libmpi_cray.so.12"], {}) is False
    assert nccl.cuda_aware(["/no/libmpi.so"]) is None
    assert all("libmpi" in path for path in nccl.loaded_libraries())


class OnTheHost:
    """A device whose memory is the host's, for messages."""

    identity = "none"

    def __init__(self):
        self.waits = 0

    def copy(self, destination, source, nbytes):
        ctypes.memmove(destination, source, nbytes)

    def synchronize(self):
        self.waits += 1


def lying(array):
    """What a mover takes for an Array."""
    return SimpleNamespace(address=array.ctypes.data, nbytes=array.nbytes)


def test_messages_from_memory_by_its_address(world):
    """Each rank's padded nodes, (most, width), lie in the target in the order of the ranks."""
    world.device = OnTheHost()
    try:
        mover = nccl.MpiMover(world)
        for most, width in ((3, 5), (1, 1), (2, 70000), (0, 4)):
            source = np.full((most, width), world.rank + 0.5, np.float32)
            target = np.full((world.size, most, width), np.nan, np.float32)
            mover.allgather(lying(source), lying(target))
            expected = np.arange(world.size)[:, None, None] + 0.5
            assert np.array_equal(target, np.broadcast_to(expected, target.shape))
        assert mover.captured is False and world.device.waits == 3
    finally:
        world.device = None


def test_a_communicator_of_nccl_is_never_destroyed(monkeypatch):
    """That would wait for the graphs that hold its messages, whoever goes first."""
    destroyed = []

    class Communicator:
        def __init__(self, size, key, rank):
            self.made = size, key, rank

        def allGather(self, source, target, nbytes, kind, stream):
            ctypes.memmove(target, source, nbytes)

        def __del__(self):
            destroyed.append(self.made)

    library = SimpleNamespace(
        NCCL_INT8=0, get_unique_id=lambda: (1, 2), NcclCommunicator=Communicator
    )
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["cupy.cuda"], "nccl", library, raising=False)
    device, memory = OnTheHost(), np.zeros(512, np.uint8)
    device.allocate, device.stream = lambda nbytes: lying(memory), 0
    monkeypatch.setattr(nccl, "_communicators", {})
    world = SimpleNamespace(device=device, size=1, rank=0, broadcast=lambda key: key)
    mover = nccl.NcclMover(world, ("A",))
    assert mover.captured and mover._communicator.made == (1, (1, 2), 0)
    assert (
        nccl.NcclMover(world, ("A",))._communicator
        is mover._communicator
        is not nccl.NcclMover(world, ("B",))._communicator
    )
    del mover
    nccl._communicators.clear()
    gc.collect()
    assert not destroyed


def test_a_gpu_that_a_rank_has_is_kept(world, monkeypatch):
    """With it what lies there: a network that was moved, kernels, connections."""
    made = []

    class Device(OnTheHost):
        def __init__(self, gpu):
            super().__init__()
            self.identity, self.memory = gpu.identity, 1 << 30
            made.append(self)

        def close(self):
            made.remove(self)

    monkeypatch.setattr(devices, "open_gpu", Device)
    monkeypatch.setattr(nccl, "make_mover", lambda world: None)
    try:
        devices.use_gpu(world, gpu("A"))
        first, counts = world.device, world.counts
        assert first.sharers == world.size
        devices.use_gpu(world, gpu("A"))
        assert world.device is first and world.counts is counts and made == [first]
        devices.use_gpu(world, gpu("A" if world.rank else "B"))  # another one on one rank
        assert world.device is not first and made == [world.device]
    finally:
        devices.use_gpu(world, None)
    assert world.device is None and not made


def test_nothing_to_move_or_no_way_to(world, monkeypatch):
    monkeypatch.setattr(nccl, "version", lambda: 0)
    world.device = OnTheHost()
    try:
        assert nccl.make_mover(world) is None
        monkeypatch.setenv(nccl.VARIABLE, "pigeon")
        assert "found pigeon" in refused(nccl.make_mover, world)
    finally:
        world.device = None
