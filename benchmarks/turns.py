"""Processes that take turns: one side works while all others sleep.

What is compared has to run in the same minutes on the same cores, and must not be disturbed by what
waits. So each side is a group of processes of its own, which sleep in a read from a socket until
they are asked for something: neither MPI's nor OpenMP's threads spin then. Messages are lines of
JSON.
"""

import contextlib
import json
import os
import socket
import subprocess
import time


class Lost(Exception):
    """A side cannot do what it was asked for; `reason` says why."""

    def __init__(self, side, reason):
        super().__init__(f"{side}: {reason}")
        self.reason = reason


class Side:
    """A group of processes of which each answers what is asked. Closing it ends them.

    commands: the command lines to start, each with `address` as its last word; ranks: how many
    processes they come to. folder: for sockets and logs.
    """

    def __init__(self, name, commands, ranks, environment, folder, patience=300.0):
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
                    raise Lost(self.name, f"ended at its start: {self._last_words()}") from None
                if time.monotonic() > deadline:
                    raise Lost(self.name, f"did not start within {self.patience:g} s") from None
                continue
            connection.settimeout(self.patience)
            link = connection.makefile("rw")
            connection.close()  # the file keeps it open
            self.links[json.loads(link.readline())["rank"]] = link

    def ask(self, action, *arguments):
        """The ranks' answers, in their order. Raises Lost."""
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
            raise Lost(self.name, f"ended: {self._last_words()}") from None
        for answer in answers:
            if answer is None:
                raise Lost(self.name, f"ended: {self._last_words()}")
            if "error" in answer:
                raise Lost(self.name, answer["error"])
        return [answer["value"] for answer in answers]

    def _last_words(self):
        time.sleep(0.2)  # what it printed at its end
        self.log.seek(0)
        lines = [line.strip() for line in self.log if line.strip()]
        own = [line for line in lines if line.startswith("mpidl: ")]
        return (own or lines or ["no message"])[-1][:300]

    def close(self):
        """Hang up, which ends the processes, and see to it that they end."""
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


def serve(address, rank, actions):
    """In a process of a Side: do what is asked, {name: function}, until the other end hangs up."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        with connection.makefile("rw") as link:

            def say(message):
                link.write(json.dumps(message) + "\n")
                link.flush()

            say({"rank": rank})
            for line in link:
                action, *arguments = json.loads(line)
                try:
                    answer = {"value": actions[action](*arguments)}
                except Exception as error:
                    text = next((x for x in str(error).splitlines() if x.strip()), "")
                    answer = {"error": f"{type(error).__name__}: {text[:300]}"}
                say(answer)


def steps_for(seconds, least=0.25, most=50):
    """How many steps of this length make a turn of at least `least` seconds."""
    return max(1, min(most, round(least / max(seconds, 1e-9))))


def timed_steps(step, count, before=lambda: None):
    """Seconds of each of `count` steps, after one that brings this side's data back to the cache.

    before(): what lines the ranks up.
    """
    step()
    before()
    return [seconds(step) for _ in range(count)]


def seconds(function):
    """How long a call of this function takes."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began
