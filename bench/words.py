"""A vocabulary that all ranks share, in random schedules and at unit costs: `python bench/words.py [COUNT]`.

Every program has to pass all checks and to run to its end on the operational machine of the tests; of each a copy with
two collectives swapped and a damaged one are judged by both as well, and they have to agree on them. Then makespan and
peak of woven schedules beside those without: at unit costs, at random ones, with collectives that take time.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.pairs import stopped
from bench.record import Record
from tests.check.pairs import damaged, verdicts
from tests.check.words import crossed, draw
from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.passes.weave import Weave
from zbc.compiler.schedules import Request, find
from zbc.compiler.sim.context import Context
from zbc.compiler.sim.simulate import simulate
from zbc.ir import Program

RANKS, MICROBATCHES, SLICES = 8, 12, 4
KINDS = ("1f1b", "zb-h1", "zb-v")


def agreement(record: Record, count: int) -> int:
    """The disagreements of proofs and machine."""
    began, names, refused, wrong, done = time.perf_counter(), Counter[str](), Counter[str](), 0, 0
    for seed in range(count):
        if stopped():
            break
        done += 1
        one = draw(seed, ranks=RANKS, microbatches=MICROBATCHES, sliced=SLICES)
        names[one.name] += 1
        fine = verdicts(one.program, seed)
        broken = {c.__name__: verdicts(c(one.program, random.Random(seed)), seed) for c in (crossed, damaged)}
        for name, verdict in broken.items():
            refused[name] += verdict == (False, False)
        if fine != (True, True) or any(a != b for a, b in broken.values()):
            wrong += 1
            record(f"seed {seed}: {one}: check and machine say {fine} as it is, {broken} damaged")
        if done % 1000 == 0:
            print(f"{done} of {count}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    sizes = f"{RANKS} ranks, {MICROBATCHES} microbatches, {SLICES} slices"
    record(f"# {done} programs of up to {sizes}: proven, and run to the end")
    record(", ".join(f"{name} {number}" for name, number in sorted(names.items())))
    record(f"refused by both: {refused['crossed']} copies with two collectives swapped, {refused['damaged']} damaged")
    record(f"{wrong} disagreements; {time.perf_counter() - began:.0f} s")
    return wrong


def _made(kind: str, p: int, m: int, k: int) -> tuple[Program, Costs]:
    card = find(kind)
    program = card.make(Request(p=p, m=m, v=card.default_chunks, slices=k))
    costs = Costs.uniform(program.placement)
    return program, costs.cut([1 / k] * k) if k > 1 else costs


def _woven(program: Program, costs: Costs, sums: int, late: int = 1) -> tuple[float, float]:
    """Makespan and peak units."""
    woven = Weave(sums, late).run(program, Context(program, costs))
    return simulate(woven, costs).makespan, max(one.units for one in peaks(woven, costs))


def shapes(record: Record) -> int:
    """Bubble and peak at unit costs, collectives free: the bubble as without, the peak a unit more for each sum."""
    wrong = 0
    record("# unit costs, S = T = st of a microbatch: bubble without and with 1 and 2 sums, peak in units (slices)")
    for kind in KINDS:
        for p, m, k, st in ((4, 8, 1, 0.0), (8, 24, 1, 0.25), (8, 12, 4, 0.25), (8, 24, 4, 0.0), (6, 8, 1, 0.5)):
            program, costs = _made(kind, p, m, k)
            plain = simulate(program, costs).makespan - 3 * m
            held = max(one.units for one in peaks(program, costs)) * k
            priced = costs.with_ms(s=(st / k,) * p, t=(st / k,) * p)
            found = [_woven(program, priced, sums) for sums in (1, 2)]
            bubbles = [ms - 3 * m - 2 * st * m for ms, _ in found]
            units = [most * k for _, most in found]
            fine = all(b <= plain + 1e-6 for b in bubbles) and [round(u - held, 6) for u in units] == [1, 2]
            wrong += not fine
            text = f"{plain:.3f} -> {bubbles[0]:.3f} {bubbles[1]:.3f}, {held:g} -> {units[0]:g} {units[1]:g}"
            record(f"{kind:6} p={p} m={m:<2} k={k} st={st:<4}  {text}{'' if fine else '  NOT AS IT SHOULD BE'}")
    for sums, limit, late in ((1, 6, 1), (1, 6, 2), (2, 7, 1)):
        program, costs = _made("v-half", 8, 24, 1)
        ms, units = _woven(program, costs.with_ms(s=(0.25,) * 8, t=(0.25,) * 8), sums, late)
        record(f"v-half p=8 m=24 st=0.25 sums={sums} late={late}: {ms:g} at {units:g} units (limit {limit})")
    return wrong


def drawn(record: Record, count: int) -> None:
    """Random op times: how much more bubble there is, as a share of F + B + W of a slice."""
    rng = random.Random(7)
    worst: dict[str, float] = dict.fromkeys(("1f1b", "zb-h1"), -1e9)
    longer = dict.fromkeys(worst, 0)
    for _ in range(count):
        p, k = rng.randint(2, 8), rng.choice((1, 2, 4))
        m = rng.randint(p + 2, 3 * p)
        times = [rng.random() + 0.2 for _ in range(3)]
        st = rng.random() * 0.5
        for kind in worst:
            program, _ = _made(kind, p, m, k)
            costs = Costs.uniform(program.placement, *times)
            costs = costs.cut([1 / k] * k) if k > 1 else costs
            plain = simulate(program, costs).makespan
            ms, _ = _woven(program, costs.with_ms(s=(st / k,) * p, t=(st / k,) * p), 1)
            more = (ms - 2 * st * m - plain) / (sum(times) / k)
            longer[kind] += more > 1e-6
            worst[kind] = max(worst[kind], more)
    for kind, more in worst.items():
        record(
            f"{count} random costs, 1 sum: {kind} at most {more:+.2f} of a slice's F + B + W, longer in {longer[kind]}"
        )


def collectives(record: Record) -> None:
    """Collectives of c: the bubble is to grow by 2c per sum at most."""
    record("# collectives of c each (of T_F): what the bubble grows by, in c per sum")
    for kind in KINDS:
        for sums in (1, 2):
            program, costs = _made(kind, 8, 24, 1)
            plain = simulate(program, costs).makespan
            found = []
            for c in (0.1, 0.5, 1.0):
                each = {name: (c,) * 8 for name in ("spread", "meet", *(["sum"] if sums == 2 else []))}
                ms, _ = _woven(program, costs.with_ms(s=(0.0,) * 8, t=(0.0,) * 8, **each), sums)
                found.append(f"c={c:g}: {(ms - plain) / c / sums:.2f}")
            record(f"{kind:6} {sums} sum{'s' * (sums > 1)}: {', '.join(found)}")


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    record = Record("words")
    wrong = shapes(record)
    drawn(record, 400)
    collectives(record)
    wrong += agreement(record, count) if count else 0
    record.write()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
