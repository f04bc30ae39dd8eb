"""Functions for the processes of the pool."""

import io
import itertools
from collections import Counter
from datetime import timedelta

import pytest
import torch

from zbc.ir import Kind
from zbc.ops import WORDS
from zbc.plan.directory import RankPlan, StoredPlan
from zbc.runtime.core.execute import finish, run_step
from zbc.runtime.core.feature import Pause
from zbc.runtime.core.optimizer import primary
from zbc.runtime.core.state import Worker
from zbc.runtime.features.shards.gathers import Gathers
from zbc.runtime.features.tensor_parallel import SharedLayers
from zbc.runtime.features.words.vocabulary_state import Vocabulary
from zbc.runtime.transports.network import Network
from zbc.runtime.transports.transport import Staged
from zbc.training.models.experts import Experts
from zbc.training.warm import warm
from zbc.training.worker import build_worker

CPU = torch.device("cpu")


def open_network(plan: StoredPlan) -> Network:
    return Network(plan.manifest, CPU, timedelta(seconds=30))


def open_worker(rank: int, plan: StoredPlan, *, staged: bool = False) -> Worker:
    part, network = plan.manifest.topology.of(rank).pp, open_network(plan)
    transport = Staged(network, CPU) if staged else network
    ramp = [RankPlan(part, one.program.ranks[part], one.manifest) for one in plan.ramp]
    return build_worker(RankPlan(part, plan.program.ranks[part], plan.manifest), transport, CPU, ramp)


def train(
    rank: int, plan: StoredPlan, steps: int, warmed: bool = False, staged: bool = False
) -> tuple[list[float], list[float], bytes, bytes]:
    """Losses, norms, and the gradients (plans without STEP leave them) and weights of this rank, packed."""
    worker = open_worker(rank, plan, staged=staged)
    if warmed:
        warm(worker)
    found = []
    for step in range(steps):
        worker.ends = step + 1 == steps
        found.append(run_step(worker, step))
    found.append(finish(worker))
    results = [result for result in found if result is not None]
    worker.features.of(Gathers).pauses(worker, Pause(whole=True))
    worker.transport.close()
    parameters = primary(worker)
    words = worker.features.find(Vocabulary)
    if words is not None and worker.replica == 0:
        own = worker.optimizers[WORDS].parameters
        parameters |= {f"{words.output.first:06d} {name}": p for name, p in own.items()}
    weights = {name: p.detach() for name, p in parameters.items()}
    grads = {name: p.grad for name, p in parameters.items()}
    return [r.loss for r in results], [r.grad_norm for r in results], pack(grads), pack(weights)


def pack(tensors: dict[str, torch.Tensor | None]) -> bytes:
    """Packs tensors as bytes instead of torch's shared memory, which ends with its process."""
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def unpack(packed: list[bytes]) -> dict[str, torch.Tensor | None]:
    return {name: tensor for one in packed for name, tensor in torch.load(io.BytesIO(one)).items()}


def without_step(op) -> bool:
    return op.kind is not Kind.STEP


def every(self, likely):
    """All choices of top_k experts, in turn."""
    those = torch.tensor([*itertools.combinations(range(self.count), self.top_k)])
    return those[torch.arange(len(likely)) % len(those)]


def skewed(self, likely):
    """Most tokens choose the same experts, so that a node and some ranks get few rows; none chooses the last one."""
    found = likely[:, :-1].topk(self.top_k, -1).indices
    found[len(likely) // 8 :] = torch.arange(self.top_k)
    return found


def one_node(self, likely):
    return torch.arange(self.top_k).repeat(len(likely), 1)


def exchanging(rank: int, plan: StoredPlan, steps: int, choose):
    """Losses and norms, and packed weights, with these choices of experts; the rows sent to ranks of this node and of
    others; and how often counts were exchanged, by op and ranks."""
    worker, sent, counts = open_worker(rank, plan), Counter[bool](), Counter[tuple[int, tuple[int, ...]]]()
    transport = worker.features.of(SharedLayers).swaps.transport
    start = transport.start_swap

    def started(mine, out, parts, into, ranks):
        if mine.is_floating_point():
            sent[ranks[1] - ranks[0] > 1] += sum(out) - out[ranks.index(rank)]
        else:
            counts[worker.progress.index, ranks] += 1
        return start(mine, out, parts, into, ranks)

    transport.start_swap = started
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Experts, "_chosen", choose)
        found = [(result.loss, result.grad_norm) for result in (run_step(worker, step) for step in range(steps))]
    worker.transport.close()
    return found, pack({name: p.detach() for name, p in primary(worker).items()}), sent, counts
