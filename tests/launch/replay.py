"""Record kernel calls as a C program that repeats the calls and checks their results.

With such a program, tests check the kernels of a machine without Python: the results must have the
same bytes as on this machine.
"""

import ctypes
from pathlib import Path

import numpy as np

from mpidl.backends import declarations
from mpidl.backends.cpu import builds
from mpidl.core.values import BF16

HEAD = """
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mpidl.h"

static const float inf = INFINITY; /* as Python writes it */
static int failed;

static void *take(size_t bytes) {
    void *data = aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (fread(data, 1, bytes, stdin) != bytes) printf("too little data\\n"), exit(2);
    return data;
}

static void check(const char *name, const void *actual, size_t bytes) {
    void *expected = take(bytes);
    if (memcmp(actual, expected, bytes)) printf("%s differs\\n", name), failed = 1;
    free(expected);
}
"""
HEADER = Path(builds.kernels_folder(), "cpu", "mpidl.h")
UNRECORDED = ("set_hook", "optimizer_step")  # functions whose arguments are addresses


class Recorder:
    """A kernel library that records its calls as a program `text` with the stdin `data`."""

    def __init__(self, library):
        self.kernels, self.called = library, []
        self.exported = declarations.exported(HEADER.read_text())
        self.declared = builds.ctypes_of(self.exported)
        self.functions, self.data = [], []

    def __getattr__(self, name):
        function = getattr(self.kernels, name)
        return function if name in UNRECORDED else lambda *args: self._record(name, function, args)

    def _record(self, name, function, args):
        words, lines, outputs, places = [], [], [], {}
        if f"{name}_bf16" in self.declared and BF16 in {getattr(a, "dtype", None) for a in args}:
            name = f"{name}_bf16"
            types = (p.type + " *" * p.is_pointer for p in self.exported[name].parameters)
            lines.append(f"extern void mpidl_{name}({', '.join(types)});")
        for kind, value in zip(self.declared[name][1], args, strict=True):
            if value is None:
                words.append("NULL")
            elif isinstance(value, np.ndarray):
                place = places.get(value.ctypes.data)
                if place is None:
                    place = places[value.ctypes.data] = f"a{len(places)}"
                    lines.append(f"void *{place} = take({value.nbytes});")
                    self.data.append(value.tobytes())
                words.append(place)
                if not kind.const:
                    outputs.append((place, value))
            elif isinstance(value, bytes):
                words.append(f'"{value.decode()}"')  # the name of a function or an optimizer
            else:
                words.append(str(int(value)) if kind is ctypes.c_int64 else float(value).hex())
        result = function(*args)
        lines.append(f"mpidl_{name}({', '.join(words)});")
        for place, value in outputs:
            lines.append(f'check("{name}, call {len(self.called)}", {place}, {value.nbytes});')
            self.data.append(value.tobytes())
        lines += [f"free({place});" for place in places.values()]
        body = "\n    ".join(lines)
        self.functions.append(f"static void call{len(self.called)}(void) {{\n    {body}\n}}\n")
        self.called.append(name)
        return result

    @property
    def text(self):
        count = len(self.called)
        lines = [*(f"call{i}();" for i in range(count)), f'printf("{count} calls\\n");']
        body = "\n    ".join([*lines, "return failed;"])
        return "\n".join([HEAD, *self.functions, f"int main(void) {{\n    {body}\n}}\n"])


class recording:
    """Record the kernel calls of this process inside the `with` block, in the yielded Recorder."""

    def __enter__(self):
        self.before = builds.kernels()
        builds.process.kernels = Recorder(self.before)
        return builds.process.kernels

    def __exit__(self, *_):
        builds.process.kernels = self.before
