"""Two machines: network namespaces with an address each and a cable between them, where this user may make some."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Machine:
    """Where a command runs: `enter` stands in front of it."""

    address: str
    interface: str
    enter: tuple[str, ...] = ()

    def start(self, command: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GLOO_", "SLURM_"))}
        paths = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        return subprocess.Popen([*self.enter, *command], cwd=folder, env={**inherited, **paths, **environment}, **kept)


def refusal() -> str | None:
    """Why no namespaces can be made here; None if they can."""
    try:
        with machines():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"no network namespaces here: {said}".strip()


@contextmanager
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two that see each other and nothing else. Raises OSError or CalledProcessError where that is not allowed."""
    tag = f"z{os.getpid() % 100000}"
    names, links = [f"{tag}a", f"{tag}b"], [f"{tag}x", f"{tag}y"]
    made = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), start=1):
            _ip("-n", name, "addr", "add", f"10.211.7.{number}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
        one, two = (
            Machine(f"10.211.7.{number}", link, ("ip", "netns", "exec", name))
            for number, (name, link) in enumerate(zip(names, links, strict=True), start=1)
        )
        yield one, two
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=10)
