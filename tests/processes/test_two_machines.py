"""Ranks on several machines, started as in docs/runs.md: network namespaces, or two torchrun agents on one."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress

import pytest

from tests.limits import until
from tests.processes.plans import free_port, metrics, threads, write_plan
from tests.processes.two_machines import ROOT, Machine, machines, refusal
from tests.runtime.small_plans import reference
from zbc.plan.directory import StoredPlan
from zbc.training.launch.reach import Interface, bind_towards, towards

HERE = Machine("127.0.0.1", "lo")
PAGE = (ROOT / "docs" / "runs.md").read_text().partition("## Starting on several machines")[2]


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
    """The commands of the page that begin like this, for `ranks` ranks per machine; `node1` has to be filled in."""
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
    """Runs one command on each machine; asserts the losses of one process."""
    processes = [
        place.start(["bash", "-c", f"{command} -o {out}"], plan.parent)
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
    plan = write_plan(tmp_path, parallel={"pp": 2, "dp": 2, "order": [0, 2, 1, 3]}, hardware={"ranks_per_node": 2})
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


SCRIPTS = re.findall(r"^```\n(#!/bin/bash\n.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SLURM = {"SLURM_JOB_NODELIST": "some[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}


def submitted(script, folder, tasks):
    """The start parameters that a script's tasks print, with an srun that starts them one after the other."""
    loops = "for task in $(seq 0 $((2 * tasks - 1))); do SLURM_PROCID=$task SLURM_NODEID=$((task / tasks))"
    for name, text in {
        "scontrol": 'test "$1 $2 $3" = "show hostnames some[1-2]" && printf "some1\\nsome2\\n"',
        "srun": 'while [ "${1#--}" != "$1" ]; do echo "srun $1" >&2; shift; done\n'
        f'tasks={tasks}; {loops} SLURM_LOCALID=$((task % tasks)) "$@"; done',
        "torchrun": 'echo "torchrun $*"',
        "python": 'echo "$RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR $MASTER_PORT: $*"',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "job.sh").write_text(script)
    command = ["bash", "-c", f"PATH={folder}:$PATH exec bash job.sh"]
    with HERE.start(command, folder, **SLURM) as process:
        said, told = process.communicate(timeout=20)
    (cores,) = re.findall(r"^#SBATCH (--cpus-per-task=\d+)$", script, re.MULTILINE)
    assert f"srun {cores}\n" in told and all(line.startswith("srun --") for line in told.splitlines()), told
    return said.splitlines()


def test_the_slurm_script_starts_one_torchrun_per_node_with_its_number(tmp_path):
    expected = [command.replace("node1", "some1") for command in written("torchrun --nnodes 2 --node-rank")]
    assert submitted(SCRIPTS[0], tmp_path, 1) == expected, "as by hand"


def test_the_slurm_script_without_torchrun_says_to_each_task_which_rank_it_is(tmp_path):
    found = submitted(SCRIPTS[1], tmp_path, 4)
    assert found == [f"{r} of 8, {r % 4} of 4, some1 29500: -m zbc run plan" for r in range(8)] and len(SCRIPTS) == 2


def test_the_manifest_for_kubernetes_starts_what_is_started_by_hand_in_each_pod():
    (text,) = re.findall(r"^```\n(apiVersion.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    found = pytest.importorskip("yaml").safe_load(text)
    job = found["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]
    assert pod["parallelism"] == pod["completions"] == 2 and pod["completionMode"] == "Indexed"
    (container,) = pod["template"]["spec"]["containers"]
    first = f"{found['metadata']['name']}-{job['name']}-0-0.{found['metadata']['name']}"
    (line,) = container["args"]
    by_hand = written("torchrun --nnodes 2 --node-rank")[1].replace(
        "--node-rank 1", "--node-rank $JOB_COMPLETION_INDEX"
    )
    assert line.startswith("exec " + by_hand.replace("node1", first))


@pytest.mark.long
def test_a_machine_that_cannot_be_reached_is_named_with_its_interface(two, plan):
    """Without agents, as any launcher starts ranks; the second machine listens on an address that only it reaches."""
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
    assert "error[E609] run: the machines of this run cannot reach each other" in said
    assert f"rank 0 ({name}, {two[0].interface} {two[0].address}) cannot reach rank 1 ({name}, lo 127.0.0.1)" in said
    assert said.count("error[") == 1 and "Traceback" not in said


@pytest.mark.repeats
@pytest.mark.limit(240)
def test_a_run_outlives_an_outage_and_names_the_machine_that_is_gone_for_good(two, tmp_path):
    """Each machine has a name of its own; one end of the cable is down until it is reported, then permanently."""
    plan = write_plan(tmp_path, parallel={"pp": 2}, train={"steps": 10**6, "watchdog_s": 25.0}, log={"every": 1})
    out, port = tmp_path / "run", free_port()
    start = f"exec torchrun --nnodes 2 --nproc-per-node 1 --master-addr {two[0].address} --master-port {port}"
    processes = [
        place.start(
            ["unshare", "--uts", "bash", "-c", f"hostname n{r}; {start} --node-rank {r} -m zbc run plan -o {out}"],
            plan.parent,
        )
        for r, place in enumerate(two)
    ]
    with running(*processes):
        until(lambda: (out / "metrics.jsonl").exists() and len(metrics(out)) > 3)
        for state, wait in (("down", 13), ("up", 0)):
            subprocess.run([*two[1].enter, "ip", "link", "set", two[1].interface, state], check=True)
            time.sleep(wait)
        before = len(metrics(out))
        until(lambda: len(metrics(out)) > before + 3)
        time.sleep(5)  # for the first sign of life to be heard
        assert [process.poll() for process in processes] == [None, None]
        subprocess.run([*two[1].enter, "ip", "link", "set", two[1].interface, "down"], check=True)
        here, there = ("".join(process.communicate(timeout=160)) for process in processes)
        subprocess.run([*two[1].enter, "ip", "link", "set", two[1].interface, "up"], check=True)
    assert "nothing from n1 for 10 s\n" in here and "n1 is heard again, after " in here, here
    assert "this machine (n1) reaches nobody: nothing from the others for 10 s\n" in there, there
    assert "error[E701] run: no progress for 25 s" in here
    assert re.search(r"^   rank 1 on n1 .*not responding .*<- the rank that holds the others up$", here, re.MULTILINE)


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
