"""The device of CuPy where there is no GPU: every name of CuPy's that is used exists, and what the
device does with them, on a stand-in for CUDA whose memory is the host's."""

import ast
import ctypes
import gc
import importlib
import re
import sys
import threading
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

from mpidl.backends.gpu import cuda_device, discovery, kernels, nvrtc
from mpidl.backends.gpu.discovery import Gpu, Visible
from mpidl.comm import nccl
from mpidl.errors import UserError

SOURCES = [Path(module.__file__) for module in (cuda_device, discovery, nccl)]
MODULES = ("runtime", "driver", "memory_hook", "nccl")


def used(source):
    """What a source uses of CuPy's modules: {(module, name): [arguments of each call]}."""
    found = {}
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).rpartition(".")[2]
            if owner in MODULES:
                found.setdefault((owner, node.attr), [])
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            key = ast.unparse(node.func.value).rpartition(".")[2], node.func.attr
            starred = any(isinstance(a, ast.Starred) for a in node.args)
            if key in found and not starred:
                found[key].append(len(node.args) + len(node.keywords))
    return found


def imported(source):
    """The names that a source imports from cupy."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cupy"):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("cupy")]
    return found


@pytest.fixture(scope="module")
def cupy():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("cupy", reason="CuPy is not installed")


def problems(cupy, source):
    """What a source wants of CuPy that is not there, or takes other arguments."""
    found = []
    for name in imported(source):
        parent, _, last = name.rpartition(".")
        if parent and not hasattr(importlib.import_module(parent), last):
            try:
                importlib.import_module(name)  # a module that its package does not import
            except ImportError:
                found.append(name)
    for (module, name), calls in used(source).items():
        if module == "nccl":  # loads with NCCL's library alone
            continue
        value = getattr(getattr(cupy.cuda, module), name, None)
        if value is None:
            found.append(f"{module}.{name}")
        declared = re.match(rf"{name}\((.*?)\)", getattr(value, "__doc__", None) or "")
        if declared and calls:
            words = [word for word in declared[1].split(",") if word.strip()]
            most, least = len(words), len([word for word in words if "=" not in word])
            found += [f"{module}.{name} of {n} arguments" for n in calls if not least <= n <= most]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_name_of_cupy_exists(cupy, path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NCCL's library, which may be missing
        assert problems(cupy, path.read_text()) == []


def test_names_are_found_and_wrong_ones_seen(cupy):
    names = used(SOURCES[0].read_text())
    assert {("runtime", "malloc"), ("driver", "launchKernel")} <= set(names)
    assert names["runtime", "memcpyAsync"] == [5, 5]
    wrong = "def f(self):\n    self.runtime.mallocNow(3)\n    runtime.malloc(3, 4)\n"
    assert problems(cupy, wrong) == ["runtime.mallocNow", "runtime.malloc of 2 arguments"]
    assert problems(cupy, "from cupy.cuda import nothing\n") == ["cupy.cuda.nothing"]


def test_every_name_of_nccl_exists(cupy):
    """Its module loads with NCCL's library alone; its names stand in it all the same."""
    (path,) = Path(cupy.__file__).parents[1].glob("cupy_backends/cuda/libs/nccl.*.so")
    content = path.read_bytes()
    names = [name for module, name in used(SOURCES[2].read_text()) if module == "nccl"]
    assert {"NcclCommunicator", "get_unique_id", "NCCL_INT8"} <= set(names)
    for name in {*names, "allGather"} - {"available"}:
        assert name.encode() in content, name


class Failure(RuntimeError):
    """As CuPy's errors are: with CUDA's number."""

    def __init__(self, status):
        self.status = status
        super().__init__(f"error {status}")


class StandIn:
    """CUDA's runtime and driver on host memory, one stream after the other, at once.

    `room`: bytes that malloc still gives. `calls`: what was asked for, by name.
    """

    def __init__(self):
        self.room, self.held, self.calls, self.recorded = 1 << 20, {}, [], None
        self.numbers = iter(range(1, 10**6))

    def __getattr__(self, name):
        if name in CONSTANTS or name.startswith(("cudaDevAttr", "CU_FUNC")):
            return name
        raise AttributeError(name)

    def _noted(self, name):
        self.calls.append(name)
        return next(self.numbers)

    def malloc(self, nbytes):
        if nbytes > self.room:
            raise Failure(cuda_device.OUT_OF_MEMORY)
        memory = np.zeros(nbytes, np.uint8)
        self.room -= nbytes
        self.held[memory.ctypes.data] = memory
        return memory.ctypes.data

    def hostAlloc(self, nbytes, flags):
        return self.malloc(nbytes)

    def free(self, address):
        if address:
            self.room += self.held.pop(address).nbytes

    freeHost = free

    def memGetInfo(self):
        return self.room, 1 << 20

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
        return self._noted("streamCreate")

    def streamDestroy(self, stream):
        self._noted("streamDestroy")

    def streamSynchronize(self, stream):
        self._noted("streamSynchronize")

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
        return self._noted("eventCreate")

    def eventRecord(self, event, stream):
        pass

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
    """As CuPy's MemoryHook: entered ones are asked before memory is handed out."""

    entered = False

    def __enter__(self):
        self.entered = True

    def __exit__(self, *_):
        self.entered = False


@pytest.fixture
def standin(monkeypatch):
    found = StandIn()
    found.hostAllocPortable, found.hostAllocMapped = 1, 2
    cupy = types.ModuleType("cupy")
    cupy.cuda = types.ModuleType("cupy.cuda")
    cupy.cuda.runtime = cupy.cuda.driver = found
    cupy.cuda.memory_hook = types.SimpleNamespace(MemoryHook=Hook)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    gpu = Gpu(2, "bus", "Stand-in", "sm_90", 132, 1 << 20)
    monkeypatch.setattr(cuda_device, "visible", lambda: Visible((gpu,), "", 3))
    return found


@pytest.fixture
def device(standin):
    return cuda_device.CudaDevice(2)


def test_what_it_says_of_itself(device, standin):
    facts = device.name, device.architecture, device.processors, device.shared, device.memory
    assert facts == ("Stand-in", "sm_90", 132, 1000, 1 << 20) and device.identity == "bus"
    assert standin.calls[0] == "setDevice 2"
    with pytest.raises(UserError, match="there is no GPU 0: 1 are visible"):
        cuda_device.CudaDevice(0)


def test_memory_goes_back_with_its_owner(device, standin):
    before = standin.room
    memory = device.allocate(1000)
    assert memory.nbytes == 1024 and standin.room == before - 1024
    del memory
    assert standin.room == before
    owner = device.allocate(10)
    thread = threading.Thread(target=lambda held: held.clear(), args=([owner],))
    del owner
    thread.start()
    thread.join()
    gc.collect()
    device.allocate(10)  # what another thread let go has gone back by now
    assert standin.room == before


def test_no_room(device, standin):
    kept = device.allocate(900 << 10)
    with pytest.raises(MemoryError, match=r"asked for 0 MB of memory, found 0 MB of the GPU's 1"):
        device.allocate(400 << 10)
    cycle = [kept]
    cycle.append(cycle)
    del kept, cycle  # only the collector frees this
    device.allocate(400 << 10)


def test_pinned_memory_and_copies(device, standin):
    before = standin.room
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
    assert standin.room == before
    assert device.pinned(0).nbytes == 0


def test_what_was_uploaded_may_be_changed_at_once(device, standin, monkeypatch):
    """Also where the copy reads host memory only when the stream comes to it."""
    waiting, now = [], standin.memcpyAsync

    def come():
        while waiting:
            now(*waiting.pop(0))

    monkeypatch.setattr(standin, "memcpyAsync", lambda *how: waiting.append(how), raising=False)
    monkeypatch.setattr(standin, "streamSynchronize", lambda stream: come(), raising=False)
    monkeypatch.setattr(cuda_device, "UPLOADING", 32)
    memory, found = device.allocate(256), np.empty(16, np.float32)
    for size in (1, 3, 5, 2, 16):  # the fourth no longer fits, the last never does
        value = np.full(size, size, np.float32)
        device.upload(memory.address, value)
        assert bool(waiting) == (size < 16) and device._uploading_bytes <= 32
        value[...] = -1
        device.download(found[:size], memory.address)
        if size in (3, 16):
            device.synchronize()
            assert found[:size].tolist() == [size] * size and not device._uploading
    pinned = device.pinned(4)
    device.upload(memory.address, pinned)
    assert waiting and not device._uploading


def test_kernels(device, standin, monkeypatch):
    monkeypatch.setattr(nvrtc, "cubin", lambda unit, architecture: b"cubin")
    unit = types.SimpleNamespace(text=TEXT, family="made_up")
    handles = device.load(unit)
    assert handles == {"twice": 11}
    assert (11, "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 976) in standin.calls
    memory, found = device.allocate(16), np.empty(4, np.float32)
    parameters = kernels.signatures(TEXT)["twice"]

    def launch(shared):
        return kernels.Launch(
            unit, "twice", (5, 6, 7), (32, 2, 1), shared, (memory, 4, 2.5), parameters
        )

    device.launch(handles["twice"], launch(512))
    device.download(found, memory.address)
    assert found.tolist() == [2.5] * 4
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


def test_marks(device):
    first, second = device.mark(timed=True), device.mark(timed=True)
    device.wait(first)
    assert device.elapsed(first, second) == 0.5
    with pytest.raises(ValueError, match="timed=True"):
        device.elapsed(first, device.mark())


def test_a_wait_that_other_ranks_may_draw_out_is_a_loop_of_tests(device, standin):
    waited = []

    def until(ready, what):
        while not ready():
            waited.append(what)

    device.until = until
    device.wait(device.mark())
    assert waited == ["the work of all ranks' GPUs"] * 2
    device.synchronize()
    assert standin.calls.count("eventSynchronize") == 2


def test_a_captured_graph_is_launched_again_and_again(device, standin):
    pinned = device.pinned(4).view(np.float32)
    memory = device.allocate(4)
    found = np.empty(1, np.float32)
    graph = device.capture(lambda: device.upload(memory.address, pinned))
    for value in (3, 4):
        pinned[0] = value
        graph.launch()
        device.download(found, memory.address)
        assert found == value
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
    "marking what was launched": lambda device: device.mark(),
    "capturing within a capture": lambda device: device.capture(lambda: None),
    "loading made_up.cu": lambda device: device.load(types.SimpleNamespace(family="made_up")),
    "allocating 5 bytes of CuPy's memory pool": lambda d: d._hook.malloc_preprocess(size=5),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_no_graph_may_hold(device, standin, text):
    with pytest.raises(RuntimeError, match=f"^{text}.* cannot be part of a captured graph"):
        device.capture(lambda: REFUSED[text](device))
    assert standin.recorded is None and standin.calls[-1] == "graphDestroy"
    assert not device._hook.entered
    device.synchronize()  # it is as before


def test_memory_let_go_within_a_capture_goes_back_after_it(device, standin):
    held = [device.allocate(8)]
    before = standin.room
    device.capture(lambda: held.clear())
    assert standin.room == before
    device.synchronize()
    assert standin.room == before + 256


def test_another_thread_stages_on_this_gpu(device, standin):
    pinned, memory, found = device.pinned(8), device.allocate(8), []
    standin.calls.clear()

    def stage():
        found.append(device.stage(memory.address, pinned))
        found.append(device.stage(memory.address, pinned))

    thread = threading.Thread(target=stage)
    thread.start()
    thread.join()
    assert standin.calls.count("setDevice 2") == 1 and len(found) == 2


def test_the_end(device, standin, monkeypatch):
    monkeypatch.setattr(nvrtc, "cubin", lambda unit, architecture: b"cubin")
    device.load(types.SimpleNamespace(text=TEXT, family="made_up"))
    device.close()
    assert standin.calls.count("moduleUnload") == 1 and standin.calls.count("streamDestroy") == 2


class Driver:
    """libcuda.so.1, as far as it is asked how many GPUs there are."""

    def __init__(self, count=1, version=13020, error=0):
        self.count, self.version, self.error = count, version, error

    def cuInit(self, flags):
        return self.error

    def cuDeviceGetCount(self, place):
        place._obj.value = self.count
        return 0

    def cuDriverGetVersion(self, place):
        place._obj.value = self.version
        return 0

    def cuGetErrorName(self, error, place):
        place._obj.value = b"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"


def seen(monkeypatch, driver, packages=("cupy-cuda13x 14.2.0",), count=None, properties=()):
    """`visible()` with this driver and CuPy; count: what getDeviceCount answers or raises."""

    def load(name):
        if driver is None:
            raise OSError(name)
        return driver

    def counted():
        if isinstance(count, Exception):
            raise count
        return count

    runtime = types.SimpleNamespace(
        getDeviceCount=counted,
        getDeviceProperties=lambda i: properties[i],
        deviceGetPCIBusId=lambda i: f"0000:0{i}:00.0",
        driverGetVersion=lambda: driver.version,
        runtimeGetVersion=lambda: 13020,
    )
    cupy = types.ModuleType("cupy")
    cupy.cuda, cupy.__version__ = types.ModuleType("cupy.cuda"), "14.2.0"
    cupy.cuda.runtime = runtime
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cupy.cuda)
    monkeypatch.setattr(discovery.ctypes, "CDLL", load)
    monkeypatch.setattr(discovery, "packages", lambda: list(packages))
    return discovery.visible()


def test_why_there_is_no_gpu(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert seen(monkeypatch, None) == Visible((), "no NVIDIA driver")
    nothing = Driver(0, error=discovery.NO_DEVICE)
    assert seen(monkeypatch, nothing) == Visible((), "the NVIDIA driver finds none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert seen(monkeypatch, nothing).reason == "CUDA_VISIBLE_DEVICES= shows none"
    assert "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" in seen(monkeypatch, Driver(error=803)).reason
    found = seen(monkeypatch, Driver(2), packages=())
    assert found == Visible((), "CuPy is not installed: run/install --with cuda13", 2)
    assert "--with cuda12" in seen(monkeypatch, Driver(version=12040), packages=()).reason
    old = seen(monkeypatch, Driver(version=12040), count=RuntimeError("insufficient"))
    assert old.reason == (
        "the NVIDIA driver runs CUDA up to 12.4, and cupy-cuda13x 14.2.0 is made for 13.2: "
        "install the CuPy of CUDA 12, or a newer driver"
    )
    other = seen(monkeypatch, Driver(), count=RuntimeError("in a bad way"))
    assert other == Visible((), "cupy-cuda13x 14.2.0: in a bad way", 1)


def test_the_gpus_there_are(monkeypatch):
    def gpu(**facts):
        kind = {"name": b"NVIDIA H200", "major": 9, "minor": 0, "uuid": b"\x01\xab"}
        return {**kind, "multiProcessorCount": 132, "totalGlobalMem": 141 << 30, **facts}

    old = gpu(name=b"Tesla P100", major=6)
    found = seen(monkeypatch, Driver(2), count=2, properties=[old, gpu()])
    assert found.gpus == (Gpu(1, "0000:01:00.0 01ab", "NVIDIA H200", "sm_90", 132, 141 << 30),)
    found = seen(monkeypatch, Driver(1), count=1, properties=[old])
    assert found == Visible((), "Tesla P100 (sm_60) is older than sm_70", 1)
    assert discovery.versions() == discovery.Versions("14.2.0", "13.2", "13.2")


def test_this_machine():
    found = discovery.visible()
    assert bool(found.gpus) != bool(found.reason)
