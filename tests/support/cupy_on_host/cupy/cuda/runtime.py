"""CUDA's runtime API on host memory, as CuPy presents it. Streams run each operation at once."""

import ctypes
import itertools
import threading
import time

from emulator import EmulatedDevice

# Error codes of CUDA.
INVALID_VALUE, OUT_OF_MEMORY, INVALID_HANDLE, ILLEGAL_ADDRESS, NOT_CAPTURED = 1, 2, 400, 700, 900
UNJOINED, ISOLATED = 904, 905

hostAllocPortable, hostAllocMapped = 1, 2
eventDefault, eventDisableTiming = 0, 2
streamNonBlocking, streamCaptureModeThreadLocal = 1, 1
cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = 1, 2, 3

TOTAL = 1 << 30  # bytes of device memory
device = EmulatedDevice()
_numbers = itertools.count(1)
_device_memory, _host_memory = {}, {}  # {address: bytes}
_streams, _events, _graphs = set(), {}, {}
_capture = None  # the Capture in progress
_failure = None  # the error of an earlier kernel, which the next wait raises


class CUDARuntimeError(RuntimeError):
    """An error of the API with CUDA's code in `status`."""

    def __init__(self, status, text):
        super().__init__(f"CUDA error {status}: {text}")
        self.status = status


class Capture:
    """A capture of a graph. Streams join it by waiting for an event that was recorded in it.

    `before` has, for each stream, the number of operations of each stream that precede its next
    one. `events` has the same for each event.
    """

    def __init__(self, stream):
        self.origin, self.thread = stream, threading.get_ident()
        self.operations, self.before, self.events = [], {stream: {stream: 0}}, {}

    def wait(self, stream, event):
        counts = self.before.setdefault(stream, {stream: 0})
        for other, count in self.events[event].items():
            counts[other] = max(counts.get(other, 0), count)

    def is_joined(self):
        """Return whether the first stream waits for all operations of the others."""
        awaited = self.before[self.origin]
        return all(awaited.get(other, 0) >= counts[other] for other, counts in self.before.items())


def check(condition, status, text):
    """Raise CUDARuntimeError unless the condition holds."""
    if not condition:
        raise CUDARuntimeError(status, text)


def outside_capture(name):
    """Raise CUDARuntimeError if this thread captures a graph."""
    capturing = _capture is not None and _capture.thread == threading.get_ident()
    check(not capturing, NOT_CAPTURED, f"{name} while a stream captures")


def submit(stream, function, *arguments):
    """Run an operation of a stream, or add it to the graph that the stream captures."""
    check(stream in _streams, INVALID_HANDLE, f"stream {stream} does not exist")
    if _capture is not None and stream in _capture.before:
        _capture.operations.append((function, arguments))
        _capture.before[stream][stream] += 1
    else:
        function(*arguments)


def fail(error):
    """Let the next wait raise the error of a kernel, as a GPU does, which runs kernels later."""
    global _failure
    _failure = _failure or CUDARuntimeError(ILLEGAL_ADDRESS, str(error))


def _raise_failure():
    if _failure is not None:
        raise _failure


def contains(memory, address, nbytes=0):
    """Return whether one allocation of a table holds these bytes."""
    return any(a <= address and address + nbytes <= a + n for a, n in list(memory.items()))


# the device


def setDevice(index):
    check(index == 0, 101, f"device {index} does not exist")


def getDeviceCount():
    return 1


def getDeviceProperties(index):
    return {
        "uuid": b"stand-in",
        "name": b"stand-in GPU",
        "major": 9,
        "minor": 0,
        "multiProcessorCount": device.processors,
        "totalGlobalMem": TOTAL,
    }


def deviceGetPCIBusId(index):
    return "0000:01:00.0"


def deviceGetAttribute(attribute, index):
    assert attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin
    return device.shared


def driverGetVersion():
    return 13000


def runtimeGetVersion():
    return 13000


# memory


def _allocate(table, nbytes, name):
    outside_capture(name)
    check(isinstance(nbytes, int) and nbytes > 0, INVALID_VALUE, f"{name} of {nbytes} bytes")
    is_free = sum(_device_memory.values()) + nbytes <= TOTAL
    check(table is _host_memory or is_free, OUT_OF_MEMORY, f"{nbytes} bytes do not fit")
    address = device._take(nbytes)
    table[address] = nbytes
    return address


def _free(table, address, name):
    outside_capture(name)
    check(address in table, INVALID_VALUE, f"{name}: {address:#x} is not allocated")
    del table[address]
    device._forget(address)


def malloc(nbytes):
    return _allocate(_device_memory, nbytes, "malloc")


def free(address):
    if address:
        _free(_device_memory, address, "free")


def hostAlloc(nbytes, flags):
    assert flags == hostAllocPortable | hostAllocMapped
    return _allocate(_host_memory, nbytes, "hostAlloc")


def freeHost(address):
    _free(_host_memory, address, "freeHost")


def memGetInfo():
    return TOTAL - sum(_device_memory.values()), TOTAL


def memcpyAsync(destination, source, nbytes, kind, stream):
    if kind != memcpyHostToDevice:
        is_there = contains(_device_memory, source, nbytes)
        check(is_there, INVALID_VALUE, f"memcpyAsync: {source:#x} is not device memory")
    if kind != memcpyDeviceToHost:
        is_there = contains(_device_memory, destination, nbytes)
        check(is_there, INVALID_VALUE, f"memcpyAsync: {destination:#x} is not device memory")
    host = {memcpyHostToDevice: source, memcpyDeviceToHost: destination}.get(kind)
    if host is not None and not contains(_host_memory, host, nbytes):
        outside_capture("memcpyAsync of memory that is not pinned")
    submit(stream, ctypes.memmove, destination, source, nbytes)


# streams and events


def streamCreateWithFlags(flags):
    assert flags == streamNonBlocking
    _streams.add(stream := next(_numbers))
    return stream


def streamCreateWithPriority(flags, priority):
    assert isinstance(priority, int)
    return streamCreateWithFlags(flags)


def streamDestroy(stream):
    _streams.remove(stream)


def streamSynchronize(stream):
    outside_capture("streamSynchronize")
    check(stream in _streams, INVALID_HANDLE, f"stream {stream} does not exist")
    _raise_failure()


def streamWaitEvent(stream, event, flags=0):
    check(stream in _streams, INVALID_HANDLE, f"stream {stream} does not exist")
    check(event in _events, INVALID_HANDLE, f"event {event} does not exist")
    if _capture is not None and event in _capture.events:
        _capture.wait(stream, event)
    else:
        is_outside = _capture is None or stream not in _capture.before
        check(is_outside, ISOLATED, "streamWaitEvent for an event outside the graph")


def eventCreateWithFlags(flags):
    assert flags in (eventDefault, eventDisableTiming)
    _events[event := next(_numbers)] = None
    return event


def eventRecord(event, stream):
    check(event in _events and stream in _streams, INVALID_HANDLE, "eventRecord")
    _events[event] = time.perf_counter()
    if _capture is not None and stream in _capture.before:
        _capture.events[event] = dict(_capture.before[stream])


def eventDestroy(event):
    check(event in _events, INVALID_HANDLE, f"event {event} does not exist")
    del _events[event]


def eventSynchronize(event):
    outside_capture("eventSynchronize")
    check(event in _events, INVALID_HANDLE, f"event {event} does not exist")
    _raise_failure()


def eventQuery(event):
    outside_capture("eventQuery")
    return 0


def eventElapsedTime(first, last):
    return max(1e3 * (_events[last] - _events[first]), 1e-3)


# graphs


def streamBeginCapture(stream, mode):
    global _capture
    assert mode == streamCaptureModeThreadLocal
    check(_capture is None and stream in _streams, NOT_CAPTURED, "streamBeginCapture")
    _capture = Capture(stream)


def streamEndCapture(stream):
    global _capture
    is_captured = _capture is not None and _capture.origin == stream
    check(is_captured, NOT_CAPTURED, "streamEndCapture")
    capture, _capture = _capture, None
    check(capture.is_joined(), UNJOINED, "streamEndCapture without all streams")
    _graphs[graph := next(_numbers)] = capture.operations
    return graph


def graphInstantiate(graph):
    _graphs[executable := next(_numbers)] = list(_graphs[graph])
    return executable


def graphUpload(executable, stream):
    check(executable in _graphs and stream in _streams, INVALID_HANDLE, "graphUpload")


def graphLaunch(executable, stream):
    outside_capture("graphLaunch")
    check(executable in _graphs and stream in _streams, INVALID_HANDLE, "graphLaunch")
    for function, arguments in _graphs[executable]:
        function(*arguments)


def graphDestroy(graph):
    outside_capture("graphDestroy")
    del _graphs[graph]


graphExecDestroy = graphDestroy
