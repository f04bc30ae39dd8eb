"""Under torchrun and other launchers: one process per rank, with its place in the environment; its GPU."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.limits import until
from tests.processes.leftovers import alive
from tests.processes.plans import free_port, metrics, processes, write_plan
from tests.refusals import error_of, refused
from zbc.errors import ZbcError
from zbc.plan.directory import read_manifest
from zbc.runtime.transports.transport import Staged
from zbc.topology import Topology
from zbc.trace import recording as trace
from zbc.training import devices, train
from zbc.training.launch import launch, reach, torchrun
from zbc.training.launch.board import Board, Place, plain_name
from zbc.training.launch.launch import RunOptions
from zbc.training.watchdog import Watchdog

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]


DATA = {"kind": "tests.processes.user_layers:Vectors"}


def started(plan, out, *more):
    command = [*TORCHRUN, "zbc", "run", str(plan), "-o", str(out), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.long
def test_torchrun_trains_and_rank_0_shows_every_line_once(tmp_path):
    plan, out = write_plan(tmp_path, parallel={"pp": 2}, schedule={"kind": "zb-v"}), tmp_path / "run"
    with started(plan, out, "--trace", "2-3") as run:
        shown = run.communicate(timeout=80)[0].splitlines()
    assert run.returncode == 0, shown
    assert [row["step"] for row in metrics(out)] == [1, 2, 3]
    assert trace.read(out).steps == (2, 3)
    lines = [line for line in shown if line.startswith(("zb-v on", "step "))]
    assert lines[0].startswith("zb-v on 2 cpu ranks") and len(lines) == 4
    assert [line.split()[1] for line in lines[1:]] == ["1/3", "2/3", "3/3"]


@pytest.mark.long
def test_ranks_with_different_plans_and_code_are_told_so_by_one_of_them(tmp_path):
    """Without torchrun, too: with any launcher that sets the usual variables; rank 0 hosts the store."""
    mine = {"parallel": {"pp": 2}, "model": {"family": "mylayers:layers", "loss": "mse"}, "data": DATA}
    plans = []
    for name, kind, size in (("first", "1f1b", 8), ("second", "zb-h1", 9)):
        (tmp_path / f"code-{name}").mkdir()
        code = f"from torch import nn\ndef layers():\n    return [nn.Linear({size}, {size}) for _ in range(4)]\n"
        (tmp_path / f"code-{name}" / "mylayers.py").write_text(code)
        plans.append(write_plan(tmp_path, name, schedule={"kind": kind}, **mine))
    paths = [f"{tmp_path}/code-{plan.name}{os.pathsep}{os.environ.get('PYTHONPATH', '')}" for plan in plans]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    kept, runs = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}, []
    for rank, plan in enumerate(plans):
        command = [sys.executable, "-m", "zbc", "run", str(plan), "-o", str(tmp_path / "run")]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": paths[rank]}
        runs.append(subprocess.Popen(command, env={**env, **own}, **kept))
    shown = [run.communicate(timeout=80) for run in runs]
    assert [run.returncode for run in runs] == [6, 6], shown
    errors = [line for _, text in shown for line in text.splitlines() if line.startswith("error[")]
    assert len(errors) == 1, shown
    assert errors[0].startswith("error[E601] run: the ranks differ in plan id: rank 1 has ")
    more = [line for _, text in shown for line in text.splitlines() if line.startswith("   and in ")]
    wanted = ["and in plan.json (sha256)", "and in the code of mylayers (sha256)"]
    assert [line.partition(":")[0].strip() for line in more] == wanted
    assert not (tmp_path / "run").exists()


@pytest.mark.repeats
@pytest.mark.limit(240)
def test_two_machines_restart_behind_the_newest_checkpoint_and_save_when_they_are_asked_to_end(tmp_path):
    """torchrun counts restarts per machine: one counts the killed rank, the other may count none."""
    tables = {"parallel": {"pp": 2}, "train": {"steps": 10**6, "watchdog_s": 20.0}, "checkpoint": {"every": 4}}
    plan, out = write_plan(tmp_path, **tables), tmp_path / "run"
    there = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two"]
    places = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2", *there]
    command = [sys.executable, "-m", "torch.distributed.run", *places, "-m", "zbc", "run", str(plan), "-o", str(out)]
    read, write = os.pipe()
    machines = [subprocess.Popen(command, stdout=write, stderr=write) for _ in range(2)]
    os.close(write)
    shown, ranks = [], []
    with os.fdopen(read) as lines:
        for line in lines:
            shown.append(line.rstrip())
            step = int(line.split()[1].partition("/")[0]) if line.startswith("step ") else 0
            if step == 6 and not ranks:
                ranks += processes(out)
                os.kill(ranks[1], signal.SIGKILL)
            elif step == 11:
                ranks += processes(out)
                for machine in machines:
                    machine.send_signal(signal.SIGTERM)
    assert len(ranks) == 4, "\n".join(shown)
    told = ("rank 1 was killed by SIGKILL", "rank 0 lost ")  # torchrun may have asked for its end first
    begins = tuple(f"error[E702] run: {text}" for text in told)
    (place,) = [i for i, line in enumerate(shown) if line.startswith(begins)]
    block = shown[place : place + 6]
    assert any(line.startswith("   while rank 0 ran op ") for line in block), block
    assert any(line.startswith("   rank 1  ") and "not responding (last heard" in line for line in block), block
    for machine in machines:
        machine.wait(60)
    assert [line for line in shown if "going on from" in line and "after step 4" in line], "\n".join(shown)
    last = len(metrics(out))
    assert [row["step"] for row in metrics(out)] == list(range(1, last + 1)) and last >= 11
    assert f"stopped after step {last} (asked by SIGTERM); resume with --resume {out / 'checkpoints'}" in shown
    assert (out / f"checkpoints/step-{last:08d}/.complete").exists()
    assert not [pid for pid in ranks if alive(pid)]


def test_torchruns_own_summary_has_the_message(tmp_path):
    path = tmp_path / "error.json"
    torchrun._tell_torchrun(ZbcError("E702", "run: rank 0 lost rank 1"), str(path))
    told = json.loads(path.read_text())["message"]
    assert told["message"] == told["extraInfo"]["py_callstack"] == "error[E702] run: rank 0 lost rank 1"
    torchrun._tell_torchrun(ZbcError("E702", "run: rank 0 lost rank 1"), str(tmp_path / "not" / "there"))


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")


@pytest.mark.long
@needs_full
def test_a_process_ends_as_it_is_to_where_what_it_said_cannot_be_written():
    code = "from zbc.training.train import end; print('said by a layer'); end(7)"
    late = {**os.environ, "PYTHONUNBUFFERED": ""}  # written when it is flushed
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, env=late, timeout=60).returncode == 7


def test_the_rank_that_hosts_the_store_stays_until_all_others_have_said_their_last_word(monkeypatch):
    store, left = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), threading.Event()

    def place(rank):
        return Place(rank, 3, "127.0.0.1", store.port, "zbc", hosts_store=rank == 0)

    def host():
        torchrun.part(place(0), 60.0)
        left.set()

    thread = threading.Thread(target=host)
    thread.start()
    torchrun.part(place(1), 60.0)
    assert not left.wait(0.3)
    torchrun.part(place(2), 60.0)
    thread.join(60)
    assert left.is_set()
    monkeypatch.setattr(torchrun, "_SAY_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as gone:  # nor does one wait for a store that does not answer
        torchrun.part(replace(place(1), port=gone.getsockname()[1]), 60.0)


@pytest.mark.parametrize(("reported", "code"), [(6, 6), (None, 7)])
def test_a_rank_that_failed_because_another_did_ends_with_the_exit_code_of_that_one(reported, code):
    store = dist.HashStore()
    assert Board(store, 1, 2).claim()

    def leave(code):
        raise SystemExit(code)

    place = SimpleNamespace(rank=0, board=lambda: Board(store, 0, 2))
    context = train.RankContext(place, RunOptions(Path()), torch.device("cpu"), print, pytest.fail, leave)
    watchdog = SimpleNamespace(await_report=lambda: reported)
    with pytest.raises(SystemExit) as left:
        train._give_up(ZbcError("E702", "run: rank 0 lost rank 1"), context, watchdog)
    assert left.value.code == code


def test_a_signal_that_killed_a_rank_elsewhere_is_in_the_headline():
    store, told = dist.HashStore(), []

    def report(failure):
        told.append(failure)
        raise SystemExit

    dog = Watchdog(lambda: Board(store, 0, 2), rank=0, ranks=2, limit=9.0, hung=report, orphaned=report)
    host = ["node-1", "node-2"].__getitem__
    dog.placed(host, Topology(2, host=host).name, report)
    dog.await_silence = lambda: [1]
    Board(store, 2, 2).tell_killed(1, "SIGKILL")
    place = SimpleNamespace(rank=0, ranks=2, board=lambda: Board(store, 0, 2))
    context = SimpleNamespace(place=place, report=report, leave=report)
    with pytest.raises(SystemExit):
        train._give_up(ZbcError("E702", "run: rank 0 on node-1 lost rank 1 on node-2"), context, dog)
    assert told[0].message == "run: rank 1 on node-2 was killed by SIGKILL" and "dmesg" in told[0].hint
    assert [*told[0].details] == ["rank 0 on node-1 lost rank 1 on node-2", "rank 1 on node-2  never heard of"]


@pytest.mark.long
@pytest.mark.parametrize("store_there", [False, True])
def test_a_run_that_is_asked_to_end_before_its_first_step_says_so_once(tmp_path, store_there):
    """One of two ranks, which waits for the other, or before that for the store of another process."""
    plan, port = write_plan(tmp_path, parallel={"pp": 2}), free_port()
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    place |= {"RANK": "0" if store_there else "1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "zbc", "run", str(plan)]
    with subprocess.Popen(command, env={**os.environ, **place}, stderr=subprocess.PIPE, text=True) as rank:
        until(lambda: catches(rank.pid, signal.SIGTERM))
        if store_there:
            board = Place(1, 2, "127.0.0.1", port, "zbc//1").board()
            until(lambda: 0 in board.beats())
        rank.terminate()
        _, said = rank.communicate(timeout=60)
    assert (rank.returncode, said.splitlines()[-1:]) == (130, [ASKED])


ASKED = "stopped before the first step (asked by SIGTERM); there is nothing to resume"


def catches(pid, number):
    mask = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)[1]
    return bool(int(mask, 16) >> (number - 1) & 1)


# ---- refused before it starts, in this process ---------------------------------------------------------------


@pytest.fixture
def as_rank(monkeypatch):
    def place(rank, world, **more):
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, **address, **more}.items():
            monkeypatch.setenv(name, str(value))

    monkeypatch.setattr(launch, "_MOMENT_S", 0.0)
    return place


def error_before(*args, **options):
    error = error_of(launch.run, RunOptions(*args, **options))
    assert error.exit_code == 6
    return error


def test_another_world_than_planned_is_refused_by_rank_0_and_the_others_leave_in_silence(tmp_path, as_rank):
    plan = write_plan(tmp_path)
    as_rank(0, 2)
    error = error_before(plan)
    assert (error.code, error.message) == ("E601", "run: plan wants 4 ranks, torchrun started 2 (WORLD_SIZE=2)")
    assert error.hint == f"run: torchrun --standalone --nproc-per-node 4 -m zbc run {plan}"
    as_rank(1, 2)
    with pytest.raises(SystemExit) as left:
        launch.run(RunOptions(plan))
    assert left.value.code == 6


def test_commands_in_hints_can_be_typed_whatever_a_plan_is_called(tmp_path):
    plan = write_plan(tmp_path, "a plan; rm")
    for error in (error_before(plan), error_before(plan, local=3)):
        for line in (*error.details, error.hint or ""):
            words = shlex.split(line.partition(": ")[2])
            assert not words or words[words.index("run", words.index("zbc")) + 1] == str(plan)


def test_local_inside_of_torchrun_is_refused(tmp_path, as_rank):
    as_rank(0, 4)
    assert error_before(write_plan(tmp_path), local=4).code == "E604"


@pytest.mark.parametrize("found", ["2.10.1+cu126", "1.13.0"])
def test_a_torch_that_is_too_old_is_refused(tmp_path, monkeypatch, found):
    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    error = error_before(tmp_path, local=1)
    assert error.code == "E602" and found in error.message and "2.11" in error.message


def test_ranks_that_share_a_device_are_refused_by_name():
    said = [f"GPU-{n} on {host}" for host in "ab" for n in range(2)]
    devices.check_apart(said, plain_name)
    with refused("E603", "rank 1, rank 4 have one device, GPU-1 on a"):
        devices.check_apart([*said, "GPU-1 on a"], plain_name)


def test_the_fullest_device_is_told_with_what_is_not_torch_s():
    line = devices.fullest([f"{10 * 2**30} {9 * 2**30}", f"{20 * 2**30} {18 * 2**30}"], plain_name)
    assert line.startswith("rank 1 has 20") and "torch 18" in line and line.endswith("programs 2 GiB")


def test_a_launcher_that_does_not_say_where_to_meet_is_refused(tmp_path, as_rank, monkeypatch):
    as_rank(0, 4)
    monkeypatch.delenv("MASTER_PORT")
    error = error_before(write_plan(tmp_path))
    assert error.code == "E604" and error.message == "run: RANK and WORLD_SIZE are set, MASTER_PORT not"


def test_a_store_that_cannot_be_hosted_is_an_error_in_words(tmp_path, as_rank):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        as_rank(0, 4, MASTER_PORT=taken.getsockname()[1])
        error = error_before(write_plan(tmp_path))
    assert error.code == "E609" and "cannot host the store" in error.message and error.details


def test_a_store_that_cannot_be_reached_is_an_error_in_words(monkeypatch):
    monkeypatch.setattr("zbc.training.launch.board._CONNECT_S", 0.5)
    with refused("E609", "cannot reach the store"):
        Place(1, 2, "127.0.0.1", free_port(), "zbc").connect()


HERE, OTHER_GPU, OTHER_HOST = ("", ""), ("GPU-0", "GPU-1"), ("here", "there")


class Said:
    """A board on which other ranks have posted the same as this one, except for given changes."""

    rank = 0

    def __init__(self, *changes: tuple[str, str]) -> None:
        self.changes, self.ranks = changes, 1 + len(changes)

    def meet(self, name: str, limit: timedelta, say: str, decide: Callable[[list[str]], str]) -> str:
        return decide([say, *(say.replace(*change) if change[0] else say for change in self.changes)])


@pytest.fixture
def gpus(monkeypatch):
    def there_are(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"))
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    return there_are


SHARED = [(2, [OTHER_GPU], False), (1, [HERE], True), (1, [OTHER_HOST], False), (1, [OTHER_HOST, OTHER_HOST], True)]
SHARED += [(2, [HERE], "E603")]  # though there are enough


@pytest.mark.parametrize(("count", "others", "shared"), SHARED)
def test_ranks_that_share_a_gpu_go_over_gloo_by_way_of_the_host(gpus, monkeypatch, count, others, shared):
    gpus(count)
    begun = []
    monkeypatch.setattr(reach.dist, "init_process_group", lambda backend, **how: begun.append(backend))
    monkeypatch.setattr(reach, "prefixed", lambda name, store: store)
    monkeypatch.setattr(
        reach, "Network", lambda manifest, device, limit: SimpleNamespace(rank=0, manifest=manifest, device=device)
    )
    device, manifest = torch.device("cuda", 0), SimpleNamespace(topology=SimpleNamespace(name=str))
    start = partial(reach.connected, manifest, device, Said(*others), lambda: None, timedelta(seconds=1))
    if shared == "E603":
        assert error_of(start).code == shared
        return
    transport, said = start()
    assert said is shared and begun == ["gloo" if shared else "nccl"]
    assert isinstance(transport, Staged) is shared
    if not shared:
        assert transport.device == device


def test_more_ranks_than_gpus_take_them_in_turn(gpus, as_rank, tmp_path):
    gpus(2)
    assert [devices.place(rank).index for rank in range(4)] == [0, 1, 0, 1]
    gpus(1)  # the only one that it is shown
    assert devices.place(3) == torch.device("cuda", 0)
    as_rank(3, 4, LOCAL_WORLD_SIZE=4)
    launch._check_cuda(RunOptions(tmp_path), read_manifest(write_plan(tmp_path, hardware={"device": "cuda"})))
