"""The summary of a plan, for `plan` and `check`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from zbc.commands.console import indented, labelled, table
from zbc.host.cores import cores
from zbc.text import GIB, aligned, change, percent, short, size, unit_of, wrap

if TYPE_CHECKING:
    from rich.console import RenderableType

    from zbc.compiler.check import Survival
    from zbc.compiler.compiled import Compiled
    from zbc.compiler.report.report import Facts, Report
    from zbc.compiler.whatif.others import Other, Others, Sharing
    from zbc.compiler.whatif.why import Path
    from zbc.host.until import Until
    from zbc.job.profile import Profile
    from zbc.job.sections import Average
    from zbc.job.throughput import Throughput
    from zbc.job.world import Weighed


_ROWS = 10  # of a table before its middle is left out
_TEXT = 69  # columns after the label in a line of 80
_LONG = 99  # the same in a line that may be longer

PROVEN = (
    "complete: each stage's F, B and W of each microbatch, once, in order",
    "paired: every send meets one receive",
    "FIFO: a pair of ranks receives, either way, in the order it sends",
    "deadlock-free: no timing makes ranks wait for each other forever",
)


def of_plan(
    compiled: Compiled, others: Others, words: Sharing | None, quicker: str | None, until: Until, *, verbose: bool
) -> Iterator[RenderableType]:
    """The summary of a fresh plan, with the cost of its output layer; `quicker`: the command for the faster of its
    `others`; `until`: the end of the time for further plans."""
    report = compiled.report
    yield labelled("step", *_headline(compiled, others))
    pays = words is not None and words.pays(compiled.settled_ms)
    better = pays and words is not None and (others.faster is None or words.ms < others.faster.ms)
    if others.faster is not None and (verbose or not better):
        yield labelled("faster", _faster(others.faster, compiled), *([] if quicker is None else [quicker]))
    if words is not None and (verbose or pays or words.shared):
        yield labelled("vocabulary", *_words(words, compiled, hint=better))
    if report.freezing is not None:
        yield labelled("freeze", *_freezing(report.freezing, report.makespan_ms, compiled.job.freeze.after))
    if report.adapter is not None:
        yield labelled("adapter", *adapter_lines(report.adapter, report.makespan_ms, report.per_rank))
    if report.unequal is not None:
        yield labelled("tokens", *_unequal(report.unequal))
    if report.flushless is not None:
        yield labelled("no flush", *_flushless(report.flushless))
    if compiled.job.parallel.average is not None:
        yield labelled("averaging", *_averaging(compiled.job.parallel.average))
    if report.exact is not None:
        yield labelled("exact", *_exact(report.exact))
    if verbose:
        yield labelled("times", *_times(compiled))
    if compiled.job.links is not None:
        yield labelled("order", *_order(compiled))
    if compiled.timeline.sums:
        yield labelled("reduce", *_sums(compiled))
    if report.tp_sums is not None:
        sums = report.tp_sums
        hidden = f"{percent(sums.hidden)} of it hidden behind other work"
        parallel = compiled.job.parallel
        label = "all-to-all" if parallel.ep > 1 else "gathers" if parallel.cp > parallel.tp == 1 else "all-reduce"
        steps = "in two steps, between nodes and inside" if compiled.costs.near else "in one step"
        yield labelled(
            label, f"inside of ops: {short(sums.ms)} ms on a rank (mean), {hidden}", *[steps] * (parallel.ep > 1)
        )
    if report.flushless is None:  # the critical path of one step says nothing about a cycle
        yield from _why(compiled, until, verbose=verbose)
    yield labelled("costs", *_costs(compiled))
    proven = "complete, paired, FIFO per direction, deadlock-free"
    yield labelled("proven", proven, *outlives(report.survives, verbose=verbose))
    yield labelled("ranks", *_ranks_note(compiled), *([] if verbose else _recomputed(compiled)))
    yield indented(_ranks(report, verbose=verbose))
    if (chosen := compiled.found.options) is not None:
        early, overlap = f"schedule.early = {chosen.early}", f"schedule.overlap = {str(chosen.overlap).lower()}"
        yield labelled("options", f"{compiled.found.name} with {early} and {overlap}")
    if compiled.found.weighed:
        yield labelled("candidates", *_weighed(compiled))
    if report.copied is not None:
        yield labelled("offload", *_copies(compiled))
    if verbose and report.bytes_known:
        yield labelled("memory", *_MEMORY)
        yield indented(_memory(report))
    if report.slices:
        yield labelled("slices", *_slices_note(report))
        yield indented(_slices(report))
    if verbose:
        yield labelled("stages", *_cut_note(compiled))
        yield indented(_stages(compiled))
    if compiled.ramp and not compiled.job.balances:
        yield labelled("ramp", *_ramp(compiled))


def _headline(compiled: Compiled, others: Others) -> Iterator[str]:
    """Step time, speedup over 1F1B, throughput, idle rate and balance."""
    report, base = compiled.report, others.baseline
    against = ""
    if base is not None and compiled.schedule != base.schedule:
        against = f"; {base.ms / compiled.settled_ms:.2f}x as fast as 1F1B ({short(base.ms)} ms)"
    yield f"{short(compiled.settled_ms)} ms with its optimizer{against}"
    yield from throughput_lines(report.rates)
    if report.flushless is not None:
        period = report.flushless.period_ms or 1.0
        idle = 1 - sum(rank.busy_ms for rank in report.per_rank) / len(report.per_rank) / period
        yield f"idle {percent(max(0.0, idle))}, balance {percent(report.balance)}"
        return
    memory = compiled.found.bounds.memory
    loose = memory and report.bound_is == "loose" and report.exact is None
    bound = _gap(report.makespan_ms, report.lower_bound_makespan_ms, loose=loose, memory=memory)
    yield f"idle {percent(report.idle_rate)}, balance {percent(report.balance)}; {bound}"
    crowd = crowded(compiled)
    if crowd is not None:
        yield crowd


def throughput_lines(rates: Throughput) -> Iterator[str]:
    """Samples per second, with tokens per second and MFU if known."""
    if rates.samples_per_s is None:
        return
    parts = [f"{short(rates.samples_per_s, 3)} samples/s"]
    if rates.tokens_per_s is not None and rates.tokens_per_s_per_rank is not None:
        parts.insert(0, f"{rates.tokens_per_s:,.0f} tokens/s, {rates.tokens_per_s_per_rank:,.0f} per rank")
    yield "; ".join([*parts, *([] if rates.mfu is None else [f"MFU {percent(rates.mfu)}"])])


def crowded(compiled: Compiled) -> str | None:
    """A note on the least step time on this machine's CPU, if costs are estimated and cores are fewer than ranks."""
    job, report = compiled.job, compiled.report
    if job.hardware.device != "cpu" or report.costs != "estimated":
        return None
    note = crowd(job.parallel.ranks, [rank.busy_ms for rank in report.per_rank], compiled.settled_ms)
    return note and f"on this machine {note}"


def crowd(ranks: int, busy: Sequence[float], step: float) -> str | None:
    """A note on the least step time if ranks outnumber cores, else None; `busy`: ms of each rank of a pipeline."""
    count = cores()
    if ranks <= count:
        return None
    least = max(step, ranks // len(busy) * sum(busy) / count)
    shared = "one core" if count == 1 else f"{count} cores"
    said = f"expect {short(least, 2)} ms a step or more" if least > 1.1 * step else "steps take longer"
    return f"{ranks} ranks share {shared}: {said}"


def recompute_lines(compiled: Compiled, plain: Other) -> Iterator[str]:
    longer = f"{100 * (compiled.settled_ms / plain.ms - 1):.0f}%"
    saved = 1 - max(rank.bytes for rank in compiled.memory) / (plain.bytes or 1.0)
    yield f"makes a step {longer} longer and saves {percent(max(0.0, saved))} of memory: B leaves W what F would keep"
    yield f'memory.activations = "keep": {short(plain.ms)} ms, {size(plain.bytes or 0)}, by the fast search'


def _faster(other: Other, compiled: Compiled) -> str:
    held = "" if other.bytes is None else f", with {size(other.bytes)}"
    return f"{other.schedule}: {short(other.ms)} ms ({change(other.ms, compiled.settled_ms)}){held}, by the fast search"


def _words(words: Sharing, compiled: Compiled, *, hint: bool) -> Iterator[str]:
    """The cost of the output layer, and the step time with the other placement of it; `hint`: with its setting."""
    longer = change(words.ms, compiled.settled_ms)
    held = "" if words.bytes is None else f", {size(words.bytes)}"
    where = "at the ends" if words.shared else "shared"
    yield f"the head takes {words.blocks:.1f} blocks; {where}: {short(words.ms)} ms a step ({longer}){held}"
    if hint:
        yield f'parallel.vocabulary = "{words.other}"'


def _freezing(found: Facts, ms: float, after: int) -> Iterator[str]:
    before = found.unfrozen_ms
    yield f"makespan {short(ms)} ms instead of {short(before)} ms ({change(ms, before)}),"
    yield f"{percent(found.frozen)} of all weight gradients are left out;"
    yield f"{percent(found.most)} in each op alike would take {short(found.alike_ms)} ms"
    yield from wrap(["by stage", *map(percent, found.by_stage)], _TEXT, between=" ")
    yield f"from step {after + 1} on layers rest in turn: this is another training"


def adapter_lines(found: Facts, ms: float, ranks: Sequence[Facts]) -> Iterator[str]:
    share = f" ({percent(found.trained / found.whole)})" if found.whole else ""
    yield f"rank {found.rank}: {found.trained:,} of {found.whole:,} parameters train{share}"
    if found.whole_ms is not None:
        yield f"makespan {short(ms)} ms; if all weights trained in this order {short(found.whole_ms)} ms"
        if ms > found.whole_ms:
            yield "slower than that: adapters take longer than the weight gradients saved; name fewer"
    held = [rank.peak_bytes for rank in ranks if rank.peak_bytes is not None]
    if found.whole_bytes and held:
        yield f"memory at most {size(max(held))}; {size(found.whole_bytes)} if all weights trained"


def _unequal(found: Facts) -> Iterator[str]:
    """The order of unequal microbatches, and the time gained by an order that knows their lengths."""
    order = "as given" if found.tokens == found.given else "renumbered"
    yield f"microbatches 0 to {len(found.tokens) - 1}, {order}, have rows of"
    yield from wrap(list(map(str, found.tokens)), _TEXT, between=", ")
    ways = ("in the order for equal ones", found.alike_ms), ("with the given numbers", found.given_ms)
    times = [f"{short(ms)} ms {name}" for name, ms in ways if ms is not None]
    yield f"{short(found.ms)} ms by the objective; {', '.join(times)}"


def _flushless(found: Facts) -> Iterator[str]:
    """The gain of steps without a flush, and the note that they change the training."""
    ms, flush = found.period_ms, found.flush_ms
    yield f"none between steps: {short(ms)} ms each; with one {short(flush)} ms ({change(flush, ms)})"
    if found.alone:
        yield from wrap(
            ["each stage steps on its own; steps late, by stage:", *map(str, found.delay)], _TEXT, between=" "
        )
    else:
        yield "gradients come 1 step late, and ranks hold two versions of their weights:"
    yield "this is another training (docs/exactness.md)"


def _exact(found: Facts) -> Iterator[str]:
    """The proven lower bound of the order's step, and the solver's change of the order it began with."""
    yield f"no order of these stages takes less than {short(found.lower_ms)} ms, gap {percent(max(0.0, found.gap))}"
    shorter = f"{short(found.ms)} ms a step instead of {short(found.before_ms)} ms: a shorter order"
    yield shorter if found.ms < found.before_ms else "none shorter than the one it began with"
    if found.too_large:
        yield "a shorter one needs more memory than there is"


def _averaging(asked: Average) -> Iterator[str]:
    """The averages of weights in place of gradients, and the note that they change the training."""
    steps = "each step" if asked.every == 1 else f"every {asked.every} steps"
    yield f"replicas sum no gradients: {steps} they average {percent(asked.share)} of their weights"
    if asked.parts > 1:
        yield f"all of them have had their turn after {asked.parts * asked.every} steps"
    yield "this is another training (docs/exactness.md)"


def _times(compiled: Compiled) -> list[str]:
    """Makespan and span of a step with the papers' bubble rates, and its time in steady state."""
    report, memory = compiled.report, compiled.found.bounds.memory
    gaps = (
        _gap(report.makespan_ms, report.lower_bound_makespan_ms, memory=memory),
        _gap(report.span_ms, report.lower_bound_span_ms, memory=memory),
    )
    rows = [("makespan", report.bubble_rate_makespan, gaps[0]), ("span", report.bubble_rate_span, gaps[1])]
    times = aligned([report.makespan_ms, report.span_ms])
    width = max(map(len, times))
    lines = [
        f"{name:<8}  {time:>{width}} ms  bubble {percent(bubble):>5} of it  {gap}"
        for (name, bubble, gap), time in zip(rows, times, strict=True)
    ]
    if report.flushless is not None:
        return [*lines, f"steady    {short(report.flushless.period_ms)} ms with the optimizer, without a flush"]
    return [*lines, *_steady(report, barrier=compiled.job.optimizer.sync == "before-step")]


def _steady(report: Report, *, barrier: bool) -> Iterator[str]:
    """The time of a step with its optimizer, and the time with or without the barrier for comparison."""
    ahead = report.ahead_ms
    here = report.barrier_ms if barrier or ahead is None else ahead
    how = "with" if barrier or ahead is None else "without"
    yield f"steady    {short(here)} ms with the optimizer, {how} its barrier"
    other_ms = ahead if barrier else report.barrier_ms
    if other_ms is not None and here > 0:
        without = "without" if barrier else "with"
        yield f"          {short(other_ms)} ms {without} the barrier, {change(other_ms, here)}"


def _why(compiled: Compiled, until: Until, *, verbose: bool) -> Iterator[RenderableType]:
    """The limiting resource and the critical path; with `verbose` the effect of small changes."""
    from zbc.compiler.whatif.why import bent_by_memory, binds, critical_path, what_ifs

    reasons = wrap(binds(compiled).split(" "), _TEXT, between=" ")
    bent = ["and memory rules out the partition that is most even in time"] if bent_by_memory(compiled) else []
    yield labelled("limited by", *reasons, *bent, *_path(critical_path(compiled)))
    if verbose:
        changes = list(what_ifs(compiled, until))
        if changes:
            yield labelled("what if", "per sequence, by the fast search", *_what_ifs(changes))


def _path(path: Path) -> Iterator[str]:
    kinds = ", ".join(f"{kind} {short(path.by_kind[kind], 3)}" for kind in sorted(path.by_kind))
    rank, most = max(path.by_rank.items(), key=lambda item: item[1])
    yield from wrap(f"critical path: {kinds} ms".split(" "), _TEXT, between=" ")
    share = percent(most / path.total if path.total else 0.0)
    yield f"and {path.changes} transfers, {short(path.transfers, 3)} ms; {share} of it on rank {rank}"
    if path.by_slice:
        late, ms = max(path.by_slice.items(), key=lambda item: item[1])
        part, mean = ms / sum(path.by_slice.values()), 1 / len(path.by_slice)
        yield f"of its F, B and W {percent(part)} are of slice {late}, {percent(mean)} of a slice on average"


def _what_ifs(found: list[Facts]) -> Iterator[str]:
    changes = aligned([100 * (entry.factor - 1) for entry in found], 2)
    for entry, by in zip(found, changes, strict=True):
        yield f"{entry.change}: {'' if by.startswith('-') else '+'}{by}%"


def _order(compiled: Compiled) -> Iterator[str]:
    """The order of ranks, and the transfer time of the slowest neighbours."""
    from zbc.compiler.cost.chain import weight
    from zbc.compiler.seating import transfers

    topology, ms = compiled.program.topology, transfers(compiled.job)
    parts = [[topology.rank(dp, pp) for pp in range(topology.pp)] for dp in range(topology.dp)]
    for dp, part in enumerate(parts):
        name = f"replica {dp}: " if topology.dp > 1 else "ranks "
        yield from wrap([f"{name}{part[0]}", *map(str, part[1:])], _TEXT, between=" ")
    slowest = max(weight(ms, [rank // topology.width for rank in part])[0] for part in parts)
    plain = max(weight(ms, range(dp * topology.pp, (dp + 1) * topology.pp))[0] for dp in range(topology.dp))
    yield f"slowest neighbours {short(slowest)} ms a tensor, as numbered {short(plain)}"


def _sums(compiled: Compiled) -> Iterator[str]:
    """The time of collectives, and the exposed part of it."""
    timeline, program = compiled.timeline, compiled.program
    ranks = range(timeline.ranks)
    longest = max(
        sum(collective.end - collective.start for collective in timeline.sums if rank in collective.ranks)
        for rank in ranks
    )
    exposed = max(map(timeline.closes, ranks)) - max(map(timeline.last_end, ranks))
    kinds = Counter(collective.op.kind.value for collective in timeline.sums)
    counted = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    over = f" over {program.dp} replicas" if program.dp > 1 else ""
    over += f" of {program.cp} ranks" if over and program.cp > 1 else f" over {program.cp} ranks" * (program.cp > 1)
    gathered = compiled.report.gathered
    if gathered is not None:
        gathers = f"{gathered.count} gather{'s' * (gathered.count > 1)} of weights on a rank, {short(gathered.ms)} ms"
        yield f"{gathers}, {short(gathered.exposed_ms)} ms of it exposed"
    text = f"{counted}{over}: up to {short(longest)} ms on a rank, {short(exposed)} ms of it after the last op of all"
    yield from wrap(text.split(" "), _LONG, between=" ")


def balance_lines(compiled: Compiled, gain: Mapping[str, Any]) -> Iterator[str]:
    """The gain of unequal numbers of microbatches, and the step times with the fewest and the most."""
    made = sorted([compiled, *(start.compiled for start in compiled.ramp)], key=lambda plan: plan.program.microbatches)
    few, most = ((plan.program.microbatches, short(plan.report.makespan_ms)) for plan in (made[0], made[-1]))
    room = compiled.job.schedule.microbatch_size * (compiled.job.model.seq_len or 0)
    if gain:
        low, high = gain["counts"]
        yield f"{gain['gain']:.2f}x as fast as equal counts, by the samples of {gain['steps']} steps: {gain['samples']}"
        padding = percent(1 - gain["fill"])
        yield f"in a step, {low} to {high} microbatches of {room} tokens for a replica, {padding} padding"
    else:
        yield f"microbatches of {room} tokens; what it gains is not known: the data cannot be read here"
    yield f"plans for {few[0]} (makespan {few[1]} ms) to {most[0]} microbatches ({most[1]} ms)"


def dealt_lines(dealt: Mapping[str, Any]) -> Iterator[str]:
    yield f"by the samples of {dealt['steps']} steps, rows have at the median"
    yield from wrap(list(map(str, dealt["tokens"])), _TEXT, between=", ")
    yield f"{percent(1 - dealt['fill'])} padding; longer than planned in {dealt['longer']} of the steps"


def _ramp(compiled: Compiled) -> Iterator[str]:
    first, per = 1, compiled.job.schedule.microbatch_size * compiled.job.parallel.dp
    counts = [start.compiled.program.microbatches for start in compiled.ramp]
    times = aligned([start.compiled.report.makespan_ms for start in compiled.ramp])
    bubbles = [percent(start.compiled.report.bubble_rate_makespan) for start in compiled.ramp]
    for start, count, time, bubble in zip(compiled.ramp, counts, times, bubbles, strict=True):
        steps = f"steps {first} to {first + start.steps - 1}" if start.steps > 1 else f"step {first}"
        work = f"{count} microbatch{'es' if count > 1 else ''} ({count * per} samples)"
        yield f"{steps}: {work}, makespan {time} ms, bubble {bubble} of it"
        first += start.steps
    count = compiled.program.microbatches
    yield f"from step {first}: {count} microbatches ({count * per} samples), as above"


def _gap(ms: float, bound: float, *, loose: bool = False, memory: bool = True) -> str:
    """The gap of a step to its lower bound; `loose`: most of it is due to the bound; `memory`: the bound includes
    limits of memory."""
    if bound <= 0:
        return "no lower bound"
    from zbc.compiler.report.report import MET

    above = ms / bound - 1
    if above < MET:
        return "proven optimal for this partition"
    less = "" if memory else " (no bound on memory)"
    return f"{percent(above)} above {'a loose' if loose else 'the'} lower bound{less}"


def _costs(compiled: Compiled) -> Iterator[str]:
    from zbc.compiler.cost.machine import assumed_link

    profile, most = compiled.job.timed, max(compiled.report.per_rank, key=lambda rank: rank.messages_ms)
    if most.messages_ms:
        part = percent(most.messages_ms / most.busy_ms)
        yield f"messages keep rank {most.rank} from computing for {short(most.messages_ms)} ms, {part} of its work"
    if (link := assumed_link(compiled.job)) is not None:
        yield from wrap(
            f"assumed: a link of {link}: set hardware.gpu or link_gbps, or profile".split(" "), _TEXT, between=" "
        )
    if profile is None:
        given = compiled.job.costs
        silent = given.f is not None and not most.messages_ms and compiled.job.parallel.pp > 1
        first, *rest = _estimated(compiled) if compiled.report.costs == "estimated" else _COSTS[compiled.report.costs]
        yield f"{first}; without costs.message a message costs its ranks nothing" if silent else first
        yield from rest
        if (dry := compiled.job.profile) is not None:
            yield f"kernels and bytes of layers: a dry run of them, torch {dry.on.torch}"
        elif (why := compiled.job.uncounted) is not None:
            told = ": ".join([f"{why.code} {why.message}", *why.details[:1]])
            yield from wrap(told.split(" "), _TEXT, between=" ")
        return
    on = profile.on
    how = "measured" if on.source == "measured" else "read off a recorded run"
    threads = f", {on.threads} thread{'s' if on.threads > 1 else ''} per rank" if on.device == "cpu" else ""
    yield f"{how} on {on.name or on.device}{threads}, torch {on.torch}"
    yield from not_to_be_trusted(profile)


def not_to_be_trusted(profile: Profile) -> Iterator[str]:
    """A warning with the times of a profile whose spread is too wide, if any."""
    wide = sorted(profile.wide(), key=lambda entry: -entry[1].spread)
    if wide:
        shown = ", ".join(f"{name} {percent(time.spread)}" for name, time in wide[:3])
        rest = f", and {len(wide) - 3} more" if len(wide) > 3 else ""
        text = f"spread too wide to trust: {shown}{rest}; profile again on a quiet machine, or with more --rounds"
        yield from wrap(text.split(" "), 65, between=" ")


def _estimated(compiled: Compiled) -> Iterator[str]:
    from zbc.job import gpu

    hardware = compiled.job.hardware
    if hardware.gpu is None:
        yield "estimated from [model] and [hardware]; `zbc profile` measures them"
    else:
        yield f"estimated from [model] and the data sheet of {hardware.gpu}"
        yield f"({gpu.SUSTAINED}); `zbc profile` measures them"
    if (remark := gpu.forgotten(hardware)) is not None:
        yield remark


_COSTS = {
    "given": ("given in [costs]",),
    "assumed equal": (
        "assumed equal for all layers, which could not be run without numbers:",
        "`zbc profile JOB.toml` measures them, and `zbc check JOB.toml --gradients`",
        "says whether they can be built and trained",
    ),
}


def outlives(found: Survival, *, verbose: bool) -> Iterator[str]:
    """Stricter transports that a program is free of deadlock under; see docs/gpu.md."""
    names = ("blocking sends", *(("waits for a whole GPU within a step", "one hardware queue") if verbose else ()))
    for name, holds in zip(names, found, strict=False):
        yield f"survives {name}: {'yes' if holds else 'no'}"


def _ranks_note(compiled: Compiled) -> list[str]:
    notes = ["units: peak activations, in shares of one microbatch per rank", *_limits(compiled)]
    if compiled.report.bytes_known:
        most = max(compiled.report.per_rank, key=lambda rank: rank.peak_bytes)
        notes.insert(0, f"memory at most {size(most.peak_bytes)}, on rank {most.rank}")
    if compiled.report.bytes_known:
        return notes
    notes.append("bytes are not known before the model is built")
    if compiled.job.hardware.memory_gib is not None:
        notes.append("whether they fit hardware.memory_gib: `zbc profile JOB.toml` measures them")
    return notes


def _copies(compiled: Compiled) -> Iterator[str]:
    """The share of activations offloaded to the host, the hidden part of the copies, and the pinned memory."""
    report, copied = compiled.report, compiled.report.copied
    if copied is None:
        return
    yield f"{copied.moved:.0%} of all activations go to the host and back; {copied.hidden:.0%} of that is hidden"
    most = max(report.host.values(), key=lambda rank: float(rank["bytes"]))["bytes"]
    if most:
        yield f"pinned on the host: at most {size(most)} a rank"
    yield from _pays_little(compiled, copied.k)


def _pays_little(compiled: Compiled, k: float) -> Iterator[str]:
    """Why offload does not help, if so: a copy takes k times F + B + W of its activations."""
    most = (1.0 if compiled.job.hardware.duplex else 0.5) / k  # copies out and back at once, or one after the other
    if most < PAYS:
        text = f"a copy takes {k:.2f} of F + B + W, so at most {most:.0%} can move without waits"
        yield from wrap(f"offload pays little here: {text}".split(" "), _TEXT, between=" ")


def _weighed(compiled: Compiled) -> Iterator[str]:
    """Step times of the tried choices of keep, recompute and offload, the fastest first; and why offload does not pay,
    if so."""
    choices = compiled.found.weighed
    fits = sorted((ms, name) for name, ms in choices if ms is not None)
    lines = [f"{name} {short(ms)} ms" for ms, name in fits]
    misfits = [name for name, ms in choices if ms is None]
    lines += [f"{', '.join(misfits)}: does not fit"] if misfits else []
    yield from wrap(lines, _TEXT, between="; ")
    k = compiled.found.copy_share
    if compiled.report.copied is None and k is not None:
        yield from _pays_little(compiled, k)


def _limits(compiled: Compiled) -> Iterator[str]:
    most, job = compiled.report.limits, compiled.job
    limits = [] if most.activation_units is None else [f"{short(most.activation_units)} units"]
    limits += [] if most.activation_bytes is None else [f"{size(most.activation_bytes)} of activations"]
    if most.device_bytes is not None and job.reserve_gib:
        there, free = short(job.hardware.least_gib or 0.0), short(job.reserve_gib)
        limits.append(f"{short(most.device_bytes / GIB)} of {there} GiB, reserve {free}")
    elif most.device_bytes is not None:
        limits.append(f"{size(most.device_bytes)} of everything")
    if limits:
        yield f"limits of a rank: {', '.join(limits)}"


def _ranks(report: Report, *, verbose: bool) -> RenderableType:
    """One row per rank; with `verbose` idle time by cause, and memory in a table of its own. For steps without a flush
    there are no causes, and idle is the rest of the period."""
    sized, period = report.bytes_known and not verbose, report.flushless.period_ms if report.flushless else None
    verbose = verbose and period is None
    unit, scale = unit_of(report.peak_bytes)
    times = [aligned([getattr(rank, key) for rank in report.per_rank]) for key in _IDLE]
    left = [sum(getattr(rank, key) for key in _IDLE) for rank in report.per_rank]
    idle = aligned(left if period is None else [max(0.0, period - rank.busy_ms) for rank in report.per_rank])
    columns = [
        [str(rank.rank) for rank in report.per_rank],
        [ranges(rank.stages) for rank in report.per_rank],
        aligned([rank.busy_ms for rank in report.per_rank]),
        *(times if verbose else [idle]),
        [f"{rank.peak_activation_units:.2f}" for rank in report.per_rank],
        *([aligned([rank.peak_bytes / scale for rank in report.per_rank], 3)] if sized else []),
    ]
    heads = ["warm-up", "message", "drain", "sync"] if verbose else ["idle ms"]
    heads = ["rank", "stages", "busy ms", *heads, "units", *([unit] if sized else [])]
    return table(heads, zip(*columns, strict=True), left=2, most=None if verbose else _ROWS)


def _memory(report: Report) -> RenderableType:
    """Memory of every rank by category, each category at its own peak."""
    unit, scale = unit_of(report.peak_bytes)
    keys = ("peak_bytes", *_BYTES)
    columns = [aligned([getattr(rank, key) / scale for rank in report.per_rank], 3) for key in keys]
    ranks = (str(rank.rank) for rank in report.per_rank)
    return table(["rank", unit, *_BYTES.values()], zip(ranks, *columns, strict=True))


PAYS = 0.5  # share of activations that must be able to move without waits, or the summary says that offload pays little
_IDLE = ("idle_warm_up_ms", "idle_message_ms", "idle_drain_ms", "idle_sums_ms")
_MEMORY = (
    "the most on each rank, and what fills it; grads: gradients; state: of",
    "the optimizer; kept: activations; logits: part of them",
)
_BYTES = {
    "weight_bytes": "weights",
    "gradient_bytes": "grads",
    "master_bytes": "masters",
    "optimizer_bytes": "state",
    "activation_bytes": "kept",
    "logit_bytes": "logits",
    "buffer_bytes": "buffers",
}


def _slices_note(report: Report) -> Iterator[str]:
    yield "of a microbatch; F, B, W: ms through all stages"
    from zbc.compiler.report.report import slice_ms
    from zbc.compiler.schedules import SCHEDULES

    ms = [*map(slice_ms, report.slices)]
    yield f"the slowest takes {max(ms) * len(ms) / sum(ms) if sum(ms) else 1.0:.4f} times the mean"

    card = SCHEDULES.get(report.schedule)
    if card is not None and card.sliced:
        yield f"a rank keeps at most {card.sliced} microbatches at unit costs"
    if report.bytes_known:
        most = max(report.per_rank, key=lambda rank: rank.kv_bytes)
        yield f"they share keys and values, with their gradients {size(most.kv_bytes)} on rank {most.rank}"


def _slices(report: Report) -> RenderableType:
    from zbc.compiler.report.report import slice_ms

    times = [aligned([part[key] for part in report.slices]) for key in ("f_ms", "b_ms", "w_ms")]
    times.append(aligned([*map(slice_ms, report.slices)]))
    named = ((str(j), str(part.begin), str(part.tokens)) for j, part in enumerate(report.slices))
    heads = ["slice", "from", "tokens", "F", "B", "W", "all"]
    rows = [(*names, *cells) for names, cells in zip(named, zip(*times, strict=True), strict=True)]
    return table(heads, rows, left=1, most=_ROWS)


def _cut_note(compiled: Compiled) -> Iterator[str]:
    """The loss of the partition against perfect balance, and how it was found."""
    from zbc.compiler.report.report import loss

    report, cut = compiled.report, compiled.report.cut
    times = aligned([cut.busiest_ms, cut.balanced_ms])
    unit, _ = _stage_unit(report)
    if report.bytes_known:
        yield f"F, B, W: ms of a microbatch; kept: {unit} of it, from F to B"
        yield f"stays: {unit} of weights, gradients and optimizer"
    else:
        yield "F, B, W: ms of a microbatch"
    busy = f"rank {cut.busiest_rank} is busy for {times[0]} ms"
    yield f"{busy}, {percent(loss(cut))} above perfect balance ({times[1]} ms)"
    if cut.all_tried:
        yield f"no other partition is better for this schedule ({cut.tried} simulated)"
    elif cut.tried > 1:
        yield f"the best of {cut.tried} partitions simulated"
    yield from _recomputed(compiled)


def _recomputed(compiled: Compiled) -> Iterator[str]:
    from zbc.compiler.partition.setup import as_ordered

    memory, stages = as_ordered(compiled.job, compiled.found).memory, compiled.report.cut.stages
    named = dict[str, list[int]]()
    for s in range(len(stages)):
        how, _, count = memory.of(s).partition("+")[0].partition(" ")
        selectively = f"recomputed selectively{'' if memory.attends_again else ', without attention'}"
        some = f"{count} layer{'s' if count != '1' else ''} recomputed" if count else "recomputed"
        if how in ("recompute", "selective"):
            named.setdefault(some if how == "recompute" else selectively, []).append(s)
    if (chunk := compiled.job.model.loss_chunk) is not None:
        yield f"model.loss_chunk = {chunk}: logits of so many tokens at a time"
    for name, again in named.items():
        some = f"stage{'s' if len(again) > 1 else ''} {ranges(again)}"
        yield f"{name}: {'all stages' if len(again) == len(stages) else some}"


def _stage_unit(report: Report) -> tuple[str, float]:
    """Unit and scale for memory of stages."""
    return unit_of(10 * max(s.state_bytes for s in report.cut.stages))


def _stages(compiled: Compiled) -> RenderableType:
    """One row per stage, with its permanent memory and the activations that a microbatch keeps from F to B."""
    stages, sized = compiled.report.cut.stages, compiled.report.bytes_known
    _, scale = _stage_unit(compiled.report)
    times = [aligned([getattr(s, key) for s in stages], 3) for key in ("f_ms", "b_ms", "w_ms")]
    sizes = [aligned([getattr(s, key) / scale for s in stages], 3) for key in ("state_bytes", "activation_bytes")]
    named = ((str(s.stage), ranges(sorted({*s.ranks})), layer_ranges(s.layers)) for s in stages)
    numbers = zip(*times, *(sizes if sized else ()), strict=True)
    heads = ["stage", "rank", "layers", "F", "B", "W", *(["stays", "kept"] if sized else [])]
    rows = [(*names, *cells) for names, cells in zip(named, numbers, strict=True)]
    return table(heads, rows, left=3)


def ranges(numbers: Sequence[int]) -> str:
    """`0-2 7`: ascending numbers, runs of three or more joined."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else " ".join(map(str, run)) for run in runs)


def layer_ranges(names: Sequence[str]) -> str:
    """`embed, layers.0-2, head` for the layers of a stage."""
    parts: list[tuple[str, list[int]]] = []
    for name in names:
        match = re.fullmatch(r"(.*\.)(\d{1,9})", name)
        stem, number = (match[1], [int(match[2])]) if match else (name, [])
        if number and parts and parts[-1][0] == stem:
            parts[-1][1].extend(number)
        else:
            parts.append((stem, number))
    return ", ".join(stem + "-".join(map(str, sorted({*numbers[:1], *numbers[-1:]}))) for stem, numbers in parts)


def best_of(weighed: Sequence[Weighed]) -> Weighed:
    """The fastest shape per sample that fits."""
    return min((row for row in weighed if row.error is None and row.sample_ms), key=lambda row: row.sample_ms or 0.0)


def chosen_of(weighed: Sequence[Weighed]) -> str:
    """`pp 4, dp 2, the fastest of 8 ranks`."""
    shape = best_of(weighed).shape
    return f"{shape}, the fastest of {shape.ranks} ranks"


def of_world(weighed: Sequence[Weighed]) -> Iterator[RenderableType]:
    """The candidate shapes, with the time of each."""
    yield labelled("world", f"{chosen_of(weighed)}, each planned by the fast search")
    best = best_of(weighed)
    planned = [row for row in weighed if row.sample_ms is not None]
    times = iter(aligned([row.sample_ms or 0.0 for row in planned], 3))
    sized = all(row.peak_bytes is not None for row in planned)
    held = iter(aligned([(row.peak_bytes or 0) / GIB for row in planned], 3) if sized else [""] * len(planned))
    axes = [axis for axis in ("cp", "tp", "ep") if any(getattr(row.shape, axis) > 1 for row in weighed)]
    rows = []
    for row in weighed:
        pp, dp, microbatches, *_ = row.shape
        cells = ["", ""] if row.sample_ms is None else ["> " * row.at_least + next(times), next(held)]
        mark = "<" if row is best else "" if row.error is None else row.error.code
        note = "no plan" if row.shape.why else mark
        shares = [str(getattr(row.shape, axis)) for axis in axes]
        rows.append([str(pp), str(dp), *shares, str(microbatches or ""), *(cells if sized else cells[:1]), note])
    heads = ["pp", "dp", *axes, "microbatches", "ms/sample", *(["GiB"] if sized else []), ""]
    yield indented(table(heads, rows, left=0, most=None))
    if any(row.at_least for row in weighed):
        yield indented("> at least: the others are faster, so it was not planned with all of its microbatches")
    for text in dict.fromkeys(_reason(row) for row in weighed if _reason(row)):
        yield indented(text)


def _reason(row: Weighed) -> str:
    """Why a shape was not planned, or must not be chosen; "" if it may be."""
    if row.error is not None:
        return f"{row.shape}: [{row.error.code}] {row.error.message}"
    return f"{row.shape}: {row.shape.why}" if row.shape.why else ""
