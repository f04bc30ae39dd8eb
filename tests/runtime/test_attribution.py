"""Real runs with slow ranks: the report of the recording names them.

Layers sleep, so that four ranks as threads keep the times of four machines; slow parts are slow by far.
tests/compiler/test_recorded.py shows with exact times that no other rank is named.
"""

import time

import pytest

from tests.jobs import toml_value
from tests.runtime.test_tracing import traced
from zbc.compiler.compile import compile_job
from zbc.compiler.recorded import report
from zbc.compiler.shapes import load_job
from zbc.plan.directory import StoredPlan

MS = 4.0
JOB = """
[model]
family = "tests.runtime.sleepers:layers"
layers = 4
loss = "mse"
args = {args}
[parallel]
pp = 4
[schedule]
kind = "1f1b"
microbatches = 4
[costs]
per = "stage"
f = 4
b = 2
w = 2
comm = 0.2
[data]
kind = "tests.runtime.sleepers:Points"
[train]
steps = 5
"""


def reported(tmp_path, ms, odd=None, change=lambda worker: None):
    """Records three steps of 1F1B on four ranks whose layers take `ms`; `odd` is a forward that takes longer."""
    args = {"ms": ms, **({} if odd is None else {"odd": odd})}
    (tmp_path / "job.toml").write_text(JOB.replace("{args}", toml_value(args)))
    compile_job(load_job(tmp_path / "job.toml")).write(tmp_path / "source")
    found = traced(tmp_path, StoredPlan.read(tmp_path / "source"), {1, 2, 3}, 5, change)[1]
    return report.build(found, again=False)


class Late:
    """A transport whose messages from one rank come late."""

    def __init__(self, inner, sender, seconds):
        self._inner, self._sender, self._seconds, self._from = inner, sender, seconds, {}

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def post(self, message, buffer, peer):
        self._from[message] = peer
        self._inner.post(message, buffer, peer)

    def wait(self, message):
        tensor = self._inner.wait(message)
        if self._from.pop(message) == self._sender:
            time.sleep(self._seconds)
        return tensor


def test_a_rank_that_is_slow_is_named(tmp_path):
    for _ in range(3):  # a machine that others use may hold up an op of another rank for as long as that
        found = reported(tmp_path, [MS, MS, 5 * MS, MS])
        if {one.rank for one in found.ops[:2]} == {2}:
            break
    assert found.slow_ranks[0].rank == 2
    assert {one.rank for one in found.ops[:2]} == {2}
    for rank, sender in ((0, 1), (1, 2), (3, 2)):
        senders = found.ranks[rank].measured.senders
        assert max(senders, key=senders.get) == sender
    assert found.ranks[2].measured.message < 0.5 * found.ranks[1].measured.message


def test_a_link_that_is_slow_is_named(tmp_path):
    def change(worker):
        if worker.rank == 2:
            worker.transport = Late(worker.transport, 1, 0.03)

    found = reported(tmp_path, [MS] * 4, change=change)
    assert (found.slow_links[0].sender, found.slow_links[0].receiver) == (1, 2)


@pytest.mark.repeats
def test_one_op_that_is_slow_is_named(tmp_path):
    """The tenth forward on rank 1 is the second of the third step.

    Ops are long enough that noise of a busy machine on other ranks is no outlier.
    """
    first = reported(tmp_path, [6 * MS] * 4, odd={"layer": 1, "at": 10, "ms": 500.0}).outliers[0]
    assert (str(first.op), first.rank, first.step) == ("F s1 m1", 1, 3)
