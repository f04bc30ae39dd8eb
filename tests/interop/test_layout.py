"""Megatron's layout string: read strictly, written shortly, and the same thing both ways."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import job
from tests.refusals import refused
from zbc.compiler.compile import compile_job
from zbc.compiler.partition import megatron_layout

GOOD = {
    "Et*3|t*4|t*4|t*3L": (3, 4, 4, 3),
    "E|(tt|)*3,t*2|L": (0, 2, 2, 2, 2, 0),
    "Ettt|(t|)*2t,L": (3, 1, 1, 1),
    "Et*0|tL": (0, 1),
    "E|L": (0, 0),
    "Et,t|tL": (2, 1),
    "EL": (0,),
}
BAD = {
    "": "its layers are none",
    "tt|tt": "its layers are t*4",
    "tE|tL": "its layers are tEtL",
    "Et|tLt": "its layers are Et*2Lt",
    "Et|Et|tL": "its layers are EtEt*2L",
    "Et|xt|tL": "stage 1 has 'x'",
    "Et|tm|L": "multi-token prediction",
    "Et|(t|tL": "'(' at character 4",
    "Et|((t|)*2)*2L": "'(' at character 4",
    "E t|tL": "' ' at character 2",
    "Et|()*2|tL": "'(' at character 4",
    "Et|(,)*2|tL": "'(' at character 4",
    "Et|(t|)L": "brackets without *n at character 4",
    "Et*|tL": "'*' at character 3",
    "*3EtL": "'*' at character 1",
    "Et*9999999|L": "more than a hundred thousand",
    "Et|t*3|tL!": "'!' at character 10",
}


@pytest.mark.parametrize("text", GOOD)
def test_layouts_say_how_many_layers_each_stage_has(text):
    assert megatron_layout.loads(text) == GOOD[text]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_layout_is_refused_with_what_was_found(text):
    with refused("E132") as caught:
        megatron_layout.loads(text, "zbc.toml:3:4")
    assert caught.value.where == "zbc.toml:3:4"
    assert BAD[text] in f"{caught.value.message} {caught.value.hint}"


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_what_is_written_reads_back(counts):
    names, number = [], 0
    for count in counts:
        names.append([f"layers.{number + i}" for i in range(count)])
        number += count
    names[0].insert(0, "embed")
    names[-1].append("head")
    assert megatron_layout.loads(megatron_layout.dumps(names)) == tuple(counts)


def test_a_job_is_cut_as_its_layout_says():
    compiled = compile_job(job(pp=4, layers=8, partition={"layout": "Et|t*3|t*3|tL"}))
    assert [len(part) for part in compiled.layers] == [2, 3, 3, 2]
    assert compiled.layers[0] == ("embed", "layers.0")
    assert megatron_layout.dumps(compiled.layers) == "Et|t*3|t*3|tL"


@pytest.mark.parametrize(
    ("partition", "code", "piece"),
    [
        ({"layout": "Et*3|t*3|tL"}, "E131", "it needs 3 bars"),
        ({"layout": "Et*3|t*3|t|L"}, "E131", "do not add up"),
        ({"layout": "Et*8||L|L"}, "E132", "its layers"),
        ({"layout": "Et*4||t*4|L"}, "E131", "stage 1 has no layers"),
    ],
)
def test_layouts_that_do_not_go_with_the_job_are_refused(partition, code, piece):
    with refused(code) as caught:
        compile_job(job(pp=4, layers=8, partition=partition))
    assert piece in caught.value.render()


def test_layout_and_layers_per_stage_exclude_each_other():
    with refused("E110"):
        job(pp=2, layers=2, partition={"layout": "Et|tL", "layers_per_stage": [1, 1]})
