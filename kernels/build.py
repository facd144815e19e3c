"""Compile kernels/cpu into one shared library per build: `python kernels/build.py`.

A build is the library for one instruction set. setup.py, run/train and the tests load this file by
its path, so it uses only Python's standard library.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import uuid

FOLDER = os.path.dirname(os.path.abspath(__file__))
SOURCES = os.path.join(FOLDER, "cpu")
FORMULAS = os.path.join(FOLDER, "formulas.h")
LIB = os.path.join(FOLDER, "lib")
OBJECTS = os.path.join(os.path.dirname(FOLDER), "build", "kernels")
PARSER = os.path.join(os.path.dirname(FOLDER), "mpidl", "backends", "declarations.py")
exported = runpy.run_path(PARSER)["exported"]
BF16 = "_bf16"  # the suffix of functions that are compiled for bfloat16
DECLARED = re.compile(r"^(?!static|typedef|INLINE)(?:const |struct )*\w+ \*?(\w+)\(", re.M)

# The kernels add and multiply in a fixed order. No flag may allow the compiler to change this
# order.
FLAGS = (
    "-std=gnu11 -O3 -fPIC -fvisibility=hidden -pthread -ffp-contract=off -fno-math-errno "
    "-Wall -Wextra -Wmissing-prototypes -Wstrict-prototypes -Wno-pass-failed "
    "-Wno-unused-parameter"  # callbacks have a common signature; some ignore arguments
).split()
# Features are listed one by one because older compilers do not know -march=x86-64-v3.
AVX2 = "-mavx2 -mfma -mbmi -mbmi2".split()
AVX512 = "-mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl -mprefer-vector-width=512".split()
NATIVE = "x86-64-v4-bf16"
BUILDS = {
    NATIVE: [*AVX2, *AVX512, "-mavx512bf16"],
    "x86-64-v4": [*AVX2, *AVX512],
    "x86-64-v3": AVX2,
    "generic": [],
}
SANITIZE = (
    "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g"
).split()


class Failed(Exception):
    """Raised if the compiler is missing or fails; `output` is the compiler's stderr."""

    output = ""


def machine(compiler=None):
    """Return the architecture that a compiler compiles for, by default this machine's."""
    if compiler is not None:
        with contextlib.suppress(Failed):
            macros = _run([*compiler, "-dM", "-E", "-x", "c", os.devnull]).stdout
            for name in ("x86_64", "aarch64"):
                if f"#define __{name}__ 1" in macros:
                    return name
    return platform.machine()


def builds(compiler=None):
    """Return the builds for an architecture, best first: a compiler's or this machine's.

    Leave out the build with bfloat16 instructions if a compiler is given that does not know them;
    the other builds compute the same bytes.
    """
    names = list(BUILDS) if machine(compiler) in ("x86_64", "AMD64") else ["generic"]
    if compiler is not None and NATIVE in names:
        try:
            _run([*compiler, *BUILDS[NATIVE], "-E", "-x", "c", os.devnull])
        except Failed:
            names.remove(NATIVE)
    return names


def find_compiler(command=None):
    """Return the command of the C compiler as a list of words.

    Parameters
    ----------
    command : str, optional
        Command to use. Default: the environment variable CC if set, otherwise the first of cc,
        gcc and clang that is on PATH.

    Raises
    ------
    Failed
        If the compiler is not found.
    """
    command = command or os.environ.get("CC")
    for candidate in [command] if command else ["cc", "gcc", "clang"]:
        try:
            words = shlex.split(candidate)
        except ValueError as error:
            raise Failed(f"no C compiler: {candidate}: {error}") from error
        if words and shutil.which(words[0]):
            return words
    raise Failed(f"no C compiler: {command or 'cc, gcc or clang'} is not on PATH")


def library_path(build, folder=LIB):
    return os.path.join(folder, f"libmpidl-{build}.so")


def source_names():
    return sorted(name for name in os.listdir(SOURCES) if name.endswith(".c"))


def read(name):
    with open(os.path.join(SOURCES, name)) as file:
        return file.read()


def sources_key():
    """Return a hash of the sources, headers and flags. Libraries contain this hash as a string."""
    digest = hashlib.sha256()
    sources = [os.path.join(SOURCES, name) for name in sorted(os.listdir(SOURCES))]
    for path in [*sources, FORMULAS, PARSER, __file__]:
        if path.endswith((".c", ".h", ".py")):
            with open(path, "rb") as file:
                digest.update(os.path.basename(path).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()[:16]


def is_current(build, folder=LIB):
    """Return whether the library was compiled from the current sources."""
    try:
        with open(library_path(build, folder), "rb") as file:
            return b"mpidl sources " + sources_key().encode() in file.read()
    except OSError:
        return False


def declarations():
    """Return the contents of mpidl.h without comments and preprocessor lines."""
    text = re.sub(r"/\*.*?\*/|^#.*?$", "", read("mpidl.h"), flags=re.S | re.M)
    return " ".join(text.split())


def calls():
    """Return C code with a case for each function of mpidl.h that play.c can call, by position."""
    formats = {
        "int64_t": "arguments[{}]",
        "float": "as_float(arguments[{}])",
        "double": "as_double(arguments[{}])",
    }
    cases = []
    for number, (name, function) in enumerate(exported(read("mpidl.h")).items()):
        parameters = function.parameters
        if name == "play" or not parameters or not all(p.type for p in parameters):
            continue  # recorded calls have only numbers and addresses as arguments
        values = [
            ("POINTER({})" if p.is_pointer else formats[p.type]).format(i)
            for i, p in enumerate(parameters)
        ]
        call = f"mpidl_{name}({', '.join(values)});"
        if name.endswith(BF16):  # mpidl.h does not declare this function
            types = ", ".join(p.type + " *" * p.is_pointer for p in parameters)
            call = f"{{ extern void mpidl_{name}({types}); {call} }}"
        cases.append(f"case {number}: {call} break;")
    return " ".join(cases)


def compilations():
    """Return (source, additional flags) of each object: some sources are compiled twice.

    A source that uses the type `value` (kernels/cpu/value.h), or that defines a function of a
    header that does, is compiled again with -DBF16, and these functions are renamed.
    """
    has_values = [name for name in os.listdir(SOURCES) if re.search(r"\bvalue \*\w", read(name))]
    functions = exported(read("mpidl.h"))
    names = {f"mpidl_{name}" for name in functions if f"{name}{BF16}" in functions}
    for header in (name for name in os.listdir(SOURCES) if name.endswith(".h")):
        if header != "mpidl.h" and not _with_includes(header).keys().isdisjoint(has_values):
            names.update(DECLARED.findall(read(header)))
    flags = ["-DBF16", *(f"-D{name}={name}{BF16}" for name in sorted(names))]
    twice = [
        name
        for name in source_names()
        if name in has_values or not names.isdisjoint(DECLARED.findall(read(name)))
    ]
    return [(name, ()) for name in source_names()] + [(name, tuple(flags)) for name in twice]


def _defines(name):
    if name == "play.c":
        return [f"-DCALLS={calls()}"]
    if name != "about.c":
        return []
    return [
        f"-DSOURCES={json.dumps(sources_key())}",
        f"-DDECLARATIONS={json.dumps(declarations())}",
    ]


def _with_includes(name, texts=None):
    """Read a source and the files that it includes; return {name: contents}."""
    texts = {} if texts is None else texts
    if name not in texts:
        texts[name] = read(name)
        for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', texts[name], re.M):
            _with_includes(included, texts)
    return texts


def _run(command):
    try:
        process = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise Failed(f"{command[0]} cannot be run: {error.strerror}") from error
    if process.returncode:
        lines = (process.stderr or process.stdout).strip().splitlines()
        text = next((x for x in lines if "error" in x), lines[-1] if lines else "no message")
        error = Failed(f"{command[0]} ended with exit code {process.returncode}: {text.strip()}")
        error.output = process.stderr
        raise error
    return process


@contextlib.contextmanager
def _replaced(path):
    """Yield the name of a new file. At the end of the `with` block, the new file replaces `path`.

    If the block raises an exception, the new file is removed. The name is unique, because two hosts
    may compile in the same file system at the same time.
    """
    new = f"{path}.{uuid.uuid4().hex}"
    try:
        yield new
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _object(compiler, version, flags, name, defines):
    """Compile a source unless its object exists; return the object's path and the warnings."""
    flags = [*flags, *defines]
    key = repr([compiler, version, flags, sorted(_with_includes(name).items()), _defines(name)])
    stem = f"{name.removesuffix('.c')}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    out = os.path.join(OBJECTS, f"{stem}.o")
    if os.path.exists(out):
        with contextlib.suppress(OSError):  # the file may belong to another user
            os.utime(out)
        return out, ""
    source = os.path.join(SOURCES, name)
    with _replaced(out) as new:
        process = _run([*compiler, *flags, *_defines(name), "-c", source, "-o", new])
    return out, process.stderr


def _remove_old_objects(days=30):
    """Remove objects that no compilation has used in the last `days` days."""
    for entry in os.scandir(OBJECTS):
        with contextlib.suppress(OSError):  # may belong to another user or be gone
            if entry.stat().st_mtime < time.time() - days * 86400:
                os.unlink(entry)


def _show_progress(jobs):
    """Wait for jobs, and report to stderr how many are done.

    A terminal gets one line, updated every second. Other outputs get a new line every 9 seconds.
    """
    start = line_time = time.monotonic()
    is_terminal = sys.stderr.isatty()
    while concurrent.futures.wait(jobs, timeout=1.0).not_done:
        now = time.monotonic()
        if is_terminal or now - line_time >= 9:
            line_time, count = now, sum(job.done() for job in jobs)
            text = f"kernels/build.py: compiled {count} of {len(jobs)} files ({now - start:.0f} s)"
            sys.stderr.write(f"\r{text}" if is_terminal else f"{text}\n")
            sys.stderr.flush()
    if is_terminal and line_time > start:
        sys.stderr.write("\r\033[K")


def compile_builds(names, folder, compiler, extra=(), is_verbose=False):
    """Compile builds in parallel into a folder.

    An existing library is replaced atomically after the new library is complete. Processes that
    loaded the old library can continue to use it. As for Python's own extension modules, the
    environment variable LDSHARED may name another command for linking.

    Parameters
    ----------
    names : list of str
        Builds to compile.
    folder : str
        Folder for the libraries.
    compiler : list of str
        Command of the compiler, as returned by `find_compiler`.
    extra : list of str
        Additional compiler flags.
    is_verbose : bool
        Whether to report progress to stderr if compiling takes more than a second.

    Returns
    -------
    {str: Failed}
        The error of each failed build.

    Raises
    ------
    Failed
        If the compiler cannot be run.
    """
    version = _run([*compiler, "--version"]).stdout
    linker = shlex.split(os.environ.get("LDSHARED", "")) or [*compiler, "-shared"]
    os.makedirs(OBJECTS, exist_ok=True)
    os.makedirs(folder, exist_ok=True)
    # all symbols must be defined, except symbols of a sanitizer's library
    linker += [] if extra else ["-Wl,-z,defs"]
    failures, warnings = {}, {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        flags = {build: [*FLAGS, *BUILDS[build], *extra] for build in names}
        jobs = {
            build: [
                pool.submit(_object, compiler, version, flags[build], name, defines)
                for name, defines in compilations()
            ]
            for build in names
        }
        if is_verbose:
            _show_progress([job for build in names for job in jobs[build]])
        for build in names:
            try:
                objects, messages = zip(*(job.result() for job in jobs[build]), strict=True)
                warnings |= dict.fromkeys(messages)  # most warnings are the same for all builds
                with _replaced(library_path(build, folder)) as new:
                    _run([*linker, *flags[build], *objects, "-lm", "-o", new])
            except Failed as error:
                failures[build] = error
            except OSError as error:  # for example a full disk
                failures[build] = Failed(str(error))
    sys.stderr.write("".join(warnings))
    _remove_old_objects()
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("builds", nargs="*", metavar="BUILD", help=f"default: {', '.join(builds())}")
    add("--cc", help="the C compiler (CC, else cc, gcc or clang)")
    add("--flags", default="", help="additional compiler flags")
    add("--out", help="folder for the libraries (kernels/lib)")
    add("--sanitize", action="store_true", help="use ASan and UBSan; write to kernels/lib/sanitize")
    add("--if-needed", action="store_true", help="compile outdated builds, if there is a compiler")
    options = parser.parse_args()
    for name in options.builds:
        if name not in BUILDS:
            parser.error(f"expected one of {', '.join(BUILDS)}, found {name}")
    folder = options.out or (os.path.join(LIB, "sanitize") if options.sanitize else LIB)
    extra = [*(SANITIZE if options.sanitize else []), *shlex.split(options.flags)]
    try:
        compiler = find_compiler(options.cc)
    except Failed as error:
        # without a compiler, mpidl uses NumPy and the commands print a notice
        return 0 if options.if_needed else f"kernels/build.py: {error}"
    try:
        names = options.builds or builds(compiler)
        if options.if_needed:
            names = [name for name in names if not is_current(name, folder)]
        failures = compile_builds(names, folder, compiler, extra, True) if names else {}
    except (Failed, OSError) as error:
        return f"kernels/build.py: {error}"
    if failures:
        sys.stderr.write(next(iter(failures.values())).output)
    lines = (f"kernels/build.py: no {name}: {reason}" for name, reason in failures.items())
    return "\n".join(lines) or 0


if __name__ == "__main__":
    sys.exit(main())
