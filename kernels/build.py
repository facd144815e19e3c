"""Compiles kernels/cpu into one shared library for each build: `python kernels/build.py`.

A build is the sources compiled for one instruction set. The package's setup.py, run/train and the
tests use this file too, by its path; it needs Python alone.
"""

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
import uuid

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCES = os.path.join(HERE, "cpu")
LIB = os.path.join(HERE, "lib")
OBJECTS = os.path.join(os.path.dirname(HERE), "build", "kernels")

# The kernels add and multiply in a fixed order: nothing here may let a compiler change it.
FLAGS = (
    "-std=gnu11 -O3 -fPIC -fvisibility=hidden -pthread -ffp-contract=off -fno-math-errno "
    "-Wall -Wextra -Wmissing-prototypes -Wstrict-prototypes -Wno-pass-failed"
).split()
# Feature by feature, because compilers of older systems do not know -march=x86-64-v3.
AVX2 = "-mavx2 -mfma -mbmi -mbmi2".split()
AVX512 = "-mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl -mprefer-vector-width=512".split()
BUILDS = {"x86-64-v4": [*AVX2, *AVX512], "x86-64-v3": AVX2, "generic": []}
SANITIZE = (
    "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g"
).split()


class Failed(Exception):
    """No compiler, or one that does not compile this: the text is a line, `output` all it said."""

    output = ""


def builds():
    """The builds of this kind of machine, the best first."""
    return list(BUILDS) if platform.machine() in ("x86_64", "AMD64") else ["generic"]


def find_compiler(named=None):
    """The C compiler's command, a list of words: what is named, else CC, else the first there is.

    Raises Failed where it is not found.
    """
    named = named or os.environ.get("CC")
    for candidate in [named] if named else ["cc", "gcc", "clang"]:
        try:
            words = shlex.split(candidate)
        except ValueError as error:
            raise Failed(f"no C compiler: {candidate}: {error}") from error
        if words and shutil.which(words[0]):
            return words
    raise Failed(f"no C compiler: {named or 'cc, gcc or clang'} is not on PATH")


def library_path(build, folder=LIB):
    return os.path.join(folder, f"libmpidl-{build}.so")


def source_names(without=()):
    names = (name for name in os.listdir(SOURCES) if name.endswith(".c"))
    return sorted(name for name in names if name not in without)


def read(name):
    with open(os.path.join(SOURCES, name)) as file:
        return file.read()


def sources_key():
    """What changes with the sources, the headers and the flags; libraries hold it as text."""
    digest = hashlib.sha256()
    for path in [os.path.join(SOURCES, name) for name in sorted(os.listdir(SOURCES))] + [__file__]:
        if path.endswith((".c", ".h", ".py")):
            with open(path, "rb") as file:
                digest.update(os.path.basename(path).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()[:16]


def is_current(build, folder=LIB):
    """Whether the library was compiled from the sources as they are now."""
    try:
        with open(library_path(build, folder), "rb") as file:
            return b"mpidl sources " + sources_key().encode() in file.read()
    except OSError:
        return False


def declarations():
    """The text of mpidl.h without comments and lines of the preprocessor."""
    text = re.sub(r"/\*.*?\*/|^#.*?$", "", read("mpidl.h"), flags=re.S | re.M)
    return " ".join(text.split())


def _defines(name):
    if name != "about.c":
        return []
    return [
        f"-DSOURCES={json.dumps(sources_key())}",
        f"-DDECLARATIONS={json.dumps(declarations())}",
    ]


def _with_includes(name, seen=None):
    """{name: text} of a source and of what it includes."""
    seen = {} if seen is None else seen
    if name not in seen:
        seen[name] = read(name)
        for included in re.findall(r'^\s*#\s*include\s*"([^"]+)"', seen[name], re.M):
            _with_includes(included, seen)
    return seen


def _run(command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise Failed(f"{command[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        text = next((x for x in lines if "error" in x), lines[-1] if lines else "no message")
        error = Failed(f"{command[0]} ended with exit code {done.returncode}: {text.strip()}")
        error.output = done.stderr
        raise error
    return done


@contextlib.contextmanager
def _whole(path):
    """The name of a new file that takes this path once it is whole, and is removed if it fails.

    It is nobody else's: two hosts may compile into one file system at once.
    """
    new = f"{path}.{uuid.uuid4().hex}"
    try:
        yield new
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _object(compiler, version, flags, name):
    """Compile one source, unless the same was compiled before: (path of the object, warnings)."""
    key = repr([compiler, version, flags, sorted(_with_includes(name).items()), _defines(name)])
    stem = f"{name.removesuffix('.c')}-{hashlib.sha256(key.encode()).hexdigest()[:24]}"
    out = os.path.join(OBJECTS, f"{stem}.o")
    if os.path.exists(out):
        with contextlib.suppress(OSError):  # another user's
            os.utime(out)
        return out, ""
    source = os.path.join(SOURCES, name)
    with _whole(out) as new:
        done = _run([*compiler, *flags, *_defines(name), "-c", source, "-o", new])
    return out, done.stderr


def _forget(days=30):
    """Remove objects that no library was made of for so long."""
    for entry in os.scandir(OBJECTS):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if entry.stat().st_mtime < time.time() - days * 86400:
                os.unlink(entry)


def compile_builds(names, folder, compiler, extra=(), without=()):
    """Compile these builds, side by side, into a folder; returns {build: its Failed}.

    compiler: as `find_compiler` returns it; Failed where it cannot be run. A library is replaced
    only when it is whole, and at once, so that processes that run the old one go on with it.
    """
    version = _run([*compiler, "--version"]).stdout
    os.makedirs(OBJECTS, exist_ok=True)
    os.makedirs(folder, exist_ok=True)
    # all symbols must be there, but for what runs only once a sanitizer's library is loaded
    link = ["-shared"] if extra or without else ["-shared", "-Wl,-z,defs"]
    failed, warnings = {}, {}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with concurrent.futures.ThreadPoolExecutor(cores) as pool:
        flags = {build: [*FLAGS, *BUILDS[build], *extra] for build in names}
        jobs = {
            build: [
                pool.submit(_object, compiler, version, flags[build], name)
                for name in source_names(without)
            ]
            for build in names
        }
        for build in names:
            try:
                objects, said = zip(*(job.result() for job in jobs[build]), strict=True)
                warnings |= dict.fromkeys(said)  # mostly the same for all builds
                with _whole(library_path(build, folder)) as new:
                    _run([*compiler, *flags[build], *link, *objects, "-lm", "-o", new])
            except Failed as error:
                failed[build] = error
            except OSError as error:  # a full disk, say
                failed[build] = Failed(str(error))
    sys.stderr.write("".join(warnings))
    _forget()
    return failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("builds", nargs="*", metavar="BUILD", help=f"of {', '.join(builds())}")
    parser.add_argument("--cc", help="the C compiler (CC, else cc, gcc or clang)")
    parser.add_argument("--flags", default="", help="further flags of the compiler")
    parser.add_argument("--out", help="folder of the libraries (kernels/lib)")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="NAME.c",
        help="leave out a source, such as one that does not compile yet",
    )
    parser.add_argument(
        "--sanitize",
        action="store_true",
        help="with AddressSanitizer and UBSan, into kernels/lib/sanitize",
    )
    parser.add_argument(
        "--if-needed",
        action="store_true",
        help="only what is not compiled from these sources; without a compiler, nothing",
    )
    given = parser.parse_args()
    names = given.builds or builds()
    for name in names:
        if name not in BUILDS:
            parser.error(f"expected a build of {', '.join(BUILDS)}, found {name}")
    folder = given.out or (os.path.join(LIB, "sanitize") if given.sanitize else LIB)
    if given.if_needed:
        names = [name for name in names if not is_current(name, folder)]
    extra = [*(SANITIZE if given.sanitize else []), *shlex.split(given.flags)]
    try:
        compiler = find_compiler(given.cc)
    except Failed as error:
        if given.if_needed:  # NumPy does the work, and the commands say so
            return 0
        return f"kernels/build.py: {error}"
    try:
        failed = compile_builds(names, folder, compiler, extra, given.without) if names else {}
    except (Failed, OSError) as error:
        return f"kernels/build.py: {error}"
    if failed:
        sys.stderr.write(next(iter(failed.values())).output)
    return "\n".join(f"kernels/build.py: no {name}: {why}" for name, why in failed.items()) or 0


if __name__ == "__main__":
    sys.exit(main())
