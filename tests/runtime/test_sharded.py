"""The parts of a stage that ranks step, and that they make the whole; ZeRO-2."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.jobs import job, stored
from tests.refusals import refused
from tests.runtime.small_plans import make_program
from tests.threads import losses_of, norms_of, run_threads, side_by_side
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.memory import ledger
from zbc.ir import Kind
from zbc.job import spec
from zbc.plan import dealing
from zbc.runtime.core.optimizer import build_optimizer
from zbc.runtime.core.validate import CHUNK
from zbc.runtime.features.shards.pieces import Piece, cut, deal
from zbc.runtime.features.shards.sharded import Sharded
from zbc.runtime.transports.hub import Hub

ADAMW = spec.Optimizer(lr=0.1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes=st.lists(st.integers(0, 40), max_size=12), ranks=st.integers(1, 6))
def test_pieces_are_dealt_once_and_evenly(sizes, ranks):
    pieces = [Piece(str(i), 0, size) for i, size in enumerate(sizes)]
    shares = deal(pieces, ranks)
    assert sorted(piece for share in shares for piece in share) == sorted(pieces) and len(shares) == ranks
    for share in shares:
        assert sum(piece.size for piece in share) <= sum(sizes) / ranks + max(sizes, default=0)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    counts=st.lists(
        st.one_of(st.integers(0, 40), st.sampled_from([CHUNK, CHUNK + 3, 5 * CHUNK]), st.integers(0, 9 * CHUNK)),
        max_size=12,
    ),
    ranks=st.integers(1, 7),
)
def test_the_most_that_a_rank_gets_is_what_dealing_gives_it(counts, ranks):
    sizes = [stop - start for count in counts for start, stop in dealing.cut(count)]
    shares = dealing.deal(sizes, ranks)
    assert dealing.most(counts, ranks) == (max(sum(sizes[i] for i in one) for one in shares), max(map(len, shares)))


def test_large_parameters_are_cut_at_the_marks_of_the_norm():
    empty = {"a": (2 * CHUNK + 5,), "b": (3, 4), "c": (), "d": (0,)}
    found = cut({name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in empty.items()})
    assert found[:3] == [Piece("a", 0, CHUNK), Piece("a", CHUNK, 2 * CHUNK), Piece("a", 2 * CHUNK, 2 * CHUNK + 5)]
    assert found[3:] == [Piece("b", 0, 12), Piece("c", 0, 1), Piece("d", 0, 0)]


def test_what_the_compiler_predicts_for_the_norm_is_one_chunk():
    assert ledger.WIDE == CHUNK


def modules():
    """A weight in three pieces, one that is not contiguous, one that does not train, one without a gradient."""
    torch.manual_seed(0)
    turned = nn.Parameter(torch.randn(6, 4, 3).transpose(0, 2))
    named = {"large": nn.Parameter(torch.randn(3, CHUNK - 7)), "turned": turned, "idle": nn.Parameter(torch.ones(5))}
    return {**named, "frozen": nn.Parameter(torch.ones(2), requires_grad=False), "scale": nn.Parameter(torch.ones(()))}


def gradients(rank, step):
    source = torch.Generator().manual_seed(10 * step + rank)
    shapes = {"large": (3, CHUNK - 7), "turned": (3, 4, 6), "scale": ()}
    return {name: torch.randn(shape, generator=source) for name, shape in shapes.items()}


@pytest.mark.always("2")
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_make_the_steps_of_the_whole_bit_by_bit(ranks):
    whole = build_optimizer(ADAMW, modules(), lowered=None)
    hub = Hub(ranks)
    parts = [Sharded(ADAMW, modules(), ranks=tuple(range(ranks)), rank=rank) for rank in range(ranks)]

    def run(rank):
        one, end = parts[rank], hub.end(rank)
        for step in range(2):
            for name, grad in gradients(rank, step).items():
                one.parameters[name].grad = grad
            one.start(end)
            assert all(p.grad is None for p in one.parameters.values())
            one.finish()
            squares = one.squares()
            one.step(0.5)
            one.drop()
            one.start_gather(end)
            one.finish_gather()
        return squares

    squares = side_by_side(ranks, run)
    for step in range(2):
        for rank in range(ranks):
            for name, grad in gradients(rank, step).items():
                p = whole.parameters[name]
                p.grad = grad if p.grad is None else p.grad + grad
        expected = whole.squares()
        whole.step(0.5)
        whole.drop()
    for name, parameter in whole.parameters.items():
        assert all(torch.equal(one.parameters[name], parameter) for one in parts), name
    for name, square in expected.items():
        assert torch.equal(sum(s[name] for s in squares if name in s), square), name
    states = [sum(t.numel() for s in one.optimizer.state.values() for t in s.values()) for one in parts]
    assert max(states) <= sum(states) / ranks + 2 * CHUNK  # two numbers for each element, and pieces are not cut


def test_parameters_of_two_types_in_one_stage_are_refused():
    mixed = {"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(3, dtype=torch.float64))}
    with refused("E110", "float32, float64"):
        Sharded(ADAMW, mixed, ranks=(0, 1), rank=0)


def test_a_stage_without_parameters_has_nothing_to_do():
    one = Sharded(ADAMW, {}, ranks=(0, 1), rank=0)
    end = Hub(2).end(0)
    one.start(end)
    one.finish()
    one.step(None)
    one.drop()
    one.start_gather(end)
    one.finish_gather()
    assert one.squares() == {} and one.optimizer is None


STEPS = 3


def test_a_sum_stands_behind_each_run_of_backwards_but_the_last():
    program = make_program("interleaved-1f1b", 2, 4, copies=2, sharded=True, scatters=True)
    backwards = [str(op) for op in program.ranks[0] if op.kind.makes_part or op.kind in (Kind.SCATTER, Kind.REDUCE)]
    assert backwards == (
        ["BW s2 m0", "BW s2 m1", "SCATTER s2", "BW s0 m0", "BW s0 m1", "SCATTER s0"]
        + ["BW s2 m2", "BW s2 m3", "REDUCE s2", "BW s0 m2", "BW s0 m3", "REDUCE s0"]
    )
    whole = make_program("breadth-first", 2, 4, copies=2, sharded=True, scatters=True)
    assert not any(op.kind is Kind.SCATTER for _, _, op in whole), "one run of backwards for each stage"


def of_two_pipes(kind, shard):
    """A job whose stages are on two ranks each, in two replicas, with costs that let the two close runs in turns."""
    how = {"model": {"hidden": 64, "heads": 4, "vocab": 256, "seq_len": 64}, "data": {"kind": "synthetic"}}
    how |= {"schedule": {"kind": kind, "microbatch_size": 2}, "memory": {"activations": "selective"}}
    compiled = compile_job(job(layers=4, pp=2, m=4, parallel={"dp": 2, "shard": shard}, **how))
    return compiled, stored(compiled)


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["chimera-zb", "bitpipe-zb"], 1))
def test_ranks_of_two_pipes_meet_in_one_order(kind):
    compiled, plan = of_two_pipes(kind, "gradients")
    first, second = ([op for op in ops if op.kind in (Kind.SCATTER, Kind.REDUCE)] for ops in compiled.program.ranks)
    assert first == second and any(op.kind is Kind.SCATTER for op in first)
    _, plain = of_two_pipes(kind, "none")
    found, wanted = run_threads(plan, STEPS), run_threads(plain, STEPS)
    assert losses_of(found) == pytest.approx(losses_of(wanted), rel=1e-5)
    assert norms_of(found) == pytest.approx(norms_of(wanted), rel=1e-4)
