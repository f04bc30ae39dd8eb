"""What each layer costs, counted from the model and the hardware: floating-point operations, bytes moved, bytes kept.

Times are the larger of arithmetic at `hardware.tflops` and memory traffic at `hardware.memory_gbps`, in ms, for one
microbatch. Per token of a block of width h, with queries of width q (all heads), keys and values of width k each, an
MLP of width f, sequence length s, n-byte activations and P weights in its linear layers:

    F   2 P + 2 s q (causal attention, half of the square)        W   2 P
    B   2 P + 5 s q (attention backward computes the scores anew)

P is h (2q + 2k) + 2 h f for gpt (12 h^2 with q = k = h and f = 4h), h (2q + 2k) + 3 h f for llama. The head adds 2 h V
per token to each of F, B and W. Bytes kept are counted in footprint.py.
These are estimates; measured times, given in [costs] or by a profile, replace them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zbc.compiler import footprint, profiled
from zbc.compiler.footprint import GRAD_BYTES, NOTHING, Footprint, Sizes
from zbc.compiler.profiled import Measurement
from zbc.profile import Profile
from zbc.spec import GivenCosts, Hardware, Job, LayerCost, Model, Optimizer

_DEFAULTS = {  # (tflops, memory GB/s, link Gbit/s, link us)
    "cuda": (312.0, 2000.0, 200.0, 10.0),
    "cpu": (0.1, 20.0, 20.0, 700.0),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer for one microbatch: times in ms, memory in bytes, parameters as a count."""

    name: str
    f: float
    b: float
    w: float
    params: int = 0
    size: Footprint = NOTHING
    tied: int = 0  # of them, those of the weight that embedding and head share
    measured: Measurement | None = None  # by a profile

    @property
    def total(self) -> float:
        return self.f + self.b + self.w

    @property
    def again(self) -> float:
        """ms that recompute adds to its backward."""
        return self.f if self.measured is None else self.measured.again


@dataclass(frozen=True, slots=True)
class Machine:
    """`[hardware]` with the defaults of its device filled in."""

    flops_per_ms: float
    bytes_per_ms: float
    link_bytes_per_ms: float
    link_ms: float

    @classmethod
    def of(cls, hardware: Hardware, profile: Profile | None = None) -> Machine:
        """Where `[hardware]` says nothing of links, a profile may have measured them."""
        tflops, memory, link, latency = _DEFAULTS[hardware.device]
        if profile is not None and profile.link is not None:
            link, latency = 8 * profile.link.gbps, profile.link.latency_us
        return cls(
            (hardware.tflops or tflops) * 1e9,
            (hardware.memory_gbps or memory) * 1e6,
            (hardware.link_gbps or link) * 1e6 / 8,
            (latency if hardware.link_us is None else hardware.link_us) / 1e3,
        )

    def ms(self, flops: float, moved: float) -> float:
        return max(flops / self.flops_per_ms, moved / self.bytes_per_ms)

    def transfer_ms(self, size: float) -> float:
        return self.link_ms + size / self.link_bytes_per_ms

    def sum_ms(self, size: float, ranks: int, *, halves: int = 2) -> float:
        """ms of a sum of `size` bytes over a ring of ranks; 0 for one rank.

        One half sums each rank's share of the bytes, the other collects the shares: (n-1)/n of the bytes each.
        """
        return self.link_ms + halves * (ranks - 1) / ranks * size / self.link_bytes_per_ms if ranks > 1 else 0.0


def layers(job: Job) -> list[Layer]:
    """Every layer in order, with measured costs or given per-layer costs where the job has them."""
    table = _counted(job)
    if job.profile is not None:
        found = profiled.measurements(job.profile, [layer.name for layer in table], job.optimizer.name)
        return [_measured(layer, one) for layer, one in zip(table, found, strict=True)]
    if job.costs.per == "layer" and job.costs.f is not None:
        return _given(table, job.costs)
    return table


def _counted(job: Job) -> list[Layer]:
    hardware = job.hardware
    cuda = hardware.device == "cuda"
    table = _family(job.model, job.schedule.microbatch_size, Machine.of(hardware), cuda)
    if table is None:  # a factory's layers are unknown until they are built: equal, with no bytes
        table = [Layer(f"layers.{i}", 1.0, 1.0, 1.0) for i in range(job.model.layers)]
    return table


def _family(model: Model, size: int, machine: Machine, cuda: bool) -> list[Layer] | None:
    if not model.builtin or model.hidden is None or model.vocab is None or model.seq_len is None:
        return None
    sizes = Sizes(
        hidden=model.hidden,
        heads=model.heads or 1,
        queries=(model.heads or 1) * model.head_width,
        keys=model.kv_width,
        mlp=model.mlp_width,
        gated=model.family == "llama",
        cuda=cuda,
        vocab=model.vocab,
        seq_len=model.seq_len,
        sequences=size,
        width=2 if model.dtype == "bfloat16" else 4,
        stream=2 if model.parameters == "bfloat16" else 4,
        rotary=model.rotary,
    )
    block = _block(sizes, machine)
    blocks = [replace(block, name=f"layers.{i}") for i in range(model.layers)]
    tied = model.vocab * model.hidden if model.tie_embeddings else 0
    return [replace(_embedding(sizes, machine), tied=tied), *blocks, replace(_head(sizes, machine), tied=tied)]


def _embedding(z: Sizes, machine: Machine) -> Layer:
    params = (z.vocab + (0 if z.rotary else z.seq_len)) * z.hidden
    moved = 8 * z.tokens * z.hidden
    return Layer(
        "embed",
        f=machine.ms(0, moved),
        b=0.0,
        w=machine.ms(0, moved + 3 * GRAD_BYTES * params),  # a dense gradient is filled, then added
        params=params,
        size=footprint.embedding(z),
    )


def _block(z: Sizes, machine: Machine) -> Layer:
    h, q, k, f = z.hidden, z.queries, z.keys, z.mlp
    others = 2 * h if z.gated else (q + 2 * k) + h + f + h + 4 * h  # norms; of gpt also biases
    # Norms, residual sums, rotary positions and the MLP's activation read and write what no matrix product does.
    turned = q + k if z.rotary else 0
    moved = (10 * h + (5 if z.gated else 2) * f + 2 * turned) * z.width * z.tokens
    linear = 2 * z.matrices * z.tokens
    return Layer(
        "block",
        f=machine.ms(linear + 2 * z.seq_len * q * z.tokens, moved),
        b=machine.ms(linear + 5 * z.seq_len * q * z.tokens, 2 * moved),
        w=machine.ms(linear, 3 * GRAD_BYTES * (z.matrices + others)),
        params=z.matrices + others,
        size=footprint.block(z),
    )


def _head(z: Sizes, machine: Machine) -> Layer:
    params = z.hidden * z.vocab + (z.hidden if z.gated else 2 * z.hidden)
    flops = 2 * z.hidden * z.vocab * z.tokens
    return Layer(
        "head",
        f=machine.ms(flops, 12 * z.vocab * z.tokens),
        b=machine.ms(flops, 12 * z.vocab * z.tokens),
        w=machine.ms(flops, 3 * GRAD_BYTES * params),
        params=params,
        size=footprint.head(z),
    )


def _measured(layer: Layer, one: Measurement) -> Layer:
    size = layer.size if one.size is None else one.size
    return replace(layer, f=one.f, b=one.b, w=one.w, params=one.params or layer.params, size=size, measured=one)


def _given(table: list[Layer], costs: GivenCosts) -> list[Layer]:
    """The table with the times of `[costs]` with per = "layer"; bytes and parameters stay."""
    block = 0
    result = []
    for layer in table:
        if layer.name in ("embed", "head"):
            extra: LayerCost = getattr(costs, layer.name)
            f, b, w = extra.f, extra.b, extra.w
        else:
            f, b, w = (_pick(value, block) for value in (costs.f, costs.b, costs.w))
            block += 1
        result.append(replace(layer, f=f, b=b, w=w))
    return result


def _pick(value: float | list[float] | None, index: int) -> float:
    return float(value[index] if isinstance(value, list) else value or 0.0)


def given_activations(job: Job, table: list[Layer]) -> list[tuple[float, float]] | None:
    """`act_b` and `act_w` of each layer where the job gives them per layer, else None."""
    costs = job.costs
    if costs.per != "layer" or costs.act_b is None:
        return None
    block = 0
    result = []
    for layer in table:
        if layer.name in ("embed", "head"):
            extra: LayerCost = getattr(costs, layer.name)
            result.append((extra.act_b, extra.act_w))
        else:
            kept = _pick(costs.act_b, block)
            result.append((kept, kept if costs.act_w is None else _pick(costs.act_w, block)))
            block += 1
    return result


def given_optimizer(costs: GivenCosts, table: Sequence[Layer]) -> list[float]:
    """`costs.optimizer` of each layer; embedding and head are extra and have none."""
    block = 0
    result = []
    for layer in table:
        outside = layer.name in ("embed", "head")
        result.append(0.0 if outside else _pick(costs.optimizer, block))
        block += not outside
    return result


def optimizer_bytes(options: Optimizer, parameters: str) -> tuple[float, float]:
    """Bytes that STEP and TENTATIVE move per parameter, in float32.

    STEP reads gradient, weight and state (two numbers for Adam, one for momentum) and writes weight and state; where
    forward reads a copy of the weights, that is written too. TENTATIVE does the same on fresh copies.
    """
    state = 4.0 * (bool(options.momentum) if options.kind == "sgd" else 2)
    step = 4 + 2 * (4 + state)
    publish = 6.0 if parameters == "bfloat16" else 8.0
    ahead = options.sync == "post-validate"
    plain = step + publish if parameters == "bfloat16" and not ahead else step
    return plain, step + publish + 2 * (4 + state)


def boundary_bytes(model: Model, size: int) -> float:
    """Bytes of the tensor between two stages for one microbatch; 0 where only the runtime can know (factories)."""
    if not model.builtin or model.hidden is None or model.seq_len is None:
        return 0.0
    # The residual stream has the type of the parameters, under autocast too.
    return (2.0 if model.parameters == "bfloat16" else 4.0) * size * model.seq_len * model.hidden
