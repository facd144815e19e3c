// The checks of kernels that the compiler inserts (CHECKS in compiler.py), as calls of functions
// that compilers name. Each function ends the launch with an error. They replace the library of the
// sanitizers, which would have to be loaded before Python. This text follows shim.h.
namespace shim {

struct Source { const char* file; u32 line, column; };  // the start of each function's first argument
struct Access { Source at; const void* type; unsigned char alignment; };  // log2 of bytes

__attribute__((noreturn, no_sanitize("undefined"))) static void overflow(void* data) {
    const Source* at = (const Source*)data;
    fail("a signed integer overflows in %s, line %u", at->file, at->line);
}

}  // namespace shim

#define SHIM_CHECK(name, ...)                                                                      \
    extern "C" __attribute__((visibility("hidden"), used, noreturn, no_sanitize("undefined"))) void \
    __ubsan_handle_##name(void* data, void*, ##__VA_ARGS__)

SHIM_CHECK(type_mismatch_v1) {
    const shim::Access* access = (const shim::Access*)data;
    shim::fail("an address is not aligned to %d bytes in %s, line %u", 1 << access->alignment,
               access->at.file, access->at.line);
}
SHIM_CHECK(add_overflow, void*) { shim::overflow(data); }
SHIM_CHECK(sub_overflow, void*) { shim::overflow(data); }
SHIM_CHECK(mul_overflow, void*) { shim::overflow(data); }
SHIM_CHECK(divrem_overflow, void*) { shim::overflow(data); }
SHIM_CHECK(negate_overflow) { shim::overflow(data); }
