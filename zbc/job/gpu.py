"""`hardware.gpu`: numbers from the data sheet of a GPU for the keys that a job leaves open.

No GPU sustains its peaks: plans assume the share ARITHMETIC of TFLOPS, and BYTES of memory and link bandwidth. The
shares come from A100s (the fit of bench/published.py vocabulary has 230 of 312 TFLOPS and 1750 of 2039 GB/s),
rounded down as power limits larger GPUs; `zbc profile` measures the actual numbers.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from zbc.errors import ZbcError
from zbc.job.sections import Hardware
from zbc.job.toml import Document
from zbc.job.wording import did_you_mean

GPU = ("hardware", "gpu")
ARITHMETIC, BYTES = 0.7, 0.85  # sustained share of a peak
SUSTAINED = f"{ARITHMETIC:.0%} of its TFLOPS, {BYTES:.0%} of its GB/s"
CPU = 20.0  # TFLOPS: more than a rank on a CPU sustains


class Gpu(NamedTuple):
    """Peaks of one GPU, and their source."""

    tflops: float  # bfloat16 with float32 sums, no sparsity
    memory_gib: float  # as nvidia-smi or rocm-smi reports it
    memory_gbps: float
    link_gbps: float  # Gbit/s from one GPU to another of its node, one way
    network_gbps: float  # Gbit/s per GPU between nodes, in the vendor's own system; 100 if there is none
    link: str
    source: str


GPUS = {
    "h100-sxm": Gpu(989, 80, 3350, 3600, 400, "NVLink 4", "NVIDIA H100 and DGX H100 data sheets, 2023"),
    "h100-pcie": Gpu(756, 80, 2000, 512, 100, "PCIe 5 x16", "NVIDIA H100 data sheet, 2023"),
    "h200": Gpu(989, 141, 4800, 3600, 400, "NVLink 4", "NVIDIA H200 and DGX H200 data sheets, 2024"),
    "b200": Gpu(2250, 180, 8000, 7200, 400, "NVLink 5", "NVIDIA DGX B200 data sheet, 2024"),
    "a100-80g": Gpu(312, 80, 2039, 2400, 200, "NVLink 3", "NVIDIA A100 80GB SXM and DGX A100 data sheets, 2021"),
    "a100-40g": Gpu(312, 40, 1555, 2400, 200, "NVLink 3", "NVIDIA A100 40GB SXM and DGX A100 data sheets, 2020"),
    # The link is per pair of GPUs; an all-reduce over all eight uses seven such links at a time.
    "mi300x": Gpu(1307, 192, 5300, 512, 400, "Infinity Fabric, a pair", "AMD Instinct MI300X data sheet, 2023"),
    "l40s": Gpu(362, 45, 864, 256, 100, "PCIe 4 x16", "NVIDIA L40S data sheet, 2023; 48 GB less ECC"),
    "rtx4090": Gpu(165, 24, 1008, 256, 100, "PCIe 4 x16", "NVIDIA Ada GPU architecture white paper, 2022"),
}
SHORT = {"h100": "h100-sxm", "a100": "a100-80g", "a100-80gb": "a100-80g", "a100-40gb": "a100-40g", "4090": "rtx4090"}


def find(name: str) -> Gpu | None:
    """A GPU by its name, in any spelling: `H100_SXM`; None if there is none."""
    plain = name.lower().replace("_", "-").replace(" ", "-")
    return GPUS.get(SHORT.get(plain, plain))


def named(name: str, where: str | None = None, key: str = "hardware.gpu") -> Gpu:
    """A GPU by its name; raises E103 with the nearest name if there is none."""
    gpu = find(name)
    if gpu is None:
        listed = f"known: {', '.join(GPUS)}"
        kind = re.search(r"[a-z]+\d+", name.lower())  # h100 of NVIDIA H100-80GB
        alike = [known for known in GPUS if kind is not None and known.startswith(kind[0])]
        nearest = did_you_mean(name, [*GPUS, *SHORT])
        hint = f"{nearest} {listed}" if nearest else f"{listed}; of others write tflops, memory_gib, link_gbps"
        hint = f"did you mean {' or '.join(alike)}?" if alike else hint
        raise ZbcError("E103", f"config: {key}: no GPU is known as {name!r}", where=where, hint=hint)
    return gpu


def values(gpu: Gpu) -> dict[tuple[str, str], float | str]:
    """Default settings of a job with this GPU."""
    return {
        ("hardware", "device"): "cuda",
        ("hardware", "memory_gib"): float(gpu.memory_gib),
        ("hardware", "tflops"): round(ARITHMETIC * gpu.tflops, 1),
        ("hardware", "memory_gbps"): round(BYTES * gpu.memory_gbps, 1),
        ("hardware", "link_gbps"): round(BYTES * gpu.link_gbps, 1),
        ("hardware", "inter_node_gbps"): round(BYTES * gpu.network_gbps, 1),
    }


def filled(document: Document) -> Document:
    """A document with the values that `hardware.gpu` stands for, at its place. A key at the same level overrides it; a
    key of an extended file, or of the file under --set hardware.gpu, does not. Unknown names are left to the rules."""
    hardware = document.values.get("hardware")
    name = hardware.get("gpu") if isinstance(hardware, dict) else None
    sheet = find(name) if isinstance(name, str) else None
    if sheet is None:
        return document
    level, tables, places = document.level(GPU), dict(document.values), dict(document.places)
    for (table, key), value in values(sheet).items():
        path = table, key
        there = tables.get(table, {})
        if not isinstance(there, dict) or (document.has(path) and document.level(path) >= level):
            continue
        tables[table] = {**there, key: value}
        places[path] = document.where(GPU)
    return replace(document, values=tables, places=places)


def measured(hardware: Hardware) -> Hardware:
    """Without the link of the data sheet: a profile has measured one."""
    sheet = None if hardware.gpu is None else find(hardware.gpu)
    if sheet is None or hardware.link_gbps != values(sheet)["hardware", "link_gbps"]:
        return hardware
    return hardware.model_copy(update={"link_gbps": None})


def peak_tflops(name: str | None) -> float | None:
    """The peak of `hardware.gpu`, of which MFU is the share; None without one."""
    sheet = None if name is None else find(name)
    return None if sheet is None else sheet.tflops


def forgotten(hardware: Hardware) -> str | None:
    """A warning for a job with more TFLOPS than a CPU has and the default device "cpu"; else None."""
    tflops = hardware.fastest.tflops
    if "device" in hardware.model_fields_set or not isinstance(tflops, float) or tflops <= CPU:
        return None
    memory = "" if hardware.memory_gbps else " with a CPU's memory bandwidth"
    return f"hardware.tflops = {tflops:g} is no CPU's: estimated{memory}; set hardware.gpu or device"
