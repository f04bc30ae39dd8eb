"""Plants old bugs again, one at a time, and records which tier of tests catches each: `make test`, or only `--all`.

    python bench/planted.py [-o bench/results/DATE-planted.txt] [--only WORD]

A bug is a line of zbc made wrong in a copy of the tree. `quick` runs the tests it concerns as `make test` does; if they
pass, `all` runs them with the tests that only repeat. A bug whose text is not found is stale: the code has changed, and
the bug has to be written anew. Exits with 1 if one is stale, or escapes only the quick tier.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("zbc", "tests", "bench", "plans", "docs", "pyproject.toml", "constraints.txt", "Makefile")
COPIED += ("README.md", "CONTRIBUTING.md")
LIMIT_S = 1200


@dataclass(frozen=True)
class Bug:
    what: str
    file: str
    old: str  # occurs in the file once
    new: str
    tests: tuple[str, ...]


RUNTIME = "tests/runtime/"
BUGS = (
    # ---- planner
    Bug(
        "the order of ranks is read as its inverse",
        "zbc/topology.py",
        "self.order[seat] if self.order else seat",
        "self.order.index(seat) if self.order else seat",
        ("tests/compiler/test_seating.py",),
    ),
    Bug(
        "of all pp and dp the slowest are taken",
        "zbc/compiler/shapes.py",
        "best = min(fits, key=",
        "best = max(fits, key=",
        ("tests/cli/test_world.py",),
    ),
    Bug(
        "a filler does not look at how long the wait was",
        "zbc/runtime/features/filler.py",
        "at - began + self._longest() <= known and not ready()",
        "not ready()",
        (RUNTIME + "test_filler.py",),
    ),
    Bug(
        "a replica warms up with one forward too few",
        "zbc/compiler/schedules/replicated.py",
        "warmup = -(-sum(replicas[s + 1 :]) // count)",
        "warmup = sum(replicas[s + 1 :]) // count - 1",
        ("tests/compiler/test_replicas.py",),
    ),
    # ---- runtime
    Bug(
        "norms that ranks hold whole learn from their own heads or tokens",
        "zbc/runtime/features/tensor_parallel.py",
        "        for stage in self.rest:\n            if stage in stages:\n",
        "        for stage in ():\n            if stage in stages:\n",
        (RUNTIME + "test_tensor_parallel.py",),
    ),
    Bug(
        "a shared sequence has the positions of its first tokens on every rank",
        "zbc/training/models/gpt.py",
        "first_row() + self.place * x.shape[1]",
        "first_row()",
        (RUNTIME + "test_composed.py",),
    ),
    Bug(
        "NORM of the second copy comes from a rank of the first",
        "zbc/runtime/features/ahead.py",
        "return worker.seat(part) if",
        "return worker.topology.rank(0, part) if",
        (RUNTIME + "test_copies.py",),
    ),
    Bug(
        "REDO does not wait for the messages still on their way",
        "zbc/runtime/features/ahead.py",
        "    for message in ahead.outstanding(worker):\n        worker.wait(message)\n",
        "",
        (RUNTIME + "test_ahead.py",),
    ),
    Bug(
        "a forward that runs again counts twice in running statistics",
        "zbc/runtime/features/ahead.py",
        "    put_back(ahead.buffers, ahead.found)\n",
        "",
        (RUNTIME + "test_ahead.py", RUNTIME + "test_modules.py"),
    ),
    Bug(
        "a step that is made again is made without its clip",
        "zbc/runtime/features/ahead.py",
        "            optimizer.commit(scale)",
        "            optimizer.commit(None)",
        (RUNTIME + "test_ahead.py",),
    ),
    Bug(
        "a tentative step loses the optimizer's state",
        "zbc/runtime/core/optimizer.py",
        "                    if state is not None:\n                        optimizer.state[master] = state\n",
        "",
        (RUNTIME + "test_ahead.py",),
    ),
    Bug(
        "a gradient below the limit of the clip is scaled up",
        "zbc/runtime/core/progress.py",
        "min(1.0, largest / (self.grad_norm + 1e-6))",
        "largest / (self.grad_norm + 1e-6)",
        (RUNTIME + "test_execute.py", RUNTIME + "test_nonfinite.py"),
    ),
    Bug(
        "a step with gradients that are not finite is made",
        "zbc/runtime/core/ops.py",
        "    if not verdict.skipped:\n        set_rate",
        "    if True:\n        set_rate",
        (RUNTIME + "test_ahead.py",),
    ),
    Bug(
        "the gradient of a microbatch counts as if there were one copy",
        "zbc/runtime/core/state.py",
        "self.ending.every or layout.microbatches // layout.apart",
        "self.ending.every or self.plan.manifest.microbatches",
        (RUNTIME + "test_copies.py",),
    ),
    Bug(
        "all copies read the data of the first",
        "zbc/runtime/core/state.py",
        "return self.phase_run.first + mb % self.phase_run.count",
        "return mb % self.phase_run.count",
        (RUNTIME + "test_copies.py",),
    ),
    Bug(
        "a weight that two stages share counts twice in the norm",
        "zbc/runtime/features/ties.py",
        "if name not in self.homes or self.homes[name][0] in own}",
        "if name in found}",
        (RUNTIME + "test_copies.py",),
    ),
    Bug(
        "both pipes answer for a stage in the norm",
        "zbc/runtime/core/optimizer.py",
        "or (alone and (optimizer.apart or first)):",
        "or (optimizer.apart or first):",
        (RUNTIME + "test_copies.py", RUNTIME + "test_gradients.py"),
    ),
    Bug(
        "a parameter without a gradient on any copy gets zeros",
        "zbc/runtime/core/bucket.py",
        "parameter.grad = part.view(parameter.shape) if there else None",
        "parameter.grad = part.view(parameter.shape)",
        (RUNTIME + "test_copies.py",),
    ),
    Bug(
        "the chunks of a dealt parameter are all put in the first place",
        "zbc/runtime/features/shards/sharded.py",
        "starts[piece.name] + piece.start // dealing.CHUNK",
        "starts[piece.name]",
        (RUNTIME + "test_sharded.py", RUNTIME + "test_copies.py"),
    ),
    Bug(
        "F does not wait for the weights that are on their way",
        "zbc/runtime/features/shards/gathers.py",
        "            self.finish(worker, self.stages[owner])\n",
        "            pass\n",
        (RUNTIME + "test_copies.py", RUNTIME + "test_freed_weights.py"),
    ),
    Bug(
        "the last part of gradients that are shared out takes the place of those before",
        "zbc/runtime/features/shards/sharded.py",
        "(before[0].add_(mine), before[1] or every)",
        "(mine, every)",
        (RUNTIME + "test_composed.py",),
    ),
    Bug(
        "weights are taken before they are published",
        "zbc/runtime/features/shards/windows.py",
        "            self._wait(_WEIGHTS, step)\n",
        "",
        (RUNTIME + "test_windows.py",),
    ),
    Bug(
        "a second sum of a stage waits for the first, which no row says",
        "zbc/runtime/features/shards/sharded.py",
        "        while self._sums and self._sums[0][0].ready():",
        "        while self._sums:",
        (RUNTIME + "test_waits.py",),
    ),
    Bug(
        "experts are summed over replicas that have others",
        "zbc/plan/directory.py",
        "return run.alike(of, rank) if owner <= EXPERTS else run.ranks(of, at)",
        "return run.ranks(of, at)",
        (RUNTIME + "test_checkpoints.py",),
    ),
    Bug(
        "every replica answers for its experts in the norm",
        "zbc/runtime/core/optimizer.py",
        "first = run.first(worker.rank, worker.layout.apart) if owner <= EXPERTS",
        "first = True if owner <= EXPERTS",
        (RUNTIME + "test_expert_parallel.py",),
    ),
    Bug(
        "gradients of rows are swapped as the rows were",
        "zbc/runtime/features/tensor_parallel.py",
        "partial(_swap, into, out)",
        "partial(_swap, out, into)",
        (RUNTIME + "test_expert_parallel.py",),
    ),
    Bug(
        "weights that stages share are averaged with each stage",
        "zbc/runtime/features/averaging.py",
        "    owned |= {TIED: shared} if shared else {}",
        "    owned |= {TIED: {}} if shared else {}",
        (RUNTIME + "test_averaging.py",),
    ),
    Bug(
        "rows are published before the step",
        "zbc/runtime/core/ops.py",
        "    worker.before_update()\n",
        "    worker.optimizers[op.stage].stepped(worker.transport, skipped=False)\n",
        (RUNTIME + "test_windows.py",),
    ),
    Bug(
        "slots are added before the gradients of all are in them",
        "zbc/runtime/features/shards/windows.py",
        "        self._wait(_GRADIENTS, step)\n",
        "",
        (RUNTIME + "test_windows.py",),
    ),
    Bug(
        "slots are added in another order than that of the ranks",
        "zbc/runtime/features/shards/windows.py",
        "        for other in slots[1:]:\n            slots[0].add_(other)",
        "        for k in range(1, len(slots)):\n            slots[0].add_(slots[-k])",
        (RUNTIME + "test_windows.py",),
    ),
    Bug(
        "later gradients of a run take the place of those before",
        "zbc/runtime/features/shards/sharded.py",
        "self._move(window.slots, add=before is not None)",
        "self._move(window.slots)",
        (RUNTIME + "test_windows.py",),
    ),
    Bug(
        "samples of a row see those before them",
        "zbc/runtime/features/slices/slicing.py",
        "each_alone(mix, q, k, v, rows)",
        "mix(q, k, v)",
        (RUNTIME + "test_unequal.py",),
    ),
    Bug(
        "positions go on from sample to sample of a row",
        "zbc/runtime/features/packing.py",
        "torch.cat([torch.arange(n) for n in (*lengths, length - sum(lengths))])",
        "torch.arange(length)",
        (RUNTIME + "test_unequal.py",),
    ),
    Bug(
        "microbatches of unequal work count alike",
        "zbc/training/data/unequal.py",
        "return Share(sum(filled) / sum(lengths), length, samples)",
        "return Share(1 / sum(map(len, self.step(step).replicas)), length, samples)",
        (RUNTIME + "test_unequal.py",),
    ),
    Bug(
        "a send that failed on NCCL counts as delivered",
        "zbc/runtime/transports/background.py",
        "            _check(under_way.popleft())",
        "            under_way.popleft()",
        (RUNTIME + "test_sends.py",),
    ),
    Bug(
        "the host of a GPU runs as far ahead as its driver lets it",
        "zbc/runtime/cuda.py",
        "while len(self._marks) >= LEAD:",
        "while len(self._marks) >= 1000:",
        (RUNTIME + "test_clock.py",),
    ),
    Bug(
        "a sum of gradients is waited for to look at its flags",
        "zbc/runtime/core/bucket.py",
        "[1.0] * len(parts) if every else present.tolist()",
        "present.tolist()",
        (RUNTIME + "test_one_read.py",),
    ),
    Bug(
        "W runs what B left in the reverse order",
        "zbc/runtime/core/slot.py",
        "work = self._work[::-1]",
        "work = self._work[:]",
        (RUNTIME + "test_split.py", RUNTIME + "test_gradients.py"),
    ),
    Bug(
        "a checkpoint forgets the optimizer's count of steps",
        "zbc/training/checkpoint/state.py",
        "        if name.startswith(OPTIM):\n",
        '        if name.startswith(OPTIM) and not name.endswith(".step"):\n',
        (RUNTIME + "test_checkpoints.py",),
    ),
    Bug(
        "the warm-up of the learning rate ends one step early",
        "zbc/job/learning_rate.py",
        "return lr * done / schedule.warmup_steps",
        "return lr * (done + 1) / schedule.warmup_steps",
        ("tests/test_learning_rate.py",),
    ),
    # ---- processes
    Bug(
        "a Ctrl-C that the launcher forwards counts as a second one",
        "zbc/host/signals.py",
        "elif now - first <= self._apart or expected:",
        "elif now - first <= self._apart:",
        ("tests/processes/test_signals.py",),
    ),
    Bug(
        "a run that was asked to stop is started again",
        "zbc/training/launch/local.py",
        "if parent.asked is not None or not worth_a_restart(failure):",
        "if not worth_a_restart(failure):",
        ("tests/processes/test_restarts.py",),
    ),
    Bug(
        "a run that was interrupted ends like one that was not",
        "zbc/training/launch/launch.py",
        "if ended.stopped is not None:",
        "if False:",
        ("tests/processes/test_local.py",),
    ),
    Bug(
        "messages of one step share their tags",
        "zbc/runtime/transports/network.py",
        "self._edges[carried.edge]) + carried.forward",
        "self._edges[carried.edge])",
        ("tests/processes/test_gloo.py",),
    ),
    # ---- schedules and passes
    Bug(
        "1F1B warms up with one forward too many",
        "zbc/compiler/schedules/lagged.py",
        'lagged("1f1b", request, warmup=lambda r: request.p - 1 - r)',
        'lagged("1f1b", request, warmup=lambda r: request.p - r)',
        ("tests/compiler/test_schedules.py",),
    ),
    Bug(
        "ZB-H1 lets W lag one microbatch too far",
        "zbc/compiler/schedules/lagged.py",
        "warmup=lambda r: request.p - 1 - r, lag=lambda r: r)",
        "warmup=lambda r: request.p - 1 - r, lag=lambda r: r + 1)",
        ("tests/compiler/test_schedules.py",),
    ),
    Bug(
        "the rounds of interleaved 1F1B warm up one forward short",
        "zbc/compiler/schedules/looped.py",
        "+ (v - 1) * max(sizes) + k - 1 + early, len(forwards))",
        "+ (v - 1) * max(sizes) + k - 2 + early, len(forwards))",
        ("tests/compiler/test_schedules.py", "tests/check/test_deadlock.py"),
    ),
    Bug(
        "DualPipe puts off the newest W instead of the oldest",
        "zbc/compiler/schedules/phases.py",
        "next(op for op in due if",
        "next(op for op in reversed(due) if",
        ("tests/compiler/test_schedules.py",),
    ),
    Bug(
        "receives are posted in the order of use, not of their channel",
        "zbc/compiler/passes/insert_comm.py",
        "step = min(step, inside.get(post, post))",
        "step = inside.get(post, post)",
        ("tests/compiler/test_passes.py", "tests/check/test_complete.py"),
    ),
    Bug(
        "a B is fused with the W of another microbatch",
        "zbc/compiler/passes/fuse_backward.py",
        "fused[-1][1:] == op[1:]",
        "fused[-1][1] == op[1]",
        ("tests/compiler/test_passes.py",),
    ),
    # ---- freezing
    Bug(
        "the gradient of a layer is the mean over all microbatches, frozen ones included",
        "zbc/runtime/features/freezing.py",
        "grad.mul_(m / count)",
        "pass",
        (f"{RUNTIME}test_freezing.py",),
    ),
    Bug(
        "the last layer of a stage never rests",
        "zbc/runtime/features/freezing.py",
        "ring[(start + turn) % len(ring)]",
        "ring[(start + turn) % max(1, len(ring) - 1)]",
        (f"{RUNTIME}test_freezing.py",),
    ),
    Bug(
        "every step begins with the same layer",
        "zbc/runtime/features/freezing.py",
        "self._first + (step - self._after) * self._before[-1]",
        "self._first",
        (f"{RUNTIME}test_freezing.py",),
    ),
    Bug(
        "recompute runs frozen layers as if they trained",
        "zbc/runtime/core/stage.py",
        "self.resting(asleep & {index}) if asleep else nullcontext()",
        "nullcontext()",
        (f"{RUNTIME}test_freezing.py",),
    ),
    Bug(
        "a frozen layer of a user trains",
        "zbc/runtime/core/slot.py",
        "frozen = slot is not None and bool(slot.frozen) and id(parameter) in slot.frozen",
        "frozen = False",
        (f"{RUNTIME}test_freezing.py",),
    ),
    Bug(
        "stages are frozen by more than most",
        "zbc/compiler/passes/freeze_shares.py",
        "cap.SetUb(self.most * counts[stage])",
        "cap.SetUb(counts[stage])",
        ("tests/compiler/test_freeze.py",),
    ),
    Bug(
        "what is rounded off is lost",
        "zbc/compiler/passes/freeze.py",
        "due[op.stage] = asked - layers",
        "due[op.stage] = 0.0",
        ("tests/compiler/test_freeze.py",),
    ),
    Bug(
        "ops with frozen layers count as samples of whole ones",
        "zbc/compiler/recorded/times.py",
        "if op.share != WHOLE:",
        "if False:",
        ("tests/compiler/test_freeze.py",),
    ),
    Bug(
        "a bound counts all of the weight gradients",
        "zbc/compiler/freezing.py",
        "m * (f + bw - costs.left_out(Op(whole, s), job.freeze.share))",
        "m * (f + bw)",
        ("tests/search/test_bounds.py",),
    ),
    # ---- cost, simulation, search
    Bug(
        "a transfer is charged twice",
        "zbc/compiler/sim/simulate.py",
        "ms = hop if message.edge < 0 else links[",
        "ms = hop if message.edge < 0 else 2 * links[",
        ("tests/compiler/test_simulate.py",),
    ),
    Bug(
        "the lower bound counts the first warm-up twice",
        "zbc/compiler/sim/bounds.py",
        "warm + tail if forced else max(warm, tail)",
        "warm + tail",
        ("tests/search/test_bounds.py",),
    ),
    Bug(
        "the search may hold one unit more than its limit",
        "zbc/compiler/search/listing.py",
        "ROOM = 1e-6",
        "ROOM = 1.0",
        ("tests/search/test_promises.py",),
    ),
    # ---- check and memory
    Bug(
        "the check does not look at the order of a channel",
        "zbc/compiler/check/faults.py",
        "for channel, k, send, recv in g.mixed:",
        "for channel, k, send, recv in ():",
        ("tests/check/test_complete.py",),
    ),
    Bug(
        "the fullest rank is compared with the limit of another",
        "zbc/compiler/check/memory.py",
        "return max(range(len(memory)), key=lambda r: memory[r].bytes / rooms[r])",
        "return 0",
        ("tests/compiler/test_unlike_ranks.py",),
    ),
    # ---- files, pictures, commands
    Bug(
        "torch's letters for the input gradient and the whole backward change places",
        "zbc/interop/torch_csv.py",
        'Kind.B: "I", Kind.W: "W", Kind.BW: "B"',
        'Kind.B: "B", Kind.W: "W", Kind.BW: "I"',
        ("tests/interop",),
    ),
    Bug(
        "torch sums a stage's gradients before its last W",
        "zbc/interop/torch_lowered.py",
        "if op.kind.makes_part}",
        'if op.kind.value in ("BW", "B")}',
        ("tests/processes/test_torch_oracle.py",),
    ),
    Bug(
        "a suggested order may hold more than the fullest rank held",
        "zbc/interop/repair.py",
        "return all(rank.units <= limit for rank, limit in zip(held, limits, strict=True))",
        "return True",
        ("tests/interop/test_torch_csv.py",),
    ),
    Bug(
        "microbatches of a trace are numbered by stage",
        "zbc/viz/perfetto.py",
        '"microbatch":{op.mb}{about}',
        '"microbatch":{op.stage}{about}',
        ("tests/viz/test_perfetto.py",),
    ),
    Bug(
        "an idle cell shows the op that covers less than half of it",
        "zbc/viz/cells.py",
        "busy[c] < 0.5 - _ALMOST",
        "busy[c] < 0.25 - _ALMOST",
        ("tests/viz/test_looks.py", "tests/viz/test_terminal.py"),
    ),
    Bug(
        "a zoomed picture is drawn as if it began at 0",
        "zbc/viz/svg.py",
        "(start - window[0]) * scale, (end - start) * scale, tip",
        "start * scale, (end - start) * scale, tip",
        ("tests/viz",),
    ),
    Bug(
        "the last number of a range on the command line is left out",
        "zbc/commands/options.py",
        "range(first, last + 1)",
        "range(first, last)",
        ("tests/cli", "tests/viz"),
    ),
    Bug(
        "help that nobody reads ends as an error of usage",
        "zbc/cli.py",
        "if isinstance(left.__context__, BrokenPipeError):",
        "if False:",
        ("tests/cli/test_start.py",),
    ),
)


@contextmanager
def copy_of_the_tree() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            source = ROOT / part
            ignore = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(source, folder / part, ignore=ignore) if source.is_dir() else shutil.copy(source, folder)
        yield folder


def first_failure(tree: Path, *arguments: str) -> str:
    """The first test that fails, "" if all pass. Raises RuntimeError if they cannot be run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode in (0, 5):  # 5: the tier has none of them
        return ""
    found = re.findall(r"^(?:FAILED|ERROR) \S*?(\w+\.py\S*)", done.stdout, re.MULTILINE)
    if done.returncode != 1 and not found:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return str(found[0])


def caught(tree: Path, bug: Bug) -> tuple[str, str, str]:
    """Whether `quick` and `all` catch it, "yes", "no" or "stale", and the test. `all` includes `quick`."""
    path = tree / bug.file
    text = path.read_text() if path.exists() else ""
    if text.count(bug.old) != 1:
        return "stale", "stale", ""
    path.write_text(text.replace(bug.old, bug.new))
    try:
        quick = first_failure(tree, *bug.tests)
        every = quick or first_failure(tree, "--all", *bug.tests)
    finally:
        path.write_text(text)
    return "yes" if quick else "no", "yes" if every else "no", every


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--only", default="", help="bugs with this word in their text or file")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if options.only in bug.what or options.only in bug.file]
    lines = [f"{'quick':<6} {'all':<6} {'bug':<78} {'file':<38} first test that fails"]
    print(lines[0], flush=True)
    found = []
    with copy_of_the_tree() as tree:
        for bug in bugs:
            quick, every, test = caught(tree, bug)
            found.append((quick, every))
            lines.append(f"{quick:<6} {every:<6} {bug.what:<78} {bug.file:<38} {test}")
            print(lines[-1], flush=True)
    lines.append(f"{len(found)} bugs, {found.count(('yes', 'yes'))} caught by both tiers")
    print(lines[-1])
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")
    return 0 if all(quick == every != "stale" for quick, every in found) else 1


if __name__ == "__main__":
    sys.exit(main())
