"""A strict reader of Chrome traces: rejects violations of the format, and events that Perfetto silently misdraws."""

import json
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import pairwise

KNOWN = {
    "M": {"ph", "cat", "name", "pid", "tid", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"ph", "cat", "name", "id", "pid", "tid", "ts"},
    "f": {"ph", "bp", "cat", "name", "id", "pid", "tid", "ts"},
    "C": {"ph", "cat", "name", "pid", "tid", "ts", "args"},
}


@dataclass
class Trace:
    """Names of processes and tracks; slices per track as (start, end, name, args); flows; counters."""

    processes: dict[int, str] = field(default_factory=dict)
    tracks: dict[tuple[int, int], str] = field(default_factory=dict)
    slices: dict[tuple[int, int], list] = field(default_factory=lambda: defaultdict(list))
    flows: list[tuple[tuple, tuple]] = field(default_factory=list)  # ((pid, tid, slice), (pid, tid, slice))
    counters: dict[tuple[int, str], list] = field(default_factory=lambda: defaultdict(list))


def read(text: str) -> Trace:
    """Reads a trace; raises AssertionError if it breaks a rule."""
    document = json.loads(text, parse_float=Decimal)
    assert document.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    trace, starts, ends = Trace(), {}, {}
    for event in document["traceEvents"]:
        phase = event["ph"]
        assert event.keys() == KNOWN[phase], event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["pid"] > 0, "process 0 is the idle process"
        where = (event["pid"], event["tid"])
        if "ts" in event:
            assert event["ts"] >= 0
            assert event["ts"] * 1000 == int(event["ts"] * 1000), "finer than a nanosecond"
        if phase == "M":
            _name(trace, event, where)
        elif phase == "X":
            assert event["dur"] >= 0
            trace.slices[where].append((event["ts"], event["ts"] + event["dur"], event["name"], event["args"]))
        elif phase == "C":
            assert all(value >= 0 for value in event["args"].values())
            trace.counters[event["pid"], event["name"]].append((event["ts"], *event["args"].values()))
        else:
            side = starts if phase == "s" else ends
            assert event["id"] not in side, "two flows with one id"
            side[event["id"]] = (where, event["ts"])
            assert phase == "s" or event["bp"] == "e", "an arrow would bind to the next slice"
    _tracks(trace)
    assert starts.keys() == ends.keys(), "half an arrow"
    for number, (where, ts) in starts.items():
        there, then = ends[number]
        assert ts <= then, "an arrow back in time"
        trace.flows.append(((*where, _at(trace, where, ts)), (*there, _at(trace, there, then))))
    return trace


def _name(trace, event, where):
    if event["name"] == "process_name":
        assert event["pid"] not in trace.processes
        trace.processes[event["pid"]] = event["args"]["name"]
    elif event["name"] == "thread_name":
        assert where not in trace.tracks
        trace.tracks[where] = event["args"]["name"]
    else:
        assert event["name"] == "process_sort_index"


def _tracks(trace):
    """Every track has a name, and its slices follow one another."""
    assert trace.slices.keys() <= trace.tracks.keys()
    assert {pid for pid, _ in trace.tracks} == trace.processes.keys()
    for where, slices in trace.slices.items():
        slices.sort(key=lambda one: one[:2])
        for one, two in pairwise(slices):
            assert one[1] <= two[0], (trace.tracks[where], one, two)
    for points in trace.counters.values():
        assert all(one[0] < two[0] for one, two in pairwise(points))


def _at(trace, where, ts):
    """The slice of an arrow's end: the one that runs then, or one without length."""
    slices = trace.slices[where]
    k = bisect_right(slices, ts, key=lambda one: one[0]) - 1
    assert k >= 0, (trace.tracks[where], ts)
    start, end = slices[k][:2]
    assert start <= ts < end or start == ts == end, (trace.tracks[where], ts)
    return slices[k]
