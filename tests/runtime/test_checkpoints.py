"""A run resumed from a checkpoint, under any plan, equals the uninterrupted run."""

import errno
import hashlib
import itertools
import json
import math
import pickle
import shlex
import shutil
import threading
import zlib

import pytest
import torch
from safetensors.torch import load_file

from tests import composed
from tests.drawn import named
from tests.jobs import tiny_tensors_move
from tests.refusals import refused
from tests.runtime.small_plans import GPT, make_plan, make_program
from tests.threads import losses_of, run_threads, watch
from tests.tiers import few
from zbc.errors import ZbcError
from zbc.plan import dealing
from zbc.runtime.core import validate
from zbc.training.checkpoint import files, saving
from zbc.training.checkpoint import folder as disk
from zbc.training.checkpoint.files import TensorPart, put_together, write_parts
from zbc.training.checkpoint.saving import check_copies

SMALL = {**GPT, "layers": 6, "hidden": 16, "vocab": 31}
ADAMW = {"lr": 1e-2, "clip_grad_norm": 0.5, "schedule": {"kind": "cosine", "warmup_steps": 2}}
TWO = {"every": 2}


def plan(schedule="1f1b", p=2, m=4, *, dp=1, checkpoint=TWO, model=SMALL, optimizer=ADAMW, seed=7, size=1, **how):
    """`m` microbatches over all copies; `zero1`, `ahead` and `tied` as their keys in a job say."""
    sync = "post-validate" if how.get("ahead") else "before-step"
    tied = bool(model.get("ties")) and (p > 1)
    program = make_program(schedule, p, m // dp, sync=sync, copies=dp, tied=tied, sharded=bool(how.get("zero1")))
    data = how.get("data", {"kind": "synthetic"})
    return make_plan(program, model=model, data=data, optimizer=optimizer, size=size, checkpoint=checkpoint, seed=seed)


def train(plan, steps, folder=None, resume=None, **options):
    """Losses of its steps, and the final checkpoint as tensors by name."""
    return losses_of(run_threads(plan, steps, folder=folder, resume=resume, **options))


def tensors(checkpoint):
    """Whole tensors of a checkpoint by name, assembled from its index without code of zbc."""
    index = json.loads((checkpoint / "index.json").read_text())
    files = {name: load_file(checkpoint / name) for name in index["files"]}
    found = {}
    for name, about in index["tensors"].items():
        flat = torch.full((math.prod(about["shape"]),), -1, dtype=getattr(torch, about["dtype"]))
        for part in about["parts"]:
            flat[part["start"] : part["start"] + part["count"]] = files[part["file"]][part["key"]].reshape(-1)
        found[name] = flat.view(about["shape"])
    return found


def same(a, b, tolerance=None):
    first, second = tensors(a), tensors(b)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.shape == second[name].shape, name
        if tolerance is None:
            assert value.equal(second[name]), name
        else:
            assert (value - second[name]).abs().max() <= tolerance * max(1.0, value.abs().max().item()), name


def at(folder, step):
    return disk.folder_of(folder, step)


def sign(checkpoint, **changes):
    """Changes the index of a checkpoint, and corrects its hash."""
    text = json.dumps(json.loads((checkpoint / "index.json").read_text()) | changes)
    (checkpoint / "index.json").write_text(text)
    (checkpoint / ".complete").write_text(json.dumps({"index": hashlib.sha256(text.encode()).hexdigest()}))


@pytest.fixture
def small_pieces(monkeypatch):
    """Parameters of more than 100 elements are cut."""
    monkeypatch.setattr(dealing, "CHUNK", 100)
    monkeypatch.setattr(validate, "CHUNK", 100)


@pytest.mark.long
def test_copies_share_out_the_writing_and_write_the_same_once_as_with_zero1(small_pieces, tmp_path):
    train(plan(dp=2), 2, tmp_path / "plain")
    train(plan(dp=2, zero1=True), 2, tmp_path / "sharded")
    same(at(tmp_path / "plain", 2), at(tmp_path / "sharded", 2))
    index = json.loads((at(tmp_path / "plain", 2) / "index.json").read_text())
    sizes = [about["bytes"] for about in index["files"].values()]
    assert len(sizes) == 4 and max(sizes) < 1.3 * min(sizes)
    for name, about in index["tensors"].items():
        assert sum(part["count"] for part in about["parts"]) == math.prod(about["shape"]), name


VECTORS = {"kind": "tests.runtime.user_models:Vectors"}


KINDS = ["averages", "batchnorm", "dropped", "empty", "frozen", "strided", "tied", "unused"]
GOING_ON = few([(kind, False) for kind in KINDS], ("averages", "dropped", "tied"))
GOING_ON += few([(kind, True) for kind in ("frozen", "tied", "unused")], ("tied",))


@pytest.mark.long("tied-True")
@pytest.mark.parametrize(("kind", "zero1"), GOING_ON)
def test_layers_of_users_go_on_with_all_they_have(kind, zero1, small_pieces, tmp_path):
    """Buffers that forwards change or make, dropout, parameters that do not train or are never used."""
    model = {"family": f"tests.runtime.zoo:{kind}", "layers": 4, "loss": "mse"}
    ways = [{"dp": 2, "zero1": True}] * 2 if zero1 else [{"p": 2, "size": 2}, {"p": 4, "size": 2}]
    one, other = (plan(model=model, data=VECTORS, **way) for way in ways)
    whole = train(one, 4, tmp_path / "whole")
    train(one, 2, tmp_path / "part")
    assert train(other, 4, tmp_path / "part", at(tmp_path / "part", 2)) == whole[2:]
    same(at(tmp_path / "part", 4), at(tmp_path / "whole", 4))


def test_what_the_files_cannot_hold_is_told_before_the_first_step(tmp_path):
    model = {"family": "tests.runtime.zoo:imaginary", "layers": 4, "loss": "mse"}
    began = []
    with refused("E611", match="is complex64, which checkpoints cannot hold"):
        step = lambda worker: lambda *args, **how: began.append(1)  # noqa: E731
        run_threads(plan(model=model, data=VECTORS), 2, folder=tmp_path, step=step)
    assert not began


KEPT = """\
1f1b: feedback, sharded optimizer, optimizer.kind="muon"
interleaved-1f1b: two versions, slices, sharded optimizer
1f1b: two versions, ep
zb-h1: freeze
1f1b: moving average, tp, sharded optimizer
1f1b: moving average, two versions, sharded optimizer
1f1b: tp, sharded optimizer, optimizer.qk_clip=0.01
zb-h1: ep, expert bias
1f1b: lookahead
interleaved-1f1b: asynchronous, optimizer.kind="sgd", optimizer.momentum=0.5
1f1b: balance, zero1
zb-h1: dealt by tokens
zb-v: slices, offload, shared vocabulary, little room
1f1b: average, parallel.average={every=2,share=0.5}, shared vocabulary
1f1b: average, parallel.average={every=1,share=0.3}, tied embeddings
zb-v: model.dtype="float16", model.loss_scale=[65536.0,3]
zb-h1: graph, zero1
zb-v: shared vocabulary, dp, tied embeddings
zb-h1: adapter, dropout
zb-v: optimizer.state="bfloat16", tp, sharded optimizer
zb-h1: optimizer.state="bfloat16", bfloat16 weights, model.master=false, post-validate, zero1
interleaved-1f1b: sharded weights, one-sided""".splitlines()


@pytest.mark.always("1f1b: two versions, ep")
@pytest.mark.long
@pytest.mark.parametrize("line", few(KEPT, KEPT[:5]))
def test_a_run_goes_on_with_the_same_bits(line, tmp_path):
    """Whatever is kept beside weights, of features in tests/drawn.py."""
    tables = named(line).both
    tables["checkpoint"], tables["train"]["steps"] = {"every": 2, "keep": 9}, 4
    _, one = composed.written(tables, tmp_path / "plan")
    with tiny_tensors_move():
        whole = run_threads(one, 4, folder=tmp_path / "whole")
        rest = run_threads(one, 4, folder=tmp_path / "rest", resume=at(tmp_path / "whole", 2))
    told = [[(one.loss, one.grad_norm, one.scale) for one in workers[0].results] for workers in (whole, rest)]
    assert told[1] == told[0][2:]
    same(at(tmp_path / "rest", 4), at(tmp_path / "whole", 4))


# ---- beside the steps ----------------------------------------------------------------------------------------


class Late:
    """An event of copies that a GPU completes as late as possible: when the next update waits, or after a while."""

    def __init__(self, pairs):
        self.pairs, self.asked, self.lock = pairs, threading.Event(), threading.Lock()
        self.waited = False

    def wait(self):
        self.waited = True
        self._copy()
        self.asked.set()

    def synchronize(self):
        self.asked.wait(0.3)  # the last one of a run is waited for by no update
        self._copy()

    def _copy(self):
        with self.lock:
            for place, tensor in self.pairs:
                place.copy_(tensor)
            self.pairs = ()


@pytest.mark.long
@pytest.mark.parametrize("ahead", [False, True])
def test_the_next_update_waits_for_what_a_gpu_copies_beside_the_steps(ahead, monkeypatch, tmp_path):
    events = []

    def copy(device, pairs):
        events.append(Late(pairs))
        return events[-1]

    options = {"ahead": ahead, "checkpoint": {"every": 1, "keep": 9}}
    train(plan(**options), 4, tmp_path / "plain")
    monkeypatch.setattr(saving, "copy_beside", copy)
    train(plan(**options), 4, tmp_path / "late")
    assert sum(event.waited for event in events) == 2 * 3  # on two ranks, by all but the last
    for step in range(1, 5):
        same(at(tmp_path / "late", step), at(tmp_path / "plain", step))


@pytest.mark.parametrize("ahead", few([False, True], (True,)))
def test_what_is_written_late_is_what_the_step_left(ahead, monkeypatch, tmp_path):
    """Nothing is written before the step after the checkpoint has changed everything."""
    later, original = threading.Event(), saving.write_parts

    def write(*args):
        assert later.wait(60)
        return original(*args)

    def let(worker, op):
        if worker.step == 3 and op == worker.script[-1][1]:
            later.set()

    train(plan(ahead=ahead), 2, tmp_path / "between")
    monkeypatch.setattr(saving, "write_parts", write)
    written_late = plan(ahead=ahead, checkpoint={"every": 2})
    train(written_late, 4, tmp_path / "late", setup=lambda worker: watch(worker, after=let))
    same(at(tmp_path / "late", 2), at(tmp_path / "between", 2))


PARTS = [
    TensorPart("a", (7, 100), 0, torch.arange(700.0)),
    TensorPart("b", (8,), 5, torch.ones(3, dtype=torch.int8)),
    TensorPart("b", (8,), 1, torch.ones(2, dtype=torch.int8)),
    TensorPart("c", (), 0, torch.tensor(True)),
    TensorPart("d", (2, 3), 0, torch.arange(6.0).view(3, 2).T.to(torch.bfloat16)),
]


def test_a_file_in_many_blocks_is_the_file_in_one_and_any_reader_opens_it(monkeypatch, tmp_path):
    one = write_parts(tmp_path / "one", 0, PARTS)
    monkeypatch.setattr(disk, "BLOCK", 64)
    monkeypatch.setattr(files, "_SYNCED", 1000)
    synced, alive, sync = [], [], files._sync
    monkeypatch.setattr(files, "_sync", lambda file: sync(file) or synced.append(1))
    many = write_parts(tmp_path / "many", 0, PARTS, lambda: alive.append(1))
    name = "rank-0000.safetensors"
    raw = (tmp_path / "many" / name).read_bytes()
    assert one == many and raw == (tmp_path / "one" / name).read_bytes()
    assert many.files == {name: disk.File(bytes=len(raw), crc32=zlib.crc32(raw))}
    disk.check_file(tmp_path / "many", name, many.files[name])
    assert len(synced) == 1 + len(raw) // 1000 and len(alive) >= 2800 // 64
    found = load_file(tmp_path / "many" / name)
    assert sorted(found) == ["a", "b[1:3]", "b[5:8]", "c", "d"]
    assert all(found[part.key].equal(part.tensor.view(part.kept_shape)) for part in PARTS)


@pytest.mark.parametrize("parts", [PARTS, [*PARTS[:1], *PARTS], PARTS[:3], [TensorPart("a", (3,), 0, torch.ones(2))]])
def test_parts_that_overlap_or_leave_something_out_are_no_checkpoint(parts, tmp_path):
    written = [write_parts(tmp_path, rank, [part]) for rank, part in enumerate(parts)]
    with refused("E703", match="overlap or leave something out"):
        put_together(written)


@pytest.mark.long
@pytest.mark.parametrize("dp", few([1, 2], (1,)))
def test_what_a_checkpoint_has_may_change_from_one_to_the_next(dp, tmp_path):
    """An optimizer has no state for parameters it has not stepped; here for one stage, then less and more again."""

    def forget(worker, op):
        if worker.step in (0, 3) and op == worker.script[-1][1]:
            worker.optimizers[1].optimizer.state.clear()

    def optimized(step):
        return {name.split(".")[1] for name in tensors(at(tmp_path, step)) if name.startswith("optim.")}

    one = plan(dp=dp, checkpoint={"every": 1, "keep": 9})
    losses = train(one, 5, tmp_path, setup=lambda worker: worker.plan.rank == 1 and watch(worker, after=forget))
    assert [optimized(step) == {"embed", "layers", "head"} for step in range(1, 6)] == [False, True, True, False, True]
    for step in (1, 2, 3, 4):
        assert train(one, step + 1, resume=at(tmp_path, step)) == losses[step : step + 1]


def test_as_many_checkpoints_stay_as_asked_and_the_last_step_is_saved(tmp_path):
    train(plan(checkpoint={"every": 2, "keep": 2}), 7, tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["step-00000006", "step-00000007"]


@pytest.mark.long
def test_a_full_disk_ends_in_a_message_and_the_checkpoint_before_is_intact(monkeypatch, tmp_path):
    train(plan(), 2, tmp_path)
    before, plain, files_made = tensors(at(tmp_path, 2)), files._sync, itertools.count()

    def sync(file):
        if next(files_made):
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(file)

    monkeypatch.setattr(files, "_sync", sync)
    with refused("E611", "step-00000004", match="No space left on device") as caught:
        train(plan(), 6, tmp_path, at(tmp_path, 2))
    assert caught.value.details[0] == f"the newest complete checkpoint is {at(tmp_path, 2)}"
    assert list(disk.complete(tmp_path)) == [2]
    after = tensors(at(tmp_path, 2))
    assert all(after[name].equal(value) for name, value in before.items())


@pytest.mark.long
def test_what_a_broken_attempt_left_is_replaced(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_index", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "broken", "index")))
        with pytest.raises(ZbcError, match="broken"):
            train(plan(p=4), 2, tmp_path)
    assert (at(tmp_path, 2) / "rank-0003.safetensors").exists() and not disk.complete(tmp_path)
    train(plan(p=2), 2, tmp_path)
    names = [".complete", "index.json", "rank-0000.safetensors", "rank-0001.safetensors"]
    assert sorted(entry.name for entry in at(tmp_path, 2).iterdir()) == names


@pytest.mark.parametrize("where", few(["weight", "exp_avg"], ("exp_avg",)))
@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_copies_that_differ_are_no_checkpoint(name, where, tmp_path):
    one = plan(name, 2, dp=2 if name == "1f1b" else 1, checkpoint={"every": 3})

    def spoil(worker, op):
        if (worker.step, worker.rank, op) == (2, one.manifest.topology.world - 1, worker.script[-1][1]):
            optimizer = list(worker.optimizers.values())[-1]
            parameter = next(p for name, p in optimizer.parameters.items() if name.startswith("layers."))
            touched = optimizer.optimizer.state[parameter]["exp_avg"] if where == "exp_avg" else parameter
            with torch.no_grad():
                touched.view(-1)[0] += 1e-3

    with refused("E705", "layers.") as caught:
        train(one, 3, tmp_path, setup=lambda worker: watch(worker, after=spoil))
    assert "alike" in caught.value.details[0]
    assert not disk.complete(tmp_path)


def test_the_message_names_the_ranks_of_each_copy():
    with pytest.raises(ZbcError) as caught:
        check_copies([{"a": "1", "b": "2"}, {"a": "1"}, {"a": "3", "b": "2"}], lambda rank: f"rank {rank}")
    assert caught.value.details == ("a: rank 0, rank 1 alike, but rank 2 alike",)


# ---- what is not loaded --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    train(plan(checkpoint={"every": 1}), 2, folder)
    return folder


@pytest.fixture
def copy(written, tmp_path):
    """Two checkpoints, to be damaged."""
    return shutil.copytree(written, tmp_path / "a run's place")


def before(error):
    """The checkpoint that an error names, as typed."""
    assert error.hint.startswith("go on from the one before: --resume ")
    return shlex.split(error.hint)[-1]


SHARD, INDEX = "rank-0001.safetensors", "index.json"
WAYS = {
    "cut off": lambda raw: raw[:-9],
    "one bit": lambda raw: raw[:-5] + bytes([raw[-5] ^ 4]) + raw[-4:],
    "gone": lambda raw: None,
    "another header": lambda raw: raw.replace(b'"F32"', b'"I32"', 1),
}
DAMAGE = [(way, name) for way in WAYS for name in (SHARD, INDEX)][:-1]


@pytest.mark.long(
    "cut off-rank-0001.safetensors", "one bit-rank-0001.safetensors", "another header-rank-0001.safetensors"
)
@pytest.mark.parametrize(("way", "name"), few(DAMAGE, lambda case: case[1] == SHARD or case[0] == "cut off"))
def test_a_damaged_file_is_named_and_the_checkpoint_before_too(way, name, copy):
    file = at(copy, 2) / name
    found = WAYS[way](file.read_bytes())
    file.unlink() if found is None else file.write_bytes(found)
    with refused("E612", str(file)) as caught:
        train(plan(), 4, resume=at(copy, 2))
    if (way, name) == ("cut off", SHARD):
        assert "bytes, " in caught.value.message and "were written" in caught.value.message
    assert before(caught.value) == str(at(copy, 1))
    assert len(train(plan(), 3, resume=at(copy, 1))) == 2


class Trap:
    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.long
def test_nothing_is_unpickled(copy, monkeypatch):
    """Pickles at places of torch's own storage, in place of a file, and with unpickling forbidden."""
    trap = pickle.dumps(Trap())
    for name in (".metadata", "__0_0.distcp", "rank-0000.pt"):
        (at(copy, 2) / name).write_bytes(trap)
    with monkeypatch.context() as patch:
        for name in ("load", "loads", "Unpickler"):
            patch.setattr(pickle, name, lambda *args, **options: pytest.fail("unpickled"))
        patch.setattr(torch, "load", lambda *args, **options: pytest.fail("torch.load"))
        assert len(train(plan(), 3, resume=at(copy, 2))) == 1
    file = at(copy, 2) / "rank-0000.safetensors"
    index = json.loads((at(copy, 2) / "index.json").read_text())
    trap = trap.ljust(file.stat().st_size)
    file.write_bytes(trap)
    index["files"][file.name] = {"bytes": len(trap), "crc32": zlib.crc32(trap)}
    disk.write_index(at(copy, 2), disk.Index(**index))
    with refused("E612", str(file)):
        train(plan(), 3, resume=at(copy, 2))


@pytest.mark.parametrize("marker", [b"", b"\x80", b"[]", b'{"index": 3}'])
def test_a_marker_that_says_nothing_is_damage_too(marker, copy):
    (at(copy, 2) / ".complete").write_bytes(marker)
    with pytest.raises(ZbcError) as caught:
        train(plan(), 4, resume=at(copy, 2))
    assert caught.value.code == "E612" and before(caught.value) == str(at(copy, 1))
    assert (".complete is damaged" in caught.value.message) == (marker in (b"", b"\x80"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 1}, "it is of step 1, and its folder is called step-00000002"),
        ({"samples": 10**30}, "samples: "),
        ({"version": 2}, "checkpoint version 2, this zbc reads 3"),
        ({"version": 4}, "checkpoint version 4, this zbc reads 3"),
    ],
)
def test_an_index_that_was_changed_and_signed_again_is_still_looked_at(changes, said, copy):
    sign(at(copy, 2), **changes)
    with refused("E612", said) as caught:
        train(plan(), 4, resume=at(copy, 2))
    assert "version" in changes or before(caught.value) == str(at(copy, 1))


def test_a_checkpoint_without_its_marker_is_not_read(copy):
    (at(copy, 2) / ".complete").unlink()
    assert disk.newest(copy) == at(copy, 1)
    with pytest.raises(ZbcError, match="not a complete checkpoint"):
        train(plan(), 4, resume=at(copy, 2))


OTHERS = {
    "deeper": ({"model": {**SMALL, "layers": 7}}, "layers.6.down.bias: only in this job"),
    "wider": ({"model": {**SMALL, "hidden": 32}}, "float32 [31, 16] in the checkpoint, float32 [31, 32] in this job"),
    "tied": ({"model": {**SMALL, "ties": True}}, "head.logits.weight: only in the checkpoint"),
    "another base": ({"model": {**SMALL, "variant": "rotary", "rope_theta": 5e5}}, "model.rope_theta = 10000.0, this"),
    "another norm": ({"model": {**SMALL, "norm_eps": 0.1}}, "model.norm_eps = 1e-05, this job has 0.1"),
    "another optimizer": ({"optimizer": {"kind": "sgd"}}, "optimizer.kind = adamw, this job has sgd"),
    "another seed": ({"seed": 8}, "train.seed = 7, this job has 8"),
}


@pytest.mark.long("deeper")
@pytest.mark.parametrize("what", OTHERS)
def test_a_checkpoint_of_another_training_is_refused_in_words(what, copy):
    """An older one has no [model], but names and shapes."""
    changes, said = OTHERS[what]
    if what in ("deeper", "wider", "tied"):
        sign(at(copy, 2), trained=None)
    with refused("E613") as caught:
        train(plan(**changes), 4, resume=at(copy, 2))
    assert said in "\n".join([caught.value.message, *caught.value.details])


def test_a_run_says_that_it_continues_in_another_precision(written):
    lines = []
    train(plan(model={**SMALL, "dtype": "bfloat16"}), 3, resume=at(written, 2), tell=lines.append)
    assert lines == ["the checkpoint was trained with model.dtype = float32, this job has bfloat16"]
