"""Prepare the cluster's namespaces and adopt orphans, as the first process in the namespaces.

    unshare --mount --uts --net --pid --fork --kill-child --mount-proc \
        python machine.py ADDRESS SOURCE TARGET [SOURCE TARGET ...]

The network consists of the loopback interface. The interface gets ADDRESS as a second address,
because without another network, names whose only address is 127.0.0.1 are not resolved. Each
SOURCE, a file or folder, replaces its TARGET. When this process ends, the kernel ends every process
of its namespaces.
"""

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time

SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8914, 0x8916, 1

address, *mounts = sys.argv[1:]
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
    fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    family_and_port = struct.pack("16sHH", b"lo:1", socket.AF_INET, 0)
    request = family_and_port + socket.inet_aton(address) + bytes(16)
    fcntl.ioctl(control, SIOCSIFADDR, request)
socket.sethostname("login")
for source, target in zip(mounts[::2], mounts[1::2], strict=True):
    subprocess.run(["mount", "--bind", source, target], check=True)
print("ready", flush=True)
while True:
    with contextlib.suppress(ChildProcessError):
        os.wait()
    time.sleep(0.1)
