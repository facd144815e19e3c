"""CUDA's driver API for modules and launches. The emulator compiles and runs the kernels."""

import ctypes

from emulator import Kernel, compiler

from cupy.cuda import runtime
from cupy.cuda.runtime import CUDARuntimeError, check
from mpidl.backends.gpu import kernels

CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 1, 8
NOT_FOUND, INVALID_LAUNCH = 500, 1
USUAL_SHARED = 48 << 10  # largest number of bytes without opt-in
_modules, _functions = {}, {}


class CUDADriverError(CUDARuntimeError):
    """An error of the driver API."""


class Function:
    """A kernel, its parameters, and the largest size of dynamic shared memory so far."""

    def __init__(self, kernel, parameters):
        self.kernel, self.parameters, self.shared = kernel, parameters, USUAL_SHARED


def moduleLoadData(image):
    """Compile the source in an image that the stand-in for NVRTC made (see libraries.c)."""
    runtime.outside_capture("moduleLoadData")
    head, text = image.decode().split("\0", 1)
    name, *options = head.split("\n")
    assert "-arch=sm_90" in options, options
    defines = [option[2:].split("=", 1) for option in options if option.startswith("-D")]
    # A unit for the shape of a layer reads the shape from its arguments if it is not defined, so
    # that layers share the compiled unit.
    defines = tuple(tuple(pair) for pair in defines if pair[0] != "CONV_SHAPE")
    if len(defines) < sum(option.startswith("-D") for option in options):
        defines += (("MIN_BLOCKS", "1"),) * (not any(key == "MIN_BLOCKS" for key, _ in defines))
    library = compiler.loaded(text, name.removesuffix(".cu"), tuple(sorted(defines)))
    _modules[module := len(_modules) + 1] = library, kernels.signatures(text)
    return module


def moduleGetFunction(module, name):
    library, signatures = _modules[module]
    if name not in signatures:
        raise CUDADriverError(NOT_FOUND, f"no kernel {name}")
    handle = len(_functions) + 1
    _functions[handle] = module, Function(Kernel(name, library), signatures[name])
    return handle


def moduleUnload(module):
    runtime.outside_capture("moduleUnload")
    _modules[module] = None


def funcGetAttribute(attribute, function):
    assert attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    return 0


def funcSetAttribute(function, attribute, value):
    assert attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    check(value <= runtime.device.shared, INVALID_LAUNCH, f"{value} bytes of shared memory")
    _functions[function][1].shared = value


def launchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, places, extra):
    """Check the limits of a launch and its arguments, and run the kernel."""
    check(function in _functions, runtime.INVALID_HANDLE, f"function {function} does not exist")
    module, function = _functions[function]
    kernel, name = function.kernel, function.kernel.name
    check(_modules[module] is not None, runtime.INVALID_HANDLE, f"{name}: the module is unloaded")
    for size in (gx, gy, gz, bx, by, bz, shared, stream, places):
        assert type(size) is int, f"{name}: CuPy takes integers, got {type(size).__name__}"
    is_grid = 0 < gx < 1 << 31 and 0 < gy < 65536 and 0 < gz < 65536
    check(is_grid, INVALID_LAUNCH, f"{name}: grid {(gx, gy, gz)}")
    is_block = min(bx, by, bz) > 0 and bz <= 64 and bx * by * bz <= min(1024, kernel.threads)
    check(is_block, INVALID_LAUNCH, f"{name}: block {(bx, by, bz)}")
    check(shared <= function.shared, INVALID_LAUNCH, f"{name}: {shared} bytes of shared memory")
    table = (ctypes.c_void_p * len(function.parameters)).from_address(places)
    values = []
    for place, parameter in zip(table, function.parameters, strict=True):
        kind = parameter.ctype or ctypes.c_void_p
        value = kind(kind.from_address(place).value)
        if parameter.elements is not None and value.value:
            is_there = any(
                runtime.contains(memory, value.value)
                for memory in (runtime._device_memory, runtime._host_memory)
            )
            check(
                is_there,
                runtime.ILLEGAL_ADDRESS,
                f"{name}: {parameter.name} is not an address of the GPU",
            )
        values.append(value)
    runtime.submit(stream, _run, kernel, (gx, gy, gz), (bx, by, bz), shared, values)


def _run(kernel, *arguments):
    try:
        runtime.device._run(kernel, *arguments)
    except RuntimeError as error:
        runtime.fail(error)
