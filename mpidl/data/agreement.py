"""Read the mini-batches of a queue on all ranks, which all stop at the same mini-batch."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from mpidl import phases
from mpidl.data.loading.bad_images import Unreadable
from mpidl.errors import StorageFault, UserError

_STOPS, _REPEATS, _FAILS = 1, 2, 3  # what a rank proposes to do next; the largest number wins


def agreed(
    batches: Generator[Any, Any, None],
    world: Any,
    signals: Any = None,
    check: Callable[[], None] = lambda: None,
) -> Generator[tuple, None, None]:
    """Yield each mini-batch after all ranks have read their parts of the mini-batch.

    Before each mini-batch, the ranks agree on whether to continue, so all ranks stop at the same
    mini-batch. If any rank has received a stop request, `signals.agreed` is set. If the queue has
    `bad_images`, the ranks also agree on the images to skip. UserError and StorageFault are raised
    on all ranks if any rank cannot read its images, or if `check`, which each rank calls before
    each mini-batch, raises the error.
    """
    bad = None  # for each rank, the images that it could not read
    while True:
        ready: list[Any] = [None]
        problem = None
        try:
            check()
            with phases.Phase(phases.INPUT, "input"):
                ready = [batches.send(bad) if bad else next(batches, None)]
        except (UserError, StorageFault) as error:
            problem = error
        signalled = signals is not None and signals.is_requested()
        unreadable = ready[0].reasons if isinstance(ready[0], Unreadable) else {}
        level = _FAILS if problem else _REPEATS if unreadable else _STOPS if signalled else 0
        with phases.span("agreement to continue"):
            level = world.gop("max", level)
        bad = None
        if level == _FAILS:
            world.raise_if_any(problem)
        if level == _REPEATS:
            ready.clear()
            bad = world.allgather(unreadable)
            continue
        if level == _STOPS:
            signals.agreed = True
            batches.close()
            return
        if ready[0] is None:
            return
        yield ready.pop()  # keep no reference, so that the next mini-batch can reuse the memory
