"""Several machines: network namespaces with a cable between each pair, if this user may create them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


_MADE = count()  # so that names are new


@dataclass(frozen=True)
class Machine:
    """A machine; `enter` is the prefix of a command that runs on it."""

    address: str
    interface: str
    enter: tuple[str, ...] = ()

    def start(self, command: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GLOO_", "SLURM_"))}
        paths = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen([*self.enter, *command], cwd=folder, env={**inherited, **paths, **environment}, **kept)


def refusal() -> str | None:
    """Why no namespaces can be created here; None if they can."""
    try:
        with machines():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"no network namespaces here: {said}".strip()


@contextmanager
def machines() -> Iterator[list[Machine]]:
    """Two machines that reach only each other. Raises OSError or CalledProcessError if that is not allowed."""
    tag = f"z{os.getpid() % 100000}{'abcdefgh'[next(_MADE) % 8]}"
    names, made = [f"{tag}n{k}" for k in range(2)], list[str]()
    links, addresses = [f"{tag}{k}" for k in range(2)], [f"10.211.7.{k + 1}" for k in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for name, link, here, there in zip(names, links, addresses, addresses[::-1], strict=True):
            _ip("-n", name, "addr", "add", here, "peer", f"{there}/32", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
        yield [Machine(addresses[k], links[k], ("ip", "netns", "exec", name)) for k, name in enumerate(names)]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
