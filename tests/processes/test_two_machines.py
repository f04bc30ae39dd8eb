"""Ranks spread over machines, started as docs/multinode.md says: network namespaces, or two torchrun agents on one."""

import json
import os
import re
import signal
import socket
from contextlib import contextmanager, suppress

import pytest

from tests.processes.plans import free_port, metrics, threads, write_plan
from tests.processes.two_machines import ROOT, Machine, machines, refusal
from tests.runtime.small_plans import reference
from zbc.plan.directory import StoredPlan
from zbc.training.launch.reach import Interface, bind_towards, interfaces, towards

HERE = Machine("127.0.0.1", "lo")
PAGE = (ROOT / "docs" / "multinode.md").read_text()


WHY = refusal()


@pytest.fixture(scope="module")
def two():
    if WHY is not None:
        pytest.skip(WHY)
    with machines() as made:
        yield made


@pytest.fixture(scope="module")
def places(request):
    """Two machines, or this one twice."""
    return (HERE, HERE) if WHY is not None else request.getfixturevalue("two")


@pytest.fixture
def plan(tmp_path):
    """Two ranks, which have to be on two machines: one each."""
    return write_plan(tmp_path, parallel={"pp": 2}, schedule={"kind": "zb-v"}, train={"watchdog_s": 30.0})


def written(start):
    return [line for line in PAGE.splitlines() if line.startswith(start)]


def documented(start, ranks=1):
    """The commands of the page that begin like this, for so many ranks a machine; `node1` is to be filled in."""
    return [line.replace("--nproc-per-node 4", f"--nproc-per-node {ranks}") for line in written(start)]


@contextmanager
def running(*processes):
    try:
        yield
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def trains(plan, out, places, commands):
    """Run one command on each machine; the losses are those of one process."""
    processes = [
        place.start(["bash", "-c", f"{command} --out {out}"], plan.parent)
        for place, command in zip(places, commands, strict=True)
    ]
    with running(*processes):
        said = [process.communicate(timeout=80) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    hosts = [name.rpartition(":")[0] for name in json.loads((out / "run.json").read_text())["processes"]]
    assert len(hosts) == StoredPlan.read(plan).manifest.topology.world
    with threads(1):
        expected = reference(StoredPlan.read(plan), 3).losses
    assert [row["loss"] for row in metrics(out)] == pytest.approx(expected, abs=1e-6)


@pytest.mark.repeats
def test_two_machines_with_fixed_numbers(places, tmp_path):
    """Two copies of a pipeline of two ranks; a machine has both copies of a rank, and messages go to the other."""
    hardware = {"ranks_per_node": 2}
    plan = write_plan(tmp_path, parallel={"pp": 2, "dp": 2, "node": [1, 2]}, hardware=hardware)
    commands = documented("torchrun --nnodes 2 --node-rank", ranks=2)
    assert len(commands) == 2
    port = str(free_port())
    filled = [command.replace("node1", places[0].address).replace("29500", port) for command in commands]
    trains(plan, tmp_path / "run", places, filled)


@pytest.mark.repeats
def test_two_agents_of_one_machine_that_find_each_other(plan, tmp_path):
    (command,) = documented("torchrun --nnodes 2 --nproc-per-node")
    filled = command.replace("node1:29500", f"127.0.0.1:{free_port()}")
    trains(plan, tmp_path / "run", (HERE, HERE), [filled, filled])


def test_the_slurm_script_starts_one_torchrun_per_node_with_its_number(tmp_path):
    """An srun that starts its command once per node, and a torchrun that says how it was called."""
    (script,) = re.findall(r"^```\n(#!/bin/bash\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for name, text in {
        "scontrol": 'test "$1 $2 $3" = "show hostnames some[1-2]" && printf "some1\\nsome2\\n"',
        "srun": 'for node in 0 1; do SLURM_NODEID=$node "$@"; done',
        "torchrun": 'echo "torchrun $*"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(script)
    command = ["bash", "-c", f"PATH={tmp_path}:$PATH exec bash job.sh"]
    slurm = {"SLURM_JOB_NODELIST": "some[1-2]", "SLURM_NNODES": "2"}
    with HERE.start(command, tmp_path, **slurm) as process:
        said, errors = process.communicate(timeout=20)
    expected = [command.replace("node1", "some1") for command in written("torchrun --nnodes 2 --node-rank")]
    assert (said.splitlines(), errors) == (expected, ""), "as by hand"


def test_a_machine_that_cannot_be_reached_is_named_with_its_interface(two, plan):
    """Without agents, as any launcher starts ranks; the second one listens where only itself can come."""
    one = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    one |= {"MASTER_ADDR": two[0].address, "MASTER_PORT": str(free_port())}
    command = ["python", "-m", "zbc", "run", "plan"]
    processes = [
        two[0].start(command, plan.parent, RANK="0", **one),
        two[1].start(command, plan.parent, RANK="1", GLOO_SOCKET_IFNAME="lo", **one),
    ]
    with running(*processes):
        said = "".join("".join(process.communicate(timeout=80)) for process in processes)
    assert [process.returncode for process in processes] == [6, 6], said
    name = socket.gethostname()
    assert "error[E615] run: the machines of this run cannot reach each other" in said
    assert f"rank 0 ({name}, {two[0].interface} {two[0].address}) cannot reach rank 1 ({name}, lo 127.0.0.1)" in said
    assert said.count("error[") == 1 and "Traceback" not in said


# ---- which interface -----------------------------------------------------------------------------------------


def test_every_interface_with_an_address_is_known():
    assert Interface("lo", "127.0.0.1") in interfaces() or not interfaces()


def test_the_interface_is_the_one_on_the_way(monkeypatch):
    known = [Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1"), Interface("ib0", "10.1.0.1")]
    ways = {"node1": "10.1.0.1", "192.0.2.1": "10.0.0.1"}
    monkeypatch.setattr("zbc.training.launch.reach.interfaces", lambda: known)
    monkeypatch.setattr("zbc.training.launch.reach._local_end", lambda host: ways.get(host, "127.0.0.1"))
    assert towards("node1") == known[2]
    assert towards("myself") == known[1], "the default route"
    ways.clear()
    assert towards("node1") is None, "two that could be meant"
    known.pop()
    assert towards("node1") == known[1], "the only one"


def test_nccl_is_told_the_interface_too_unless_the_user_has(monkeypatch):
    monkeypatch.setattr("zbc.training.launch.reach.towards", lambda host: Interface("eth0", "10.0.0.1"))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    bind_towards("node1")
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth0", "=eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib")
    bind_towards("node1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib"


def test_what_the_user_chose_stays(monkeypatch):
    monkeypatch.setattr("zbc.training.launch.reach.interfaces", lambda: [Interface("lo", "127.0.0.1")])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,eth0")
    assert bind_towards("node1") is None and os.environ["GLOO_SOCKET_IFNAME"] == "ib0,eth0"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert bind_towards("localhost") == Interface("lo", "127.0.0.1") and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
