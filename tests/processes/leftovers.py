"""Checks that a run leaves no process and no listening port, however it ends."""

import os
from multiprocessing import forkserver
from pathlib import Path

_LISTENS = "0A"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def forked() -> set[int]:
    """The processes started by the fork server that still exist."""
    server = forkserver._forkserver._forkserver_pid
    return set() if server is None else {pid for pid in _processes() if _parent(pid) == server and alive(pid)}


def ports() -> set[str]:
    """The TCP ports this process listens on, as /proc writes them."""
    sockets = {target for fd in Path("/proc/self/fd").iterdir() if (target := _link(fd)).startswith("socket:[")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in _lines(Path("/proc/self/net") / name)[1:]]
    return {row[1] for row in rows if row[3] == _LISTENS and f"socket:[{row[9]}]" in sockets}


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:
        return ""


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
