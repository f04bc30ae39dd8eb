"""Steps on four or two processes of this machine, compared with those of a contestant and with predictions of zbc.

    python bench/run.py NAME [--quick] [--steps N] [--case CASE ...]
    python bench/run.py --list

Contestants run in the same processes and take turns, step by step, so that a busy machine slows all. Only `throughput`
measures computation: in the others layers sleep (sleeping.py), so a step takes the simulated time plus the overhead of
the runtime, and all messages and collectives are real. A step lasts from a moment that all ranks agreed on to the end
of its last rank. Ours includes VALIDATE and STEP, in which ranks agree on the gradient norm and the optimizer runs;
torch's ends with the last gradient, except in `throughput`, where it sums the norm over the ranks and runs the same
optimizer after its step.

`slices` and `offload` use the commands of zbc: the costs of their plans are the sleeping times of layers plus the
overhead of runtime and link per op from `zbc profile`, and the step is also checked with `zbc report`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from ranks import Noise, Turn, in_turns, logged, meeting, planned, results, zbc
from record import Record
from sleeping import Paced

from tests.runtime.small_plans import make_plan
from zbc.compiler.check import check_all
from zbc.compiler.cost.cost import Costs
from zbc.compiler.lowering import Lowering
from zbc.compiler.passes.weave import Weave
from zbc.compiler.recorded.report import build
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Kind, Op
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.trace import recording as trace

WARM_UP = 2  # first steps, which do not count


class Side(NamedTuple):
    """A contestant: its name, its plan, the predicted ms of a step, and its factory on a rank."""

    name: str
    plan: StoredPlan
    told: float | None
    make: Callable[[Side, int, Path], Callable[[int], Any]]
    more: Any = None


class Case(NamedTuple):
    sides: Sequence[Side]
    job: str = ""


class Row(NamedTuple):
    """A bench: its contestants, its heading, and its cases."""

    first: str
    others: str
    printed: str
    steps: int
    cases: Sequence[str]  # with --quick only the first
    sides: Callable[[str, Path], Case] | None = None  # for contestants that take turns
    ranks: int = 4
    measure: Callable[[Record, str, int], str] | None = None  # for the others; returns the job


# ---- jobs ----------------------------------------------------------------------------------------------------


def toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)


def job(**sections: Mapping[str, Any]) -> str:
    parts = ["# a job of bench/run.py"]
    for name, values in sections.items():
        parts += [f"[{name}]", *(f"{key} = {toml(value)}" for key, value in values.items())]
    return "\n".join(parts) + "\n"


def sleepers(kind: str, count: int, args: Mapping[str, float], family: str = "layers", **more: Any) -> str:
    """A job of layers that sleep on four ranks; costs are their sleeping times unless `more` has others."""
    sections: dict[str, Any] = {
        "model": {"family": f"sleeping:{family}", "layers": count, "loss": "mse", "args": {"count": count, **args}},
        "parallel": {"pp": 4},
        "schedule": {"kind": kind, "microbatches": 8},
        "costs": {"f": args["f"], "b": args["b"], "w": args["w"], "comm": 0.0},
        "data": {"kind": "sleeping:Points"},
    }
    return job(**{name: {**sections.get(name, {}), **more.get(name, {})} for name in {**sections, **more}})


def stored(text: str, folder: Path) -> tuple[StoredPlan, Any]:
    compiled = planned(text, folder / "plan")
    return StoredPlan.read(folder / "plan"), compiled


# ---- contestants, on each rank -------------------------------------------------------------------------------


def ours(side: Side, rank: int, _: Path) -> Callable[[int], Any]:
    import contestants

    return contestants.zbc(side.plan, rank).step


def torchs(side: Side, rank: int, folder: Path) -> Callable[[int], Any]:
    import contestants

    return contestants.torch_schedule(side.name, side.plan, rank, folder).step


def torchs_training(side: Side, rank: int, folder: Path) -> Callable[[int], Any]:
    import contestants

    return contestants.torch_training(side.plan, rank, folder, recompute=side.more)


def one_by_one(side: Side, rank: int, _: Path) -> Callable[[int], Any]:
    """Ours, with the ops of a group one after the other."""
    import contestants

    from zbc.runtime.features.groups.units import Braids

    mine = contestants.zbc(side.plan, rank)
    mine.worker.features.of(Braids).one_by_one = True
    return mine.step


def paced(side: Side, rank: int, _: Path) -> Callable[[int], Any]:
    """Ours, with ops that take the times of `side.more`."""
    import contestants

    worker = contestants.zbc(side.plan, rank).worker

    def ms(op: Op) -> float:
        found: float = side.more[op.kind, rank if op.kind.unit_wide else op.stage]
        return found

    worker.clock = Paced(worker, ms)  # type: ignore[assignment]
    return partial(run_step, worker)


def rank_main(rank: int, ranks: int, sides: Sequence[Side], steps: int, folder: Path, sender: Any) -> None:
    with meeting(rank, ranks, folder / "meet"):
        found = in_turns({side.name: side.make(side, rank, folder) for side in sides}, steps, WARM_UP)
        if rank == 0:
            sender.send(found)


# ---- fidelity: a step compared with the simulated one and torch's --------------------------------------------

# Torch has no class for ZB-H1, and its ZB-V is its general runtime with an order equal to ours.
PEERS = {
    "1f1b": ("Schedule1F1B", "torch, our order"),
    "zb-h1": ("torch, our order",),
    "zb-v": ("ScheduleZBVZeroBubble",),
}


def fidelity(kind: str, folder: Path) -> Case:
    """F = B = W = 20 ms per rank."""
    count = 8 if kind == "zb-v" else 4
    text = sleepers(kind, count, dict.fromkeys("fbw", 80.0 / count), costs=dict.fromkeys("fbw", 20.0))
    plan, compiled = stored(text, folder)
    told = compiled.report.makespan_ms
    return Case([Side("zbc", plan, told, ours), *(Side(name, plan, told, torchs) for name in PEERS[kind])], text)


# ---- throughput: a small GPT on two ranks, trained by torch's general runtime and by ours --------------------

SMALL = {"layers": 2, "hidden": 16, "vocab": 256, "seq_len": 8}
MEDIUM = {"layers": 4, "hidden": 128, "vocab": 512, "seq_len": 64}


def throughput(name: str, folder: Path) -> Case:
    """torch runs our order with its own split of backward; with recompute its layers use torch's checkpointing."""
    which, kind = name.split()
    small, again = which == "small", which == "recompute"
    text = job(
        model={**(SMALL if small else MEDIUM), "heads": 4},
        parallel={"pp": 2},
        schedule={"kind": kind, "microbatches": 16 if small else 8, "microbatch_size": 1 if small else 2},
        memory={"activations": "recompute" if again else "keep"},
        data={"kind": "synthetic"},
    )
    plan, _ = stored(text, folder)
    return Case([Side("torch", plan, None, torchs_training, again), Side("zbc", plan, None, ours)], text)


# ---- shared, braids: layers that two ranks share -------------------------------------------------------------


FAMILIES = {"tp": ("shared", {"pp": 2, "tp": 2}), "ep": ("exchanged", {"pp": 2, "dp": 2, "ep": 2})}


def grouped(
    axis: str, kind: str, count: int, ms: float, a: float, m: int, folder: Path, **more: Any
) -> tuple[Any, ...]:
    """Plan and job of 2 x 2 ranks; layers of `ms` for F, B and W exchange in F and in B, for `a` ms at least.

    An exchange that completes sooner is held back; `more["costs"]` has the time of exchanges per stage.
    """
    family, parallel = FAMILIES[axis]
    text = sleepers(
        kind,
        count,
        {**dict.fromkeys("fbw", ms), "a": a},
        family,
        parallel=parallel,
        optimizer={"kind": "sgd", "lr": 0.0},
        **{**more, "schedule": {"microbatches": m, "microbatch_size": 2, **more.get("schedule", {})}},
    )
    return *stored(text, folder), text


def shared(kind: str, folder: Path, axis: str = "tp") -> Case:
    """The prediction is F + a, B + a, and a BW whose exchange is hidden by its W, of experts all but the first. Layers
    with experts take longer: six real messages per layer take some ms on few cores."""
    chunks, ms = 1 if kind in ("1f1b", "zb-h1") else 2, 12.0 if axis == "tp" else 36.0
    costs = {"per": "layer", axis: ms / 2 * 8 / 2 / chunks}
    plan, compiled, text = grouped(axis, kind, 8, ms, ms / 2, 8, folder, costs=costs)
    return Case([Side("zbc", plan, compiled.timeline.makespan, ours)], text)


def braids(kind: str, folder: Path, axis: str = "tp") -> Case:
    """Four units per stage, as in two blocks. In the simulation a group of f and b ms with exchanges of a_f and a_b
    takes max(f + b, a_f + a_b), and without groups ops wait for their own exchanges."""
    schedule = {} if kind == "braid-v" else {"overlap": True}
    if kind == "interleaved-1f1b":
        schedule |= {"chunks": 2, "early": 1}
    how: dict[str, Any] = {"costs": {"per": "layer", axis: 20.0 * 16 / 4}, "schedule": schedule}
    plan, compiled, text = grouped(
        axis, kind, 16, 25.0, 20.0, 6, folder, **how, partition={"layers_per_stage": "equal"}
    )
    ranks = [[op for op in ops if not op.kind.is_mark] for ops in compiled.program.ranks]
    apart = simulate(compiled.program.with_ranks(ranks, by="apart"), compiled.costs).makespan
    if ranks == list(map(list, compiled.program.ranks)):
        sys.exit(f"{kind} has no groups")
    sides = (("one after the other", apart, one_by_one), ("in turns", compiled.timeline.makespan, ours))
    return Case([Side(name, plan, told, make) for name, told, make in sides], text)


# ---- vocabulary: shared by all ranks, compared with the ends of the pipeline ---------------------------------

BLOCKS, HEAD = (7, 7, 6, 6), 7.6  # layers of each stage; the output layer in layers
MS = 5.0  # forward of a layer, and each half of its backward


def vocabulary(kind: str, folder: Path) -> Case:
    """The proportions of a Gemma with 2 billion parameters: 26 layers, and an output layer of 256,000 words that takes
    as long as 7.6 of them. A small model with as many layers really trains, each op paced. At the ends the output layer
    adds to the last 6 layers."""
    return Case([side(name, kind, sums) for sums, name in enumerate(("ends", "shared, 1 sum", "shared, 2 sums"))])


def side(name: str, kind: str, sums: int) -> Side:
    """The head is three equal products: logits, the gradient of their input, and the gradient of their weights. With 1
    sum S computes the first two, with 2 sums only the first."""
    p = len(BLOCKS)
    order = find(kind).make(Request(p=p, m=16))
    last = 0.0 if sums else HEAD
    stage = tuple(MS * (count + (last if s == p - 1 else 0.0)) for s, count in enumerate(BLOCKS))
    third, tiny = MS * HEAD / p, MS / 50  # tiny: a look-up has no arithmetic
    s, t = ((2 * third, third), (third, 2 * third))[sums == 2]
    each = {"s": s, "t": t, "i": tiny, "e": tiny} if sums else {}
    costs = Costs.uniform(order.placement).with_ms(
        f=stage, b=stage, w=stage, bw=tuple(2 * ms for ms in stage), **{key: (ms,) * p for key, ms in each.items()}
    )
    program = Weave(sums).run(order, Context.of(order, costs)) if sums else order
    program = Lowering("before-step").lower(Context.of(program, costs)).program
    check_all(program)
    cuts = [0, *(1 + sum(BLOCKS[: s + 1]) for s in range(p - 1)), sum(BLOCKS) + 2]
    model = {"family": "gpt", "layers": sum(BLOCKS), "hidden": 32, "heads": 2, "vocab": 512, "seq_len": 16}
    plan = make_plan(program, model=model, cuts=cuts, optimizer={"lr": 1e-3})
    ms = {(k, s): ms_of(costs, k, s) for k in Kind if k.computes for s in range(p)}
    return Side(name, plan, simulate(program, costs).makespan, paced, ms)


def ms_of(costs: Costs, kind: Kind, stage: int) -> float:
    column = costs.ms.get(kind.row.cost, ())
    found = column[stage] if stage < len(column) else 0.0
    return float(found if isinstance(found, int | float) else found[0])


# ---- slices, offload: through the commands -------------------------------------------------------------------


def added(folder: Path) -> dict[str, float]:
    """Overhead in ms of an op, and of a message; for a stage in the middle, which has two messages per op."""
    short, wide = 2.0, {"args": {"width": 64}}
    text = sleepers("zb-h1", 4, dict.fromkeys("fbw", short), "calibrated", schedule={"microbatches": 4}, data=wide)
    (folder / "job.toml").write_text(text)
    zbc(folder, "profile", "job.toml", "-o", "profile.json", "--rounds", "20")
    profile = json.loads((folder / "profile.json").read_text())
    host, layer = profile["host"], profile["layers"]["Sleeper"]
    found = {
        name: layer[name]["ms"] - short + (host[f"{name}_us"] + count * host["transfer_us"]) / 1e3
        for name, count in {"f": 2, "b": 2, "w": 0}.items()
    }
    return {**found, "comm": profile["link"]["latency_us"] / 1e3}


def commanded(folder: Path, text: str, steps: int) -> tuple[Any, Path]:
    """Plans a job, runs `steps` steps, records one and measures memory in one; returns the prediction and the run."""
    (folder / "job.toml").write_text(text)
    told = json.loads(zbc(folder, "plan", "job.toml", "-o", "plan", "--json"))
    out, last = Path(tempfile.mkdtemp(dir=folder)) / "run", steps + WARM_UP
    options = ("--steps", str(last + 2), "--trace", str(last + 1), "-o", str(out))
    zbc(folder, "run", "plan", "--local", "4", *options)
    return told, out


def beside(told: float, out: Path, steps: int) -> str:
    middle = statistics.median(logged(out, "step_ms")[WARM_UP : WARM_UP + steps])
    return f"predicted {told:8.1f}  measured {middle:8.1f}  off by {told / middle - 1:+.1%}"


def slices(record: Record, case: str, steps: int) -> str:
    kind, what = case.split()
    with tempfile.TemporaryDirectory() as name:
        return (sliced_memory if what == "memory" else sliced_steps)(record, Path(name), kind, steps)


def sliced_memory(record: Record, folder: Path, kind: str, steps: int) -> str:
    """A small GPT on sequences of 4,096 tokens, whole and in slices; losses of ten times as many steps."""
    steps = 10 * steps
    record(f"# {kind}: MiB of activations on each rank, predicted / weighed; losses of {steps} steps beside whole ones")
    wanted: list[float] = []
    for k in (1, 4, 8):
        text = job(
            model={"layers": 4, "hidden": 32, "heads": 1, "vocab": 128, "seq_len": 4096},
            parallel={"pp": 4},
            schedule={"kind": kind, "microbatches": 4, "slices": k},
            data={"kind": "synthetic"},
            train={"seed": 3},
        )
        _, out = commanded(folder, text, steps)
        ranks = [(one.predicted or {}, one.measured) for one in build(trace.read(out), again=False).memory]
        both = [(told["activations"] / 2**20, found["activations"] / 2**20) for told, found in ranks]
        worst = max((a / b - 1 for a, b in both), key=abs)
        found = logged(out, "loss")[:steps]
        wanted = wanted or found
        far = max(abs(a / b - 1) for a, b in zip(found, wanted, strict=True))
        shown = "  ".join(f"{a:6.1f} / {b:6.1f}" for a, b in both)
        record(
            f"k={k}  {shown}  off by {worst:+.1%} at most; losses {found[0]:.4f} to {found[-1]:.4f}, apart {far:.1e}"
        )
    return text


def sliced_steps(record: Record, folder: Path, kind: str, steps: int) -> str:
    """The same work in ops of 160 ms and of 20 ms; also compared with the order replayed with measured op times."""
    more = added(folder)
    record(f"# {kind}: ms of a step, the same work in ops of 160 ms and of 20 ms")
    record("# added, ms: " + ", ".join(f"{name} {ms:.3f}" for name, ms in more.items()))
    for k in (1, 8):
        costs = {name: ms if name == "comm" else 160.0 + k * ms for name, ms in more.items()}
        sizes: dict[str, Any] = {"schedule": {"microbatches": 4, "slices": k}, "data": {"args": {"width": 64}}}
        ms = dict.fromkeys("fbw", 160.0 / k)
        text = sleepers(kind, 4, ms, "calibrated", costs=costs, model={"seq_len": 64}, **sizes)
        told, out = commanded(folder, text, steps)
        seen = build(trace.read(out))
        own = seen.replan.present_ms / seen.step.measured - 1 if seen.replan else float("nan")
        record(f"k={k}  {beside(told['barrier_ms'], out, steps)}; with the run's own op times by {own:+.1%}")
    return text


def offload(record: Record, case: str, steps: int) -> str:
    """Ops of 40 ms, copies of 0.8 of one: threads that copy sleep. A copy is hidden if no op waits for it."""
    kind, limit = case.split()
    chunks, op = 2 if kind in ("gis", "zb-v") else 1, 40.0
    with tempfile.TemporaryDirectory() as name:
        more = added(Path(name))
        costs: dict[str, Any] = {key: ms if key == "comm" else op + ms for key, ms in more.items()}
        costs |= {"per": "layer", "offload": 0.8 * op * chunks, "act_b": 1.0, "act_w": 0.4}
        text = sleepers(
            kind,
            4 * chunks,
            {**dict.fromkeys("fbw", op), "copy": 0.8 * op},
            "copied",
            schedule={"memory_limit": limit, **({"chunks": chunks} if chunks > 1 else {})},
            memory={"activations": "offload"},
            costs=costs,
            partition={"layers_per_stage": "equal"},
            data={"args": {"width": 64}},
        )
        told, out = commanded(Path(name), text, steps)
        report = json.loads(zbc(Path(name), "report", str(out), "--json"))
        shown = beside(told["barrier_ms"], out, steps)
    both = [min(one[f"{way}_hidden"] for one in report["copies"]) for way in ("predicted", "measured")]
    hidden = "predicted {:.0%}, measured {:.0%}".format(*both)
    moved = f"{told['copied']['moved']:4.0%} moved"
    record(f"{kind:8} {limit:5} {moved}  {shown}; hidden on the rank that waits most: {hidden}")
    return text


# ---- the table -----------------------------------------------------------------------------------------------

KINDS = ("1f1b", "zb-h1")
BOTH = "what is gained, and was to be"
PARTS = {
    "fidelity": Row(
        first="zbc",
        others="torch.distributed.pipelining",
        printed="a step of each beside the simulated one",
        steps=5,
        cases=list(PEERS),
        sides=fidelity,
    ),
    "throughput": Row(
        first="torch.distributed.pipelining, training on two ranks in our order",
        others="zbc",
        printed="how many times as fast ours is, by the clock and by processor time",
        steps=60,
        cases=[
            "small 1f1b",
            "small zb-h1",
            "small zb-v",
            *(f"{a} {b}" for a in ("medium", "recompute") for b in KINDS),
        ],
        sides=throughput,
        ranks=2,
    ),
    "shared": Row(
        first="layers that two ranks share, on 2 x 2 ranks",
        others="nothing",
        printed="a step beside the one that is predicted with its sums",
        steps=8,
        cases=("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "gpipe"),
        sides=shared,
    ),
    "braids": Row(
        first="groups whose ops run one after the other, on 2 x 2 ranks",
        others="in turns",
        printed=BOTH,
        steps=6,
        cases=("braid-v", "dualpipe-v"),
        sides=braids,
    ),
    "experts": Row(
        first="experts that two replicas share, on 2 x 2 ranks",
        others="nothing",
        printed="a step beside the one that is predicted with its all-to-alls",
        steps=8,
        cases=("1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "dualpipe-v"),
        sides=partial(shared, axis="ep"),
    ),
    "hidden": Row(
        first="groups with experts whose ops run one after the other, on 2 x 2 ranks",
        others="in turns",
        printed=BOTH,
        steps=6,
        cases=("braid-v", "dualpipe-v", "interleaved-1f1b"),
        sides=partial(braids, axis="ep"),
    ),
    "vocabulary": Row(
        first="a vocabulary at the ends of the pipeline",
        others="one that all ranks share",
        printed=BOTH,
        steps=5,
        cases=KINDS,
        sides=vocabulary,
    ),
    "slices": Row(
        first="whole microbatches",
        others="4 and 8 slices",
        printed="activations, losses and steps beside predicted ones",
        steps=5,
        cases=[f"{kind} {what}" for kind in KINDS for what in ("steps", "memory")],
        measure=slices,
    ),
    "offload": Row(
        first="steps with copies to the host",
        others="nothing",
        printed="a step and the hidden share of the copies, beside predicted ones",
        steps=7,
        cases=("1f1b 0.6x", "zb-h1 0.75x", "gis 0.5x", "zb-v 0.6x"),
        measure=offload,
    ),
}


def turns(record: Record, row: Row, case: str, steps: int) -> str:
    """Runs the contestants of a case; returns its job."""
    with tempfile.TemporaryDirectory() as name:
        assert row.sides is not None
        made = row.sides(case, Path(name))
        arguments = (row.ranks, made.sides, steps, Path(name))
        ((found, noise),) = results(rank_main, arguments, ranks=row.ranks, limit=600.0)
    for line in lines(case, made.sides, found, noise):
        record(line)
    return made.job


TITLES = (
    f"{'case':16} {'':22} {'simulated ms':>12} {'median ms':>10} {'ratio':>6} "
    f"{'gain':>6} {'told':>6} {'of cpu':>6} {'quartiles':>14} {'losses':>8}   steps, ms"
)


def lines(case: str, sides: Sequence[Side], found: Mapping[str, Sequence[Turn]], noise: Noise) -> Iterator[str]:
    """A line for each contestant: measured over simulated; the speedup over the first, measured, simulated and by
    processor time, with quartiles; the difference of its losses to those of the first."""
    first = sides[0]
    base, median = (
        found[first.name],
        {name: statistics.median(turn.ms for turn in took) for name, took in found.items()},
    )
    for one in sides:
        took, middle = found[one.name], median[one.name]
        told = f"{'-':>12}" if one.told is None else f"{one.told:12.1f}"
        ratio = f"{'-':>6}" if one.told is None else f"{middle / one.told:6.3f}"
        gains = f"{'-':>6} {'-':>6} {'-':>6} {'-':>14} {'-':>8}"
        if one is not first:
            low, _, high = statistics.quantiles([a.ms / b.ms for a, b in zip(base, took, strict=True)], n=4)
            cpu = statistics.median(turn.cpu for turn in base) / statistics.median(turn.cpu for turn in took)
            meant = f"{first.told / one.told:6.3f}" if first.told and one.told else f"{'-':>6}"
            apart = max(abs(a.loss - b.loss) / max(abs(b.loss), 1e-30) for a, b in zip(took, base, strict=True))
            far = f"{apart:8.1e}" if math.isfinite(apart) else f"{'-':>8}"
            shown = f"{low:.3f} to {high:.3f}"
            gains = f"{median[first.name] / middle:6.3f} {meant} {cpu:6.3f} {shown:>14} {far}"
        steps = " ".join(f"{turn.ms:.1f}" for turn in took[:10])
        yield f"{case:16} {one.name:22} {told} {middle:10.1f} {ratio} {gains}   {steps}"
    said = f"a sleep ended {noise.late:.3f} ms late on average; other programs used {noise.others:.0%} of the machine"
    yield f"{'':16} # {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", nargs="?", choices=PARTS)
    parser.add_argument("--list", action="store_true", help="what each compares and prints")
    parser.add_argument("--steps", type=int, help="steps of each contestant; the median counts")
    parser.add_argument("--case", action="append", help="only this one (repeatable); writes no file")
    parser.add_argument("--quick", action="store_true", help="two steps of the first case; writes no file")
    asked = parser.parse_args()
    if asked.list or asked.name is None:
        for name, row in PARTS.items():
            print(f"{name:11} {row.first} | {row.others}: {row.printed}\n{'':11} {', '.join(row.cases)}")
        return
    row, record = PARTS[asked.name], Record(f"{asked.name}-run")
    if unknown := set(asked.case or ()) - set(row.cases):
        parser.error(f"{asked.name} has the cases {', '.join(row.cases)}; not {', '.join(sorted(unknown))}")
    cases, steps = asked.case or row.cases[: 1 if asked.quick else None], 2 if asked.quick else asked.steps or row.steps
    record(f"# {row.first} | {row.others}: {row.printed}; median of {steps} steps")
    if row.measure is None:
        record(TITLES)
    jobs = {case: (row.measure or partial(turns, row=row))(record, case=case, steps=steps) for case in cases}
    for case, text in jobs.items():
        record(f"\n# the job of {case}\n{text.rstrip()}" if text else "")
    if not (asked.case or asked.quick):
        record.write()


if __name__ == "__main__":
    main()
