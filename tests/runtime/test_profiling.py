"""Profiling: kinds of layers, times and bytes of ops, and the memory of plans made from a profile."""

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.jobs import job, stored
from tests.runtime import ticking
from tests.threads import scaled
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.memory.per_rank import peaks
from zbc.compiler.shapes import load_job
from zbc.ir import Kind
from zbc.job.profile import Profile, spread
from zbc.runtime.core.execute import run_step
from zbc.runtime.core.tensors import TensorSpec
from zbc.training import devices
from zbc.training.models.model import LayerPlan
from zbc.training.profiling import times, words
from zbc.training.profiling.alike import chain, describe, kinds
from zbc.training.profiling.link import fit, share_of
from zbc.training.profiling.rig import IDLE, build_rig
from zbc.training.profiling.session import Measurements, Sampling, assemble, effort, unpredicted
from zbc.training.profiling.times import Stopwatch, measured, quick
from zbc.training.profiling.weigh import parts

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
NOISE = {"kind": "synthetic"}
POINT = TensorSpec((2, 1), torch.float32)


def factory(name, layers, data=None, **args):
    loss = "cross_entropy" if "classes" in (data or {}) else "mse"
    model = {"family": f"tests.runtime.ticking:{name}", "loss": loss, "args": args}
    vectors = {"kind": "tests.runtime.ticking:Vectors", "args": data or {}}
    return job(layers=layers, pp=2, m=4, model=model, data=vectors)


# ---- which layers are alike ----------------------------------------------------------------------------------


def plans_of(modules):
    return [
        LayerPlan(f"layers.{i}", functools.partial(lambda module: module, module)) for i, module in enumerate(modules)
    ]


def test_layers_of_one_structure_and_setting_are_one_kind_but_for_the_first_and_the_last():
    found = kinds(plans_of([ticking.Ticker(f, 1, 1) for f in (1, 1, 1, 2, 1, 1)]), [POINT] * 6)
    assert found == ["Ticker+data", "Ticker", "Ticker", "Ticker-2", "Ticker", "Ticker+loss"]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, bias=False)),
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 5)),
        (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)),
        (lambda: nn.Sequential(nn.ReLU()), lambda: nn.Sequential(nn.GELU())),
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4).requires_grad_(False)),
        (lambda: with_call(functools.partial(pow, 2)), lambda: with_call(functools.partial(pow, 3))),
        (lambda: with_call(closing_over(2)), lambda: with_call(closing_over(3))),
        (lambda: with_call({"width": [1, 2]}), lambda: with_call({"width": [1, 3]})),
        (lambda: nn.BatchNorm1d(3), lambda: nn.BatchNorm1d(3, track_running_stats=False)),
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4).bfloat16()),
    ],
)
def test_what_two_layers_differ_in_makes_two_kinds(a, b):
    assert describe(a()) == describe(a())
    assert describe(a()) != describe(b())


def with_call(value):
    module = nn.Identity()
    module.value = value
    return module


def closing_over(number):
    return lambda x: x + number


def test_the_same_layer_on_another_shape_is_another_kind():
    wide = TensorSpec((2, 8), torch.float32)
    assert kinds(plans_of([nn.ReLU()] * 4), [POINT, POINT, wide, wide])[1:3] == ["ReLU", "ReLU-2"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=12))
def test_a_chain_has_every_kind_and_its_layers_fit_together(layers):
    """Here inputs and outputs of a kind are part of its name."""
    takes = [shape for _, shape in layers]
    following = [*takes[1:], "end"]
    order = [f"{kind}-{a}-{b}" for (kind, a), b in zip(layers, following, strict=True)]
    order[0], order[-1] = order[0] + "+data", order[-1] + "+loss"
    gives = dict(zip(order, following, strict=True))
    found = chain(order, takes)
    assert found[0] == 0 and found[-1] == len(order) - 1 and found == sorted(set(found))
    assert {order[i] for i in found} == set(order)
    assert all(gives[order[a]] == takes[b] for a, b in pairwise(found))


def test_a_chain_is_short():
    assert chain(["a", "b", "b", "b", "c"], ["x"] * 5) == [0, 1, 4]
    assert len(chain(["a+data", *["a", "b"] * 20, "c"], [0, *[0, 1] * 20, 0])) == 4


# ---- times ---------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Measurements read the clock that only `ticking` layers move."""
    ticking.NOW[0] = 0.0
    monkeypatch.setattr(times.time, "perf_counter", lambda: ticking.NOW[0])


def profiled(described, samples=None, rig=None, rounds=3, on=""):
    """A profile with these times, by default 0, and the bytes of its layers."""
    rig = rig or build_rig(described, CPU)
    if samples is None:
        names = [*times.NAMES, times.KEEP, times.AGAIN]
        samples = {**{(kind, name): [1.0] for kind in rig.kinds for name in names}, ("", times.CLOSE): [0.0]}
    found = Measurements(samples, parts(rig, CPU)[0], rig.order, (), {}, {}, None, on)
    return assemble(described, Sampling("cpu", 1, 1, rounds), found)


def planned(described, **changes):
    """The job compiled with the profile of its layers; `changes` are keys of its sections."""
    sections = {name: getattr(described, name).model_copy(update=change) for name, change in changes.items()}
    return compile_job(replace(described, profile=profiled(described), **sections))


def profile_by(described, rounds=3):
    rig = build_rig(described, CPU)
    watch = Stopwatch(rig, CPU)
    for _ in range(times.WARM_UP + rounds):
        watch.round()
    watch.close()
    return profiled(described, dict(watch.samples), rig, rounds, "a processor")


def test_times_are_those_of_the_ops_of_every_kind(clock):
    found = profile_by(factory("layers", 6, f=1.0, b=2.0, w=4.0))
    assert found.order == ["Ticker+data", "Ticker", "Ticker-2", "Ticker-2", "Ticker", "Ticker+loss"]
    for kind, f in (("Ticker", 10.0), ("Ticker-2", 1.0), ("Ticker+loss", 1.0)):
        layer = found.layers[kind]
        for name, ms in (("f", f), ("b", 2.0), ("w", 4.0), ("bw", 6.0), ("again", f), ("step", 0.0), ("norm", 0.0)):
            assert getattr(layer, name).ms == pytest.approx(ms), (kind, name)
            assert getattr(layer, name).spread == pytest.approx(0.0)
    host = found.host
    assert max(host.f_us, host.b_us, host.w_us, host.close_us) == pytest.approx(0, abs=1e-6)


def test_weights_stay_as_they_are():
    watch = Stopwatch(build_rig(job(data=NOISE, optimizer={"weight_decay": 0.1, "lr": 1.0}), CPU), CPU)
    before = {name: p.clone() for one in watch._worker.optimizers.values() for name, p in one.parameters.items()}
    for _ in range(3):
        watch.round()
    after = {name: p for one in watch._worker.optimizers.values() for name, p in one.parameters.items()}
    watch.close()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_of_a_family_one_block_is_measured_and_a_tied_head_with_a_weight_of_its_own():
    rig = build_rig(job(data=NOISE, layers=30), CPU)
    assert rig.kinds == ("embed", IDLE, "block", "head")
    assert rig.order == ("embed", *["block"] * 30, "head")
    rig = build_rig(job(data=NOISE, model={"ties": True}), CPU)
    assert parts(rig, CPU)[0]["head"].parameters == 32 * 256 + 2 * 32


def test_a_profile_says_what_it_was_measured_with():
    found = profile_by(job(data=NOISE))
    assert (found.on.device, found.on.name, found.on.torch) == ("cpu", "a processor", torch.__version__)
    assert Profile.model_validate(found.plain()).dumps() == found.dumps()


def test_spread_is_the_distance_of_the_quartiles():
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2.0 / 3.0)
    assert spread([1.0]) == spread([0.0, 0.0]) == 0.0
    assert measured([2.0, 3.0, 4.0], less=1.0).ms == 2.0
    assert measured([2.0, 3.0, 4.0], less=1.0).spread == pytest.approx(0.5)
    assert measured([2.0], less=3.0).ms == 0.0


def test_the_effort_is_that_of_a_local_run():
    how = effort(job(pp=64), device=None, threads=None, rounds=5)
    assert how.threads == 1 and 1 <= how.together <= 64
    assert effort(job(pp=1), device="cpu", threads=None, rounds=5).together == 1
    assert effort(job(), device="cpu", threads=10**6, rounds=5) == Sampling("cpu", 10**6, 1, 5)


# ---- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [False, True])
def test_of_layers_that_ranks_share_the_part_of_one_is_measured(sequence):
    """Sums add nothing, so one rank can be measured without others."""
    model = {"hidden": 48, "heads": 6, "seq_len": 24, "vocab": 300}
    described = job(data=NOISE, model=model, parallel={"tp": 2, "tp_sequence": sequence})
    z = parts(build_rig(described, CPU), CPU)[0]["block"].bytes
    assert z.input == z.output == 2 * 24 * 48 * 4 / (2 if sequence else 1)
    watch = Stopwatch(build_rig(described, CPU), CPU)
    for _ in range(times.WARM_UP + 1):
        watch.round()
    assert {kind for kind, name in watch.samples if name == "f"} == {"embed", "block", "head", IDLE}
    watch.close()


def test_steps_of_a_rank_without_others_are_finite(monkeypatch):
    """Terms that it does not have are 0, not what their memory held."""
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, math.nan))
    described = job(data=NOISE, parallel={"tp": 2, "tp_sequence": True})
    worker = build_rig(described, CPU).worker(CPU)
    assert math.isfinite(run_step(worker, 0).grad_norm)


def test_optimizer_state_is_weighed_where_gradients_overflow():
    """Such a step is skipped, and a skipped one makes no state."""
    [found] = parts(build_rig(job(data=NOISE, model={"loss": f"{__name__}:infinite"}), CPU), CPU)
    assert all(one.bytes.optimizer == pytest.approx(8 * one.parameters, rel=0.1) for one in found.values())


def infinite(output, target):
    return output.mean() * math.inf


BACK = (Kind.B, Kind.W, Kind.BW)
CUTS = {"1f1b": ([3, 4], [2, 5]), "zb-h1": ([3, 4], [4, 3]), "gpipe": ([3, 4],), "zb-v": ([1, 2, 2, 2], [2, 2, 2, 1])}


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "cut"), few([(kind, cut) for kind, cuts in CUTS.items() for cut in cuts], [("zb-h1", [4, 3])])
)
@pytest.mark.parametrize("activations", few(["keep", "recompute"], ("keep",)))
def test_memory_of_layers_nobody_knows_is_predicted_once_they_were_profiled(kind, activations, cut):
    """Some of these stages end in a layer that keeps its output, and some pass that on to a stage of their rank."""
    described = factory("nets", 7, {"width": 24, "classes": 3}, width=24, count=6)
    schedule, memory = {"kind": kind}, {"activations": activations}
    compiled = planned(described, schedule=schedule, memory=memory, partition={"layers_per_stage": cut})
    weighed = [[scale.held for scale in scaled(stored(compiled))[1]] for _ in range(4)]
    placement = compiled.program.placement
    losses = {placement.rank_of(s) for s in range(placement.stages) if not placement.sinks(s)}
    for rank, predicted in enumerate(peaks(compiled.program, compiled.costs)):
        for name in ("weights", "gradients", "masters", "optimizer", "activations"):
            # Ranks are threads: a neighbour that is late leaves more on its way, never less.
            held = min(getattr(ranks[rank], name) for ranks in weighed)
            # Not predicted, like other data read ahead: the targets of a step, a number each, read to be counted.
            read = 8 * compiled.program.microbatches if name == "activations" and rank in losses else 0
            assert getattr(predicted, name) == pytest.approx(held - read, rel=0.05, abs=64), name


@pytest.mark.long
@pytest.mark.parametrize("kind", few(["gpipe", "zb-h1"], ("zb-h1",)))
@pytest.mark.parametrize("activations", few(["keep", "recompute"], ("recompute",)))
def test_what_backwards_of_a_convolutional_net_rise_to_is_predicted(activations, kind):
    """With recompute its blocks peak in their second forward, which makes two tensors that it does not keep."""
    described = load_job(ROOT / "plans" / "convnet.toml")
    costs, schedule = {"f": None, "b": None, "w": None, "per": "rank"}, {"kind": kind, "microbatches": 5}
    compiled = planned(described, schedule=schedule, memory={"activations": activations}, costs=costs)
    found = peaks(compiled.program, compiled.costs)
    for scale, told in zip(scaled(stored(compiled))[1], found, strict=True):
        assert told.gradients == scale.held.gradients
        for one in scale.readings:
            if one.op.kind in BACK:
                predicted = compiled.costs.need_bytes(one.op, first=one.came > 0)
                assert predicted == pytest.approx(one.rise, rel=0.02, abs=64), one.op


# ---- the link ------------------------------------------------------------------------------------------------


@pytest.mark.long
@given(st.floats(1, 1e4), st.floats(0.01, 100), st.floats(0, 50))
def test_a_link_is_found_again_from_its_own_times(latency, gbps, send):
    sizes = (64, 4096, 10**6, 4 * 10**6)
    samples = {str(n): [send + latency + n / (gbps * 1e3)] * 5 for n in sizes}
    link = fit({**samples, "send": [send] * 5, "agree": [1.0]})
    for n in sizes:
        assert link.ms(n) == pytest.approx((latency + n / (gbps * 1e3)) / 1e3, rel=1e-3, abs=1e-4)


def test_a_link_never_gets_faster_with_larger_messages():
    assert fit({"64": [100.0], "1000000": [50.0], "send": [0.0]}).ms(10**9) >= 0.05
    steep = fit({"64": [1.0], "1000": [100.0], "1000000": [10**6]})
    assert steep.latency_us >= 0 and steep.gbps > 0
    assert fit({"agree": [1.0]}) is None


@given(st.floats(0, 3), st.floats(1, 1e4), st.floats(1, 1e5))
def test_the_share_of_a_transfer_is_what_two_of_them_add_to_products(share, transfer, products):
    samples = {"alone": [products] * 3, "beside": [products + 2 * share * transfer] * 3, "large": [transfer] * 3}
    assert share_of(samples) == pytest.approx(share, abs=1e-6)
    assert share_of({**samples, "beside": [products / 2]}) == 0.0, "noise"
    assert share_of({}) == share_of({"alone": [1.0], "beside": [2.0]}) == 0.0


def test_of_a_call_that_is_often_interrupted_the_quick_ones_count():
    assert quick([900.0, 10.0, 11.0, 700.0]) == 10.0
    assert quick([]) == 0.0


def test_what_a_gpu_holds_beside_predicted_tensors_is_context_and_workspaces(monkeypatch):
    """100 bytes, 10 free, 60 in torch's allocator, of which cuBLAS frees 8."""
    allocated = [50, 42]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated.pop(0))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    assert unpredicted(torch.device("cuda", 0)) == 30 + 8


@pytest.mark.long
def test_a_job_with_slices_has_a_block_measured_in_slices(monkeypatch):
    """Each op takes its tokens plus a tenth of those before them, on a clock that only these layers move."""
    rig = build_rig(job(model={"seq_len": 24}, schedule={"slices": 2}, data={"kind": "synthetic"}), CPU)
    now = [0.0]
    monkeypatch.setattr(devices.time, "perf_counter", lambda: now[0])
    real = times._measured

    def measured(rig, device, cuts):
        built = type(rig).worker

        def worker(self, *arguments, **options):
            made = built(self, *arguments, **options)
            stage = self.kinds.index(times.BLOCK)

            def ticking(handler, worker, op):
                handler(worker, op)
                if op.stage == stage:
                    now[0] += (cuts[op.slice + 1] - cuts[op.slice] + cuts[op.slice] / 10) / 1e3

            made.phase_run.wrap([kind for kind in Kind if kind.computes], ticking)
            return made

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(rig), "worker", worker)
            return real(rig, device, cuts)

    monkeypatch.setattr(times, "_measured", measured)
    found = times.slice_times(rig, CPU)
    places = [(24, 0), (12, 0), (12, 12), *((6, at) for at in range(0, 24, 6)), *((3, at) for at in range(0, 24, 3))]
    assert sorted(found) == sorted(places)
    for (rows, past), took in found.items():
        assert took == pytest.approx(dict.fromkeys(("f", "b", "w"), rows + past / 10))
    assert times.slice_times(build_rig(job(data={"kind": "synthetic"}), CPU), CPU) == {}


def test_a_job_whose_ranks_may_share_the_vocabulary_has_their_shares_measured(monkeypatch):
    """On a clock that moves by one at each read every op takes one tick."""
    ticks = itertools.count()
    monkeypatch.setattr(devices.time, "perf_counter", lambda: next(ticks) / 1e3)
    called = Counter()
    for owner, name in ((words.Output, "tell"), (words.Output, "learn"), (words.Embedding, "learn")):
        inner = getattr(owner, name)

        def counted(self, *arguments, inner=inner, key=(owner.__name__, name), **options):
            called[key, options.get("early", options.get("part"))] += 1
            return inner(self, *arguments, **options)

        monkeypatch.setattr(owner, name, counted)
    shared = job(model={"vocab": 258}, parallel={"pp": 4, "vocabulary": "auto"}, data={"kind": "synthetic"})
    found = words.word_times(build_rig(shared, CPU), CPU)
    assert found.rows == 65 and [*found.s, *found.t, found.i, found.e] == pytest.approx([1.0] * 6)
    rounds = words.WARM_UP + words.ROUNDS
    both = {(key, way): rounds for key in (("Output", "tell"), ("Output", "learn")) for way in (True, False)}
    assert called == {**both, (("Embedding", "learn"), None): 2 * rounds}
    assert words.word_times(build_rig(job(data={"kind": "synthetic"}), CPU), CPU) is None
