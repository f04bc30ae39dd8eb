"""A fake GPU for tests: a stream that runs its work when a test lets it, and events on it."""

from types import SimpleNamespace


class Stream:
    """Items in order: work that takes some ms, gates that a message opens, events."""

    def __init__(self, *, prompt=False):
        self.items, self.now, self.prompt, self.waited = [], 0.0, prompt, 0

    def launch(self, ms):
        self.items.append(ms)

    def wait_for(self, gate):
        """Later items wait until `gate()`."""
        self.items.append(gate)

    def record(self, event):
        event.turn += 1
        self.items.append((event, event.turn))
        if self.prompt:
            self.run()

    def run(self, most=10**9):
        """Runs up to `count` pieces of work, and other items before the next piece."""
        while self.items:
            item = self.items[0]
            if callable(item):
                if not item():
                    return
            elif isinstance(item, tuple):
                event, turn = item
                event.passed, event.at = turn, self.now
            elif most == 0:
                return
            else:
                self.now, most = self.now + item, most - 1
            self.items.pop(0)


class Event:
    def __init__(self):
        self.stream, self.turn, self.passed, self.at = Stream(), 0, 0, 0.0

    def record(self, stream):
        self.stream = stream
        stream.record(self)

    def query(self):
        return self.passed == self.turn  # as CUDA's: true of one that was never recorded

    def synchronize(self):
        self.stream.waited += 1
        self.stream.run()
        if not self.query():
            raise AssertionError("the host waits for what the device cannot do")

    def elapsed_time(self, other):
        assert self.query() and other.query(), "asked of events that have not passed"
        return other.at - self.at


def fake_torch(streams):
    """A fake of torch for a module that uses events of `streams`, by the number of the device.

    A wait for a whole device fails.
    """

    def synchronize(*_):
        raise AssertionError("waits for the whole device")

    current = {"current_stream": lambda device: streams[device.index], "set_device": lambda device: None}
    cuda = SimpleNamespace(Event=lambda enable_timing=False: Event(), synchronize=synchronize, **current)
    return SimpleNamespace(cuda=cuda)
