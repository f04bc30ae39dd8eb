"""`explain machine`: the abilities of this machine."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path
from types import ModuleType

from zbc import __version__
from zbc.host.cores import cores
from zbc.host.torch_version import OLDEST, release
from zbc.text import size


def inspect() -> dict[str, list[str]]:
    """Label -> lines."""
    lines, torch = {"zbc": [__version__], "python": [f"{platform.python_version()} on {platform.system()}"]}, None
    try:
        import torch as module

        old = "" if release(module.__version__) >= OLDEST else f"; zbc run needs {'.'.join(map(str, OLDEST))} or newer"
        torch, lines["torch"] = module, [f"{module.__version__}{old}"]
    except (ImportError, OSError) as error:  # OSError: a library torch needs is missing or damaged
        lines["torch"] = [f"cannot be imported: {error}"]
    lines["cpu"] = [f"{cores()} cores"]
    lines["devices"] = _devices(torch)
    lines["transports"] = _transports(torch)
    lines["folder"] = [f"{Path.cwd()}: {'can' if _writable() else 'cannot'} be written"]
    lines["can"] = _abilities(torch)
    return lines


def _devices(torch: ModuleType | None) -> list[str]:
    if torch is None:
        return ["unknown without torch"]
    if not torch.cuda.is_available():
        seen = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
        known = f" that this torch can use, though the system has {', '.join(seen)}" if seen else ""
        return [f"no CUDA device{known}"]
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"cuda:{index} {device.name}, {size(device.total_memory)}" for index, device in enumerate(devices)]


def _transports(torch: ModuleType | None) -> list[str]:
    if torch is None:
        return ["unknown without torch"]
    import torch.distributed as dist

    if not dist.is_available():
        return ["this torch has no torch.distributed: one process only"]
    yes = {True: "yes", False: "no"}
    return [f"gloo (CPU): {yes[dist.is_gloo_available()]}; NCCL (CUDA): {yes[dist.is_nccl_available()]}"]


def _writable() -> bool:
    try:
        with tempfile.TemporaryFile(dir=Path.cwd()):
            return True
    except OSError:
        return False


def _abilities(torch: ModuleType | None) -> list[str]:
    """The possible uses of this machine, one line per command."""
    lines = ["plan, check, compare and draw any job"]
    if torch is None:
        return [*lines, "not run plans: install torch first"]
    lines.append("run plans on this machine's CPU: zbc run PLAN --local N --device cpu")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices > 1:
        lines.append(f"run plans of up to {devices} ranks on its GPUs: torchrun --nproc-per-node N -m zbc run PLAN")
    elif devices == 0:
        lines.append("not run plans on GPUs: there is none")
    return lines
