"""Steps of ranks that are threads in which each op takes a given time, beside what the plan's order predicts of it."""

import time
from dataclasses import replace
from typing import Any

from torch import Tensor

from bench.sleeping import Paced, sleep_until
from tests.threads import run_threads
from zbc.compiler.compiled import Compiled
from zbc.compiler.cost.cost import Costs
from zbc.compiler.sim.context import Context
from zbc.compiler.steps import period_of
from zbc.ir import WHOLE, Kind, Message
from zbc.plan.directory import StoredPlan
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.state import Worker
from zbc.runtime.transports.hub import Hub
from zbc.runtime.transports.transport import Letter

UNITS = {"f": 1.0, "b": 1.3, "w": 0.7, "s": 0.5, "t": 0.5, "i": 0.4, "e": 0.4}  # what ops of a column take
LINK, STEPS = 0.3, 3  # what messages take; steps, the first of which does not count
NEAR = 0.05


class Late(Hub):
    """A hub on which messages between stages arrive `late` seconds after they were sent."""

    def __init__(self, ranks: int, *, late: float, **how: Any) -> None:
        super().__init__(ranks, **how)
        self._late, self._due = late, dict[tuple[int, Letter], float]()

    def put(self, source: int, message: Letter, tensor: Tensor, peer: int) -> None:
        if isinstance(message, Message):
            self._due[peer, message] = time.perf_counter() + self._late
        super().put(source, message, tensor, peer)

    def take(self, rank: int, message: Letter, peer: int) -> Tensor:
        tensor = super().take(rank, message, peer)
        sleep_until(self._due.pop((rank, message), 0.0))
        return tensor

    def there(self, rank: int, message: Letter) -> bool:
        return super().there(rank, message) and time.perf_counter() >= self._due.get((rank, message), 0.0)


def costs_of(costs: Costs, unit: float) -> Costs:
    """Costs of the same form in which ops of a microbatch take some `unit` ms, by kind and stage."""

    def even(entry: Any, ms: float) -> Any:
        return (ms,) * len(entry) if isinstance(entry, tuple) else ms * (entry > 0)

    ms = {
        name: tuple(even(entry, UNITS[name] * unit * (1 + 0.2 * (s % 3))) for s, entry in enumerate(column))
        for name, column in costs.ms.items()
        if name in UNITS
    }
    links = tuple({edge: even(each, LINK * unit) for edge, each in pipe.items()} for pipe in costs.links)
    return replace(costs, ms=ms, links=links, occupies=(), shared=1, alone=1.0, rendezvous=False)


def emulated(made: Compiled, plan: StoredPlan) -> float | None:
    """A step over its prediction, less 1; None for groups, and where steps differ.

    An op of a microbatch takes a time that is long beside what this machine computes for it, and a message of a stage
    arrives later than it was sent. Collectives, copies and the optimizer take what they take.
    """
    ops = {op for rank in made.program.ranks for op in rank}
    differ = made.job.schedule.ramp or made.job.train.eval_every or any(op.share != WHOLE for op in ops)
    if differ or any(op.kind is Kind.OVERLAP for op in ops):
        return None
    unit = max(150.0, 60.0 * plan.manifest.topology.world)
    found = _off(made, plan, unit)
    return found if abs(found) < NEAR else _off(made, plan, 2 * unit)  # a wrong order is as far off at any unit


def _off(made: Compiled, plan: StoredPlan, unit: float) -> float:
    topology, costs = plan.manifest.topology, costs_of(made.costs, unit)
    program, barrier = made.program, made.job.optimizer.sync == "before-step"
    known = Context(program, costs)
    told = period_of(program, costs) if program.flushless else known.step_ms("makespan" if barrier else "period")
    times: list[list[tuple[float, float]]] = [[] for _ in range(topology.world)]

    def paced(worker: Worker) -> None:
        worker.clock = Paced(worker, costs.duration)

    def timed(worker: Worker) -> Any:
        def run(*of: Any, **how: Any) -> Any:
            began = time.perf_counter()
            result = run_step(*of, **how)
            times[worker.rank].append((began, time.perf_counter()))
            return result

        return run

    hub = Late(topology.world, inside=topology.inside, late=LINK * unit / 1e3)
    run_threads(plan, STEPS, setup=paced, step=timed, hub=hub)
    begins = [min(one[step][0] for one in times) for step in range(STEPS)]
    ends = [max(one[step][1] for one in times) for step in range(STEPS)]
    last = STEPS - program.flushless  # nothing follows the last one, and ranks wait for less
    took = [ends[k] - (begins[k] if barrier else ends[k - 1]) for k in range(1, last)]
    return 1e3 * min(took) / told - 1
