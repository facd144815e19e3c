"""Test CudaDevice without a GPU, on a replacement for CUDA that uses host memory."""

import ctypes
import gc
import sys
import threading
import types

import numpy as np
import pytest

from mpidl.backends.discovery import Gpu, Visible
from mpidl.backends.gpu import cuda_device, kernels, nvrtc
from mpidl.errors import UserError


class Failure(RuntimeError):
    """An exception with a CUDA error number, like the exceptions of CuPy."""

    def __init__(self, status):
        self.status = status
        super().__init__(f"error {status}")


class StandIn:
    """A replacement for CUDA on host memory, in which operations of streams run immediately.

    `free_bytes` is the number of bytes that malloc can still allocate. `calls` lists the names of
    the called functions.
    """

    def __init__(self):
        self.free_bytes, self.allocations, self.calls, self.recorded = 1 << 20, {}, [], None
        self.numbers = iter(range(1, 10**6))

    def __getattr__(self, name):
        if name in CONSTANTS or name.startswith(("cudaDevAttr", "CU_FUNC")):
            return name
        raise AttributeError(name)

    def _note(self, name):
        self.calls.append(name)
        return next(self.numbers)

    def malloc(self, nbytes):
        if nbytes > self.free_bytes:
            raise Failure(cuda_device.OUT_OF_MEMORY)
        memory = np.zeros(nbytes, np.uint8)
        self.free_bytes -= nbytes
        self.allocations[memory.ctypes.data] = memory
        return memory.ctypes.data

    def hostAlloc(self, nbytes, flags):
        return self.malloc(nbytes)

    def free(self, address):
        if address:
            self.free_bytes += self.allocations.pop(address).nbytes

    freeHost = free

    def memGetInfo(self):
        return self.free_bytes, 1 << 20

    def memcpyAsync(self, destination, source, nbytes, kind, stream):
        if self.recorded is None:
            ctypes.memmove(destination, source, nbytes)
        else:
            self.recorded.append((destination, source, nbytes))

    def setDevice(self, index):
        self.calls.append(f"setDevice {index}")

    def deviceGetAttribute(self, attribute, index):
        return 1000

    def streamCreateWithFlags(self, flags):
        return self._note("streamCreate")

    def streamCreateWithPriority(self, flags, priority):
        return self._note("streamCreate")

    def streamDestroy(self, stream):
        self._note("streamDestroy")

    def streamSynchronize(self, stream):
        self._note("streamSynchronize")

    def streamWaitEvent(self, stream, event):
        self.calls.append(("streamWaitEvent", stream, event))

    def streamBeginCapture(self, stream, mode):
        self.recorded = []

    def streamEndCapture(self, stream):
        self.recorded, graph = None, self.recorded
        return graph

    def graphInstantiate(self, graph):
        return list(graph)

    def graphDestroy(self, graph):
        self.calls.append("graphDestroy")

    def graphExecDestroy(self, graph):
        self.calls.append("graphExecDestroy")

    def graphUpload(self, graph, stream):
        pass

    def graphLaunch(self, graph, stream):
        for copy in graph:
            ctypes.memmove(*copy)

    def eventCreateWithFlags(self, flags):
        return self._note("eventCreate")

    def eventRecord(self, event, stream):
        self.calls.append(("eventRecord", stream, event))

    def eventSynchronize(self, event):
        self.calls.append("eventSynchronize")

    def eventQuery(self, event):
        self.calls.append("eventQuery")
        return 600 if self.calls.count("eventQuery") < 3 else 0  # cudaErrorNotReady, twice

    def eventDestroy(self, event):
        self.calls.append("eventDestroy")

    def eventElapsedTime(self, first, second):
        return 0.5

    def driverGetVersion(self):
        return 13020

    def moduleLoadData(self, image):
        if image != b"cubin":
            raise Failure(209)
        return 7

    def moduleUnload(self, module):
        self.calls.append("moduleUnload")

    def moduleGetFunction(self, module, name):
        if name == "left_out":
            raise Failure(cuda_device.NOT_FOUND)
        return {"twice": 11}[name]

    def funcGetAttribute(self, attribute, function):
        return 24

    def funcSetAttribute(self, function, attribute, value):
        self.calls.append((function, attribute, value))

    def launchKernel(self, function, *rest):
        *sizes, shared, stream, places, extra = rest
        if shared > 976:
            raise Failure(1)
        pointers = (ctypes.c_void_p * 3).from_address(places)
        address = ctypes.c_void_p.from_address(pointers[0]).value
        count = ctypes.c_int.from_address(pointers[1]).value
        factor = ctypes.c_float.from_address(pointers[2]).value
        (ctypes.c_float * count).from_address(address)[:] = [factor] * count
        self.calls.append((function, *sizes, shared, extra))


CONSTANTS = (
    *("memcpyHostToDevice", "memcpyDeviceToHost", "memcpyDeviceToDevice", "streamNonBlocking"),
    *("eventDefault", "eventDisableTiming", "streamCaptureModeThreadLocal"),
)
TEXT = """
extern "C" __global__ void twice(float* out, int count, float factor) {}
extern "C" __global__ void left_out(float* out) {}
"""


class Hook:
    """A replacement for CuPy's MemoryHook. CuPy calls active hooks before it allocates memory."""

    entered = False

    def __enter__(self):
        self.entered = True

    def __exit__(self, *_):
        self.entered = False


@pytest.fixture
def standin(monkeypatch):
    cuda = StandIn()
    cuda.hostAllocPortable, cuda.hostAllocMapped = 1, 2
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.ModuleType("cupy.cuda")
    cupy.cuda.runtime = cupy.cuda.driver = cuda
    cupy.cuda.memory_hook = types.SimpleNamespace(MemoryHook=Hook)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    gpu = Gpu(2, "bus", "Stand-in", "sm_90", 132, 1 << 20)
    monkeypatch.setattr(cuda_device, "visible", lambda: Visible((gpu,), "", 3))
    return cuda


@pytest.fixture
def device(standin):
    return cuda_device.CudaDevice(2)


def test_a_device_describes_its_gpu(device, standin):
    facts = device.name, device.architecture, device.processors, device.shared, device.memory
    assert facts == ("Stand-in", "sm_90", 132, 1000, 1 << 20) and device.identity == "bus"
    assert standin.calls[0] == "setDevice 2"
    with pytest.raises(UserError, match="GPU 0 does not exist: 1 are visible"):
        cuda_device.CudaDevice(0)


def test_memory_is_freed_with_its_owner(device, standin):
    before = standin.free_bytes
    memory = device.allocate(1000)
    assert memory.nbytes == 1024 and standin.free_bytes == before - 1024
    del memory
    assert standin.free_bytes == before
    owner = device.allocate(10)
    thread = threading.Thread(target=lambda owners: owners.clear(), args=([owner],))
    del owner
    thread.start()
    thread.join()
    gc.collect()
    device.allocate(10)  # also frees memory that another thread released
    assert standin.free_bytes == before


def test_without_free_memory_garbage_is_collected_first(device, standin):
    memory = device.allocate(900 << 10)
    with pytest.raises(MemoryError, match=r"cannot allocate 0 MB of memory: 0 of 1 MB are free"):
        device.allocate(400 << 10)
    cycle = [memory]
    cycle.append(cycle)
    del memory, cycle  # only the garbage collector can free this memory
    device.allocate(400 << 10)


def test_pinned_memory_and_copies(device, standin):
    before = standin.free_bytes
    pinned = device.pinned(16).view(np.float32)
    pinned[...] = 1, 2, 3, 4
    memory = device.allocate(16)
    device.upload(memory.address, pinned)
    other, back = device.allocate(16), np.empty(4, np.float32)
    device.copy(other.address, memory.address, 16)
    device.download(back, other.address)
    device.synchronize()
    assert back.tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="C-contiguous"):
        device.upload(memory.address, back[::2])
    token = device.stage(memory.address, pinned[:2])
    device.after(token)
    assert ("streamWaitEvent", device.stream, token.event) in standin.calls
    with pytest.raises(ValueError, match="expected pinned memory"):
        device.stage(memory.address, back)
    part = pinned[1:]
    del pinned
    assert part.tolist() == [2, 3, 4]
    del part, memory, other
    assert standin.free_bytes == before
    assert device.pinned(0).nbytes == 0


def test_host_memory_can_be_changed_right_after_an_upload(device, standin, monkeypatch):
    """The uploaded values are right even if the copy reads host memory later, in stream order."""
    waiting, copy = [], standin.memcpyAsync

    def run_stream():
        while waiting:
            copy(*waiting.pop(0))

    monkeypatch.setattr(standin, "memcpyAsync", lambda *call: waiting.append(call), raising=False)
    monkeypatch.setattr(standin, "streamSynchronize", lambda stream: run_stream(), raising=False)
    monkeypatch.setattr(cuda_device, "UPLOADING", 32)
    memory, copied = device.allocate(256), np.empty(16, np.float32)
    for size in (1, 3, 5, 2, 16):  # the fourth array must wait, and the last one is too large
        value = np.full(size, size, np.float32)
        device.upload(memory.address, value)
        assert bool(waiting) == (size < 16) and device._uploading_bytes <= 32
        value[...] = -1
        device.download(copied[:size], memory.address)
        if size in (3, 16):
            device.synchronize()
            assert copied[:size].tolist() == [size] * size and not device._uploading
    pinned = device.pinned(4)
    device.upload(memory.address, pinned)
    assert waiting and not device._uploading


def test_kernels_are_loaded_and_launched(device, standin, monkeypatch):
    monkeypatch.setattr(nvrtc, "cubin", lambda unit, architecture: b"cubin")
    unit = types.SimpleNamespace(text=TEXT, family="made_up")
    handles = device.load(unit)
    assert handles == {"twice": 11}
    assert (11, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 976) in standin.calls
    memory, result = device.allocate(16), np.empty(4, np.float32)
    parameters = kernels.signatures(TEXT)["twice"]

    def launch(shared):
        return kernels.Launch(
            unit, "twice", (5, 6, 7), (32, 2, 1), shared, (memory, 4, 2.5), parameters
        )

    device.launch(handles["twice"], launch(512))
    device.download(result, memory.address)
    assert result.tolist() == [2.5] * 4
    assert standin.calls[-1] == (11, 5, 6, 7, 32, 2, 1, 512, 0)
    with pytest.raises(
        RuntimeError, match=r"twice: grid \(5, 6, 7\), block .* 999 bytes of shared"
    ):
        device.launch(handles["twice"], launch(999))
    monkeypatch.setattr(nvrtc, "cubin", lambda unit, architecture: b"torn")
    with pytest.raises(
        RuntimeError, match="cannot load made_up.cu as compiled for sm_90: error 209"
    ):
        device.load(unit)


def test_a_second_stream_waits_for_the_first_and_the_first_for_it(device, standin):
    stream = device.stream
    standin.calls.clear()
    device.aside()
    second = device.stream
    assert device.is_aside and second != stream
    token = device.back()
    assert device.stream == stream and not device.is_aside
    device.join(token)
    events = [call for call in standin.calls if isinstance(call, tuple)]
    before, after = events[0][2], token.event
    assert events == [
        ("eventRecord", stream, before),
        ("streamWaitEvent", second, before),
        ("eventRecord", second, after),
        ("streamWaitEvent", stream, after),
    ]


def test_a_capture_that_fails_aside_ends_in_the_first_stream(device):
    stream = device.stream

    def fail():
        device.aside()
        raise KeyError

    with pytest.raises(KeyError):
        device.capture(fail)
    assert device.stream == stream


def test_marks_measure_time_if_they_are_timed(device):
    first, second = device.mark(timed=True), device.mark(timed=True)
    device.wait(first)
    assert device.elapsed(first, second) == 0.5
    with pytest.raises(ValueError, match="timed=True"):
        device.elapsed(first, device.mark())


def test_waits_for_other_ranks_poll_the_event(device, standin):
    waited = []

    def until(ready, description):
        while not ready():
            waited.append(description)

    device.until = until
    mark = device.mark()
    device.wait(mark)
    assert device.reached(mark)
    assert waited == ["the work of all ranks' GPUs"] * 2
    device.synchronize()
    assert standin.calls.count("eventSynchronize") == 2


def test_a_captured_graph_can_be_launched_repeatedly(device, standin):
    pinned = device.pinned(4).view(np.float32)
    memory = device.allocate(4)
    copied = np.empty(1, np.float32)
    graph = device.capture(lambda: device.upload(memory.address, pinned))
    for value in (3, 4):
        pinned[0] = value
        graph.launch()
        device.download(copied, memory.address)
        assert copied == value
    del graph
    assert standin.calls[-1] == "graphExecDestroy"


REFUSED = {
    "allocating 8 bytes of device memory": lambda device: device.allocate(8),
    "allocating 8 bytes of pinned memory": lambda device: device.pinned(8),
    "uploading 8 bytes of host memory that is not": lambda device: device.upload(0, np.zeros(1)),
    "downloading 8 bytes of host memory that is": lambda device: device.download(np.zeros(1), 0),
    "waiting for the device": lambda device: device.synchronize(),
    "waiting for a mark": lambda device: device.wait(None),
    "waiting for a copy": lambda device: device.after(None),
    "waiting for a mark cannot": lambda device: device.reached(None),
    "marking the launches so far": lambda device: device.mark(),
    "capturing within a capture": lambda device: device.capture(lambda: None),
    "loading made_up.cu": lambda device: device.load(types.SimpleNamespace(family="made_up")),
    "allocating 5 bytes of CuPy's memory pool": lambda d: d._hook.malloc_preprocess(size=5),
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_capture_refuses_calls_of_the_host_and_is_ended(device, standin, text):
    with pytest.raises(RuntimeError, match=f"^{text}.* be part of a captured graph"):
        device.capture(lambda: REFUSED[text](device))
    assert standin.recorded is None and standin.calls[-1] == "graphDestroy"
    assert not device._hook.entered
    device.synchronize()  # allocation works again


def test_memory_released_during_a_capture_is_freed_after_it(device, standin):
    owners = [device.allocate(8)]
    before = standin.free_bytes
    device.capture(lambda: owners.clear())
    assert standin.free_bytes == before
    device.synchronize()
    assert standin.free_bytes == before + 256


def test_another_thread_stages_on_the_same_gpu(device, standin):
    pinned, memory, tokens = device.pinned(8), device.allocate(8), []
    standin.calls.clear()

    def stage():
        tokens.append(device.stage(memory.address, pinned))
        tokens.append(device.stage(memory.address, pinned))

    thread = threading.Thread(target=stage)
    thread.start()
    thread.join()
    assert standin.calls.count("setDevice 2") == 1 and len(tokens) == 2


def test_close_releases_modules_and_streams(device, standin, monkeypatch):
    monkeypatch.setattr(nvrtc, "cubin", lambda unit, architecture: b"cubin")
    device.load(types.SimpleNamespace(text=TEXT, family="made_up"))
    device.close()
    assert standin.calls.count("moduleUnload") == 1 and standin.calls.count("streamDestroy") == 3
