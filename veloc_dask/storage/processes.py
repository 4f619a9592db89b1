"""Which process wrote something, and whether it still lives.

A process is known by its id, its start time (ids are used again) and the namespace that its id counts in (an id means
nothing in another container).
"""

from __future__ import annotations

import os

_token = (0, "")


def process_start(pid: int) -> int:
    """Start time of a process in clock ticks since boot (pids are used again); 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
            return 0 if state in (b"Z", b"X") else int(fields[18])  # a zombie writes nothing any more
    except (FileNotFoundError, ProcessLookupError):
        if os.path.isdir("/proc/self"):
            return 0
    except (OSError, ValueError, IndexError):
        return 0
    try:  # no /proc (macOS): a living process is taken for the same one
        os.kill(pid, 0)
    except ProcessLookupError:
        return 0
    except PermissionError:
        return 1
    return 1


def pid_namespace() -> str:
    """The process id namespace that this process lives in."""
    try:
        return "".join(c for c in os.readlink("/proc/self/ns/pid") if c.isdigit())
    except OSError:
        return "0"


def token() -> str:
    """This process, as part of a file name: namespace, id and start time."""
    global _token
    pid = os.getpid()
    if _token[0] != pid:  # not yet known, or a fork
        _token = (pid, f"{pid_namespace()}-{pid}-{process_start(pid)}")
    return _token[1]


def is_dead(namespace: str, pid: str, start: str) -> bool:
    """Whether the process of a token is gone for certain; False if that cannot be told from here."""
    if namespace != pid_namespace() or not pid.isdigit() or not start.isdigit():
        return False
    return process_start(int(pid)) != int(start) or int(start) == 0
