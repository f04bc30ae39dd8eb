"""`profile.json`: costs of a model's layers on a device, measured, derived from a recorded run, or bytes of a dry run.

    zbc profile JOB.toml -o profile.json       zbc plan JOB.toml --profile profile.json

Layers that do the same on tensors of the same shape are one kind, stored once, so a profile also serves jobs with more
or fewer blocks, other ranks and other schedules. It does not serve another model, device or microbatch size: see
`misfits`. The same measurements give the same bytes; a profile holds no names of machines.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from zbc.errors import ZbcError
from zbc.host.contents import contents
from zbc.job.adapter import Adapter
from zbc.job.model_section import Model
from zbc.job.section import Count, Ms, NotNegative, Rate, Section, Us, key
from zbc.job.wording import first_of
from zbc.topology import INNER, At

if TYPE_CHECKING:
    from zbc.job.spec import Job

FORMAT, VERSION = "zbc-profile", 1
WIDE = 0.10  # distance of the quartiles, as a share of the median, above which a time is not trusted
FAMILY = ["embed", "block", "head"]  # the order of a built-in family whose blocks all cost the same
_DIGITS = 6  # significant digits in the file
# Of a layer, left out where they are empty, as in files from before there were any.
_NEWER = ("slices", "kernels", "collectives", "apart", "tied", "matrices", "experts")
# Keys of [model] that no cost depends on.
_FREE = ("pretrained", "norm_eps", "rope_theta")

Bytes = Annotated[int, Field(ge=0, le=2**60)]


class Measured(Section):
    """A median and the distance of the quartiles as a share of it."""

    ms: Ms
    spread: NotNegative = 0.0


class SliceTime(Section):
    """ms of a slice of a sequence, attending to the keys and values of the tokens before it."""

    rows: Count = key(..., "tokens of the slice")
    past: Annotated[int, Field(ge=0)] = key(..., "tokens of the sequence before them")
    f: Ms
    b: Ms
    w: Ms


class LayerBytes(Section):
    """Bytes of one layer; activations for one microbatch.

    `kept_b` is saved from F to B in addition to the layer's input and output, which neighbours share (`keeps_input`:
    its backward needs its input, and so on), `kept_w` from B to W. `more_*` is the workspace of an op: its peak beyond
    the bytes held before it and, for F, after it (`more_alone`: an F that saves nothing). `rise_*` is that of the
    first backward of a step, with gradients as they come, of which B makes `gradients_b`.
    Parameters and their states are as the runtime holds them: buffers and copies of weights in another type count as
    weights. `largest`: elements of the largest parameter, `ends`: elements of the first and the last that train;
    `pair` is the largest sum of twice a parameter and the one before it, the workspace of a step (0 in older files:
    twice the largest).
    """

    input: Bytes
    output: Bytes
    kept_b: Bytes
    kept_w: Bytes
    keeps_input: bool
    keeps_output: bool
    keeps_given: bool = key(False, "W needs the gradient of its output as it came")
    kept_again: Bytes = key(0, "with recompute, what stays from F to B beside the input")
    kv: Bytes = key(0, "of a slice, its keys and values; those of all slices are in buffers of their own")
    more_f: Bytes = 0
    more_alone: Bytes = 0
    more_b: Bytes = 0
    more_w: Bytes = 0
    more_bw: Bytes = 0
    rise_b: Bytes | None = key(None, "None, in older files: as if all gradients were there before")
    rise_w: Bytes | None = None
    rise_bw: Bytes | None = None
    late: dict[str, int] = key(
        {},
        "of b, bw, rise_b, rise_bw the part after the last kernel that reads the gradient that came from the next "
        "layer; the others are until then",
    )
    whole: list[Bytes] = key([], "more_bw and rise_bw in plans that split no backward, if they differ", max_length=3)
    whole_late: dict[str, int] = key({}, "of these, as late")
    until_bw: Bytes | None = key(None, "as rise_bw of a later one, until it meets other ranks, if it does")
    weights: Bytes
    casts: Bytes = key(0, "of weights, in copies in the type that layers compute in")
    buffers: Bytes = key(0, "of weights, in tensors that are no parameters")
    tensors: list[Bytes] | None = key(None, "of kept_b, each of no whole numbers; None: not known")
    gradients: Bytes
    gradients_b: Bytes | None = key(None, "of them, what B makes where W is an op of its own; None: all")
    masters: Bytes
    optimizer: Bytes
    largest: Bytes
    pair: Bytes = 0
    ends: list[Bytes] = Field(default_factory=list, max_length=2)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """Without the keys of older files that follow from others."""
        return {k: v for k, v in data.items() if not k.startswith("first_")} if isinstance(data, dict) else data


# Of an op: a class, floating-point operations, bytes moved, and of how many equal kernels these are the sums.
Kernel = Annotated[tuple[str, float, float, int], Field(strict=False)]
# Of an op, in order: an axis of ranks, what they do together, and the bytes of the whole tensor.
Collective = Annotated[tuple[str, str, int], Field(strict=False)]
Shape = Annotated[tuple[int, int], Field(strict=False)]  # of a matrix


class LayerProfile(Section):
    """One kind of layer. Times are of one microbatch, without the overhead of a rank per op (`Host`).

    None: not measured; the value is derived from the others or the cost model. A dry run has `kernels` and
    `collectives` by op instead: f, b, w, bw and again, from which times follow for some hardware.
    """

    f: Measured
    b: Measured = key(..., "the gradient of the input, where W is an op of its own")
    w: Measured = key(..., "the gradient of the weights; with b more than bw, since b leaves work for it")
    bw: Measured | None = key(None, "both in one; None: b + w")
    again: Measured | None = key(None, "what recompute adds to a backward; None: f")
    step: Measured | None = key(None, "the optimizer's step")
    norm: Measured | None = key(None, "the sum of squares of the gradients")
    tentative: Measured | None = key(None, "a tentative step, without the barrier")
    parameters: int = key(0, "how many numbers", ge=0)
    parts: list[Bytes] = key([], "how many numbers in each parameter; [] if not known")
    apart: list[Bytes] = key([], "of parts, those of experts that ranks share out")
    tied: int = key(0, "how many numbers are in parameters of another layer (model.ties)", ge=0)
    matrices: list[Shape] = key([], "of those that Muon steps")
    experts: int = key(0, "matrices in the largest stack of these", ge=0)
    bytes: LayerBytes | None = None
    kernels: dict[str, list[Kernel]] = key({}, "of a dry run")
    collectives: dict[str, list[Collective]] = key({}, "of a dry run, inside of ops")
    slices: list[SliceTime] = key([], "of a block: times of slices of a microbatch")

    def times(self) -> Iterator[tuple[str, Measured]]:
        for name in ("f", "b", "w", "bw", "again", "step", "norm", "tentative"):
            measured = getattr(self, name)
            if measured is not None:
                yield name, measured


class Point(Section):
    """The time from the start of a send until its receiver continues."""

    bytes: Count
    us: Us
    spread: NotNegative = 0.0


class LinkProfile(Section):
    """A transfer between two ranks takes `latency_us` and its bytes at `gbps` (GB/s), fitted to `points`."""

    latency_us: Us
    gbps: Rate
    points: list[Point] = Field(default_factory=list)

    def ms(self, size: float) -> float:
        """ms of a transfer of `size` bytes."""
        return self.latency_us / 1e3 + size / (self.gbps * 1e6)


class Host(Section):
    """Overhead of a rank in microseconds: per F, B (or BW) and W of a stage, and per transfer before or after them, to
    which `transfer_share` of the transfer adds.

    `agree_us`: one all-reduce of a few numbers over two ranks, several of which agree on a step; `close_us`: the other
    work of a rank at the end of a step.
    """

    f_us: Us = 0.0
    b_us: Us = 0.0
    w_us: Us = 0.0
    transfer_us: Us = 0.0
    transfer_share: NotNegative = 0.0
    agree_us: Us = 0.0
    close_us: Us = 0.0


class Copy(Section):
    """GB/s between pinned host memory and device memory: one way alone, both ways at once, and both ways during matrix
    products, which then take `slower` times as long."""

    to_device_gbps: Rate
    to_host_gbps: Rate
    both_to_device_gbps: Rate | None = None
    both_to_host_gbps: Rate | None = None
    busy_to_device_gbps: Rate | None = None
    busy_to_host_gbps: Rate | None = None
    slower: NotNegative | None = None

    @property
    def gbps(self) -> tuple[float, float]:
        """GB/s to the host and back: the lowest that was measured, since a plan copies both ways while it computes."""
        out = (self.to_host_gbps, self.both_to_host_gbps, self.busy_to_host_gbps)
        back = (self.to_device_gbps, self.both_to_device_gbps, self.busy_to_device_gbps)
        least_out, least_back = (min(rate for rate in rates if rate is not None) for rates in (out, back))
        return least_out, least_back

    @property
    def alone(self) -> float:
        """The time of a copy while none goes the other way, as a share of its time at `gbps`."""
        out, back = self.gbps
        return min(1.0, (out / self.to_host_gbps + back / self.to_device_gbps) / 2)


class WordTimes(Section):
    """ms of a rank's share of a shared vocabulary, for one microbatch and `rows` rows of its tables."""

    rows: Count = key(..., "words of the rank")
    s: list[Ms] = key(..., "logits of its words, with 1 and with 2 sums", min_length=2, max_length=2)
    t: list[Ms] = key(..., "the gradient of its rows, with 1 and with 2 sums", min_length=2, max_length=2)
    i: Ms = key(..., "look-up of its words")
    e: Ms = key(..., "the gradient of what was looked up")

    def whole(self, vocab: int) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        """ms of F, B and W of the embedding and of the output layer, with all words at the ends of a pipeline."""
        parts = vocab / self.rows
        return (self.i, 0.0, self.e), (parts * self.s[1], parts * (self.s[0] - self.s[1]), parts * self.t[0])


class WordBytes(Section):
    """A rank's share of a shared vocabulary, for one microbatch, by a dry run: what its ops I, S, T and E need, and the
    values between them (zbc/ops.py)."""

    rows: Count = key(..., "words of the rank with most")
    parts: list[Bytes] = key(..., "how many numbers in its rows of each table")
    weights: Bytes = key(..., "of these tables, and of copies in the type that the output layer computes in")
    told: Bytes = key(..., "that it tells the other ranks of its logits")
    values: dict[str, Bytes]
    needs: dict[str, Bytes] = key(..., "of an op, by its column: its peak beyond the bytes held before")
    kernels: dict[str, list[Kernel]] = key(..., "of an op, by its column")


class Origin(Section):
    """The device and method of the measurements. "dry": layers ran without numbers; every plan makes times of
    their kernels."""

    source: Literal["measured", "trace", "dry"] = "measured"
    device: Literal["cpu", "cuda"]
    name: str = key("", "of the processor or GPU")
    threads: Count = key(1, "per rank")
    together: Count = key(1, "ranks that computed at the same time")
    rounds: Count = key(1, "repetitions behind each median")
    torch: str = ""


class Profile(Section):
    """`profile.json`. `order`: the kind of each layer; embed, block, head cover all layers of a built-in family."""

    format: Literal["zbc-profile"] = "zbc-profile"
    version: Literal[1] = 1
    on: Origin
    model: dict[str, Any]
    adapter: dict[str, Any] = key({}, "rank and targets of what trains in place of all weights")
    microbatch_size: Count
    cp: Count = key(1, "ranks that share the tokens; times and bytes are of those that one has")
    tp: Count = key(1, "ranks that share each layer; times and bytes are of the part that one has")
    optimizer: str = key("", "the kind of the optimizer that `step` and bytes are of")
    layers: dict[str, LayerProfile]
    order: list[str]
    link: LinkProfile | None = None
    sums: LinkProfile | None = key(None, "a sum over the ranks that share a layer, instead of a transfer")
    copies: Copy | None = key(None, "between host and device; on cuda")
    words: WordTimes | None = key(None, "of jobs whose ranks may share the vocabulary")
    shared: WordBytes | None = key(None, "where ranks share the vocabulary, by a dry run")
    reserve_bytes: Bytes | None = key(
        None, "of a GPU, in use beside torch's own memory: context, workspaces, communicators"
    )
    host: Host = Host()
    tokens: list[Count] = key([], "of the rows of each microbatch of the recorded steps, if unequal")

    @property
    def timed(self) -> bool:
        """Whether its times were measured."""
        return self.on.source != "dry"

    def plain(self) -> dict[str, Any]:
        """The profile as plain data, as in files."""
        plain: dict[str, Any] = _rounded(self.model_dump(mode="json"))
        for layer, name in product(plain["layers"].values(), _NEWER):
            if not layer[name]:
                del layer[name]
        for name in ("words", "shared", "sums", "cp", "tp", "adapter", "tokens"):
            if getattr(self, name) in (None, 1, {}, []):
                del plain[name]
        if self.copies is not None:
            plain["copies"] = {name: value for name, value in plain["copies"].items() if value is not None}
        return plain

    def dumps(self) -> str:
        return json.dumps(self.plain(), indent=1, sort_keys=True) + "\n"

    def wide(self) -> Iterator[tuple[str, Measured]]:
        """Times with too wide a spread, as `block.w`; only times above a tenth of the largest of their layer."""
        for kind, layer in self.layers.items():
            times = dict(layer.times())
            most = max((time.ms for time in times.values()), default=0.0)
            yield from (
                (f"{kind}.{n}", time) for n, time in times.items() if time.spread > WIDE and time.ms > most / 10
            )


def spread(values: Sequence[float]) -> float:
    """The distance of the quartiles as a share of the median; 0 for fewer than two values or a median of 0."""
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / abs(middle) if middle else 0.0


def _rounded(value: Any) -> Any:
    """The value with all floats rounded to the significant digits of a file."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def model_of(model: Model) -> dict[str, Any]:
    """The keys of `[model]` that decide the cost of a layer, with default widths filled in."""
    keys = {key: value for key, value in model.model_dump(mode="json").items() if key not in _FREE}
    if model.builtin:
        del keys["layers"], keys["ties"]
        keys |= {"kv_heads": model.kv_heads or model.heads, "head_size": model.head_width}
        keys["ffn_hidden"] = [model.mlp_width, model.shared_hidden] if model.shared_hidden else model.mlp_width
    return keys


def about(job: Job) -> dict[str, Any]:
    """The fields of a profile that say which job it is of."""
    return {
        "model": model_of(job.model),
        "adapter": job.adapter.timed,
        "microbatch_size": job.schedule.microbatch_size,
        "cp": job.parallel.cp,
        "tp": job.parallel.tp,
        "optimizer": job.optimizer.name,
    }


def order_of(kinds: Sequence[str]) -> list[str]:
    """`Profile.order` of layers of these kinds."""
    return FAMILY if {*kinds} == {*FAMILY} else list(kinds)


def misfits(
    profile: Profile, model: Model, adapter: Adapter, *, device: str, microbatch_size: int, inner: At
) -> list[str]:
    """Differences between a profile and a job, as lines of text; empty if it fits. `inner`: ranks along INNER."""
    wanted, profiled = _rounded(model_of(model)), _rounded(profile.model)
    defaults = {key: info.default for key, info in Model.model_fields.items()}
    rows = [(f"model.{key}", profiled.get(key, defaults.get(key)), wanted[key]) for key in wanted]
    rows += [(f"model.{key}", value, None) for key, value in profiled.items() if key not in wanted]
    wanted, profiled = adapter.timed, profile.adapter
    rows += [(f"adapter.{key}", profiled.get(key), wanted.get(key)) for key in {**profiled, **wanted}]
    rows.append(("schedule.microbatch_size", profile.microbatch_size, microbatch_size))
    rows.append(("hardware.device", profile.on.device, device))
    rows += [(f"parallel.{axis.name}", getattr(profile, axis.name), n) for axis, n in zip(INNER, inner, strict=True)]
    lines = [f"{key}: {_word(a)} in the profile, {_word(b)} in the job" for key, a, b in rows if a != b]
    return lines or _incomplete(profile, model)


def _incomplete(profile: Profile, model: Model) -> list[str]:
    unknown = sorted(set(profile.order) - profile.layers.keys())
    if unknown:
        return [f"order names {', '.join(unknown)}, which layers does not have"]
    extra = 2 if model.builtin else 0  # embedding and head
    if (model.builtin and profile.order == FAMILY) or len(profile.order) == model.layers + extra:
        return []
    return [f"order has {len(profile.order) - extra} layers, model.layers is {model.layers}"]


def _word(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)


def read(path: Path, where: str | None = None) -> Profile:
    """Reads a profile; `where`: the place that names it. Raises E142 (missing, damaged, of another version)."""
    again = "make it with `zbc profile JOB.toml -o FILE`"
    try:
        data = json.loads(contents(path))
    except OSError as error:
        raise ZbcError("E142", f"profile: cannot read {path}: {error.strerror}", where=where, hint=again) from None
    except (ValueError, RecursionError):  # of JSON and of text that is not UTF-8
        raise ZbcError("E142", f"profile: {path} is not JSON", where=where, hint=again) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        form = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ZbcError("E142", f"profile: {path} is not a profile (format {form!r})", where=where, hint=again)
    if data.get("version") != VERSION:
        text = f"profile: {path} has version {data.get('version')!r}, this zbc reads {VERSION}"
        raise ZbcError("E142", text, where=where, hint=again)
    return checked(data, str(path), where, again)


def checked(data: Any, name: str, where: str | None, hint: str) -> Profile:
    """`data` as a profile. Raises E142 with the first problem."""
    try:
        profile = Profile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]["input"]
        value = "" if isinstance(first, dict | list) else f", found {first!r}"
        text = f"profile: {name}: {first_of(error)}{value}"
        raise ZbcError("E142", text, where=where, hint=hint) from None
    if profile.timed and not any(layer.f.ms + layer.b.ms + layer.w.ms for layer in profile.layers.values()):
        raise ZbcError("E142", f"profile: {name}: layers: none of them takes any time", where=where, hint=hint)
    return profile
