"""The table of features that exclude each other, and its use for jobs, candidates and pages."""

from pathlib import Path

import pytest

from tests.jobs import job
from tests.refusals import refused
from zbc import excludes
from zbc.compiler.partition.setup import refusals
from zbc.compiler.schedules import SCHEDULES
from zbc.job.spec import SECTIONS
from zbc.topology import Topology

LIMITS = Path(__file__).parent.parent / "docs/limits.md"
# A value of its key for each trait that a setting is.
VALUES = {
    **dict.fromkeys(("compile", "tied embeddings", "tp_sequence", "overlap", "fused gradients"), True),
    **dict.fromkeys(("tp", "dp", "cp", "ep", "slices", "group", "chunks"), 2),
    **dict.fromkeys(("replicas", "open vocabulary", "open slices", "open activations"), "auto"),
    **{name: [1.0, 2.0] for name in ("slow ranks", "rates by rank", "bandwidths by rank", "memory by rank")},
    **{
        name: name for name in ("float16", "one-sided", "selective", "post-validate", "asynchronous", "steps", "period")
    },
    "ties": {"layers.0.weight": "layers.1.weight"},
    "bfloat16 weights": "bfloat16",
    "no masters": "bfloat16 alone",
    "autocast": "bfloat16",
    "experts": 4,
    "expert bias": (0.0, 0.001),
    "loss by chunks": 7,
    "model of transformers": "zbc.training.models.transformers:layers",
    "norms of heads": "qwen3",
    "own layers": "some.module:layers",
    "graph": {"a": [1], "b": [1, "a"]},
    "ep over dp": Topology(1, 2, ep=2),
    "world": 8,
    "average": {"every": 1},
    "sharded optimizer": "optimizer",
    "sharded weights": "weights",
    "sharded gradients": "gradients",
    "sharded all": "all",
    "shared vocabulary": "shared",
    "open kind": "Auto",
    "ramp": [{"microbatches": 2, "steps": 1}],
    "tokens": [2, 1],
    "file": "order.csv",
    "plugin": "some:order",
    "memory limit": "1x",
    "offload": {"0": "offload"},
    "two versions": "two-versions",
    "feedback": 0.5,
    "moving average": 0.99,
    "clipped scores": 100.0,
    "freeze": 0.5,
    "adapter": 8,
    "dropout": 0.1,
    "trained whole": ["whole lm_head"],
    "balance": "length",
    "dealt by tokens": "tokens",
    "evaluation": 10,
    "metric": "some.task:metric",
    "filler": "some.task:make",
}
SETTINGS = [pair for pair in excludes.PAIRS if pair.one in VALUES and pair.other in VALUES]


class Section:
    """Settings of a table; any other attribute is None."""

    def __init__(self, values):
        self.__dict__.update(values)


def sections_with(*traits):
    found = {}
    for trait in traits:
        table, key = excludes.TRAITS[trait].place
        found.setdefault(table, {})[key] = VALUES[trait]
    return {table: Section(values) for table, values in found.items()}


def test_every_trait_is_a_setting_with_a_value_here_or_of_the_schedule():
    assert VALUES.keys() == {name for name, trait in excludes.TRAITS.items() if trait.there is not None}
    for name, trait in excludes.TRAITS.items():
        assert (name in VALUES) == trait.of(sections_with(*{name} & VALUES.keys())), name
        table, key = trait.place
        assert table == "run" or key in {*SECTIONS[table].model_fields, *vars(SECTIONS[table])}, trait.key


def test_each_pair_stands_once():
    pairs = [frozenset(pair[:2]) for pair in excludes.PAIRS]
    assert len({*pairs}) == len(pairs) and all(len(pair) == 2 for pair in pairs)


def test_a_job_with_its_defaults_has_no_trait():
    plain = vars(job())
    assert [name for name, trait in excludes.TRAITS.items() if trait.of(plain)] == []


@pytest.mark.parametrize("pair", SETTINGS, ids=lambda pair: f"{pair.one} x {pair.other}".replace(" ", "-"))
def test_a_pair_is_refused_by_its_code_at_its_place(pair):
    errors = list(excludes.problems(sections_with(pair.one, pair.other), ".".join))
    assert [(error.code, error.where) for error in errors] == [("E110", excludes.TRAITS[pair.at].key)]
    assert all(excludes.TRAITS[trait].label in errors[0].message for trait in pair[:2])
    for trait in pair[:2]:
        assert list(excludes.problems(sections_with(trait), ".".join)) == []


@pytest.mark.parametrize(("trait", "setting"), [("whole", "slices"), ("flush", "two versions"), ("chains", "graph")])
def test_every_candidate_is_asked_for_what_its_schedule_has(trait, setting):
    base = job()
    sections = vars(base) | sections_with(setting)
    for card in SCHEDULES.values():
        found = list(excludes.of_schedule(sections, base.document.where, card.name, card.traits))
        assert bool(found) == (trait in card.traits), card.name


def test_slices_are_asked_of_every_candidate():
    sliced = job(schedule={"slices": 2})
    assert [card.whole for card in SCHEDULES.values()] == [any(refusals(sliced, card)) for card in SCHEDULES.values()]


def test_the_page_prints_the_table():
    rows = ["| " + " | ".join(row) + " |" for row in excludes.table()]
    text = LIMITS.read_text(encoding="utf-8")
    assert "\n".join(rows) in text, "write docs/limits.md anew from `zbc explain limits`"


def test_an_error_names_what_excludes_and_what_helps():
    with refused("E110", match="zb-v, a schedule that needs a flush, exclude each other", hint="1f1b") as caught:
        job(kind="zb-v", optimizer={"sync": "two-versions"})
    assert caught.value.where.endswith("zbc.toml:19:8")
