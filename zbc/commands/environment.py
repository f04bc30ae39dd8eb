"""What `doctor` finds: versions, devices, and what they allow."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path
from types import ModuleType

from zbc import __version__
from zbc.host.cores import cores
from zbc.text import size

_OLDEST = (2, 11)  # torch, see pyproject.toml


def inspect() -> dict[str, list[str]]:
    """Label -> lines."""
    found, torch = {"zbc": [__version__], "python": [f"{platform.python_version()} on {platform.system()}"]}, None
    try:
        import torch as module

        torch, found["torch"] = module, [_torch_version(module)]
    except (ImportError, OSError) as error:  # OSError: a library torch needs is missing or damaged
        found["torch"] = [f"cannot be imported: {error}"]
    found["cpu"] = [f"{cores()} cores"]
    found["devices"] = _devices(torch)
    found["transports"] = _transports(torch)
    found["folder"] = [f"{Path.cwd()}: {'can' if _writable() else 'cannot'} be written"]
    found["can"] = _abilities(torch)
    return found


def _torch_version(torch: ModuleType) -> str:
    parts = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdigit())
    old = "" if parts >= _OLDEST else f"; zbc run needs {'.'.join(map(str, _OLDEST))} or newer"
    return f"{torch.__version__}{old}"


def _devices(torch: ModuleType | None) -> list[str]:
    if torch is None:
        return ["unknown without torch"]
    if not torch.cuda.is_available():
        seen = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
        if seen:
            return [f"no CUDA device that this torch can use, though the system has {', '.join(seen)}"]
        return ["no CUDA device"]
    lines = []
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index} {device.name}, {size(device.total_memory)}")
    return lines


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
    """What can be done here, one line per command."""
    lines = ["plan, check, compare and draw any job"]
    if torch is None:
        return [*lines, "not run plans: install torch first"]
    lines.append("run plans on this machine's CPU: zbc run PLAN --local N")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices > 1:
        lines.append(f"run plans of up to {devices} ranks on its GPUs: torchrun --nproc-per-node N -m zbc run PLAN")
    elif devices == 0:
        lines.append("not run plans on GPUs: there is none")
    return lines
