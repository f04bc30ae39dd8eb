"""A planned job with all its results, and its plan directory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from zbc.compiler.cost.cost import Costs
from zbc.compiler.memory.per_rank import RankMemory
from zbc.compiler.partition.setup import Ordered, as_ordered
from zbc.compiler.report import report
from zbc.compiler.sim.simulate import Timeline
from zbc.ir import Program
from zbc.job import gpu
from zbc.job.cuts import cuts_of
from zbc.job.flops import attention_cost
from zbc.job.spec import Job
from zbc.job.throughput import Throughput, settled_of, throughput
from zbc.plan import directory as plans


class RampStart(NamedTuple):
    """A plan with fewer microbatches, and the number of steps a training runs it before the next."""

    compiled: Compiled
    steps: int


@dataclass(frozen=True, slots=True)
class Compiled:
    """All results for one planned job."""

    job: Job
    schedule: str
    compute: Program  # compute-only, as made by the schedule
    program: Program  # complete
    costs: Costs
    layers: tuple[tuple[str, ...], ...]  # stage -> layer names
    found: Ordered  # its order, partition and recomputing stages
    timeline: Timeline
    memory: list[RankMemory]
    report: report.Report
    ramp: tuple[RampStart, ...] = ()

    @property
    def step_ms(self) -> float:
        """ms of a step as plans are compared: in steady state, or by the job's objective (see `Job.steady`)."""
        return self.settled_ms if self.job.steady else self.report.step_ms(self.job.objective)

    @property
    def settled_ms(self) -> float:
        """ms of a step with its optimizer in steady state."""
        return settled_of(self.report, self.job.optimizer.sync)

    @property
    def sequences(self) -> int:
        """Sequences per step, over all replicas."""
        return self.job.parallel.dp * self.job.schedule.microbatches * self.job.schedule.microbatch_size

    def rates(self, ms: float) -> Throughput:
        """Throughput of steps of `ms`."""
        job = self.job
        world, peak, frozen = job.parallel.ranks, gpu.peak_tflops(job.hardware.gpu), bool(job.adapter.rank)
        tokens = job.parallel.dp * job.schedule.microbatch_size * sum(job.tokens) if job.model.seq_len else 0
        return throughput(job.model, self.sequences, ms, world, peak, tokens or None, frozen=frozen)

    def assemble(self) -> tuple[plans.Manifest, dict[str, str]]:
        """The manifest and the text of every other file; names of files may have a folder."""
        boundary, parts, below = _boundary(self.job), [], dict[str, str]()
        for start in self.ramp:
            its, files = start.compiled.assemble()
            name = f"m{its.microbatches}"
            parts.append(
                plans.RampPlan(folder=name, microbatches=its.microbatches, steps=start.steps, sha256=its.digest())
            )
            below |= {f"{name}/{file}": text for file, text in {plans.MANIFEST: its.dumps(), **files}.items()}
        manifest, files = plans.assemble(
            self.program,
            parameters={"chunks": self.program.placement.chunks},
            layers=self.layers,
            boundaries=[boundary] * (len(self.layers) - 1),
            microbatch_size=self.job.schedule.microbatch_size,
            predicted=self.report.predicted(),
            planning=as_ordered(self.job, self.found).planning(),
            training=self.job.training(),
            ramp=parts,
            cuts=cuts_of(self.job),
            words=self.job.words,
            balance=_unequal(self.job),
        )
        return manifest, {**files, **below}

    def write(self, folder: Path) -> plans.Manifest:
        """Write the plan directory; it appears complete or not at all."""
        manifest, files = self.assemble()
        plans.write(folder, manifest, files)
        return manifest


def _unequal(job: Job) -> plans.Unequal | None:
    """How samples are dealt to replicas with unequal numbers of microbatches."""
    if not job.balances or job.model.seq_len is None:
        return None
    return plans.Unequal(room=job.model.seq_len, most=job.most_microbatches, quadratic=attention_cost(job.model))


def _boundary(job: Job) -> plans.Boundary | None:
    """The tensor between stages, if known before the model is built."""
    model = job.model
    if not model.builtin or model.seq_len is None or model.hidden is None:
        return None
    longest = max((b - a for a, b in pairwise(cuts_of(job))), default=model.seq_len)
    rows, kind = longest // job.parallel.cp, model.parameters.split()[0]
    return plans.Boundary(shape=[job.schedule.microbatch_size, rows, model.hidden], dtype=kind)
