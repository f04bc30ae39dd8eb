"""What a model computes: the settings that a checkpoint stores and that a run continuing from it must have, too."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from zbc.job.adapter import Adapter
from zbc.job.model_section import Model
from zbc.job.section import Section
from zbc.job.spellings import of_plan

_Section = TypeVar("_Section", bound=Section)

# They may differ, and a run says so.
PRECISION = {"model.dtype", "model.parameters", "model.seq_len", "optimizer.state"}
# How it is computed or planned, and where its first weights came from.
_OTHERWISE = {"compile", "loss_chunk", "loss_scale", "imbalance", "pretrained", "config"}


class Difference(NamedTuple):
    """A setting that differs between a checkpoint, `before`, and a job, `now`."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} = {_shown(self.before)}, this job has {_shown(self.now)}"

    @property
    def undo(self) -> str:
        """How the job gets the checkpoint's setting."""
        if self.before is None:
            return f"drop {self.key}"
        return f"plan with --set {shlex.quote(f'{self.key}={_shown(self.before)}')}"


def differences(before: Mapping[str, Mapping[str, Any]], now: Mapping[str, Any]) -> list[Difference]:
    """The settings in which two trainings differ, each given as its sections [model], [adapter] and [optimizer]; those
    that one has by default and the other has written down are the same."""
    ours, theirs = _settings(now), _settings(before)
    keys = dict.fromkeys([*theirs, *ours])
    return [Difference(key, theirs.get(key), ours.get(key)) for key in keys if theirs.get(key) != ours.get(key)]


def _settings(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`model.layers` -> 4; defaults that follow from other keys are resolved."""
    model, adapter = _read(Model, sections["model"]), _read(Adapter, sections.get("adapter", {}))
    values = model.model_dump(mode="json", exclude=_OTHERWISE)
    if model.builtin:
        values |= {"kv_heads": model.kv_heads or model.heads, "head_size": model.head_width}
        values |= {"ffn_hidden": [model.mlp_width, model.shared_hidden] if model.shared_hidden else model.mlp_width}
        values |= {"top_k": model.met or None}
    adapts = {"rank": adapter.rank, "alpha": adapter.scale * adapter.rank}  # names of weights tell the targets
    state = sections.get("optimizer", {}).get("state", "float32")
    return dict(_flat({"model": values, "adapter": adapts, "optimizer": {"state": state}}))


def _read(section: type[_Section], values: Mapping[str, Any]) -> _Section:
    """A section as another version of zbc may have written it: without keys that this one lacks."""
    known = of_plan(section.__name__.lower(), values)  # before keys that are not known go
    return section.model_validate({key: known[key] for key in known if key in section.model_fields}, strict=False)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
