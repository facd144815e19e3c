"""Run the compiled kernels of every build that this CPU supports, with several thread counts."""

import os
import platform

import numpy as np
import pytest

from mpidl.backends import settings
from mpidl.backends.cpu import builds
from mpidl.core.fold import Partial

# With 3 threads, teams of threads share images, and teams may differ by one thread. The slow part
# `threads` uses more numbers of threads.
THREADS = tuple(map(int, os.environ.get("MPIDL_TEST_THREADS", "1,3").split(",")))
BUILDS = [build for build in builds.built() if builds.runs_here(build)]
VECTOR_BUILDS = [build for build in BUILDS if build != "generic"] or BUILDS
# Builds with fused multiply-adds, whose bytes are equal.
FUSED_BUILDS = [b for b in BUILDS if b != "generic" or platform.machine() in ("aarch64", "arm64")]
needs_kernels = pytest.mark.skipif(
    builds.running() == "numpy",
    reason="no kernels, or MPIDL_CPU=numpy: python kernels/build.py compiles them",
)


def bytes_of(value):
    """Return the bytes of an array, of a Partial's nodes, or of each item of a tuple of both."""
    if isinstance(value, (tuple, list)):
        return [bytes_of(part) for part in value]
    if isinstance(value, Partial):
        return [np.asarray(node).tobytes() for term in value.terms for node in term.nodes]
    return None if value is None else np.asarray(value).tobytes()


def on_all_builds(call, names=BUILDS):
    """Return {build: call()}; check that vector builds and all thread counts give equal bytes."""
    results, before = {}, builds.running()
    try:
        for build in names:
            library = builds.use(build)
            for threads in THREADS:
                library.set_threads(threads)
                result = call()
                expected = results.setdefault(build, result)
                assert bytes_of(result) == bytes_of(expected), f"{build}, {threads} threads"
            library.set_threads(settings.threads)
    finally:
        builds.use(before)
    fused = {build: bytes_of(results[build]) for build in results if build in FUSED_BUILDS}
    assert all(b == next(iter(fused.values())) for b in fused.values()), f"{list(fused)} differ"
    return results
