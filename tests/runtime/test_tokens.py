"""Token files as training data: contents, order, reading ahead; damaged files, and ids beyond the vocabulary."""

import gc
import json
import os
import threading
from array import array
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refusals import error_of
from tests.runtime.small_plans import GPT, make_plan, make_program
from tests.runtime.woven import shared_program
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.job import spec
from zbc.training.data.corpus import Tokens, sidecar, write_sidecar
from zbc.training.data.data import Batches, Permutation, all_samples, build_dataset, build_samples, build_validation
from zbc.training.data.pairs import Words
from zbc.training.data.prefetch import Prefetched
from zbc.training.data.split import Steps
from zbc.training.data.unequal import all_documents

MODEL = spec.Model(layers=1, hidden=8, heads=1, vocab=300, seq_len=4)


def write(path, tokens, dtype="uint16", vocab=300):
    path.write_bytes(array({"uint16": "H", "uint32": "I"}[dtype], tokens).tobytes())
    write_sidecar(path, Tokens(dtype, len(tokens), vocab))
    return str(path)


def samples(model=MODEL, build=build_samples, **data):
    return build(spec.Data.model_validate({"kind": "tokens", **data}), model, 1)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 100, 255, 1000])
def test_an_order_has_every_number_once(count):
    for seed in range(5):
        assert sorted(Permutation(count, seed)) == list(range(count))
    with pytest.raises(IndexError):
        Permutation(count, 0)[count]


def test_orders_differ_by_seed_and_places_are_spread_evenly():
    assert len({tuple(Permutation(50, seed)) for seed in range(200)}) == 200
    huge = Permutation(10**9 + 7, 3)
    found = [huge[i] for i in range(2000)]
    assert len(set(found)) == 2000 and max(found) > 9e8 and min(found) < 1e8
    # Each of 20 numbers is about equally often at each place: chi-square of 361 degrees of freedom, 5 sigma.
    count, trials = 20, 4000
    table = Counter((i, value) for seed in range(trials) for i, value in enumerate(Permutation(count, seed)))
    expected = trials / count
    square = sum((table[i, j] - expected) ** 2 / expected for i in range(count) for j in range(count))
    assert abs(square - 361) < 5 * (2 * 361) ** 0.5


@pytest.mark.parametrize(("dtype", "top"), [("uint16", 65535), ("uint32", 2**32 - 1)])
def test_windows_follow_each_other_and_targets_are_one_token_later(tmp_path, dtype, top):
    path = write(tmp_path / "a.bin", [*range(12), top, 1], dtype, None)
    found = samples(model=MODEL.model_copy(update={"vocab": None}), path=path)
    assert len(found) == 3
    assert found.inputs([2, 0]).tolist() == [[8, 9, 10, 11], [0, 1, 2, 3]]
    assert found.targets([2, 0]).tolist() == [[9, 10, 11, top], [1, 2, 3, 4]]
    assert found.inputs([0]).dtype == torch.int64


def test_several_files_are_one_after_the_other_and_no_window_spans_two(tmp_path):
    paths = [write(tmp_path / f"{i}.bin", range(100 * i, 100 * i + n)) for i, n in enumerate([9, 3, 5])]
    found = samples(path=paths)
    assert len(found) == 3
    assert found.inputs(range(3)).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [200, 201, 202, 203]]
    assert found.targets([2]).tolist() == [[201, 202, 203, 204]]


def test_a_file_without_a_description_needs_its_type(tmp_path):
    path = write(tmp_path / "a.bin", range(20))
    sidecar(tmp_path / "a.bin").unlink()
    assert error_of(samples, path=path).code == "E501"
    assert samples(path=path, dtype="uint16").inputs([1]).tolist() == [[4, 5, 6, 7]]


def test_the_last_part_is_kept_for_evaluation(tmp_path):
    path = write(tmp_path / "a.bin", range(41))
    train, rest = (samples(path=path, validation=0.25, build=build) for build in (build_samples, build_validation))
    assert (len(train), len(rest)) == (7, 3)
    assert rest.inputs([0, 2]).tolist() == [[28, 29, 30, 31], [36, 37, 38, 39]]
    assert train.targets([6]).tolist() == [[25, 26, 27, 28]] and rest.targets([2]).tolist() == [[37, 38, 39, 40]]
    assert samples(path=path, build=build_validation) is None
    other = write(tmp_path / "b.bin", range(9))
    assert len(samples(path=path, validation=other, build=build_validation)) == 2
    assert len(samples(path=path, validation=other)) == 10


def test_files_that_are_not_there_or_damaged(tmp_path):
    assert error_of(samples, path=str(tmp_path / "gone.bin")).code == "E501"
    assert error_of(samples, path=str(tmp_path)).code == "E501"
    path = write(tmp_path / "a.bin", range(20))
    for text in ("{", "[]", "3", '{"format": "zbc-tokens", "version": 2}', json.dumps({"format": "x"})):
        sidecar(tmp_path / "a.bin").write_text(text)
        assert error_of(samples, path=path).code == "E501", text
    write(tmp_path / "a.bin", range(20))
    for size in (0, 39, 41):
        os.truncate(path, size)
        error = error_of(samples, path=path)
        assert error.code == "E501" and f"but {size} bytes" in error.message


def test_a_file_that_shrinks_while_it_is_read_is_named_with_the_place(tmp_path):
    path = write(tmp_path / "a.bin", range(200))
    found = samples(path=path)
    os.truncate(path, 100)
    assert found.inputs([0]).tolist() == [[0, 1, 2, 3]]
    error = error_of(found.inputs, [30])
    assert error.code == "E501" and "ends at byte" in error.message and path in error.message


def test_tokens_beyond_the_vocabulary_are_found_at_once_or_where_they_are(tmp_path):
    path = write(tmp_path / "a.bin", [1, 2, 3, 4, 5, 300, 7, 8, 9], vocab=301)
    assert "tokens up to 300, model.vocab is 300" in error_of(samples, path=path).message
    write(tmp_path / "a.bin", [1, 2, 3, 4, 5, 300, 7, 8, 9], vocab=None)
    found = samples(path=path)
    found.inputs([0])
    error = error_of(found.inputs, [1])
    assert error.code == "E505" and f"token 5 of {path} is 300" in error.message


class Recorded:
    """Samples that record when they were read, and by which thread."""

    def __init__(self, count=64, bad=None):
        self.read, self.bad = [], bad
        self._count = count

    def __len__(self):
        return self._count

    def rows(self, indices, which):
        self.read.append((which, tuple(indices), threading.current_thread().name))
        if self.bad in indices:
            raise ZbcError("E501", "data: damaged")
        return torch.tensor(indices)


def prefetched(wants, **options):
    recorded = Recorded(**options)
    how = {"seed": 1, "microbatches": 4, "size": 2}
    return Prefetched(recorded, [wants], **how), Batches(Recorded(), **how), recorded


WANTS = [("inputs", 0), ("inputs", 1), ("targets", 0), ("inputs", 2), ("targets", 1), ("inputs", 3)]


def test_what_comes_next_is_ready_before_it_is_asked_for():
    ready, plain, recorded = prefetched(WANTS)
    for step in range(3):
        for kind, mb in WANTS:
            assert torch.equal(getattr(ready, kind)(step, mb), getattr(plain, kind)(step, mb))
            assert step + 1 in ready._steps and len(ready._steps) <= 3
    ready.close()
    names = [name for _, _, name in recorded.read]
    assert 3 * len(WANTS) <= len(names) <= 4 * len(WANTS) and threading.current_thread().name not in names


def test_another_order_and_another_step_give_the_same_numbers():
    ready, plain, _ = prefetched(WANTS)
    for step, (kind, mb) in [(5, WANTS[3]), (0, WANTS[0]), (0, WANTS[0]), (9, ("targets", 3)), (1, WANTS[5])]:
        assert torch.equal(getattr(ready, kind)(step, mb), getattr(plain, kind)(step, mb))


def test_the_thread_that_makes_tensors_for_a_gpu_is_told_which(monkeypatch):
    told, pinned = [], []
    monkeypatch.setattr("torch.cuda.set_device", lambda device: told.append((threading.current_thread().name, device)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    ready = Prefetched(Recorded(), [WANTS], torch.device("cuda", 3), seed=1, microbatches=4, size=2)
    for kind, mb in WANTS:
        getattr(ready, kind)(0, mb)
    ready.close()
    assert told == [("zbc-data_0", torch.device("cuda", 3))] and len(pinned) >= len(WANTS)


def test_an_error_is_raised_where_its_tensor_is_asked_for():
    _, plain, _ = prefetched(WANTS)
    ready, _, _ = prefetched(WANTS, bad=plain.numbers(0, 2)[0])
    ready.inputs(0, 0)
    ready.inputs(0, 1)
    ready.targets(0, 0)
    assert error_of(ready.inputs, 0, 2).code == "E501"


def test_what_is_closed_makes_all_on_the_spot_until_it_is_opened_again():
    ready, plain, recorded = prefetched(WANTS)
    assert torch.equal(ready.inputs(0, 0), plain.inputs(0, 0))
    (first,) = ready._thread._threads
    ready.close()
    assert not first.is_alive()
    before = len(recorded.read)
    assert torch.equal(ready.inputs(0, 1), plain.inputs(0, 1))
    assert [name for _, _, name in recorded.read[before:]] == [threading.current_thread().name]
    ready.open()
    assert torch.equal(ready.inputs(0, 2), plain.inputs(0, 2))
    assert [thread.is_alive() for thread in ready._thread._threads] == [True]
    ready.close()


def test_the_thread_ends_with_what_it_makes_ready_for():
    def use():
        ready, _, _ = prefetched(WANTS)
        ready.inputs(0, 0)
        [step.result() for step in ready._steps.values()]  # a thread that reads is not over yet
        return [*ready._thread._threads]

    (thread,) = use()
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "p"), few([("1f1b", 1), ("zb-v", 2), ("1f1b", 4)], ("zb-v",)))
def test_a_pipeline_trains_on_token_files_and_every_window_is_seen_once_an_epoch(tmp_path, schedule, p):
    path = write(tmp_path / "a.bin", [i % 61 for i in range(16 * 24 + 1)], vocab=61)
    plan = make_plan(make_program(schedule, p, 4), model=GPT, data={"kind": "tokens", "path": path})
    workers = run_threads(plan, 3)  # 3 steps of 4 microbatches of 2: one epoch of 24 windows
    batches = next(w.batches for w in workers if w.batches is not None)
    seen = [i for step in range(3) for mb in range(4) for i in batches.numbers(step, mb)]
    assert sorted(seen) == list(range(24)) and seen != sorted(seen)
    expected = run_threads(make_plan(make_program("1f1b", 1, 4), model=GPT, data={"kind": "tokens", "path": path}), 3)
    assert losses_of(workers) == losses_of(expected)


def test_a_damaged_file_stops_a_run_with_the_op_that_read_it(tmp_path):
    path = write(tmp_path / "a.bin", [1] * 16 * 20 + [61], vocab=None)
    good = make_plan(make_program("1f1b", 2, 4), model=GPT, data={"kind": "tokens", "path": path})
    with pytest.raises(ZbcError) as caught:
        run_threads(good, 9)
    assert caught.value.code == "E505" and any("F s1" in note for note in caught.value.__notes__)


HERE, VOCAB, LENGTH, COUNT = "tests.runtime.test_tokens", 61, 16, 12
WORDS = {**GPT, "vocab": VOCAB, "seq_len": LENGTH}


class Rows:
    """COUNT samples of LENGTH tokens; `odd` has (sample, 0 for its input or 1 for its target, place, id)."""

    lengths = (LENGTH,) * COUNT

    def __init__(self, odd, dtype="int64"):
        self.pairs = [
            [(torch.arange(LENGTH + 1) * (n + 3) % VOCAB)[k : k + LENGTH] for k in (0, 1)] for n in range(COUNT)
        ]
        for sample, which, place, number in odd:
            self.pairs[sample][which][place] = number
        self.pairs = [[tensor.to(getattr(torch, dtype)) for tensor in pair] for pair in self.pairs]

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return tuple(self.pairs[index])


class Lists(Rows):
    """Each is a step of one microbatch."""

    def __getitem__(self, index):
        x, target = self.pairs[index]
        return [(x[None], target[None], 1.0)]


def soft(logits, target):
    return (logits.float().mean() - target.float().clamp(0, 1).mean()) ** 2


def data_of(odd, kind="Rows", **more):
    return {"kind": f"{HERE}:{kind}", "args": {"odd": odd}, **more}


def read(kind, odd, dtype, loss):
    """Reads all samples, inputs and then targets, as ranks do."""
    chosen = spec.Model.model_validate({**WORDS, "loss": loss})
    data = spec.Data.model_validate(data_of(odd, "Lists" if kind == "steps" else "Rows"))
    data.args["dtype"] = dtype
    if kind == "steps":
        words, ignores = Words.of(chosen), loss == "cross_entropy"
        steps = Steps(
            build_dataset(data, chosen, 1), "Lists", 1, count=1, size=1, length=LENGTH, ignores=ignores, words=words
        )
        return [steps.step(n) for n in range(COUNT)]
    samples = (all_samples if kind == "samples" else all_documents)(data, chosen, 1)
    return [getattr(samples, what)([n, n + 1]) for what in ("inputs", "targets") for n in range(0, COUNT, 2)]


ODD = st.tuples(
    st.integers(0, COUNT - 1), st.integers(0, 1), st.integers(0, LENGTH - 1), st.sampled_from([-100, -1, 60, 61, 120])
)


@pytest.mark.parametrize("examples", few([40, 400], (40,)))
def test_samples_with_odd_ids_are_refused_by_sample_and_id_and_others_never(examples):
    @settings(max_examples=examples, deadline=None)
    @given(
        st.sampled_from(["samples", "steps", "documents"]),
        st.lists(ODD, max_size=3),
        st.sampled_from(["int64", "int32", "int16"]),
        st.sampled_from(["cross_entropy", f"{HERE}:soft"]),
    )
    def check(kind, odd, dtype, loss):
        last = {(sample, which, place): number for sample, which, place, number in odd}
        wrong = set()
        for (sample, which, _), number in last.items():
            ignored = which == 1 and (number == -100 or loss != "cross_entropy")
            if not 0 <= number < VOCAB and not ignored:
                wrong.add(f"the {('input', 'target')[which]} of {'step' if kind == 'steps' else 'sample'} {sample} ")
        if not wrong:
            read(kind, odd, dtype, loss)
            return
        with pytest.raises(ZbcError) as caught:
            read(kind, odd, dtype, loss)
        text = str(caught.value)
        assert caught.value.code == "E505" and any(name in text for name in wrong), (text, wrong)
        assert any(f" has the id {number}, model.vocab is {VOCAB}" in text for number in last.values())

    check()


def plans(way, odd, **more):
    data, model = data_of(odd, **more.pop("data", {})), {**WORDS, "loss_chunk": 8} if way == "chunked" else WORDS
    program = shared_program("1f1b", 2, 2, 1) if way == "shared" else make_program("1f1b", 2, 2, tp=1 + (way == "tp"))
    return make_plan(program, model=model, data=data, **more)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("way", ["shared", "tp", "chunked", "plain"])
def test_no_way_to_share_words_trains_on(way, which):
    assert len(losses_of(run_threads(plans(way, [(n, 1, 3, -100) for n in range(COUNT)]), 1))) == 1
    with pytest.raises(ZbcError, match=r"data: the (input|target) of sample \d+ of .*Rows has the id 61"):
        run_threads(plans(way, [(n, which, 3, 61) for n in range(COUNT)]), 1)


def test_samples_for_evaluation_are_looked_at_too():
    kept = {"data": {"validation": 0.3}, "train": {"eval_every": 1, "eval_batches": 1}}
    with pytest.raises(ZbcError, match=r"sample (8|9|10|11) of .* has the id -7"):
        run_threads(plans("tp", [(n, 1, 0, -7) for n in range(8, 12)], **kept), 1)
