"""Run groups of processes in turns: one side of a comparison works while all others sleep.

Sides can be compared only if they run within the same minutes on the same cores, and if waiting
sides do not disturb the running side. Each side is therefore a group of processes that sleep in a
read from a socket until they receive a request. During this read, neither MPI nor OpenMP threads
spin. Messages are lines of JSON.
"""

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from mpidl.launcher import environment

PATIENCE = 900.0  # seconds for an answer; compiling, and steps of large networks, take minutes


class Lost(Exception):
    """Raised if a side cannot answer; `reason` says why."""

    def __init__(self, side: str, reason: str):
        super().__init__(f"{side}: {reason}")
        self.reason = reason


class Side:
    """A group of processes that serve requests. `close` ends the processes.

    Parameters
    ----------
    name : str
        Name of the side in messages and in file names.
    commands : sequence of list of str
        Command lines to start. The address of the socket is appended to each.
    ranks : int
        Number of processes that will connect. A launcher may start several processes.
    environment : mapping
        Environment of the processes.
    folder : str
        Folder for the socket and the log.
    patience : float
        Seconds to wait for the start and for each answer.

    Raises
    ------
    Lost
        If the processes end or do not connect in time.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        ranks: int,
        environment: Mapping[str, str],
        folder: str,
        patience: float = 300.0,
    ):
        self.name, self.patience, self.links = name, patience, {}
        self.address = os.path.join(folder, f"{name}.socket")
        self.log = open(os.path.join(folder, f"{name}.log"), "w+")
        self.processes = []
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(self.address)
                listener.listen(ranks)
                for command in commands:
                    process = subprocess.Popen(
                        [*command, self.address],
                        stdin=subprocess.DEVNULL,
                        stdout=self.log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                    self.processes.append(process)
                self._accept(listener, ranks)
            stack.pop_all()

    def _accept(self, listener, ranks):
        listener.settimeout(0.5)
        deadline = time.monotonic() + self.patience
        while len(self.links) < ranks:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if any(process.poll() is not None for process in self.processes):
                    raise Lost(self.name, f"ended while starting: {self._last_message()}") from None
                if time.monotonic() > deadline:
                    raise Lost(self.name, f"did not start within {self.patience:g} s") from None
                continue
            connection.settimeout(self.patience)
            link = connection.makefile("rw")
            connection.close()  # the file keeps it open
            self.links[json.loads(link.readline())["rank"]] = link

    def ask(self, action: str, *arguments) -> list:
        """Call an action on every rank and return the answers in rank order.

        Raises
        ------
        Lost
            If a rank ends, answers with an error, or does not answer in time.
        """
        links = [self.links[rank] for rank in sorted(self.links)]
        answers = []
        try:
            for link in links:
                link.write(json.dumps([action, *arguments]) + "\n")
                link.flush()
            for link in links:
                answers.append(json.loads(link.readline() or "null"))
        except TimeoutError:
            raise Lost(self.name, f"no answer to '{action}' within {self.patience:g} s") from None
        except OSError:
            raise Lost(self.name, f"ended: {self._last_message()}") from None
        for answer in answers:
            if answer is None:
                raise Lost(self.name, f"ended: {self._last_message()}")
            if "error" in answer:
                raise Lost(self.name, answer["error"])
        return [answer["value"] for answer in answers]

    def mean_step(self, count: int) -> float:
        """Run a turn of `count` steps; return the mean seconds per step of the slowest rank."""
        return max(sum(seconds) / len(seconds) for seconds in self.ask("steps", count))

    def _last_message(self):
        time.sleep(0.2)  # the process may still be printing its last message
        self.log.seek(0)
        return last_message(self.log.read())

    def close(self) -> None:
        """Close the connections, which ends the processes, and terminate remaining processes."""
        for link in self.links.values():
            with contextlib.suppress(OSError):
                link.close()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
                process.kill()
                process.wait()
        self.log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def environment_of_checkout() -> dict[str, str]:
    """Return an environment in which any Python imports `mpidl` and `benchmarks` from here."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [root, variables.get("PYTHONPATH")]))
    return variables


def last_message(output: str) -> str:
    """Return the first error message of mpidl in a process's output, or else the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    return next((line for line in lines if line.startswith("mpidl: ")), last)[:300]


def serve(address: str, rank: int, *actions: Callable) -> None:
    """Serve the requests of a `Side` until it closes the connection.

    A process of the `Side` calls this function. Each request names one of `actions`.
    """
    functions = {action.__name__: action for action in actions}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as link:

            def send(message):
                link.write(json.dumps(message) + "\n")
                link.flush()

            send({"rank": rank})
            for line in link:
                name, *arguments = json.loads(line)
                try:
                    answer = {"value": functions[name](*arguments)}
                except Exception as error:
                    text = next((x for x in str(error).splitlines() if x.strip()), "")
                    answer = {"error": f"{type(error).__name__}: {text[:300]}"}
                send(answer)


def alternate(names: Iterable, rounds: int) -> Iterator[tuple]:
    """Yield (round, name) for all names in each round; odd rounds reverse the order."""
    names = list(names)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            yield number, name


def alternate_steps(
    sides: Mapping[object, Side], counts: Mapping[object, int], rounds: int
) -> dict[object, list[float]]:
    """Run sides in turns of `counts` steps. Return {side: seconds per step of each round}."""
    times: dict[object, list[float]] = {name: [] for name in sides}
    for _, name in alternate(sides, rounds):
        times[name].append(sides[name].mean_step(counts[name]))
    return times


def steps_for(seconds: float, turn: float = 0.25, limit: int = 50) -> int:
    """Return the number of steps that fill a turn of `turn` seconds, from 1 to `limit`.

    `seconds` is the duration of one step.
    """
    return max(1, min(limit, round(turn / max(seconds, 1e-9))))


def timed_steps(
    step: Callable,
    count: int,
    barrier: Callable = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the seconds of each of `count` steps, by a clock.

    An extra step runs first and brings the data back into the cache. Then `barrier()` synchronizes
    the ranks.
    """
    step()
    barrier()
    return [seconds(step, clock) for _ in range(count)]


def seconds(
    function: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the duration of a call of a function, in seconds of a clock."""
    start = clock()
    function()
    return clock() - start
