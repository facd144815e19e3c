"""Parts of a run that take time, and the thread that shows how long they take."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable


class Stage:
    """A part of a run that is not an iteration, such as the validation.

    Parameters
    ----------
    name : str
        Name of the stage.
    images : int
        Number of images that the stage processes, 0 if they are not counted.
    """

    def __init__(self, name: str, images: int = 0) -> None:
        self.name, self.images, self.processed = name, images, 0
        self.start_time = time.monotonic()

    def advance(self, processed: int) -> None:
        """Set the number of images that have been processed."""
        self.processed = processed

    def describe(self) -> str:
        """Return a text such as "validation: 1280 of 10000 images (12 s)"."""
        counted = f": {self.processed} of {self.images} images" if self.images else ""
        seconds = int(time.monotonic() - self.start_time)
        return f"{self.name}{counted}" + (f" ({seconds} s)" if seconds else "")


class Ticker(threading.Thread):
    """A thread that calls a function at an interval in seconds until it is stopped."""

    def __init__(self, function: Callable[[], None], interval: float) -> None:
        super().__init__(name="mpidl-console", daemon=True)
        self.function, self.interval, self.is_stopped = function, interval, threading.Event()

    def run(self) -> None:
        # The stream may be closed, or its reader may be gone: the next line reports that.
        with contextlib.suppress(OSError, ValueError):
            while not self.is_stopped.wait(self.interval):
                self.function()

    def stop(self) -> None:
        """End the thread, after the call that it may be making."""
        self.is_stopped.set()
        if threading.current_thread() is not self:
            self.join()
