"""Test the assignment of GPUs to ranks on simulated hosts, and exchanges between GPUs."""

import ctypes
import gc
from types import SimpleNamespace

import nccl_on_mpi
import numpy as np
import pytest
from image_sets import refusal

import mpidl as dl
from mpidl.backends import settings
from mpidl.backends.discovery import Gpu, Visible
from mpidl.backends.gpu import nvrtc
from mpidl.comm import nccl
from mpidl.comm.nccl import Capabilities, choose_transport
from mpidl.errors import UserError
from mpidl.ranks import devices
from mpidl.ranks.devices import RankGpus, assign_gpus, parse_gpus, parse_ranges, slurm_gpus


def gpu(letter, index=0, name="NVIDIA H100", architecture="sm_90", processors=132):
    """Return the GPU with identity `letter`, which a rank sees at index `index`."""
    return Gpu(index, letter, name, architecture, processors, 80 << 30)


def seeing(letters, host="node0", **kind):
    """Return the report of a rank that sees the given GPUs on its host."""
    gpus = tuple(gpu(f"{host} {x}", i, **kind) for i, x in enumerate(letters))
    return RankGpus(host, gpus, "" if gpus else "no NVIDIA driver", len(gpus))


def assigned(ranks, gpus=None, device="gpu"):
    """Return letter and index of each rank's GPU, such as "A0 B1", or None if ranks use CPUs."""
    assignment = assign_gpus(ranks, device, gpus).gpus
    return assignment and " ".join(f"{g.identity.split()[-1]}{g.index}" for g in assignment)


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
        # srun --gpus-per-task=1 or 2: each rank sees only its own GPUs, numbered from 0
        ([seeing("A"), seeing("B"), seeing("C")], "A0 B0 C0"),
        ([seeing("AB"), seeing("CD")], "A0 C0"),
        ([seeing("AB"), seeing("BA")], "A0 B0"),  # the ranks number the same GPUs differently
    ],
)
def test_ranks_take_the_gpus_of_their_host_in_order(ranks, expected):
    assert assigned(ranks) == assigned(ranks, device="auto") == expected


def test_gpus_are_selected_by_number():
    assert assigned([seeing("ABCD")] * 2, "2,0") == "C2 A0"
    assert assigned([seeing("ABCD")] * 4, "3,1") == "D3 D3 B1 B1"
    assert assign_gpus([seeing("ABCD")] * 2, "gpu", "2,0").lines == []
    text = refusal(assign_gpus, [seeing("AB")] * 2, "gpu", "0,2")
    assert text == ("--gpus 0,2: expected numbers among 0, 1, which rank 0 on node0 sees, found 2")
    text = refusal(assign_gpus, [seeing("AB"), seeing("A", "node1")], "auto", "1")
    assert "rank 1 on node1 sees" in text


@pytest.mark.parametrize("text", ["", "x", "0,", "-1", "1,1", "0 1", "0-2"])
def test_gpu_numbers_are_checked(text):
    assert refusal(parse_gpus, text).startswith("--gpus must be distinct GPU numbers such as 0,2")


def test_shared_and_unused_gpus_are_reported():
    for ranks in ([seeing("AB")] * 2, [seeing("A"), seeing("B")]):
        assert assign_gpus(ranks, "gpu").lines == []
    (line,) = assign_gpus([seeing("AB")] * 4, "gpu").lines
    assert line == "warning: 4 ranks share 2 GPU(s) on node0: one rank per GPU is faster"
    (line,) = assign_gpus([seeing("A"), seeing("A"), seeing("B")], "gpu").lines
    assert "3 ranks share 2 GPU(s)" in line
    (line,) = assign_gpus([seeing("ABCD"), seeing("ABCD", "node1")], "gpu").lines
    assert line == "note: 1 of 4 GPUs are used on node0, node1, one per rank"


def test_different_gpus_are_reported_by_host():
    ranks = [seeing("A"), seeing("A", "node1", name="NVIDIA A100", architecture="sm_80")]
    (line,) = assign_gpus(ranks, "auto").lines
    assert line.startswith("warning: the ranks use different GPUs")
    assert "node0 (NVIDIA H100 (sm_90, 132 processors)); node1 (NVIDIA A100 (sm_80, " in line
    (line,) = assign_gpus([seeing("A"), seeing("A", "node1", processors=114)], "auto").lines
    assert "114 processors" in line


def test_device_gpu_needs_a_gpu_on_every_host():
    text = refusal(assign_gpus, [seeing("")] * 2, "gpu")
    assert text == (
        "--device gpu: expected a GPU that mpidl can train on, found none on node0 (no NVIDIA "
        "driver)"
    )
    text = refusal(assign_gpus, [seeing("A"), seeing("", "node1")], "gpu")
    assert text.endswith("found none on node1 (no NVIDIA driver)")
    assert refusal(assign_gpus, [seeing("")], "auto", "0").startswith("--gpus 0: expected a GPU")


def test_auto_uses_gpus_if_every_rank_has_one():
    assert assigned([seeing("A"), seeing("A", "node1")], device="auto") == "A0 A0"
    assert assign_gpus([seeing("")] * 2, "auto") == (None, [])
    gpus, (line,) = assign_gpus([seeing("A"), seeing("", "node1")], "auto")
    assert gpus is None
    assert line == (
        "note: all ranks compute on CPUs: found GPUs on node0, but none on node1 (no NVIDIA driver)"
    )
    unusable = RankGpus("node0", (), "CuPy is not installed", driver_count=2)
    gpus, (line,) = assign_gpus([unusable], "auto")
    assert gpus is None and "node0 (CuPy is not installed)" in line


def test_gpus_that_slurm_allocated():
    four = tuple(gpu(x, i) for i, x in enumerate("ABCD"))

    def letters(**environ):
        gpus, note = slurm_gpus(four, "node0", environ)
        return "".join(g.identity for g in gpus), note

    assert letters(SLURM_STEP_GPUS="1,3") == ("BD", "")
    assert letters(SLURM_JOB_GPUS="0-2") == ("ABC", "")
    assert letters() == letters(SLURM_GPUS_ON_NODE="4") == ("ABCD", "")
    # CUDA already shows only the job's GPUs, because of the variable or of a cgroup.
    assert letters(SLURM_STEP_GPUS="1,3", CUDA_VISIBLE_DEVICES="1,3,0,2") == ("ABCD", "")
    for numbers in ("4,5,6,7", "0,1,2,3,4,5,6,7", "gpu:2"):
        assert letters(SLURM_JOB_GPUS=numbers) == ("ABCD", "")
    assert letters(SLURM_STEP_GPUS="4,5,6,7") == ("ABCD", "")
    gpus, note = letters(SLURM_GPUS_ON_NODE="2")
    assert gpus == "ABCD" and note.startswith("warning: Slurm gave this job 2 of the 4 GPUs")
    assert assign_gpus([RankGpus("node0", four, note=note)] * 4, "auto").lines == [note]


def test_ranges_of_numbers():
    assert parse_ranges("0-2,5") == [0, 1, 2, 5] and parse_ranges("") == []


def test_a_gpu_needs_a_compiler_of_kernels(monkeypatch):
    def fail_to_find(architecture):
        raise UserError(f"no installed NVRTC supports {architecture}")

    monkeypatch.setattr(devices, "visible", lambda: Visible((gpu("A"),), "", 1))
    monkeypatch.setattr(nvrtc, "find", lambda architecture: None)
    assert devices.find_gpus("node0", {}).gpus == (gpu("A"),)
    monkeypatch.setattr(nvrtc, "find", fail_to_find)
    rank = devices.find_gpus("node0", {})
    assert rank == RankGpus("node0", (), "no installed NVRTC supports sm_90", 1)
    assert assign_gpus([rank], "auto").gpus is None


def test_devices_of_the_world(world, monkeypatch):
    """`use_device("cpu")` does not look for GPUs, and an error about GPUs names the host."""
    monkeypatch.setattr(devices, "visible", None)
    assert world.use_device("cpu") == [] and world.device is None
    assert "--gpus 0: expected --device gpu" in refusal(world.use_device, "cpu", "0")
    monkeypatch.setattr(devices, "visible", lambda: Visible((), "no NVIDIA driver"))
    assert world.use_device("auto") == [] and world.device is None
    assert "found none on" in refusal(world.use_device, "gpu")


def test_the_device_must_have_the_precision(world, monkeypatch):
    """The error names the option and the device, which `auto` may have chosen, and its values."""
    monkeypatch.setattr(settings, "precision", "fp32")
    gpus = {"cpu": None, "gpu": gpu("A")}
    monkeypatch.setattr(devices, "choose_device", lambda world, device, _: (gpus[device], []))
    opened = []
    monkeypatch.setattr(devices, "use_gpu", lambda world, gpu: opened.append(gpu))
    monkeypatch.setattr(world, "device_request", None)
    text = refusal(dl.configure, precision="tf32")
    assert text == "--precision tf32: expected fp32 or bf16 on CPUs; tf32 needs --device gpu"
    assert settings.precision == "fp32"
    for precision, device in (("bf16", "gpu"), ("bf16", "cpu"), ("fp32", "gpu")):
        dl.configure(precision=precision)
        assert world.use_device(device) == []
    monkeypatch.setattr(settings, "on_gpu", True)
    dl.configure(precision="tf32")
    assert settings.precision == "tf32" and world.use_device("gpu") == []
    assert "tf32: expected fp32 or bf16 on CPUs" in refusal(world.use_device, "cpu")


def able(*letters, version=22707, aware=False, host="node0"):
    return [Capabilities(host, letter, version, aware) for letter in letters]


@pytest.mark.parametrize(
    "ranks, transport, expected",
    [
        (able("A"), None, "host"),
        (able("A", "B"), None, "nccl"),
        (able("A", "A"), None, "host"),
        # GPUs on different hosts may have the same identity
        (able("A") + able("A", host="node1"), None, "nccl"),
        (able("A", "B", version=0), None, "host"),
        (able("A", "B", version=0, aware=None), None, "host"),
        (able("A", "B", version=0, aware=True), None, "mpi"),
        (able("A", "A", aware=True), None, "host"),
        (able("A") + able("B", version=22304), None, "host"),
        (able("A") + able("B", version=0), None, "host"),
        (able("A", "B"), "host", "host"),
        (able("A", "B"), "nccl", "nccl"),
        (able("A", "A", aware=True), "mpi", "mpi"),
        # the user's request decides if it is unknown whether MPI is CUDA-aware
        (able("A", "B", aware=None), "mpi", "mpi"),
    ],
)
def test_transport_of_nodes(ranks, transport, expected):
    assert choose_transport(ranks, transport) == expected


@pytest.mark.parametrize(
    "transport, ranks, text",
    [
        ("rdma", able("A", "B"), "MPIDL_TRANSPORT must be nccl, mpi or host, found rdma"),
        ("", able("A"), "MPIDL_TRANSPORT must be nccl, mpi or host, found "),
        ("nccl", able("A", "B", "B"), "ranks 1 and 2 share one GPU, which NCCL does not support"),
        ("nccl", able("A") + able("B", version=0), "rank 1 on node0 finds no NCCL"),
        ("nccl", able("A") + able("B", version=1), "different versions of NCCL"),
        ("mpi", able("A", "B"), "the MPI of rank 0 on node0 is not CUDA-aware"),
    ],
)
def test_transports_that_cannot_be_used(transport, ranks, text):
    assert text in refusal(choose_transport, ranks, transport)


def test_whether_the_mpi_reads_device_memory():
    assert nccl.cuda_aware() in (False, None)
    assert nccl.cuda_aware(["/lib/libmpi_cray.so.12"], {}) is False
    assert nccl.cuda_aware(["/no/libmpi.so"]) is None
    assert all("libmpi" in path for path in nccl.loaded_libraries())


class HostDevice:
    """A simulated device for messages, with memory on the host."""

    identity, is_aside = "none", False

    def stream(self, function, *arguments):
        """Run a message of `nccl_on_mpi` at once."""
        function(*arguments)

    def allocate(self, nbytes):
        return device_array(np.zeros(nbytes, np.uint8))

    def copy(self, destination, source, nbytes):
        ctypes.memmove(destination, source, nbytes)

    def synchronize(self):
        pass


def device_array(array):
    """Return an object with the attributes of a device array that a mover uses."""
    return SimpleNamespace(address=array.ctypes.data, nbytes=array.nbytes, keep=array)


@pytest.fixture
def device_world(world):
    """Return the world with a simulated device."""
    world.device = HostDevice()
    yield world
    world.device = None


@pytest.fixture(params=["mpi", "nccl"])
def mover(request, device_world):
    """Return a mover whose messages MPI sends between arrays in host memory."""
    if request.param == "mpi":
        yield nccl.MpiMover(device_world)
        return
    with nccl_on_mpi.installed():
        yield nccl.NcclMover(device_world, ("these ranks",))


def test_a_mover_gathers_in_the_order_of_the_ranks(mover):
    for count, width in ((3, 5), (1, 1), (2, 70000)):
        source = np.full((count, width), mover.rank + 0.5, np.float32)
        target = np.full((mover.size, count, width), np.nan, np.float32)
        mover.wait(mover.allgather(device_array(source), device_array(target)))
        expected = np.arange(mover.size)[:, None, None] + 0.5
        assert np.array_equal(target, np.broadcast_to(expected, target.shape))


def test_a_mover_sends_each_rank_its_arrays(mover):
    """Rank r sends r + 1 arrays of different sizes to each rank, including itself."""
    ranks = range(mover.size)
    sends, receives = [], []
    for rank in ranks:
        sends += [(rank, np.full(i + 1, 100 * mover.rank + rank)) for i in range(mover.rank + 1)]
        receives += [(rank, np.zeros(i + 1, int)) for i in range(rank + 1)]
    arrays = [[(r, device_array(a)) for r, a in messages] for messages in (sends, receives)]
    mover.wait(mover.exchange(*arrays))
    for rank, received in receives:
        assert (received == 100 * rank + mover.rank).all()


def test_streams_have_communicators_of_their_own_that_are_never_destroyed(monkeypatch):
    """A communicator is kept, because its destructor would wait for CUDA graphs that use it."""
    destroyed, used = [], []

    class Communicator(nccl_on_mpi.NcclCommunicator):
        def __init__(self, *arguments):
            self.arguments = arguments

        def allGather(self, *arguments):
            used.append(self)

        def __del__(self):
            destroyed.append(self.arguments)

    monkeypatch.setattr(nccl_on_mpi, "NcclCommunicator", Communicator)
    device, array = HostDevice(), device_array(np.zeros(1))
    world = SimpleNamespace(device=device, size=1, rank=0, broadcast=lambda key: key)
    with nccl_on_mpi.installed():
        movers = [nccl.NcclMover(world, (gpu,)) for gpu in "AAB"]
        assert movers[0].captured and len(nccl.communicators) == 2
        for mover in movers:
            used.clear()
            for device.is_aside in (False, True):
                mover.allgather(array, array)
            assert used == mover.communicators and used[0] is not used[1]
        assert movers[0].communicators is movers[1].communicators
        assert used[0].arguments == (1, (0,), 0)
        del mover, movers
        used.clear()
        nccl.communicators.clear()
        gc.collect()
        assert not destroyed


def test_a_rank_keeps_its_gpu(world, monkeypatch):
    """If all ranks keep their GPUs, devices stay open. Otherwise, devices are closed."""
    devices_in_use = []

    class Device(HostDevice):
        def __init__(self, gpu):
            super().__init__()
            self.identity, self.memory = gpu.identity, 1 << 30
            devices_in_use.append(self)

        def close(self):
            devices_in_use.remove(self)

    monkeypatch.setattr(devices, "open_gpu", Device)
    monkeypatch.setattr(nccl, "make_mover", lambda world: None)
    try:
        devices.use_gpu(world, gpu("A"))
        first, counts = world.device, world.counts
        assert first.sharers == world.size
        devices.use_gpu(world, gpu("A"))
        assert world.device is first and world.counts is counts and devices_in_use == [first]
        devices.use_gpu(world, gpu("A" if world.rank else "B"))  # rank 0 changes its GPU
        assert world.device is not first and devices_in_use == [world.device]
    finally:
        devices.use_gpu(world, None)
    assert world.device is None and not devices_in_use


def test_a_mover_is_made_if_the_transport_needs_one(device_world, monkeypatch):
    monkeypatch.setattr(nccl, "version", lambda: 0)
    assert nccl.make_mover(device_world) is None
    monkeypatch.setenv(nccl.VARIABLE, "pigeon")
    assert "found pigeon" in refusal(nccl.make_mover, device_world)
