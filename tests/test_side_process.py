"""Test that a side process ends when its stdin is closed, and not by signals to the job."""

import os
import signal
import subprocess

from mpidl import side_process

ECHO = """
import os, sys
print(os.getppid(), sorted(name for name in os.environ if name.startswith(("PMI", "SLURM_"))))
sys.stdout.flush()
for line in sys.stdin:
    print(line.strip() + ", still here", flush=True)
"""


def test_signals_of_the_job_do_not_end_the_process(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "3")
    monkeypatch.setenv("SLURM_PROCID", "3")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    process = side_process.start(["-c", ECHO], stdout=subprocess.PIPE, text=True)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    for number in side_process.SIGNALS:  # Python may still be starting
        process.send_signal(number)
    assert process.stdout.readline() == f"{os.getpid()} []\n"
    for number in side_process.SIGNALS:
        process.send_signal(number)
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline() == "hello, still here\n"
    process.stdin.close()
    assert process.wait() == 0
    process.stdout.close()
