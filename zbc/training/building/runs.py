"""The PhaseRun of a rank in each phase of a training: the script, with wrappers around its handlers."""

from __future__ import annotations

from collections.abc import Mapping

from zbc.ir import Kind
from zbc.ops import rows_with
from zbc.plan.directory import RankPlan
from zbc.runtime.core.stage import Stage
from zbc.runtime.core.state import PhaseRun
from zbc.runtime.core.validate import VectorLayout
from zbc.runtime.features.cycle import Cycle, stage_step
from zbc.runtime.features.freezing import Turns, turns_of
from zbc.runtime.features.gathers import with_weights
from zbc.runtime.features.packing import in_rows
from zbc.runtime.features.routing import experts_of_all_blocks
from zbc.runtime.handlers import HANDLERS
from zbc.training.building.context import Settings, Site

_RUNS_LAYERS = [kind for kind in Kind if kind.is_forward or kind.is_backward]  # backwards may run forwards again


def phase_run(site: Site, plan: RankPlan) -> PhaseRun:
    manifest, run, shapes = plan.manifest, plan.manifest.topology, site.shapes
    placement, unequal = manifest.to_placement(), site.manifest.balance
    batch = run.batch if unequal is None else run.dp * unequal.most
    apart = run.dp // run.span if manifest.averages else 1
    routed = experts_of_all_blocks(manifest.planning)
    layout = VectorLayout(
        shapes.parameters, batch, run.world, shapes.sizes, apart, site.dealer is not None, routed, site.ranks
    )
    handlers = dict(HANDLERS)
    rows = rows_with(("weights for W",) if manifest.with_w else ())
    readers = [kind for kind in Kind if kind.computes and any(ref.what == "weights" for ref in rows[kind].reads)]
    for wanted, kinds, around in (
        (unequal is not None, _RUNS_LAYERS, in_rows),
        (manifest.sharded and not manifest.flushless, readers, with_weights),
    ):
        handlers |= {kind: around(handlers[kind]) for kind in kinds} if wanted else {}
    texts = tuple(map(placement.text, plan.ops))
    if manifest.flushless:
        options = Settings.of(manifest).optimizer
        every = options.every if options.sync == "asynchronous" else 0
        handlers |= {kind: stage_step for kind in Kind if kind.steps}
        cycle = Cycle(plan.ops, texts, manifest.microbatches, handlers, options.clip_stage_norm, every)
        return PhaseRun(plan, layout, [], cycle)
    return PhaseRun(plan, layout, [(handlers[op.kind], op, text) for op, text in zip(plan.ops, texts, strict=True)])


def turns_in(site: Site, plan: RankPlan, stages: Mapping[int, Stage]) -> dict[int, Turns]:
    """The turns of the stages with frozen layers."""
    after = site.settings.freeze.after
    found = {s: turns_of(plan.ops, stage, plan.manifest, after) for s, stage in stages.items()}
    return {s: turns for s, turns in found.items() if turns is not None}
