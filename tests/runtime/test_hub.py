"""The in-process transport: it checks more than networks do, and turns every hang into an error."""

import threading
import weakref

import pytest
import torch

from tests.threads import side_by_side
from zbc.errors import ZbcError
from zbc.ir import Message
from zbc.runtime.transports.hub import Hub

DOWN = Message(0, 1, 0, 0, 0)  # output of stage 0, microbatch 0
UP = Message(1, 0, 0, 0, 0)


def together(ranks, *parts):
    """Runs one function per rank, each with its transport; returns the exception of each, by rank."""
    hub = Hub(ranks)
    errors = {}

    def run(rank):
        end = hub.end(rank)
        try:
            parts[rank](end)
        except ZbcError as error:
            errors[rank] = error
            hub.poison(rank, error.message)
        finally:
            end.close()

    side_by_side(len(parts), run)
    return errors


def receiving(message=DOWN, peer=0, buffer=None):
    """A rank that waits for a message."""

    def run(end):
        end.post(message, torch.empty(1) if buffer is None else buffer, peer)
        end.wait(message)

    return run


def test_a_message_arrives_in_the_posted_buffer_and_only_when_waited_for():
    hub, buffer = Hub(2), torch.zeros(3)
    sender, receiver = hub.end(0), hub.end(1)
    receiver.post(DOWN, buffer, 0)
    sender.send(DOWN, torch.arange(3.0), 1)
    assert buffer.isnan().all()  # whoever forgets to wait computes NaN
    assert receiver.wait(DOWN) is buffer and buffer.tolist() == [0.0, 1.0, 2.0]
    sender.finish_step(), receiver.finish_step()


@pytest.mark.parametrize("post_first", [True, False])
def test_a_prompt_hub_delivers_before_the_wait_and_rids_the_sender_of_its_tensor(post_first):
    hub = Hub(2, prompt=True)
    sender, receiver, buffer = hub.end(0), hub.end(1), torch.zeros(3)
    tensor = torch.arange(3.0)
    kept = weakref.ref(tensor.untyped_storage())
    if post_first:
        receiver.post(DOWN, buffer, 0)
    sender.send(DOWN, tensor, 1)
    if not post_first:
        receiver.post(DOWN, buffer, 0)
    del tensor
    assert buffer.tolist() == [0.0, 1.0, 2.0] and kept() is None
    assert receiver.wait(DOWN) is buffer and buffer.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("sent", "wanted", "text"),
    [
        (torch.zeros(8), torch.zeros(16), "float32 [8] from rank 0, its buffer is float32 [16]"),
        (torch.zeros(8), torch.zeros(8, dtype=torch.float64), "float32 [8] from rank 0, its buffer is float64 [8]"),
        (torch.zeros(2, 4), torch.zeros(8), "float32 [2, 4] from rank 0, its buffer is float32 [8]"),
    ],
)
def test_another_shape_or_dtype_than_the_buffer_is_refused(sent, wanted, text):
    errors = together(2, lambda end: end.send(DOWN, sent, 1), receiving(buffer=wanted))
    assert errors[1].code == "E505" and text in errors[1].message and "RECV_F s1 m0" in errors[1].message


def nothing(end):
    pass


WRONG = {
    "sent twice": (lambda end: [end.send(DOWN, torch.zeros(1), 1) for _ in range(2)], nothing),
    "posted twice": (lambda end: [end.post(DOWN, torch.empty(1), 0) for _ in range(2)], nothing),
    "not posted": (lambda end: end.wait(DOWN), nothing),
    "RECV_F s1 m0": (lambda end: (end.post(DOWN, torch.empty(1), 0), end.finish_step()),),
    "came from rank 2, the plan says rank 0": (nothing, receiving(), lambda end: end.send(DOWN, torch.zeros(1), 1)),
    "different shapes": (lambda end: end.all_reduce(torch.zeros(1 + end.rank), (0, 1)),) * 2,
    "of different shapes": (lambda end: end.start_reduce(torch.ones(1), end.rank, (0, 1)).wait(),) * 2,
}


@pytest.mark.parametrize("said", WRONG)
def test_calls_that_a_network_would_not_notice_are_refused(said):
    """The last one asks for another root on each rank."""
    errors = together(len(WRONG[said]), *WRONG[said])
    assert any(error.code == "E703" and said in error.message for error in errors.values()), errors


def test_waits_that_cannot_end_are_told_with_who_waits_for_what():
    errors = together(2, receiving(UP, 1), receiving())
    first = next(error for error in errors.values() if error.code == "E703")
    assert first.details == ("rank 0 waits for RECV_B s0 m0 from rank 1", "rank 1 waits for RECV_F s1 m0 from rank 0")
    assert {error.code for error in errors.values()} == {"E702", "E703"}
    errors = together(2, lambda end: None, receiving())
    assert "rank 1 waits for RECV_F s1 m0 from rank 0" in errors[1].message
    errors = together(2, lambda end: end.all_reduce(torch.zeros(1), (0, 1)), lambda end: None)
    assert "a sum over ranks 0, 1" in errors[0].message


def test_sums_are_the_same_on_every_rank_and_in_the_order_of_ranks():
    """1e8 + 1 - 1e8 is 0 in float32 in rank order, 1 in another."""
    values, found = [1e8, 1.0, -1e8], {}

    def part(end):
        tensor = torch.tensor([values[end.rank]])
        end.all_reduce(tensor, (0, 1, 2))
        pair = torch.tensor([float(end.rank)])
        if end.rank:
            end.all_reduce(pair, (1, 2))
        found[end.rank] = tensor.item(), pair.item()

    assert together(3, part, part, part) == {}
    assert found == {0: (0.0, 0.0), 1: (0.0, 3.0), 2: (0.0, 3.0)}


def test_poison_reaches_ranks_that_wait_and_ranks_that_call_later():
    reached = threading.Event()

    def waits(end):
        end.post(DOWN, torch.empty(1), 1)
        reached.set()
        end.wait(DOWN)

    def fails(end):
        reached.wait()
        raise ZbcError("E999", "boom")

    errors = together(2, waits, fails)
    assert errors[0].code == "E702" and "rank 1 failed: boom" in errors[0].message
    hub = Hub(2)
    hub.poison(1, "boom")
    with pytest.raises(ZbcError, match="rank 1 failed: boom"):
        hub.end(0).send(DOWN, torch.zeros(1), 1)


def test_whoever_comes_last_writes_into_views_that_another_rank_made_without_gradients():
    """Torch refuses that where gradients are recorded."""
    hub = Hub(2)
    with torch.no_grad():
        mine = torch.zeros(2, 2, 1).unbind()[1]
    meeting = hub.end(0).start_gather(torch.ones(1, requires_grad=True), mine, (0, 1))
    hub.end(1).start_gather(torch.full((1,), 2.0), torch.zeros(2, 1), (0, 1))
    meeting.wait()
    assert mine.flatten().tolist() == [1.0, 2.0]


def test_a_collective_holds_the_tensors_of_its_rank_as_long_as_a_network_would_and_nobody_elses():
    """A plan counts the row that a rank gathers until the weights are read."""
    hub, rows = Hub(2), [torch.ones(1), torch.ones(1)]
    kept = [weakref.ref(row.untyped_storage()) for row in rows]
    pending = [hub.end(rank).start_gather(rows.pop(), torch.empty(2, 1), (0, 1)) for rank in range(2)]
    assert all(one.ready() for one in pending) and all(ref() is not None for ref in kept)
    pending.pop()
    assert [ref() is None for ref in kept] == [True, False]
