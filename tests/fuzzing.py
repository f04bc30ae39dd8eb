"""Damaged inputs: for any content of a file, zbc reads it or raises a ZbcError with the problem."""

import hashlib
import json
import random
import shutil
import struct
import zlib
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from tests.fuzzing_orders import any_job, move_ops, moved, runs, sign
from tests.jobs import toml_text, toml_value
from tests.profiles import profile_of
from zbc.api import Plan
from zbc.commands.checking import check_csv, check_plan
from zbc.compiler.compile import compile_job
from zbc.compiler.schedules import SCHEDULES, Request
from zbc.compiler.shapes import load_job
from zbc.errors import ZbcError
from zbc.interop import torch_csv
from zbc.job import hfconfig
from zbc.job.hffolder import INDEX, tensor_files
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.files import Reader, TensorPart, put_together, write_parts
from zbc.training.data.corpus import Tokens, sidecar, write_sidecar
from zbc.training.data.tokens import TokenWindows

VALUES: list[Any] = [None, True, -1, 0, 1, 3, 2**31, 2**63, 10**30, 10**400, -0.5, 1e308, float("nan"), "", "x", "a:b"]
VALUES += ["1.0x", "é\x00", "../x", "0", [], [1, "a"], [[]], {}, {"a": 1}, {"kind": "linear", "factor": 0}, "F s0 m0"]
VALUES += ["float32"]


def damage(rng: random.Random, raw: bytes) -> bytes:
    """A few changes of bytes: flipped, dropped, doubled, cut off, digits made long, other bytes inserted."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        how = rng.randrange(6)
        if how == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at : at + rng.randint(1, 30)]
        elif how == 2:
            data[at:at] = data[at : at + rng.randint(1, 60)]
        elif how == 3:
            del data[at:]
        elif how == 4:
            digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
            if digits:
                where = rng.choice(digits)
                data[where:where] = rng.choice([b"9" * 20, b"9" * 5000, b"-", b"0", b"1e", b"7"])
        else:
            data[at:at] = rng.choice([b"\x00", b"\xff\xfe", b"[", b"}", b'"', b"\n", "é".encode(), b"nan", b"[[a]]"])
    return bytes(data)


def swap_value(rng: random.Random, tree: Any) -> Any:
    """The same JSON with one value, anywhere, replaced by some other."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(sorted(tree))
        if rng.random() < 0.1:
            return {k: v for k, v in tree.items() if k != key}
        return {**tree, key: swap_value(rng, tree[key])}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        at = rng.randrange(len(tree))
        return [*tree[:at], swap_value(rng, tree[at]), *tree[at + 1 :]]
    return rng.choice(near(tree) if rng.random() < 0.5 else VALUES)


def near(value: Any) -> list[Any]:
    """Values of almost the same form: neighbours and extremes of a number, a list of other length or order."""
    if isinstance(value, int | float):
        return [value - 1, value + 1, 2 * value, -value, value / 3 if abs(value) < 1e300 else 0, 2**53]
    if isinstance(value, list):
        return [value * 2, value[:-1], value[1:], value[1:] + value[:1], [value], {"0": value}]
    if isinstance(value, dict):
        return [{**value, "x": value}, {**value, **dict.fromkeys(value, value)}, [value], [*value], [*value.values()]]
    return [[value], {"x": value}, f"{value}x"]


KINDS = ("job", "plan", "csv", "toml", "profile", "tokens", "config", "index", "checkpoint")


class Inputs:
    """Good inputs below a folder, and for each of KINDS a method that damages one by a seed and reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "good.toml").write_text(
            toml_text(
                model={"rope_theta": 10000.0, "variant": "rotary"},
                costs={"f": 1.0, "b": [1.0, 2.0, 3.0, 4.0], "w": 1.0},
                optimizer={"schedule": {"kind": "cosine", "warmup_steps": 1}},
                data={"validation": 0.1},
            )
        )
        (folder / "plain.toml").write_text(toml_text())
        compile_job(load_job(folder / "good.toml")).write(folder / "good-plan")
        self.orders = [
            Plan.read(folder / "good-plan").export("torch-csv")[".csv"],
            torch_csv.dumps(SCHEDULES["dualpipe-v"].make(Request(2, 4, 2, overlap=True))),
            torch_csv.dumps(SCHEDULES["zb-v"].make(Request(3, 3, 2))),
        ]

    def toml(self, rng: random.Random) -> None:
        path = self.folder / "job.toml"
        raw = (self.folder / "good.toml").read_bytes()
        if rng.random() < 0.5:
            path.write_bytes(damage(rng, raw))
            load_job(path)
        else:
            section = rng.choice(
                ["model", "parallel", "schedule", "costs", "optimizer", "train", "data", "memory", "log"]
            )
            key = rng.choice(["layers", "hidden", "heads", "kind", "f", "lr", "schedule", "path", "pp", "every", "x"])
            path.write_bytes(raw)
            load_job(path, [f"{section}.{key}={toml_value(rng.choice(VALUES))}"])

    def profile(self, rng: random.Random) -> None:
        """A profile with up to three changes, and a plan by it."""
        data = profile_of(load_job(self.folder / "plain.toml")).model_dump(mode="json")
        for _ in range(rng.randint(1, 3)):
            data = swap_value(rng, data)
        path = self.folder / "profile.json"
        path.write_bytes(damage(rng, json.dumps(data).encode()) if rng.random() < 0.2 else json.dumps(data).encode())
        compiled = compile_job(load_job(self.folder / "plain.toml", profile=path), budget=0.0)
        runs(compiled.program)

    def plan(self, rng: random.Random) -> None:
        folder = self.folder / "plan"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / "good-plan", folder)
        for _ in range(rng.randint(1, 2)):
            if rng.random() < 0.5:
                with suppress(ValueError, KeyError, TypeError, IndexError):  # damaged before
                    move_ops(rng, folder)
                continue
            file = rng.choice(sorted(folder.iterdir()))
            raw = file.read_bytes()
            try:
                changed = json.dumps(swap_value(rng, json.loads(raw))).encode()
            except ValueError:
                changed = raw
            file.write_bytes(damage(rng, raw) if rng.random() < 0.4 else changed)
        if rng.random() < 0.8:
            sign(folder)
        runs(check_plan(folder).program)

    def job(self, rng: random.Random) -> None:
        changes, budget = any_job(rng)
        path = self.folder / "any.toml"
        path.write_text(toml_text(**changes))
        compiled = compile_job(load_job(path), budget=budget)
        runs(compiled.program)
        compiled.write(self.folder / "any-plan")
        check_plan(self.folder / "any-plan")

    def csv(self, rng: random.Random) -> None:
        path = self.folder / "order.csv"
        rows = [row.split(",") for row in rng.choice(self.orders).splitlines()]
        cells = [cell for row in rows for cell in row]
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(rows))
            rows[at] = moved(rng, rows[at], cells) if rows[at] else rows[at]
        raw = "\n".join(",".join(row) for row in rows).encode()
        path.write_bytes(damage(rng, raw) if rng.random() < 0.4 else raw)
        runs(check_csv(path).program)

    def tokens(self, rng: random.Random) -> None:
        path = self.folder / "tokens.bin"
        path.write_bytes(array("H", range(100)).tobytes())
        write_sidecar(path, Tokens("uint16", 100, 100, 0, 1, "bytes"))
        about = sidecar(path)
        if rng.random() < 0.5:
            about.write_text(json.dumps(swap_value(rng, json.loads(about.read_bytes()))))
        elif rng.random() < 0.7:
            about.write_bytes(damage(rng, about.read_bytes()))
        else:
            about.unlink()
        if rng.random() < 0.5:
            path.write_bytes(damage(rng, path.read_bytes()))
        dtype = rng.choice([None, "uint16", "uint32"])
        found = TokenWindows([str(path)], dtype, rng.choice([1, 7, 2**40]), rng.choice([None, 50, 100, 2**40]))
        for index in {0, len(found) - 1} if len(found) else ():
            found.inputs([index])
            found.targets([index])

    def config(self, rng: random.Random) -> None:
        rope = {"rope_type": "default", "rope_theta": 1e4}
        llama = {"model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 2, "rope_parameters": rope}
        llama |= {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64}
        llama |= {"num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
        sliding = llama | {"model_type": "mistral", "sliding_window": 64, "layer_types": []}
        gpt = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_inner": None}
        good = rng.choice([llama, sliding, gpt])
        path = self.folder / hfconfig.CONFIG
        path.write_text(json.dumps(swap_value(rng, good)))
        if rng.random() < 0.3:
            path.write_bytes(damage(rng, path.read_bytes()))
        read = hfconfig.read_config(self.folder)
        found = hfconfig.model_of(read, "config.json")
        hfconfig.check_fits(found, read, "config.json")
        hfconfig.config_of(found)

    def index(self, rng: random.Random) -> None:
        folder = self.folder / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        text = json.dumps(swap_value(rng, header) if rng.random() < 0.5 else header).encode()
        (folder / "model.safetensors").write_bytes(damage(rng, struct.pack("<Q", len(text)) + text + bytes(8)))
        if rng.random() < 0.5:
            good = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}
            (folder / INDEX).write_text(json.dumps(swap_value(rng, good)))
        tensor_files(folder)

    def checkpoint(self, rng: random.Random) -> None:
        """A damaged checkpoint of two ranks; often with valid hashes and a valid marker."""
        folder = write_checkpoint(self.folder / "checkpoints")
        index = json.loads((folder / disk.INDEX).read_bytes())
        name, how = rng.choice(sorted(index["files"])), rng.random()
        if how < 0.4:
            index = swap_value(rng, index)
        elif how < 0.8:
            raw = damage(rng, (folder / name).read_bytes())
            (folder / name).write_bytes(raw)
            index["files"][name] = {"bytes": len(raw), "crc32": zlib.crc32(raw)}
        text = json.dumps(index).encode()
        text = damage(rng, text) if how >= 0.8 else text
        (folder / disk.INDEX).write_bytes(text)
        if how < 0.9:
            (folder / disk.COMPLETE).write_text(json.dumps({"index": hashlib.sha256(text).hexdigest()}))
        reader = Reader(folder)
        reader.check_files()
        for tensor, start, count in (("model.a", 3, 6), ("model.b", 1, 3), ("optim.a.step", 0, 1)):
            if tensor in reader.tensors:
                reader.fill(torch.empty(count), tensor, start)


def write_checkpoint(parent: Path) -> Path:
    """A complete checkpoint, written by two ranks."""
    folder = disk.folder_of(parent, 1)
    shutil.rmtree(folder, ignore_errors=True)
    numbers = torch.arange(12.0)
    shares = [
        [TensorPart("model.a", (4, 3), 0, numbers), TensorPart("model.b", (5,), 2, numbers[:3])],
        [TensorPart("model.b", (5,), 0, numbers[:2]), TensorPart("optim.a.step", (), 0, numbers[:1])],
    ]
    whole = put_together([write_parts(folder, rank, share) for rank, share in enumerate(shares)])
    words = dict.fromkeys(("optimizer", "plan", "schedule", "run", "zbc_version", "torch_version"), "x")
    about = {**words, "step": 1, "samples": 8, "data_samples": 9, "seed": 7, "ranks": 2, "copies": 1}
    own = {"format": disk.FORMAT, "version": disk.VERSION}
    disk.write_index(folder, disk.Index(**own, **about, files=whole.files, tensors=whole.tensors))
    return folder


def survives(inputs: Inputs, kind: str, seed: int) -> bool:
    """Whether the input was read in spite of its damage; False for a ZbcError. Other exceptions propagate."""
    try:
        getattr(inputs, kind)(random.Random(f"{kind} {seed}"))
    except ZbcError as error:
        error.render()
        return False
    return True
