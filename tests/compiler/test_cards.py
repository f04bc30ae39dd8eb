"""Cards of layers: made once, kept in files that may be damaged, foreign, read-only or raced, and made for the job."""

import json
import subprocess
import sys

import pytest

from tests.jobs import job, write_job
from zbc.compiler.compile import compile_job
from zbc.compiler.cost import cards
from zbc.job import userobject

GPT = {"layers": 2, "seq_len": 16}
OWN = """
import torch
from torch import nn

def layers(width=4, broken=False, count=3):
    return [nn.Linear(8, width), Reads() if broken else nn.ReLU(), nn.Linear(width, 3)][:count]

class Reads(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x

class Noise:
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.randn(8), torch.tensor(index % 3)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The folder of cards, empty, of a zbc that has made none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache" / "zbc" / "cards"
    forget()


def forget():
    cards._by_section.clear()
    cards._by_name.clear()


@pytest.fixture
def makes(monkeypatch):
    """The names of the policies for which cards are made."""
    found, real = [], userobject.load

    def load(name, what, **where):
        made = real(name, what, **where)
        return (
            (lambda job, policy, cuts: found.append(policy) or made(job, policy, cuts)) if name == cards.MAKER else made
        )

    monkeypatch.setattr(userobject, "load", load)
    return found


def bytes_of(made):
    return [layer.bytes for layer in cards.of(made)[0].layers.values()]


def own(tmp_path, monkeypatch, count=3, **args):
    (tmp_path / "owned.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "owned", raising=False)
    model = {"family": "owned:layers", "layers": count, "loss": "cross_entropy", "seq_len": None, "vocab": None}
    return job(model={**model, "args": {"count": count, **args}}, pp=count, m=4, data={"kind": "owned:Noise"})


def test_it_is_made_once_and_read_from_its_file_then(place, makes):
    made = job(model=GPT)
    found = bytes_of(made)
    assert makes == ["keep"] and len([*place.iterdir()]) == 1
    forget()
    assert bytes_of(made) == found and makes == ["keep"]


@pytest.mark.parametrize("text", ["", "{", "[]", "[7]", "nonsense", '[{"format": "zbc-profile", "version": 9}]'])
def test_a_file_that_is_no_card_is_made_again(place, makes, text):
    made = job(model=GPT)
    found = bytes_of(made)
    (file,) = place.iterdir()
    whole = file.read_text()
    file.write_text(text)
    forget()
    assert bytes_of(made) == found and makes == 2 * ["keep"] and file.read_text() == whole


def test_where_nothing_can_be_written_it_is_made_each_time(place, makes):
    place.parent.parent.write_text("a file")
    made = job(model=GPT)
    found = bytes_of(made)
    forget()
    assert bytes_of(made) == found and makes == 2 * ["keep"]


SAME = [
    (lambda: job(model=GPT), lambda: job(model={**GPT, "layers": 6}, pp=3, m=8)),
    (
        lambda: job(model={**GPT, "experts": 4}, kind="1f1b", parallel={"dp": 2, "ep": 2}),
        lambda: job(model={**GPT, "experts": 4}, kind="zb-v", pp=2, parallel={"dp": 4, "ep": 2, "shard": "all"}),
    ),
    (lambda: job(model=GPT, adapter={"rank": 2}), lambda: job(model={**GPT, "layers": 6}, adapter={"rank": 2}, pp=3)),
    (lambda: job(model=GPT, optimizer={"lr": 1e-3}), lambda: job(model=GPT, optimizer={"sync": "post-validate"})),
]


@pytest.mark.long
def test_heads_that_make_some_logits_at_a_time_are_shared_by_cards_with_other_experts_and_policies(place, makes):
    chunked = {**GPT, "experts": 4, "loss_chunk": 3}
    jobs = [job(model=chunked, parallel={"dp": 4, "ep": ep}) for ep in (2, 4)]
    found = [cards.of(one, policy)[0].layers for one, policy in zip(jobs, (cards.KEEP, cards.CHEAP), strict=True)]
    assert makes == ["keep", "ends", "selective"]
    (whole,) = userobject.load(cards.MAKER, "")(cards._plain(cards._under(jobs[1], cards.CHEAP)), "selective", ())
    assert found[1] == cards._read(json.dumps([whole.plain()]))[0].layers


OTHER = [
    {"model": {**GPT, "seq_len": 32}},
    {"model": {**GPT, "family": "llama", "window": 4, "layers": 4}},
    {"model": GPT, "schedule": {"microbatch_size": 4}},
    {"model": GPT, "parallel": {"tp": 2}},
    {"model": GPT, "optimizer": {"kind": "muon"}},
    {"model": GPT, "train": {"fused_gradients": True}},
    {"model": GPT, "hardware": {"device": "cuda"}},
    {"model": GPT, "adapter": {"rank": 2}},
]


@pytest.mark.long("<lambda>-<lambda>1")
@pytest.mark.parametrize(("one", "other"), SAME)
def test_jobs_whose_layers_do_the_same_share_it(place, makes, one, other):
    assert bytes_of(one()) == bytes_of(other()) and len(makes) == 1


@pytest.mark.long("changes1", "changes7")
@pytest.mark.parametrize("changes", OTHER)
def test_what_layers_depend_on_is_another_card(place, makes, changes):
    bytes_of(job(model=GPT))
    bytes_of(job(**changes))
    assert len(makes) == 2


def test_layers_of_a_factory_are_counted(place, tmp_path, monkeypatch):
    one, few, wide = (compile_job(own(tmp_path, monkeypatch, **of)).report for of in ({"count": 1}, {}, {"width": 400}))
    assert one.costs == few.costs == wide.costs == "estimated" and one.bytes_known and few.bytes_known
    assert max(rank.peak_bytes for rank in wide.per_rank) > 10 * max(rank.peak_bytes for rank in few.per_rank)


def test_other_files_beside_users_code_are_another_card(place, tmp_path, monkeypatch, makes):
    own(tmp_path, monkeypatch)
    forget()
    own(tmp_path, monkeypatch)
    assert len(makes) == 1
    (tmp_path / "helper.py").write_text("WIDTH = 3")
    forget()
    own(tmp_path, monkeypatch)
    assert len(makes) == 2


def test_layers_that_need_numbers_count_alike_and_say_why(place, tmp_path, monkeypatch):
    made = own(tmp_path, monkeypatch, broken=True)
    assert made.profile is None and made.uncounted.code == "E505"
    report = compile_job(made).report
    assert report.costs == "assumed equal" and not report.bytes_known


def test_with_costs_given_no_code_of_users_runs(place, tmp_path, monkeypatch):
    (tmp_path / "owned.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    model = {"family": "owned:layers", "layers": 3, "loss": "mse", "seq_len": None, "vocab": None}
    made = job(
        model=model, pp=3, m=4, data={"kind": "owned:Noise"}, costs={"per": "layer", "f": 1.0, "b": 1.0, "w": 1.0}
    )
    assert made.uncounted is None and compile_job(made).report.costs == "given"


@pytest.mark.long
def test_processes_that_make_it_at_once_agree_and_a_later_plan_needs_no_torch(place, tmp_path):
    path = write_job(tmp_path, model=GPT)
    code = "import sys, zbc; print(zbc.plan(zbc.load(sys.argv[1]), budget=0).compiled.report.peak_bytes)"
    code += "; print('torch' in sys.modules)"
    both = [subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) for _ in range(2)]
    first, second = (one.communicate()[0].split() for one in both)
    later = subprocess.run([sys.executable, "-c", code, path], capture_output=True).stdout.split()
    assert first == second == [later[0], b"True"] and later[1] == b"False"
