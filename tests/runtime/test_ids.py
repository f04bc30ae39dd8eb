"""Ids of a user's samples that the vocabulary does not have are refused where a rank reads them: shards of a vocabulary
and losses by chunks would train on with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.small_plans import GPT, make_plan, make_program
from tests.runtime.woven import shared_program
from tests.threads import losses_of, run_threads
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.job import spec
from zbc.training.data.data import all_samples, build_dataset
from zbc.training.data.pairs import Words
from zbc.training.data.split import Steps
from zbc.training.data.unequal import all_documents

HERE, VOCAB, LENGTH, COUNT = "tests.runtime.test_ids", 61, 16, 12
MODEL = {**GPT, "vocab": VOCAB, "seq_len": LENGTH}


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
    chosen = spec.Model.model_validate({**MODEL, "loss": loss})
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
    data, model = data_of(odd, **more.pop("data", {})), MODEL
    if way == "shared":
        return make_plan(shared_program("1f1b", 2, 2, 1), model=model, data=data, **more)
    if way == "tp":
        return make_plan(make_program("1f1b", 2, 2, tp=2), model=model, data=data, **more)
    model = {**MODEL, "loss_chunk": 8} if way == "chunked" else MODEL
    return make_plan(make_program("1f1b", 2, 2), model=model, data=data, **more)


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
