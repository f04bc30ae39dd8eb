"""Several machines: network namespaces with a cable between each pair, if this user may create them."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path
from types import MappingProxyType

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
def machines(number: int = 2, slow: Mapping[tuple[int, int], str] = MappingProxyType({})) -> Iterator[list[Machine]]:
    """`count` machines that reach only each other, each pair by a cable of its own; `slow` cables as in tc: "40mbit".

    A machine has one address, on all of its cables. Raises OSError or CalledProcessError if that is not allowed.
    """
    tag = f"z{os.getpid() % 100000}{'abcdefgh'[next(_MADE) % 8]}"
    names, made = [f"{tag}n{k}" for k in range(number)], list[str]()
    addresses = [f"10.211.7.{k + 1}" for k in range(number)]
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        for a, b in combinations(range(number), 2):
            ends = (a, b), (b, a)
            links = [f"{tag}{here}{there}" for here, there in ends]
            _ip("link", "add", links[0], "netns", names[a], "type", "veth", "peer", "name", links[1], "netns", names[b])
            for (here, there), link in zip(ends, links, strict=True):
                ways = addresses[here], "peer", f"{addresses[there]}/32"
                _ip("-n", names[here], "addr", "add", *ways, "dev", link)
                _ip("-n", names[here], "link", "set", link, "up")
                if (a, b) in slow:
                    limit = "tbf", "rate", slow[a, b], "burst", "64kb", "latency", "400ms"
                    _run("tc", "-n", names[here], "qdisc", "add", "dev", link, "root", *limit)
        yield [
            Machine(addresses[k], f"{tag}{k}{(k + 1) % number}", ("ip", "netns", "exec", name))
            for k, name in enumerate(names)
        ]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
