"""Check that the emulated GPU computes like a GPU and detects faults in kernels."""

import threading

import numpy as np
import pytest
from emulator import opened

from mpidl.backends.gpu import array, kernels, launching

ORDERS = pytest.mark.parametrize("device", [0, 1, 2], indirect=True)


class Text:
    """A unit whose source is given as a string instead of a file."""

    family = "test"

    def __init__(self, text, **defines):
        self.text = kernels.source("common.cuh") + '#line 1 "test.cu"\n' + text
        self.defines = tuple(sorted(defines.items()))


def launch(device, unit, name, grid, block, *arguments, shared=0):
    parameters = kernels.signatures(unit.text)[name]
    sizes = kernels._three(grid), kernels._three(block)
    values = kernels.Launch(unit, name, *sizes, shared, arguments, parameters)
    device.launch(device.load(unit)[name], values)


def numbers(*shape, dtype=np.float32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


TRANSPOSE = """
extern "C" __global__ void __launch_bounds__(64)
    transpose(const float* __restrict__ x, float* __restrict__ y) {
    __shared__ float tile[8][9];
    const int i = threadIdx.x / 8, j = threadIdx.x % 8, k = blockIdx.x * 64 + threadIdx.x;
    tile[i][j] = x[k];
    if (BARRIER) __syncthreads();
    y[k] = tile[j][i];
}
"""


@ORDERS
@pytest.mark.parametrize("barrier", [True, False])
def test_a_missing_barrier_gives_wrong_results(device, barrier):
    x = numbers(5, 8, 8)
    y = array.empty(x.shape)
    launch(device, Text(TRANSPOSE, BARRIER=int(barrier)), "transpose", 5, 64, array.plain(x), y)
    assert np.array_equal(y.numpy(), x.transpose(0, 2, 1)) == barrier


def test_other_threads_may_free_memory_while_a_kernel_runs(device):
    """A reader of images does this. Without a lock, its bytes look like a write of the kernel."""
    x = array.plain(numbers(500, 8, 8))
    y, unit, stop = array.empty(x.shape), Text(TRANSPOSE, BARRIER=1), threading.Event()

    def replace():
        while not stop.is_set():
            device.pinned(256)

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(100):
            launch(device, unit, "transpose", 500, 64, x, y)
    finally:
        stop.set()
        thread.join()


PIPELINE = """
extern "C" __global__ void __launch_bounds__(32)
    pipeline(const float* __restrict__ x, float* __restrict__ y, int steps) {
    DYN_SMEM(float, stages);
    for (int s = 0; s < 2; ++s) {
        cp_async16(stages + (s * 32 + threadIdx.x) * 4, x + (s * 32 + threadIdx.x) * 4, s < steps);
        if (COMMIT) cp_commit();
    }
    float sum = 0.f;
    for (int s = 0; s < steps; ++s) {
        cp_wait<WAIT>();
        float* stage = stages + s % 2 * 128;
        const float* last = stage + threadIdx.x * 4;
        sum += (last[0] + last[1]) + (last[2] + last[3]);
        const int next = s + 2;
        cp_async16(stage + threadIdx.x * 4, x + (next < steps ? next : 0) * 128 + threadIdx.x * 4,
                   next < steps);
        if (COMMIT) cp_commit();
    }
    y[threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize("wait, commit", [(1, 1), (2, 1), (0, 0)])
def test_asynchronous_copies_arrive_at_their_wait(device, wait, commit):
    x = numbers(5, 32, 4)
    y = array.empty((32,))
    unit = Text(PIPELINE, WAIT=wait, COMMIT=commit)
    launch(device, unit, "pipeline", 1, 32, array.plain(x), y, 5, shared=1024)
    correct = np.allclose(y.numpy(), x.sum((0, 2)), atol=1e-5)
    assert correct == (wait == 1 and commit == 1)
    assert correct or np.isnan(y.numpy()).all()


WARPS = """
extern "C" __global__ void __launch_bounds__(64)
    warps(const double* __restrict__ x, double* __restrict__ y, int* __restrict__ z) {
    double v = x[threadIdx.x];
    for (int m = 16; m; m /= 2) v += shfl_xor(v, m);
    y[threadIdx.x] = v;
    z[threadIdx.x] = shfl_down((int)threadIdx.x, 3) + 100 * shfl_up((int)threadIdx.x, 1) +
                     10000 * shfl((int)threadIdx.x, 5);
}
"""


@ORDERS
def test_shuffles_exchange_values_of_a_warp(device):
    x, y, z = numbers(64, dtype=np.float64), array.empty((64,), "f8"), array.empty((64,), "i4")
    launch(device, Text(WARPS), "warps", 1, 64, array.plain(x), y, z)
    assert np.allclose(y.numpy().reshape(2, 32), x.reshape(2, 32).sum(1, keepdims=True))
    lane = np.arange(32)
    down, up = np.where(lane + 3 < 32, lane + 3, lane), np.where(lane, lane - 1, 0)
    for warp, lanes in enumerate(z.numpy().reshape(2, 32)):
        first = 32 * warp
        assert (lanes == first + down + 100 * (first + up) + 10000 * (first + 5)).all()


MMA = """
extern "C" __global__ void __launch_bounds__(32)
    product(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c) {
    __shared__ __align__(16) float rows[16 * 8];  // 8 numbers per row of the matrix `a`
    for (int i = threadIdx.x; i < 128; i += 32) rows[i] = a[i];
    __syncthreads();
    const int lane = threadIdx.x, g = lane >> 2, t = lane & 3;
    u32 x[4];
    ldsm4(x[0], x[1], x[2], x[3], rows + (lane & 15) * 8 + (lane >> 4) * 4);
    const u32 y[2] = {__float_as_uint(b[t * 8 + g]), __float_as_uint(b[(t + 4) * 8 + g])};
    float sum[4] = {};
    mma_tf32(sum, x, y);
    c[g * 8 + 2 * t] = sum[0], c[g * 8 + 2 * t + 1] = sum[1];
    c[(g + 8) * 8 + 2 * t] = sum[2], c[(g + 8) * 8 + 2 * t + 1] = sum[3];
}
"""


def tf32(x):
    """Clear the 13 bits that a tensor core does not read, and convert to float64."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("truncate", [False, True])
def test_tensor_cores_multiply_tf32(truncate):
    a, b = numbers(16, 8), numbers(8, 8)[::-1].copy()
    with opened(truncate=truncate) as device:
        c = array.empty((16, 8))
        launch(device, Text(MMA), "product", 1, 32, array.plain(a), array.plain(b), c)
        product = c.numpy().astype(np.float64)
    exact = tf32(a) @ tf32(b)
    assert np.allclose(product, exact, rtol=2e-7, atol=1e-7)
    assert (abs(product) <= abs(exact)).all() == truncate


FAULTS = """
extern "C" __global__ void __launch_bounds__(64) scale(float* x, long long n, double by) {
    for (long long i = threadIdx.x; i < n; i += blockDim.x) x[i] = (float)(x[i] * by);
}
extern "C" __global__ void __launch_bounds__(64) before(float* x) { x[-1] = 0.f; }
extern "C" __global__ void __launch_bounds__(64) shared_memory(float* x) {
    DYN_SMEM(float, s);
    s[threadIdx.x] = x[0];
}
extern "C" __global__ void __launch_bounds__(64) left(float* x) {
    if (threadIdx.x > 8) __syncthreads();
}
extern "C" __global__ void __launch_bounds__(64) alone(float* x) {
    if (threadIdx.x > 8) x[0] = shfl_xor(1.f, 1);
}
extern "C" __global__ void __launch_bounds__(64) apart(float* x) {
    if (threadIdx.x & 1) x[0] = shfl_xor(1.f, 1); else __syncwarp();
}
extern "C" __global__ void __launch_bounds__(64) unaligned(float* x) {
    DYN_SMEM(float, s);
    cp_async16(s + 1, x, true);
}
extern "C" __global__ void __launch_bounds__(64) misaligned(float* x, int by) {
    if (threadIdx.x == 0) ((float4*)(x + by))->w = x[4];
}
extern "C" __global__ void __launch_bounds__(64) overflowing(float* x, int n) {
    if (threadIdx.x == 0) x[0] = n * 65536 / 65536;
}
"""


@pytest.mark.parametrize("name, argument", [("misaligned", 8), ("overflowing", 1 << 14)])
def test_aligned_accesses_and_small_numbers_are_no_faults(device, name, argument):
    x = array.plain(np.full(64, 1 << 14, np.float32))
    launch(device, Text(FAULTS), name, 1, 64, x, argument)
    assert (x.numpy() == 1 << 14).all()


@ORDERS
@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("scale", (65, 2.0), "kernel scale: writes out of bounds, after an allocation of 256"),
        ("before", (), "kernel before: writes out of bounds, before an allocation of 256 bytes"),
        ("shared_memory", (), "writes past its 128 bytes of shared memory"),
        ("left", (), "__syncthreads after 9 threads returned"),
        ("alone", (), "some lanes wait in a warp collective for ever"),
        ("apart", (), "lanes wait in different collectives"),
        ("unaligned", (), "an address is not aligned to 16 bytes"),
        ("misaligned", (2,), "kernel misaligned: an address is not aligned to 16 bytes in test.cu"),
        ("overflowing", (1 << 15,), "kernel overflowing: a signed integer overflows in test.cu"),
    ],
)
def test_faults_of_kernels_raise_an_error(device, name, arguments, message):
    x = array.plain(np.ones(64, np.float32))
    with pytest.raises(RuntimeError, match=message):
        launch(device, Text(FAULTS), name, 1, 64, x, *arguments, shared=128)
    y = array.plain(np.ones(64, np.float32))
    launch(device, Text(FAULTS), "scale", 1, 64, y, 64, 2.0)  # the device still works
    assert (y.numpy() == 2).all()


@pytest.mark.parametrize(
    "grid, block, shared, message",
    [
        (1, 96, 0, "a block of 96 threads for a kernel with at most 64"),
        (1, 33, 0, "a block of 33 threads"),
        ((1, 65536), 64, 0, "no device takes a grid"),
        (1, 64, 1 << 20, "1048576 bytes of shared memory"),
    ],
)
def test_impossible_launches_are_refused(device, grid, block, shared, message):
    x = array.plain(np.ones(64, np.float32))
    with pytest.raises(RuntimeError, match=message):
        launch(device, Text(FAULTS), "before", grid, block, x, shared=shared)


def test_freed_memory_is_refused(device):
    x = array.plain(np.ones(64, np.float32))
    freed = array.Array(launching.Block(x.address, 256), np.float32, (64,))
    del x
    with pytest.raises(RuntimeError, match="scale: x: address .* is not in memory"):
        launch(device, Text(FAULTS), "scale", 1, 64, freed, 64, 2.0)


def test_new_memory_holds_nan(device):
    assert np.isnan(array.empty((7,)).numpy()).all()
    assert np.isnan(array.empty((7,), np.float64).numpy()).all()


def test_captured_launches_run_with_their_graph(device):
    x = array.plain(np.ones(64, np.float32))
    unit = Text(FAULTS)
    kernel = device.load(unit)["scale"]
    parameters = kernels.signatures(unit.text)["scale"]
    values = kernels.Launch(unit, "scale", (1, 1, 1), (64, 1, 1), 0, (x, 64, 2.0), parameters)
    graph = device.capture(lambda: device.launch(kernel, values))
    assert (x.numpy() == 1).all()
    graph.launch()
    graph.launch()
    assert (x.numpy() == 4).all()


@pytest.mark.parametrize(
    "name",
    ["allocate", "pinned", "upload", "download", "synchronize", "mark", "wait", "stage", "load"],
)
def test_a_capture_refuses_calls_of_the_host(device, name):
    x = array.plain(np.ones(64, np.float32))
    host, token, pinned = np.zeros(64, np.float32), device.mark(), device.pinned(256)
    calls = {
        "allocate": lambda: device.allocate(8),
        "pinned": lambda: device.pinned(8),
        "upload": lambda: device.upload(x.address, host),
        "download": lambda: device.download(host, x.address),
        "synchronize": device.synchronize,
        "mark": device.mark,
        "wait": lambda: device.wait(token),
        "stage": lambda: device.stage(x.address, pinned),
        "load": lambda: device.load(Text(FAULTS)),
    }
    with pytest.raises(RuntimeError, match="while a graph is being captured"):
        device.capture(calls[name])
    calls[name]()  # the capture has ended


def test_pinned_copies_are_captured(device):
    x, pinned = array.plain(np.ones(64, np.float32)), device.pinned(256).view(np.float32)
    pinned[:] = 3
    graph = device.capture(lambda: device.upload(x.address, pinned))
    assert (x.numpy() == 1).all()
    pinned[:] = 5
    graph.launch()
    assert (x.numpy() == 5).all()


def test_a_staged_upload_arrives_at_the_wait(device):
    x, pinned = array.plain(np.ones(64, np.float32)), device.pinned(256).view(np.float32)
    pinned[:] = 3
    token = device.stage(x.address, pinned)
    assert np.isnan(x.numpy()).all()
    device.after(token)
    assert (x.numpy() == 3).all()
    with pytest.raises(RuntimeError, match="not pinned"):
        device.stage(x.address, np.zeros(64, np.float32))


def test_a_pinned_download_arrives_at_the_wait(device):
    x, pinned = array.plain(np.ones(64, np.float32)), device.pinned(256).view(np.float32)
    early = device.mark()
    device.download(pinned, x.address)
    device.wait(early)
    assert np.isnan(pinned).all()
    token = device.mark()
    device.upload(x.address, np.full(64, 2, np.float32))
    device.wait(token)
    assert (pinned == 1).all()


def test_elapsed_time_is_not_negative(device):
    a, b = device.mark(timed=True), device.mark(timed=True)
    assert device.elapsed(a, b) >= 0


def test_copies_out_of_bounds_are_refused(device):
    x = array.plain(np.ones(64, np.float32))
    with pytest.raises(RuntimeError, match="upload: address"):
        device.upload(x.address + 4, np.zeros(64, np.float32))
    with pytest.raises(RuntimeError, match="copy: address"):
        device.copy(x.address, x.address + 4, 256)
