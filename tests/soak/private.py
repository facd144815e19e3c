"""Give a trial a private, empty /dev/shm and a small disk that it can fill.

Other jobs of the machine also use /dev/shm. In a mount namespace, all files in /dev/shm belong to
the trial.
"""

import os
import subprocess
import sys

VARIABLE = "MPIDL_SOAK_NAMESPACE"
UNSHARE = (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"])  # root, other users


def enter():
    """Run this program again in a mount namespace; return False if the system refuses one."""
    if VARIABLE in os.environ:
        return True
    for words in UNSHARE:
        try:
            mount = ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
            subprocess.run([*words, *mount], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        os.environ[VARIABLE] = "yes"
        sys.stdout.flush()
        os.execvp(words[0], [*words, sys.executable, *sys.orig_argv[1:]])
    return False


def mount(folder, megabytes):
    """Mount an empty file system in memory on a folder."""
    size = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder)], check=True)


def unmount(folder):
    subprocess.run(["umount", str(folder)], check=True)
