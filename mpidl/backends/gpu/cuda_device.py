"""Control a GPU with CUDA, through CuPy's thin layer over the runtime and driver APIs.

The module does not use CuPy's arrays or memory pool. Memory comes from cudaMalloc, `nvrtc.cubin`
compiles the kernels, and captured graphs replay repeated launches.

This module has not run on a GPU yet. On machines without a GPU, a test checks that the installed
CuPy has every name used here. Tests run the kernels on an emulated device with the same interface.
"""

import contextlib
import ctypes
import gc
import os
import sys
import threading
import weakref

import numpy as np

from mpidl.backends.discovery import in_words, visible
from mpidl.backends.gpu import kernels, nvrtc
from mpidl.backends.gpu.launching import ALIGNED
from mpidl.errors import UserError

# Error codes of the CUDA runtime and driver. CuPy's exceptions store the code in `status`.
OUT_OF_MEMORY = 2
NOT_FOUND = 500
NOT_READY = 600

UPLOADING = 16 << 20  # maximum total size in bytes of host copies for uploads in progress


class Memory:
    """Device memory that is freed when this object is deleted."""

    def __init__(self, device, address, nbytes):
        self._device, self.address, self.nbytes = device, address, nbytes

    def __del__(self):
        self._device.give_back(self._device.runtime.free, self.address)


class Mark:
    """A point in a stream, which the device reaches when all earlier work is complete."""

    def __init__(self, device, timed):
        runtime = device.runtime
        self.timed, self._destroy = timed, runtime.eventDestroy
        flags = runtime.eventDefault if timed else runtime.eventDisableTiming
        self.event = runtime.eventCreateWithFlags(flags)

    def __del__(self, is_finalizing=sys.is_finalizing):
        if not is_finalizing():
            self._destroy(self.event)


class Graph:
    """A captured graph of launches; `launch` starts all of them."""

    def __init__(self, device, executable):
        self._device, self._executable = device, executable

    def launch(self):
        self._device.runtime.graphLaunch(self._executable, self._device.stream)

    def __del__(self):
        self._device.give_back(self._device.runtime.graphExecDestroy, self._executable)


class CudaDevice:
    """A visible GPU, selected by its index, with streams for computing, for copies and for sums.

    Any thread may call `stage`. Only the thread that created the object may call the other methods.
    During `capture`, methods that allocate, wait, or copy unpinned memory raise RuntimeError.

    The constructor raises UserError if the GPU cannot be used. `name` and `architecture` are for
    example "NVIDIA H200" and "sm_90", and `identity` is the same in all processes. The GPU has
    `processors` multiprocessors, `memory` bytes, and `shared` bytes of shared memory for a thread
    block. `stream` is the cudaStream_t of launches: between `aside` and `back`, the stream for sums
    over the ranks, otherwise the stream for computing.
    """

    specialize = True  # compile convolution kernels with the shape of the layer as constants
    # A function until(ready, name) that waits until ready() is true; None if other ranks cannot
    # delay this GPU.
    until = None
    sharers = 1  # number of ranks that compute on this GPU; `ranks.devices` sets it
    # With MPIDL_SYNCHRONOUS=1, wait for each kernel, so that an error names the kernel. A wait
    # cannot be part of a graph, so there are no graphs.
    synchronous = False
    _failure = ""  # the message of the first launch that failed

    def __init__(self, index=0):
        visible_gpus = visible()
        matching = [gpu for gpu in visible_gpus.gpus if gpu.index == index]
        if not matching:
            reason = visible_gpus.reason or f"{len(visible_gpus.gpus)} are visible"
            raise UserError(f"--device gpu: GPU {index} does not exist: {reason}")
        from cupy.cuda import driver, memory_hook, runtime

        self.runtime, self.driver = runtime, driver
        self.index, self.identity, self.name, self.architecture, self.processors, self.memory = (
            matching[0]
        )
        self.synchronous = os.environ.get("MPIDL_SYNCHRONOUS") == "1"
        self._threads, self._thread = threading.local(), threading.get_ident()
        self._capturing, self._late = False, []  # [(free, handle)] of memory to free later
        self._pinned, self._modules = {}, []  # {address: size in bytes}, handles of modules
        self._uploading, self._uploading_bytes = [], 0  # host arrays that uploads may still read
        try:
            self._bind()
            runtime.free(0)  # creates the context
            self.shared = runtime.deviceGetAttribute(
                runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, index
            )
            flags = runtime.streamNonBlocking
            self.stream = self._computing = runtime.streamCreateWithFlags(flags)
            self._copies = runtime.streamCreateWithFlags(flags)
            # Small kernels that other GPUs wait for go first.
            self._sums = runtime.streamCreateWithPriority(flags, -1)
        except RuntimeError as error:
            raise UserError(f"--device gpu: {self.name} cannot be used: {error}") from error
        self._hook = _refusing(memory_hook.MemoryHook)

    # memory

    def allocate(self, nbytes):
        """Return `nbytes` of uninitialized device memory, as a Memory.

        Raise MemoryError if too little memory is free.
        """
        self._refuse("allocating", f"{nbytes} bytes of device memory")
        self._give_back_late()
        size = -(-max(nbytes, 1) // ALIGNED) * ALIGNED
        return Memory(self, self._take(lambda: self.runtime.malloc(size), nbytes), size)

    def pinned(self, nbytes):
        """Return pinned host memory as a uint8 array (nbytes,). Kernels can use its address."""
        self._refuse("allocating", f"{nbytes} bytes of pinned memory")
        runtime, size = self.runtime, max(nbytes, 1)
        flags = runtime.hostAllocPortable | runtime.hostAllocMapped
        address = self._take(lambda: runtime.hostAlloc(size, flags), nbytes, "pinned host memory")
        memory = (ctypes.c_ubyte * size).from_address(address)
        self._pinned[address] = size
        weakref.finalize(memory, self._unpin, address).atexit = False
        return np.frombuffer(memory, np.uint8, nbytes)

    def _unpin(self, address):
        self._pinned.pop(address, None)
        self.give_back(self.runtime.freeHost, address)

    def _take(self, take, nbytes, kind="memory"):
        """Return the address that take() returns.

        If the memory is exhausted, collect garbage and call take() again. Raise MemoryError if the
        second call fails too.
        """
        for first in (True, False):
            try:
                return take()
            except RuntimeError as error:
                if getattr(error, "status", None) != OUT_OF_MEMORY:
                    raise
                if first:
                    gc.collect()
                    self._give_back_late()
        free, total = self.runtime.memGetInfo()
        raise MemoryError(
            f"{self.name}: cannot allocate {nbytes / 2**20:.0f} MB of {kind}: {free / 2**20:.0f} "
            f"of {total / 2**20:.0f} MB are free; use a smaller mini-batch or more GPUs"
        )

    def give_back(self, free, handle, is_finalizing=sys.is_finalizing):
        """Call free(handle). During a capture, or in another thread, defer the call.

        At exit, Python may delete the names of this module before some objects that own memory.
        The default argument is then still there, and the memory is freed when the process ends.
        """
        if is_finalizing():
            return
        if self._capturing or threading.get_ident() != self._thread:
            self._late.append((free, handle))  # another thread may have selected another device
        else:
            free(handle)

    def _give_back_late(self):
        while self._late:
            free, handle = self._late.pop()
            free(handle)

    def free_memory(self):
        """Return the number of bytes of device memory that no process uses."""
        return self.runtime.memGetInfo()[0]

    # copies

    def upload(self, address, array):
        """Copy a C-contiguous array to device memory, in stream order.

        The caller may change an unpinned array immediately after this call, but a pinned array only
        after the copy has finished.
        """
        self._copy_pinned("uploading", array)
        kind, pinned = self.runtime.memcpyHostToDevice, self._is_pinned(array)
        if not pinned and array.nbytes <= UPLOADING:
            # Copy the array, because a GPU that can access all host memory reads the array in
            # stream order, possibly after this call.
            if self._uploading_bytes + array.nbytes > UPLOADING:
                self.synchronize()
            array = array.copy()
            self._uploading.append(array)
            self._uploading_bytes += array.nbytes
        self._copy(address, array.ctypes.data, array.nbytes, kind)
        if not pinned and array.nbytes > UPLOADING:
            self.synchronize()

    def download(self, array, address):
        """Copy device memory into a C-contiguous array, in stream order.

        The array is valid after the next wait for the device.
        """
        self._copy_pinned("downloading", array)
        runtime = self.runtime
        self._copy(array.ctypes.data, address, array.nbytes, runtime.memcpyDeviceToHost)

    def copy(self, destination, source, nbytes):
        """Copy within device memory, in stream order."""
        self._copy(destination, source, nbytes, self.runtime.memcpyDeviceToDevice)

    def stage(self, address, array):
        """Copy pinned memory to the device while the device computes; return a token for `after`.

        `address` is the destination in device memory.
        """
        if not self._is_pinned(array):
            raise ValueError("stage: expected pinned memory, which can be copied asynchronously")
        if threading.get_ident() == self._thread:
            self._refuse("staging", f"{array.nbytes} bytes")
        self._bind()
        kind = self.runtime.memcpyHostToDevice
        if array.nbytes:
            data = array.ctypes.data
            self.runtime.memcpyAsync(address, data, array.nbytes, kind, self._copies)
        return self._marked(self._copies, timed=False)

    def after(self, token):
        """Make later launches wait for the copy of a `token` from `stage`."""
        self._refuse("waiting", "for a copy")
        self.runtime.streamWaitEvent(self.stream, token.event)

    def _copy(self, destination, source, nbytes, kind):
        if nbytes:
            self.runtime.memcpyAsync(destination, source, nbytes, kind, self.stream)

    def _copy_pinned(self, action, array):
        if not array.flags.c_contiguous:
            raise ValueError(
                f"{action}: expected a C-contiguous array, got strides {array.strides}"
            )
        if self._capturing and not self._is_pinned(array):
            self._refuse(action, f"{array.nbytes} bytes of host memory that is not pinned")

    def _is_pinned(self, array):
        start, stop = array.ctypes.data, array.ctypes.data + array.nbytes
        return any(
            address <= start and stop <= address + nbytes
            for address, nbytes in list(self._pinned.items())
        )

    # kernels

    def load(self, unit):
        """Load a `kernels.Unit`, from the cache if possible; return {kernel name: handle}."""
        self._refuse("loading", f"{unit.family}.cu")
        driver, image = self.driver, nvrtc.cubin(unit, self.architecture)
        try:
            module = driver.moduleLoadData(image)
        except RuntimeError as error:
            raise RuntimeError(
                f"{self.name} cannot load {unit.family}.cu as compiled for {self.architecture}: "
                f"{error} (the driver runs CUDA {in_words(self.runtime.driverGetVersion())})"
            ) from error
        self._modules.append(module)
        functions = {}
        for name in kernels.signatures(unit.text):
            try:
                functions[name] = driver.moduleGetFunction(module, name)
            except RuntimeError as error:
                if getattr(error, "status", None) != NOT_FOUND:  # the unit excludes this kernel
                    raise
        for kernel in functions.values():
            # raise the limit, which is 48 KiB of shared memory per thread block by default
            static = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, kernel)
            dynamic = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            driver.funcSetAttribute(kernel, dynamic, self.shared - static)
        return functions

    def launch(self, handle, launch):
        """Run a `kernels.Launch` on the stream; `handle` comes from `load`."""
        values = launch.values()
        places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        try:
            geometry = *launch.grid, *launch.block, launch.shared
            self.driver.launchKernel(handle, *geometry, self.stream, ctypes.addressof(places), 0)
            if self.synchronous:
                self.runtime.streamSynchronize(self.stream)
        except RuntimeError as error:
            place = f"{launch.place}: " if launch.place else ""
            self._failure = self._failure or (
                f"{place}{launch.name}: grid {launch.grid}, block {launch.block}, "
                f"{launch.shared} bytes of shared memory: {error}"
            )
            raise RuntimeError(self._failure) from error

    # waiting and capturing

    def synchronize(self):
        """Wait until all launches and copies in the current stream have finished."""
        self._refuse("waiting", "for the device")
        if self.until is not None:
            self.wait(self.mark())
        with self._errors_of_kernels():
            self.runtime.streamSynchronize(self.stream)
        self._uploading, self._uploading_bytes = [], 0
        self._give_back_late()

    def mark(self, timed=False):
        """Return a Mark that the device reaches when all launches so far have finished."""
        self._refuse("marking", "the launches so far")
        return self._marked(self.stream, timed)

    def wait(self, token):
        """Wait until the device has reached a mark or finished a copy (a token of `stage`)."""
        self._refuse("waiting", "for a mark")
        if self.until is not None:
            self.until(lambda: self.reached(token), "the work of all ranks' GPUs")
        with self._errors_of_kernels():
            self.runtime.eventSynchronize(token.event)

    @contextlib.contextmanager
    def _errors_of_kernels(self):
        """Name the kernel that failed earlier if it is known, because all later calls fail too."""
        try:
            yield
        except RuntimeError as error:
            advice = "a kernel before this call failed; MPIDL_SYNCHRONOUS=1 names it"
            text = self._failure or f"{self.name}: {error} ({advice})"
            raise RuntimeError(text) from error

    def reached(self, token):
        """Return whether the device has reached a mark, without waiting."""
        self._refuse("waiting", "for a mark")
        with self._errors_of_kernels():
            return self.runtime.eventQuery(token.event) != NOT_READY

    def elapsed(self, first, second):
        """Wait for two marks created with timed=True; return the time between them, in ms."""
        if not (first.timed and second.timed):
            raise ValueError("elapsed: expected marks created with timed=True")
        self.wait(second)
        return self.runtime.eventElapsedTime(first.event, second.event)

    def capture(self, play):
        """Call play(), and return the launches that it makes as a Graph, without running them.

        If play() raises an exception, the capture ends and the exception is re-raised.
        """
        self._refuse("capturing", "within a capture")
        runtime = self.runtime
        self._give_back_late()
        with self._hook:
            # the thread-local mode does not restrict what other threads call
            runtime.streamBeginCapture(self.stream, runtime.streamCaptureModeThreadLocal)
            self._capturing = True
            try:
                play()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture may be invalid already
                    runtime.graphDestroy(runtime.streamEndCapture(self._computing))
                raise
            else:
                graph = runtime.streamEndCapture(self._computing)
            finally:
                self._capturing, self.stream = False, self._computing
        try:
            executable = runtime.graphInstantiate(graph)
        finally:
            runtime.graphDestroy(graph)
        runtime.graphUpload(executable, self.stream)
        return Graph(self, executable)

    # a second stream of launches

    @property
    def is_aside(self):
        """Whether launches run in the stream for sums."""
        return self.stream != self._computing

    def aside(self):
        """Run later launches in the stream for sums, after all launches so far, until `back`."""
        mark = self._marked(self.stream, timed=False)
        self.runtime.streamWaitEvent(self._sums, mark.event)
        self.stream = self._sums

    def back(self):
        """Run later launches in the stream for computing again; return a token for `join`."""
        token = self._marked(self.stream, timed=False)
        self.stream = self._computing
        return token

    def join(self, token):
        """Make later launches wait for those before the call of `back` that returned the token.

        A capture must contain the `join` of each `aside` that it contains.
        """
        self.runtime.streamWaitEvent(self.stream, token.event)

    def _marked(self, stream, timed):
        self._bind()
        mark = Mark(self, timed)
        self.runtime.eventRecord(mark.event, stream)
        return mark

    # closing

    def close(self):
        """Wait for the device, then free the streams and kernels.

        Device memory is freed when the objects that own it are deleted.
        """
        self.synchronize()
        for module in self._modules:
            self.driver.moduleUnload(module)
        for stream in (self.stream, self._copies, self._sums):
            self.runtime.streamSynchronize(stream)
            self.runtime.streamDestroy(stream)
        self._modules = []

    def _bind(self):
        """Select this GPU for the calling thread, because every thread starts with GPU 0."""
        if not getattr(self._threads, "bound", False):
            self.runtime.setDevice(self.index)
            self._threads.bound = True

    def _refuse(self, action, amount):
        if self._capturing:
            raise RuntimeError(f"{action} {amount} cannot be part of a captured graph")


def _refusing(base):
    """Return a CuPy memory hook that raises RuntimeError if CuPy's memory pool allocates.

    The hook is active during a capture, because the pool could reuse the memory before the graph is
    launched.
    """

    def refuse(hook, **facts):
        raise RuntimeError(
            f"allocating {facts.get('size')} bytes of CuPy's memory pool cannot be part of a "
            "captured graph"
        )

    name = "mpidl: no memory in a capture"
    return type("Refusing", (base,), {"name": name, "malloc_preprocess": refuse})()
