// Runs CUDA C kernels on the CPU, for tests only. This header defines the parts of the language
// that mpidl's .cu files use. A kernel runs one block at a time. Each thread of a block is a fiber
// that runs until it waits for other threads.
//
// - __syncthreads waits for the block. Warp collectives (shuffles, ldmatrix, mma) wait for 32
//   lanes. A wait that can never end is an error, and so is a barrier after some threads have
//   returned.
// - The data of a cp.async arrive only at the cp_wait for it. Until then, the target holds NaN.
// - Shared memory starts as NaN (bytes 0xFF), like all memory of the emulated device.
// - There are three schedules (order 0 forward, 1 reverse, 2 random). A warp runs as far as it can
//   before the next warp runs, so a missing barrier changes the results.
// - Threads that never wait run one after another on one fiber, like a plain loop.
#pragma once
#define MPIDL_EMULATED
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <cmath>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static __attribute__((section("mpidl_shared"), used))
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

typedef unsigned int u32;
struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) double2 { double x, y; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline int2 make_int2(int x, int y) { return {x, y}; }
static inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

extern "C" {
extern char __start_mpidl_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_mpidl_shared[] __attribute__((weak, visibility("hidden")));
}

namespace shim {

// Locals and statics must be in memory when another fiber runs.
#define SHIM_FENCE asm volatile("" ::: "memory")

#ifdef __x86_64__
enum { ENTRY = 8 };  // at the start of a function, a return address is above the stack pointer
#else
enum { ENTRY = 0 };
#endif
enum { STACK = 256 << 10, PAGE = 4096, GUARD = 1024 };

struct Copy { void* to; char data[16]; int bytes; };

struct Thread {
    void* context[5];
    uint3 index;
    int number;
    bool started;
    std::vector<Copy> copies;  // by cp.async, in order; the first `landed` copies have been written
    std::vector<int> groups;   // the end of each committed group in `copies`
    size_t landed, waited;     // `waited` groups have landed
};

struct Fiber { void* context[5]; char* stack; };

// The stacks that no fiber uses, for all libraries of the process: a process can map only 65530
// pieces of memory, and a stack with its guard page is two of them.
struct Stacks { long long count; char* unused[4096]; };

struct Warp {
    u32 ready;  // a bit for each lane that can run
    int arrived, collective;
    const void* in[32];
    void* out[32];
};

static std::vector<Thread> threads;
static std::vector<Warp> warps;
static std::vector<Fiber*> fibers, idle;
static Stacks* stacks;
static Thread *current, *next;
static Fiber* starting;
static void* home[5];
static int count, at_barrier, done, turn, order, truncate;
static uint32_t dice;
static char* dynamic;
static void (*body)(void**);
static void** arguments;
static char message[512];

// A context is the point at which a thread continues: its frame, its next instruction and its
// stack, as __builtin_setjmp stores them. exchange(from, to) continues at `to`, and returns when
// another thread continues at `from`. On x86-64 the function is inline: the processor would
// mispredict a return to the caller of another fiber, which is several times slower.
#ifdef __x86_64__
#define SHIM_INLINE inline __attribute__((always_inline))
#ifdef __AVX512F__
#define SHIM_AVX512                                                                                \
    , "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24", "xmm25",    \
        "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1", "k2", "k3", "k4", "k5", "k6",  \
        "k7"
#else
#define SHIM_AVX512
#endif
static SHIM_INLINE void exchange(void** from, void** to) {
    asm volatile("leaq 1f(%%rip), %%rax\n movq %%rbp, (%0)\n movq %%rax, 8(%0)\n"
                 "movq %%rsp, 16(%0)\n movq (%1), %%rbp\n movq 16(%1), %%rsp\n jmp *8(%1)\n 1:"
                 : "+D"(from), "+S"(to)
                 :
                 : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14",
                   "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                   "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "cc",
                   "memory" SHIM_AVX512);
}
#else
#define SHIM_INLINE __attribute__((noinline))
__attribute__((noinline, noreturn)) static void leave(void** to) { __builtin_longjmp(to, 1); }
static SHIM_INLINE void exchange(void** from, void** to) {
    if (!__builtin_setjmp(from)) leave(to);
}
#endif
__attribute__((noinline, noreturn)) static void jump(void** to) {
    void* nobody[5];
    exchange(nobody, to);
    __builtin_unreachable();
}

__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char* format, ...) {
    va_list values;
    va_start(values, format);
    const int n = vsnprintf(message, sizeof message, format, values);
    va_end(values);
    snprintf(message + n, sizeof message - n, " (block %u,%u,%u thread %d)", blockIdx.x,
             blockIdx.y, blockIdx.z, current ? current->number : -1);
    jump(home);
}

static inline uint32_t random() {
    dice ^= dice << 13, dice ^= dice >> 17, dice ^= dice << 5;
    return dice;
}

static inline Thread* lane_of(int w, int lane) {
    warps[w].ready &= ~(1u << lane);
    return &threads[w * 32 + lane];
}

// Returns the next thread, or null if all are done. Ends the launch if all wait forever.
__attribute__((noinline)) static Thread* pick() {
    const int n = count / 32;
    for (;;) {
        if (order >= 2) {
            const int start = random() % n, turned = random() & 31;
            for (int i = 0; i < n; ++i) {
                const int w = (start + i) % n;
                const u32 r = warps[w].ready, rolled = r >> turned | r << ((32 - turned) & 31);
                if (r) return lane_of(w, (__builtin_ctz(rolled) + turned) & 31);
            }
        } else {
            for (int i = 0; i < n; ++i) {
                const int w = order ? n - 1 - turn : turn;
                const u32 r = warps[w].ready;
                if (r) return lane_of(w, order ? 31 - __builtin_clz(r) : __builtin_ctz(r));
                turn = turn + 1 == n ? 0 : turn + 1;
            }
        }
        if (done == count) return nullptr;
        if (at_barrier + done != count) fail("some lanes wait in a warp collective for ever");
        if (done) fail("__syncthreads after %d threads returned", done);
        at_barrier = turn = 0;
        for (Warp& w : warps) w.ready = ~0u;
    }
}

__attribute__((noinline)) static void fiber_main() {
    Fiber* me = starting;
    for (;;) {
        Thread* t = next;
        do {
            t->started = true, current = t, threadIdx = t->index;
            body(arguments);
            ++done;
            t = pick();
        } while (t && !t->started);
        idle.push_back(me);
        exchange(me->context, t ? t->context : home);
    }
}

// Returns the context of an idle fiber, in which a thread that has not started can run.
__attribute__((noinline)) static void** fiber_for(Thread* t) {
    next = t;
    if (!idle.empty()) {
        Fiber* f = idle.back();
        idle.pop_back();
        return f->context;
    }
    Fiber* f = starting = new Fiber;
    if (stacks->count) {
        f->stack = stacks->unused[--stacks->count];
    } else {
        f->stack = (char*)mmap(nullptr, STACK, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (f->stack == MAP_FAILED) fail("no memory for a stack");
        mprotect(f->stack, PAGE, PROT_NONE);
    }
    fibers.push_back(f);
    char* top = f->stack + STACK - fibers.size() % 61 * 320;  // not all in one cache set
    f->context[0] = nullptr, f->context[1] = (void*)fiber_main, f->context[2] = top - ENTRY;
    return f->context;
}

// Lets other threads run; returns when this thread is selected again.
static SHIM_INLINE void suspend() {
    Thread* me = current;
    Thread* t = pick();
    if (t == me) return;
    exchange(me->context, t->started ? t->context : fiber_for(t));
    current = me, threadIdx = me->index;
}

// Waits for all 32 lanes. The last lane does the work with the arguments of all lanes.
template <class F>
static inline __attribute__((always_inline)) void meet(int collective, const void* in, void* out, F work) {
    SHIM_FENCE;
    Warp& w = warps[current->number / 32];
    const int lane = current->number % 32;
    if (w.arrived && w.collective != collective) fail("lanes wait in different collectives");
    w.collective = collective, w.in[lane] = in, w.out[lane] = out;
    if (++w.arrived < 32) {
        suspend();
    } else {
        w.arrived = 0;
        work(w);
        w.ready = ~(1u << lane);
    }
    SHIM_FENCE;
}

static void end_fibers() {  // also those that are still inside a failed kernel
    for (Fiber* f : fibers) {
        stacks->unused[stacks->count++] = f->stack;
        delete f;
    }
    fibers.clear(), idle.clear();
}

static void run_block() {
    for (Thread& t : threads) {
        t.started = false, t.landed = t.waited = 0;
        if (!t.copies.empty()) t.copies.clear();
        if (!t.groups.empty()) t.groups.clear();
    }
    for (Warp& w : warps) w.ready = ~0u, w.arrived = 0;
    at_barrier = done = turn = 0;
    current = nullptr;
    exchange(home, fiber_for(pick()));
}

// A row of the table of guards: `bytes` bytes at `address` must still contain `pattern`.
struct Guard { const char* address; long long bytes, pattern; };

static bool is_whole(const Guard& guard) {
    long long seen;
    for (long long i = 0; i < guard.bytes; i += sizeof seen) {
        memcpy(&seen, guard.address + i, sizeof seen);
        if (seen != guard.pattern) return false;
    }
    return true;
}

// Runs a whole grid, then checks the guards. Returns an error message or null; `culprit` is the
// guard that was overwritten, or -1.
static const char* launch(void (*kernel)(void**), void** values, const unsigned* grid,
                          const unsigned* block, size_t shared, int schedule, int truncating,
                          const Guard* guards, long long n_guards, long long* culprit,
                          Stacks* unused_stacks) {
    stacks = unused_stacks;
    body = kernel, arguments = values, order = schedule, truncate = truncating;
    dice = 2463534242u, message[0] = 0, *culprit = -1, current = nullptr;
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
    count = block[0] * block[1] * block[2];
    threads.resize(count), warps.resize(count / 32);
    for (int i = 0; i < count; ++i) {
        const unsigned n = i;
        threads[i].number = i;
        threads[i].index = {n % block[0], n / block[0] % block[1], n / block[0] / block[1]};
    }
    std::vector<char> memory(shared + GUARD + 128);
    dynamic = (char*)(((uintptr_t)memory.data() + 127) & ~(uintptr_t)127);
    const long long blocks = (long long)grid[0] * grid[1] * grid[2];
    long long step = 1;
    if (order >= 2)  // a step without a common divisor with `blocks` visits all blocks
        for (step = blocks * 5 / 8 + 1;; ++step) {
            long long a = step, b = blocks;
            while (b) { const long long r = a % b; a = b, b = r; }
            if (a == 1) break;
        }
    for (long long i = 0; i < blocks && !message[0]; ++i) {
        const long long n = order == 1 ? blocks - 1 - i : i * step % blocks;
        blockIdx = {unsigned(n % grid[0]), unsigned(n / grid[0] % grid[1]),
                    unsigned(n / grid[0] / grid[1])};
        memset(dynamic, 0xff, shared + GUARD);
        if (__start_mpidl_shared)
            memset(__start_mpidl_shared, 0xff, __stop_mpidl_shared - __start_mpidl_shared);
        SHIM_FENCE;
        run_block();
        SHIM_FENCE;
        if (!message[0] && !is_whole({dynamic + shared, GUARD, -1}))
            snprintf(message, sizeof message, "writes past its %zu bytes of shared memory", shared);
    }
    end_fibers();
    for (long long i = 0; i < n_guards && !message[0]; ++i)
        if (!is_whole(guards[i])) {
            *culprit = i;
            return "writes out of bounds";
        }
    return message[0] ? message : nullptr;
}

constexpr int first(int a, int = 0, int = 0) { return a; }

struct In { const void *a, *b; };

template <class T> struct Shuffle { T value; int argument; };

template <int KIND, class T> static inline T shuffle(T value, int argument) {
    const Shuffle<T> in{value, argument};
    T out;
    meet(16 + KIND, &in, &out, [](Warp& w) {
        for (int l = 0; l < 32; ++l) {
            const int n = ((const Shuffle<T>*)w.in[l])->argument;
            int from = KIND == 0 ? l ^ n : KIND == 1 ? l + n : KIND == 2 ? l - n : n & 31;
            if (from < 0 || from > 31) from = l;
            *(T*)w.out[l] = ((const Shuffle<T>*)w.in[from])->value;
        }
    });
    return out;
}

// The target of a copy has unknown contents until the kernel waits for the copy.
static inline void copy(void* to, const void* from, bool ok, int bytes) {
    if ((uintptr_t)to % bytes || (ok && (uintptr_t)from % bytes))
        fail("cp.async: an address is not aligned to %d bytes", bytes);
    Copy c{to, {}, bytes};
    if (ok) memcpy(c.data, from, bytes);
    memset(to, 0xff, bytes);
    current->copies.push_back(c);
}

static inline void wait(int most) {
    SHIM_FENCE;
    Thread& t = *current;
    for (; t.groups.size() - t.waited > (size_t)most; ++t.waited)
        for (; t.landed < (size_t)t.groups[t.waited]; ++t.landed)
            memcpy(t.copies[t.landed].to, t.copies[t.landed].data, t.copies[t.landed].bytes);
    SHIM_FENCE;
}

static inline float rounded(double sum) {  // to nearest, or towards zero as some tensor cores do
    const float f = (float)sum;
    return truncate && std::fabs((double)f) > std::fabs(sum) ? std::nextafterf(f, 0.f) : f;
}

static inline double tf32(u32 bits) {
    float f;
    bits &= ~0x1fffu;
    memcpy(&f, &bits, 4);
    return f;
}

}  // namespace shim

#define DYN_SMEM(T, name) T* name = (T*)shim::dynamic

static inline __attribute__((always_inline)) void __syncthreads() {
    SHIM_FENCE;
    ++shim::at_barrier;
    shim::suspend();
    SHIM_FENCE;
}
static inline __attribute__((always_inline)) void __syncwarp() {
    shim::meet(1, nullptr, nullptr, [](shim::Warp&) {});
}
template <class T> static inline T shfl_xor(T v, int mask) { return shim::shuffle<0>(v, mask); }
template <class T> static inline T shfl_down(T v, int by) { return shim::shuffle<1>(v, by); }
template <class T> static inline T shfl_up(T v, int by) { return shim::shuffle<2>(v, by); }
template <class T> static inline T shfl(T v, int lane) { return shim::shuffle<3>(v, lane); }

static inline void cp_async16(void* to, const void* from, bool ok) { shim::copy(to, from, ok, 16); }
static inline void cp_async8(void* to, const void* from, bool ok) { shim::copy(to, from, ok, 8); }
static inline void cp_async4(void* to, const void* from, bool ok) { shim::copy(to, from, ok, 4); }
static inline void cp_commit() { shim::current->groups.push_back(shim::current->copies.size()); }
template <int N> static inline void cp_wait() { shim::wait(N); }

static inline void ldsm4(u32& a, u32& b, u32& c, u32& d, const void* row) {
    if ((uintptr_t)row & 15) shim::fail("ldmatrix: a row is not aligned to 16 bytes");
    u32 out[4];
    shim::meet(2, row, out, [](shim::Warp& w) {
        for (int l = 0; l < 32; ++l)
            for (int m = 0; m < 4; ++m)
                ((u32*)w.out[l])[m] = ((const u32*)w.in[m * 8 + (l >> 2)])[l & 3];
    });
    a = out[0], b = out[1], c = out[2], d = out[3];
}

// Computes c += a b for m16n8k8. Products are exact; each element of c is rounded once.
static inline void mma_tf32(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const shim::In in{a, b};
    shim::meet(3, &in, c, [](shim::Warp& w) {
        typedef double Row __attribute__((vector_size(64)));
        double A[16][8];
        Row B[8], C[16];
        for (int l = 0; l < 32; ++l) {
            const u32 *x = (const u32*)((const shim::In*)w.in[l])->a;
            const u32 *y = (const u32*)((const shim::In*)w.in[l])->b;
            const float* z = (const float*)w.out[l];
            const int g = l >> 2, t = l & 3;
            A[g][t] = shim::tf32(x[0]), A[g + 8][t] = shim::tf32(x[1]);
            A[g][t + 4] = shim::tf32(x[2]), A[g + 8][t + 4] = shim::tf32(x[3]);
            B[t][g] = shim::tf32(y[0]), B[t + 4][g] = shim::tf32(y[1]);
            C[g][2 * t] = z[0], C[g][2 * t + 1] = z[1];
            C[g + 8][2 * t] = z[2], C[g + 8][2 * t + 1] = z[3];
        }
        for (int r = 0; r < 16; ++r)
            for (int k = 0; k < 8; ++k) C[r] += A[r][k] * B[k];
        for (int l = 0; l < 32; ++l) {
            float* z = (float*)w.out[l];
            const int g = l >> 2, t = l & 3;
            z[0] = shim::rounded(C[g][2 * t]), z[1] = shim::rounded(C[g][2 * t + 1]);
            z[2] = shim::rounded(C[g + 8][2 * t]), z[3] = shim::rounded(C[g + 8][2 * t + 1]);
        }
    });
}

static inline double bf16(u32 bits) {
    float f;
    bits <<= 16;
    memcpy(&f, &bits, 4);
    return f;
}

// Like mma_tf32, for m16n8k16 and bfloat16.
static inline void mma_bf16(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    const shim::In in{a, b};
    shim::meet(4, &in, c, [](shim::Warp& w) {
        typedef double Row __attribute__((vector_size(64)));
        double A[16][16];
        Row B[16], C[16];
        for (int l = 0; l < 32; ++l) {
            const u32 *x = (const u32*)((const shim::In*)w.in[l])->a;
            const u32 *y = (const u32*)((const shim::In*)w.in[l])->b;
            const float* z = (const float*)w.out[l];
            const int g = l >> 2, t = l & 3;
            for (int i = 0; i < 4; ++i)
                for (int e = 0; e < 2; ++e)
                    A[g + i % 2 * 8][2 * t + e + i / 2 * 8] = bf16(x[i] >> 16 * e & 0xffff);
            for (int i = 0; i < 2; ++i)
                for (int e = 0; e < 2; ++e)
                    B[2 * t + e + 8 * i][g] = bf16(y[i] >> 16 * e & 0xffff);
            C[g][2 * t] = z[0], C[g][2 * t + 1] = z[1];
            C[g + 8][2 * t] = z[2], C[g + 8][2 * t + 1] = z[3];
        }
        for (int r = 0; r < 16; ++r)
            for (int k = 0; k < 16; ++k) C[r] += A[r][k] * B[k];
        for (int l = 0; l < 32; ++l) {
            float* z = (float*)w.out[l];
            const int g = l >> 2, t = l & 3;
            z[0] = shim::rounded(C[g][2 * t]), z[1] = shim::rounded(C[g][2 * t + 1]);
            z[2] = shim::rounded(C[g + 8][2 * t]), z[3] = shim::rounded(C[g + 8][2 * t + 1]);
        }
    });
}

static inline void ldsm4_turned(u32& a, u32& b, u32& c, u32& d, const void* row) {
    if ((uintptr_t)row & 15) shim::fail("ldmatrix: a row is not aligned to 16 bytes");
    u32 out[4];
    shim::meet(5, row, out, [](shim::Warp& w) {
        for (int l = 0; l < 32; ++l)
            for (int m = 0; m < 4; ++m) {
                u32 word = 0;
                for (int e = 0; e < 2; ++e)
                    word |= (u32)((const uint16_t*)w.in[m * 8 + 2 * (l & 3) + e])[l >> 2]
                            << 16 * e;
                ((u32*)w.out[l])[m] = word;
            }
    });
    a = out[0], b = out[1], c = out[2], d = out[3];
}

template <class To, class From> static inline To shim_bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "");
    memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(u32 u) { return shim_bits<float>(u); }
static inline u32 __float_as_uint(float f) { return shim_bits<u32>(f); }
static inline float __int_as_float(int i) { return shim_bits<float>(i); }
static inline int __float_as_int(float f) { return shim_bits<int>(f); }
static inline double __longlong_as_double(long long i) { return shim_bits<double>(i); }
static inline long long __double_as_longlong(double d) { return shim_bits<long long>(d); }

static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }

static inline void __threadfence() {}
static inline int atomicAdd(int* p, int by) { return (*p += by) - by; }
template <class T> static inline T __ldg(const T* p) { return *p; }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
[[noreturn]] static inline void __trap() { shim::fail("__trap"); }

#define SHIM_MIN_MAX(T)                                            \
    static inline T min(T a, T b) { return b < a ? b : a; }        \
    static inline T max(T a, T b) { return a < b ? b : a; }
SHIM_MIN_MAX(int)
SHIM_MIN_MAX(unsigned)
SHIM_MIN_MAX(long long)
SHIM_MIN_MAX(unsigned long long)
SHIM_MIN_MAX(float)
SHIM_MIN_MAX(double)
