/* Information about this library. build.py defines the macros SOURCES and DECLARATIONS. */
#include "mpidl.h"

#ifndef SOURCES
#define SOURCES ""
#endif
#ifndef DECLARATIONS
#define DECLARATIONS ""
#endif

const char *mpidl_compiler(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#else
    return "gcc " __VERSION__;
#endif
}

/* build.py searches the library file for this string. */
const char *mpidl_sources(void) { return "mpidl sources " SOURCES; }

const char *mpidl_declarations(void) { return DECLARATIONS; }
