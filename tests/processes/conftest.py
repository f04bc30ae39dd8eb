"""No test here may hang: every test has a time limit, every process of the pool answers in time or is killed."""

import multiprocessing
import os
from datetime import timedelta

import pytest

from tests.limits import at_most
from tests.processes.leftovers import alive, forked, ports
from tests.processes.plans import processes, threads
from zbc.runtime.transports.network import bind_loopback
from zbc.training.launch.forking import fork_server

LIMIT_S = 90


@pytest.fixture(autouse=True)
def limit(request):
    """Raises in a test that takes too long; ends the process if that does not help."""
    marker = request.node.get_closest_marker("limit")
    seconds = LIMIT_S if marker is None else marker.args[0]

    with at_most(seconds):
        yield


@pytest.fixture
def one_thread_per_kernel():
    """One thread per kernel, as in the ranks of the pool."""
    with threads(1):
        yield


@pytest.fixture
def out(tmp_path):
    """The run directory; at the end of the test no rank of the run and no open port may be left."""
    before, listening = forked(), ports()
    folder = tmp_path / "run"
    yield folder
    if (folder / "run.json").exists():
        assert not [pid for pid in processes(folder) if alive(pid)]
    assert forked() <= before
    assert ports() <= listening


class Pool:
    """Processes in one gloo world: `run(function, *args)` calls `function(rank, *args)` on each; returns results by
    rank."""

    def __init__(self, ranks: int) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            mine, theirs = multiprocessing.Pipe()
            process = fork_server().Process(target=_serve, args=(rank, ranks, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, function, *args):
        for pipe in self._pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(60):
                self.close()
                raise TimeoutError(f"rank {rank} of the pool does not answer")
            results.append(pipe.recv())
        for fine, result in results:
            if not fine:
                raise result
        return [result for _, result in results]

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()


def _serve(rank, ranks, port, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    bind_loopback()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((True, function(rank, *args)))
        except Exception as error:
            pipe.send((False, error))


def ranks(count):
    @pytest.fixture(scope="session")
    def made():
        made = Pool(count)
        yield made
        made.close()

    return made


pool, pair = ranks(4), ranks(2)
