"""A GPU by CUDA, through CuPy's thin layer over the runtime and driver API.

CuPy's own arrays and memory pool are not used: memory comes from cudaMalloc, kernels from
`nvrtc.cubin`, and repeated launches from captured graphs.

It has not run on a GPU yet. On machines without one, a test checks every name used here against the
installed CuPy, and the kernels run on an emulated device of the same interface.
"""

import contextlib
import ctypes
import gc
import sys
import threading
import weakref

import numpy as np

from mpidl.backends.gpu import kernels, nvrtc
from mpidl.backends.gpu.discovery import in_words, visible
from mpidl.backends.gpu.launching import ALIGNED
from mpidl.errors import UserError

# Numbers of the runtime's and driver's errors, which CuPy keeps in `status`.
OUT_OF_MEMORY = 2
NOT_FOUND = 500
NOT_READY = 600

UPLOADING = 16 << 20  # bytes of copies of host memory that pending uploads may still read


class Memory:
    """Device memory; it is freed when this object is collected."""

    def __init__(self, device, address, nbytes):
        self._device, self.address, self.nbytes = device, address, nbytes

    def __del__(self):
        self._device.give_back(self._device.runtime.free, self.address)


class Mark:
    """A point in the work of a stream."""

    def __init__(self, device, timed):
        runtime = device.runtime
        self.timed, self._destroy = timed, runtime.eventDestroy
        flags = runtime.eventDefault if timed else runtime.eventDisableTiming
        self.event = runtime.eventCreateWithFlags(flags)

    def __del__(self):
        if not sys.is_finalizing():
            self._destroy(self.event)


class Graph:
    """Captured launches; `launch` starts all of them."""

    def __init__(self, device, executable):
        self._device, self._executable = device, executable

    def launch(self):
        self._device.runtime.graphLaunch(self._executable, self._device.stream)

    def __del__(self):
        self._device.give_back(self._device.runtime.graphExecDestroy, self._executable)


class CudaDevice:
    """The visible GPU number `index`: one stream to compute on, one to copy on.

    One thread calls its methods; another may call `stage`. While `capture` plays, methods that
    allocate, wait, or copy memory that is not pinned raise RuntimeError.

    Attributes
    ----------
    name, architecture : str
        Such as "NVIDIA H200", "sm_90".
    processors : int
        Streaming multiprocessors.
    shared : int
        Bytes of dynamic shared memory that a block may have.
    memory : int
        Bytes of device memory.
    identity : str
        Of the physical device, the same for all processes.
    stream : int
        cudaStream_t.

    Raises
    ------
    UserError
        If the GPU cannot be used.
    """

    specialize = True  # a layer's shape goes into its kernels as constants
    until = None  # until(ready, name) waits if other ranks' GPUs may delay this one
    sharers = 1  # ranks that compute on this GPU, which `comm.devices` counts

    def __init__(self, index=0):
        visible_gpus = visible()
        matching = [gpu for gpu in visible_gpus.gpus if gpu.index == index]
        if not matching:
            reason = visible_gpus.reason or f"{len(visible_gpus.gpus)} are visible"
            raise UserError(f"--device gpu: there is no GPU {index}: {reason}")
        from cupy.cuda import driver, memory_hook, runtime

        self.runtime, self.driver = runtime, driver
        self.index, self.identity, self.name, self.architecture, self.processors, self.memory = (
            matching[0]
        )
        self._threads, self._thread = threading.local(), threading.get_ident()
        self._capturing, self._late = False, []  # to be given back later: (free, handle)
        self._pinned, self._modules = {}, []  # {address: bytes}, handles
        self._uploading, self._uploading_bytes = [], 0  # what uploads may still read
        try:
            self._bind()
            runtime.free(0)  # makes the context
            self.shared = runtime.deviceGetAttribute(
                runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, index
            )
            self.stream = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
            self._copies = runtime.streamCreateWithFlags(runtime.streamNonBlocking)
        except RuntimeError as error:
            raise UserError(f"--device gpu: {self.name} cannot be used: {error}") from error
        self._hook = _refusing(memory_hook.MemoryHook)

    # memory

    def allocate(self, nbytes):
        """Return uninitialized memory of so many bytes. Raises MemoryError if there is no room."""
        self._refuse("allocating", f"{nbytes} bytes of device memory")
        self._give_back_late()
        size = -(-max(nbytes, 1) // ALIGNED) * ALIGNED
        return Memory(self, self._take(lambda: self.runtime.malloc(size), nbytes), size)

    def pinned(self, nbytes):
        """Return host memory, (nbytes,) uint8, that kernels reach at its own address."""
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
        """Return the address from take(), tried again after a garbage collection."""
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
            f"{self.name}: asked for {nbytes / 2**20:.0f} MB of {kind}, found "
            f"{free / 2**20:.0f} MB of the GPU's {total / 2**20:.0f} free; a smaller mini-batch, "
            "or more GPUs, would need less of each"
        )

    def give_back(self, free, handle):
        """Call free(handle) now, or later if that is not possible now."""
        if sys.is_finalizing():
            return  # the end of the process frees it
        if self._capturing or threading.get_ident() != self._thread:
            self._late.append((free, handle))  # another thread may stand on another device
        else:
            free(handle)

    def _give_back_late(self):
        while self._late:
            free, handle = self._late.pop()
            free(handle)

    # copies

    def upload(self, address, array):
        """Copy a C-contiguous array to device memory, in the order of the stream.

        The caller may change the array at once; a pinned one only when the copy is done.
        """
        self._copy_pinned("uploading", array)
        kind, pinned = self.runtime.memcpyHostToDevice, self._is_pinned(array)
        if not pinned and array.nbytes <= UPLOADING:
            # CUDA may read this late: a GPU that can read all host memory does so in stream order
            if self._uploading_bytes + array.nbytes > UPLOADING:
                self.synchronize()
            array = array.copy()
            self._uploading.append(array)
            self._uploading_bytes += array.nbytes
        self._copy(address, array.ctypes.data, array.nbytes, kind)
        if not pinned and array.nbytes > UPLOADING:
            self.synchronize()

    def download(self, array, address):
        """Copy device memory into a C-contiguous array, in the order of the stream.

        The array is valid after the next wait for the device.
        """
        self._copy_pinned("downloading", array)
        runtime = self.runtime
        self._copy(array.ctypes.data, address, array.nbytes, runtime.memcpyDeviceToHost)

    def copy(self, destination, source, nbytes):
        """Copy within device memory, in the order of the stream."""
        self._copy(destination, source, nbytes, self.runtime.memcpyDeviceToDevice)

    def stage(self, address, array):
        """Copy pinned memory to the device beside computations; return a token for `after`."""
        if not self._is_pinned(array):
            raise ValueError("stage: expected pinned memory, whose copy the host need not wait for")
        if threading.get_ident() == self._thread:
            self._refuse("staging", f"{array.nbytes} bytes")
        self._bind()
        kind = self.runtime.memcpyHostToDevice
        if array.nbytes:
            data = array.ctypes.data
            self.runtime.memcpyAsync(address, data, array.nbytes, kind, self._copies)
        return self._marked(self._copies, timed=False)

    def after(self, token):
        """Make later launches wait for the copy of a token from `stage`."""
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
        """Return {kernel: cuFunction} of a `kernels.Unit`, compiled if the cache lacks it."""
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
                if getattr(error, "status", None) != NOT_FOUND:  # these definitions leave it out
                    raise
        for kernel in functions.values():
            # without this a block has 48 KiB in all, whatever the device could give it
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
        except RuntimeError as error:
            raise RuntimeError(
                f"{launch.name}: grid {launch.grid}, block {launch.block}, {launch.shared} bytes "
                f"of shared memory: {error}"
            ) from error

    # waiting and capturing

    def synchronize(self):
        """Wait for all launches."""
        self._refuse("waiting", "for the device")
        if self.until is not None:
            self.wait(self.mark())
        self.runtime.streamSynchronize(self.stream)
        self._uploading, self._uploading_bytes = [], 0
        self._give_back_late()

    def mark(self, timed=False):
        """Return a Mark behind all launches so far."""
        self._refuse("marking", "what was launched")
        return self._marked(self.stream, timed)

    def wait(self, token):
        """Wait until the device reaches a mark."""
        self._refuse("waiting", "for a mark")
        if self.until is not None:
            query = self.runtime.eventQuery
            self.until(lambda: query(token.event) != NOT_READY, "the work of all ranks' GPUs")
        self.runtime.eventSynchronize(token.event)  # at once; raises what went wrong

    def elapsed(self, first, second):
        """Return the milliseconds between two marks with timed=True; waits for both."""
        if not (first.timed and second.timed):
            raise ValueError("elapsed: expected marks that were made with timed=True")
        self.wait(second)
        return self.runtime.eventElapsedTime(first.event, second.event)

    def capture(self, play):
        """Return the Graph of the launches of play(), none of which runs. Re-raises its errors."""
        self._refuse("capturing", "within a capture")
        runtime = self.runtime
        self._give_back_late()
        with self._hook:
            # thread-local: what other threads do meanwhile is theirs
            runtime.streamBeginCapture(self.stream, runtime.streamCaptureModeThreadLocal)
            self._capturing = True
            try:
                play()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the capture may be spoiled already
                    runtime.graphDestroy(runtime.streamEndCapture(self.stream))
                raise
            else:
                graph = runtime.streamEndCapture(self.stream)
            finally:
                self._capturing = False
        try:
            executable = runtime.graphInstantiate(graph)
        finally:
            runtime.graphDestroy(graph)
        runtime.graphUpload(executable, self.stream)
        return Graph(self, executable)

    def _marked(self, stream, timed):
        self._bind()
        mark = Mark(self, timed)
        self.runtime.eventRecord(mark.event, stream)
        return mark

    # the end

    def close(self):
        """Wait for the device; free its streams and kernels. Memory is freed with its owners."""
        self.synchronize()
        for module in self._modules:
            self.driver.moduleUnload(module)
        for stream in (self.stream, self._copies):
            self.runtime.streamSynchronize(stream)
            self.runtime.streamDestroy(stream)
        self._modules = []

    def _bind(self):
        """Select this GPU for the calling thread; new threads start on the first one."""
        if not getattr(self._threads, "bound", False):
            self.runtime.setDevice(self.index)
            self._threads.bound = True

    def _refuse(self, action, amount):
        if self._capturing:
            raise RuntimeError(f"{action} {amount} cannot be part of a captured graph")


def _refusing(base):
    """Return a hook that refuses memory of CuPy's own pool during a capture.

    That memory would be free for others when the graph is launched.
    """

    def refuse(hook, **facts):
        raise RuntimeError(
            f"allocating {facts.get('size')} bytes of CuPy's memory pool cannot be part of a "
            "captured graph"
        )

    name = "mpidl: no memory in a capture"
    return type("Refusing", (base,), {"name": name, "malloc_preprocess": refuse})()
