/* What the library exports. mpidl/backends/native.py reads this file for the names and types of the
 * arguments: one declaration a function, of the types int64_t, double, float, a pointer to one of
 * them or to int32_t or uint8_t, or a function without arguments; a result is one of these or a
 * text. Pointers may be NULL where it says so. Nothing here fails: Python has checked the arguments.
 *
 * Shapes: x (blocks, C, H, W, 16); a source is how an activation is read, either `x` itself, or,
 * where `mean` is not NULL, max(0, (x - mean) * scale + beta) by channel, which is never stored.
 */
#ifndef MPIDL_H
#define MPIDL_H

#include <stdint.h>

#pragma GCC visibility push(default) /* all else is hidden: it must not meet another library's */

/* about.c */
const char *mpidl_compiler(void);     /* "gcc 12.2.0" */
const char *mpidl_sources(void);      /* a hash of what it was compiled from */
const char *mpidl_declarations(void); /* this file, as it was then */

/* team.c */
void mpidl_set_threads(int64_t count);
void mpidl_set_hook(void (*function)(void)); /* run about every millisecond of a pass; or NULL */

/* peak.c */
/* Adds products up in registers, `iterations` times; returns how many operations that were, two a
 * product. result: 32 floats, the factor in the first 16, the term in the others. */
int64_t mpidl_fma_peak(int64_t iterations, float *result);
void mpidl_copy(const float *from, float *to, int64_t floats);

#pragma GCC visibility pop /* every declaration stands above */
#endif
