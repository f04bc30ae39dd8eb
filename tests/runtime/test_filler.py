"""User work while a rank waits."""

from types import SimpleNamespace

import pytest
import torch

from tests.runtime.small_plans import make_plan, make_program
from tests.threads import losses_of, norms_of, run_threads
from zbc.ir import Message
from zbc.runtime.features.filler import Filling

CPU = torch.device("cpu")
A, B = Message(0, 1, 0, 0, 0), Message(0, 1, 1, 0, 0)


class Clock:
    """A rank that waits for messages with known arrival times; a step of its task takes `takes` seconds."""

    def __init__(self, takes=1.0, seconds=None):
        self.time, self.takes, self.steps, self.comes = 0.0, takes, 0, {}
        self.seconds, self.rank = seconds, 0
        self.send = self.post = self.close = self.share = None

    def now(self):
        return self.time

    def ready(self, message):
        return self.time >= self.comes[message]

    def wait(self, message):
        self.time = max(self.time, self.comes[message])
        return message

    def step(self):
        self.steps += 1
        self.time += self.takes

    def finish_step(self, *, drain=True):
        pass


def filled(**how):
    clock = Clock(**how)
    return clock, Filling(clock, clock, CPU, print, clock.now)


def awaited(filling, clock, message, seconds):
    """The number of steps in a wait of given length, and the delay of its end."""
    before, clock.comes[message] = clock.steps, clock.time + seconds
    assert filling.wait(message) is message
    return clock.steps - before, clock.time - clock.comes[message]


def test_a_wait_is_filled_as_far_as_it_went_the_last_time():
    clock, filling = filled(seconds=1.0)
    assert awaited(filling, clock, A, 5.5) == (0, 0.0), "nobody knows yet how long it is"
    assert awaited(filling, clock, A, 5.5) == (5, 0.0)
    assert awaited(filling, clock, A, 9.0) == (5, 0.0), "longer than known"
    assert awaited(filling, clock, B, 9.0) == (0, 0.0), "another wait"
    assert awaited(filling, clock, A, 9.0) == (9, 0.0)
    assert filling.found == (19, 19.0, 38.0)


def test_waits_that_end_early_and_steps_that_take_longer_are_known_by_what_they_took():
    clock, filling = filled(seconds=1.0)
    awaited(filling, clock, A, 9.0)
    assert awaited(filling, clock, A, 2.5) == (3, 0.5)
    assert awaited(filling, clock, A, 2.5) == (2, 0.0)
    assert awaited(filling, clock, A, 2.5) == (2, 0.0)
    assert awaited(filling, clock, A, 0.0) == (0, 0.0), "it is there"
    clock, filling = filled(takes=2.0, seconds=0.1)
    awaited(filling, clock, A, 3.0)
    assert awaited(filling, clock, A, 3.0) == (1, 0.0), "the first showed that there is no time for a second"
    awaited(filling, clock, B, 1.0)
    assert awaited(filling, clock, B, 1.0) == (0, 0.0), "too long for this one"


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("x"), "which failed: ValueError: x"), (StopIteration, "all of")]
)
def test_what_a_task_raises_ends_it_alone(error, said):
    clock, told = Clock(seconds=1.0), []

    def step():
        raise error

    filling = Filling(clock, SimpleNamespace(step=step, seconds=1.0), CPU, told.append, clock.now)
    awaited(filling, clock, A, 3.0)
    assert awaited(filling, clock, A, 3.0) == (0, 0.0)
    assert filling.task is None and len(told) == 1 and said in told[0]
    awaited(filling, clock, A, 3.0)
    assert len(told) == 1


@pytest.mark.long("2")
@pytest.mark.parametrize("copies", [1, 2])
def test_training_is_the_same_with_a_filler(copies):
    """Messages, sums of gradients and the verdict of all ranks, over a hub; the task spends torch's random numbers."""
    plan = make_plan(make_program("zb-v", 2, 4, copies=copies), optimizer={"clip_grad_norm": 0.5})
    plain = run_threads(plan, 4)
    seen = []

    def fill(worker):
        task = SimpleNamespace(step=lambda: torch.rand(10).sum().item(), seconds=1e-6)
        worker.transport = Filling(worker.transport, task, CPU, seen.append)

    filled = run_threads(plan, 4, setup=fill)
    assert losses_of(filled) == losses_of(plain)
    assert norms_of(filled) == norms_of(plain)
    assert sum(worker.transport.found.steps for worker in filled) > 0 and not seen


def test_a_rank_that_fails_is_heard_while_others_fill():
    """`ready` is true if a wait would raise, so filling ends."""
    plan = make_plan(make_program("1f1b", 2, 4))

    def fill(worker):
        task = SimpleNamespace(step=lambda: None, seconds=1e-9)
        letters = {one for route in worker.routes.values() if (one := route.brought) is not None}
        worker.transport = Filling(worker.transport, task, CPU, print)
        worker.transport._known = dict.fromkeys([*range(9), *letters], 1e9)
        if worker.rank == 1:
            worker.optimizers[1].step = None

    with pytest.raises(TypeError):
        run_threads(plan, 2, setup=fill)
