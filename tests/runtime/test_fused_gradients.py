"""Weight gradients added inside their products: as without to rounding, and less memory where W runs."""

import pytest

from tests.composed import TOLERANCE, apart, beside, compiled, trained
from tests.tiers import few
from zbc.runtime.core import split

FUSED = {"train__fused_gradients": True}
TRAITS = ("slices", "tp", "tp_sequence", "offload", "shared vocabulary", "sharded weights", "sharded gradients")
TRAITS += ("freeze",)
TRAITS += ("post-validate", "two versions", "average", "tied embeddings", "one-sided", "autocast")
CASES = [("", "1f1b"), ("", "zb-v"), *((trait, "1f1b") for trait in TRAITS)]


@pytest.mark.long
@pytest.mark.parametrize(("trait", "kind"), few(CASES, CASES[:3]))
def test_gradients_added_inside_products_train_as_those_added_after(trait, kind, monkeypatch):
    calls = []
    add = split.accumulate_product
    monkeypatch.setattr(split, "accumulate_product", lambda *given: calls.append(1) or add(*given))
    jobs = [beside(*filter(None, (trait,)), schedule__kind=kind, **how)[0] for how in ({}, FUSED)]
    for job in jobs:  # times decide which layers are frozen
        job["costs"] = {"f": 1.0, "b": 1.0, "w": 1.0}
    plain = trained(jobs[0])
    assert not calls
    fused = trained(jobs[1])
    assert calls
    assert apart(fused, plain) < TOLERANCE


WIDE = {f"model__{key}": value for key, value in {"layers": 4, "hidden": 128, "seq_len": 8, "vocab": 64}.items()}


@pytest.mark.long
def test_products_on_a_gpu_are_priced_with_the_sum_they_write():
    """At 4096 wide a sum of its own takes a third of the time of W; inside the product it hides."""
    spent = []
    for how in ({}, FUSED):
        job, _ = beside(schedule__kind="zb-h1", **{**WIDE, "model__hidden": 4096, "model__seq_len": 4096}, **how)
        job["hardware"] = {"device": "cuda", "gpu": "h100"}
        job["model"]["dtype"] = "bfloat16"
        spent.append(compiled(job).costs.of("w", 1))
    assert 0.6 < spent[1] / spent[0] < 0.85
