"""What each layer costs, counted from the model and the hardware: floating-point operations, bytes moved, bytes kept.

Times are the larger of arithmetic at `hardware.tflops` and memory traffic at `hardware.memory_gbps`, in ms, for one
microbatch. Per token of a block of width h, sequence length s, with n-byte activations:

    F   24 h^2 + 2 s h (causal attention, half of the square)        W   24 h^2
    B   24 h^2 + 5 s h (attention backward computes the scores anew)
    kept F -> B   two residual inputs in float32 (8h) and 15 h n: norm outputs, q k v, attention and MLP in and out
    kept B -> W   16 h n: input and output gradient of the four linear layers (what runtime/split.py stores)

The head adds 2 h V per token to each of F, B and W, and keeps the logits and their float32 log-probabilities.
These are estimates; measured times given in [costs] replace them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from zbc.spec import GivenCosts, Hardware, Job, LayerCost, Model

GRAD_BYTES = 4  # gradients, master weights and optimizer state are float32

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
    act_b: float = 0.0
    act_w: float = 0.0
    params: int = 0
    entry: float = 0.0  # bytes of its input, all that F keeps where it recomputes
    tied: int = 0  # of them, those of the weight that embedding and head share

    @property
    def total(self) -> float:
        return self.f + self.b + self.w


@dataclass(frozen=True, slots=True)
class Machine:
    """`[hardware]` with the defaults of its device filled in."""

    flops_per_ms: float
    bytes_per_ms: float
    link_bytes_per_ms: float
    link_ms: float

    @classmethod
    def of(cls, hardware: Hardware) -> Machine:
        tflops, memory, link, latency = _DEFAULTS[hardware.device]
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
    """Every layer in order, with given per-layer costs where the job has them."""
    table = _gpt(job.model, job.schedule.microbatch_size, Machine.of(job.hardware))
    if table is None:  # a factory's layers are unknown until they are built: equal, with no bytes
        table = [Layer(f"layers.{i}", 1.0, 1.0, 1.0) for i in range(job.model.layers)]
    if job.costs.per == "layer" and job.costs.f is not None:
        return _given(table, job.costs)
    return table


def _gpt(model: Model, size: int, machine: Machine) -> list[Layer] | None:
    if model.family != "gpt":
        return None
    if model.hidden is None or model.vocab is None or model.seq_len is None:
        return None
    h, s, vocab = model.hidden, model.seq_len, model.vocab
    n = 2 if model.dtype == "bfloat16" else 4
    tokens = size * s
    embedding = _embedding(h, vocab, s if model.positions == "learned" else 0, tokens, machine)
    blocks = [_block(f"layers.{i}", h, s, n, tokens, machine) for i in range(model.layers)]
    head = _head(h, vocab, n, tokens, machine)
    tied = vocab * h if model.tie_embeddings else 0
    return [replace(embedding, tied=tied), *blocks, replace(head, tied=tied)]


def _embedding(h: int, vocab: int, positions: int, tokens: int, machine: Machine) -> Layer:
    params = (vocab + positions) * h
    moved = 8 * tokens * h
    return Layer(
        "embed",
        f=machine.ms(0, moved),
        b=0.0,
        w=machine.ms(0, moved + 3 * GRAD_BYTES * params),  # a dense gradient is filled, then added
        act_b=8 * tokens,
        act_w=(8 + 4 * h) * tokens,
        params=params,
        entry=8 * tokens,
    )


def _block(name: str, h: int, s: int, n: int, tokens: int, machine: Machine) -> Layer:
    params = 12 * h * h + 13 * h
    linear = 24 * h * h * tokens
    moved = 18 * h * n * tokens  # norms, GELU and residual sums read and write what no matrix product does
    return Layer(
        name,
        f=machine.ms(linear + 2 * s * h * tokens, moved),
        b=machine.ms(linear + 5 * s * h * tokens, 2 * moved),
        w=machine.ms(linear, 3 * GRAD_BYTES * params),
        act_b=(8 * h + 15 * h * n) * tokens,
        act_w=16 * h * n * tokens,
        params=params,
        entry=4 * h * tokens,
    )


def _head(h: int, vocab: int, n: int, tokens: int, machine: Machine) -> Layer:
    params = h * vocab + 2 * h
    flops = 2 * h * vocab * tokens
    return Layer(
        "head",
        f=machine.ms(flops, 12 * vocab * tokens),
        b=machine.ms(flops, 12 * vocab * tokens),
        w=machine.ms(flops, 3 * GRAD_BYTES * params),
        act_b=(4 * h + h * n + vocab * n + 4 * vocab) * tokens,
        act_w=(h + vocab) * n * tokens,
        params=params,
        entry=4 * h * tokens,
    )


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


def boundary_bytes(model: Model, size: int) -> float:
    """Bytes of the tensor between two stages for one microbatch; 0 where only the runtime can know (factories)."""
    if model.family != "gpt" or model.hidden is None or model.seq_len is None:
        return 0.0
    # The residual stream has the type of the parameters, under autocast too.
    return (2.0 if model.parameters == "bfloat16" else 4.0) * size * model.seq_len * model.hidden
