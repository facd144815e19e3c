"""Stages of a run, such as the validation, and the thread that shows their elapsed time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable


class Stage:
    """A part of a run that is not an iteration, such as the validation.

    With 0 images, images are not counted. `unit` says what is counted instead of images.
    """

    def __init__(self, name: str, images: int = 0, unit: str = "images") -> None:
        self.name, self.images, self.unit, self.processed = name, images, unit, 0
        self.start_time = time.monotonic()

    def advance(self, processed: int) -> None:
        """Set the number of processed images."""
        self.processed = processed

    def describe(self) -> str:
        """Return a text such as "validation: 1280 of 10000 images (12 s)"."""
        counted = f": {self.processed} of {self.images} {self.unit}" if self.images else ""
        seconds = int(time.monotonic() - self.start_time)
        return f"{self.name}{counted}" + (f" ({seconds} s)" if seconds else "")


class Ticker(threading.Thread):
    """A thread that calls a function every `interval` seconds until `stop` is called."""

    def __init__(self, function: Callable[[], None], interval: float) -> None:
        super().__init__(name="mpidl-console", daemon=True)
        self.function, self.interval, self.is_stopped = function, interval, threading.Event()

    def run(self) -> None:
        # If the stream is closed or its reader is gone, the next printed line raises the error.
        with contextlib.suppress(OSError, ValueError):
            while not self.is_stopped.wait(self.interval):
                self.function()

    def stop(self) -> None:
        """End the thread, after a running call of the function has returned."""
        self.is_stopped.set()
        if threading.current_thread() is not self:
            self.join()
