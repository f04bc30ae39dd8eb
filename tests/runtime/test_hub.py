"""The in-process transport: it checks more than networks do, and turns every hang into an error."""

import threading
import weakref

import pytest
import torch

from tests.threads import side_by_side
from zbc.errors import ZbcError
from zbc.ir import Message
from zbc.runtime.transports.hub import Hub
from zbc.runtime.transports.transport import Then

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
    found = {}

    def sender(end):
        end.send(DOWN, torch.arange(3.0), 1)
        end.finish_step()

    def receiver(end):
        buffer = torch.zeros(3)
        end.post(DOWN, buffer, 0)
        assert buffer.isnan().all()  # whoever forgets to wait computes NaN
        assert end.wait(DOWN) is buffer
        found["buffer"] = buffer
        end.finish_step()

    assert together(2, sender, receiver) == {}
    assert found["buffer"].tolist() == [0.0, 1.0, 2.0]


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


def test_a_collective_holds_the_tensors_of_its_rank_as_long_as_a_network_would():
    """And nobody else's: a plan counts the row that a rank gathers until the weights are read."""
    hub = Hub(2)
    rows = [torch.ones(1), torch.ones(1)]
    kept = [weakref.ref(row.untyped_storage()) for row in rows]
    pending = [hub.end(rank).start_gather(rows.pop(), torch.empty(2, 1), (0, 1)) for rank in range(2)]
    assert all(one.ready() for one in pending) and all(ref() is not None for ref in kept)
    pending.pop()
    assert [ref() is None for ref in kept] == [True, False]


def test_messages_are_matched_by_name_not_by_order():
    second = DOWN._replace(mb=1)
    found = []

    def sender(end):
        end.send(second, torch.ones(1), 1)
        end.send(DOWN, torch.zeros(1), 1)
        end.finish_step()

    def receiver(end):
        end.post(DOWN, torch.empty(1), 0)
        end.post(second, torch.empty(1), 0)
        found.extend([end.wait(DOWN).item(), end.wait(second).item()])

    assert together(2, sender, receiver) == {}
    assert found == [0.0, 1.0]


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


def test_a_message_from_another_rank_than_planned_is_refused():
    errors = together(3, lambda end: None, receiving(), lambda end: end.send(DOWN, torch.zeros(1), 1))
    assert "came from rank 2, the plan says rank 0" in errors[1].message and errors[1].code == "E703"


def test_sending_posting_or_waiting_twice_is_refused():
    def sends(end):
        end.send(DOWN, torch.zeros(1), 1)
        end.send(DOWN, torch.zeros(1), 1)

    def posts(end):
        end.post(DOWN, torch.empty(1), 0)
        end.post(DOWN, torch.empty(1), 0)

    def waits(end):
        end.wait(DOWN)

    for part, text in ((sends, "sent twice"), (posts, "posted twice"), (waits, "not posted")):
        (error,) = together(2, part, lambda end: None).values()
        assert error.code == "E703" and text in error.message


def test_a_receive_nobody_used_is_named_at_the_end_of_the_step():
    def receiver(end):
        end.post(DOWN, torch.empty(1), 0)
        end.finish_step()

    (error,) = together(1, receiver).values()
    assert "RECV_F s1 m0" in error.message


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


def test_sums_of_different_shapes_are_refused():
    errors = together(2, *(lambda end: end.all_reduce(torch.zeros(1 + end.rank), (0, 1)),) * 2)
    assert any(error.code == "E703" and "different shapes" in error.message for error in errors.values())


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
    hub, both = Hub(2), torch.zeros(2, 2, 1)
    with torch.no_grad():
        mine = both.unbind()[1]
    ends = [hub.end(rank) for rank in range(2)]
    meetings = [ends[0].start_gather(torch.ones(1, requires_grad=True), mine, (0, 1))]
    meetings.append(ends[1].start_gather(torch.full((1,), 2.0), torch.zeros(2, 1), (0, 1)))
    for meeting in meetings:
        meeting.wait()
    assert both.flatten().tolist() == [0.0, 0.0, 1.0, 2.0]


def test_a_hub_sends_to_all_and_sums_to_one():
    found = {}

    def part(end):
        sent, summed = torch.full((2,), float(end.rank)), torch.full((2,), 1.0 + end.rank)
        one, two = end.start_broadcast(sent, 1, (0, 1, 2)), end.start_reduce(summed, 2, (0, 1, 2))
        one.wait(), two.wait()
        found[end.rank] = sent.tolist(), summed

    assert together(3, part, part, part) == {}
    assert [found[rank][0] for rank in range(3)] == [[1.0, 1.0]] * 3
    assert found[2][1].tolist() == [6.0, 6.0] and all(found[rank][1].isnan().all() for rank in (0, 1))


def test_what_follows_a_gather_is_summed_into_one():
    found = {}

    def part(end):
        parts, made = torch.zeros(3, 2), []

        def make():
            made.append(parts.sum(0) * (end.rank + 1.0))
            return made[0]

        end.start_gather(torch.full((2,), float(end.rank)), parts, (0, 1, 2), Then(make, 1)).wait()
        found[end.rank] = parts.tolist(), made[0].tolist()

    assert together(3, part, part, part) == {}
    assert all(parts == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]] for parts, _ in found.values())
    assert found[1][1] == [18.0, 18.0]


def test_ranks_that_ask_for_another_root_are_told():
    errors = together(2, *(lambda end: end.start_reduce(torch.ones(1), end.rank, (0, 1)).wait(),) * 2)
    assert any("of different shapes" in error.message for error in errors.values())
