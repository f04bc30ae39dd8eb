"""Imports point only to the left of the design's list, and only the runtime touches torch."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import tomli

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
    for f in sorted(ROOT.glob("zbc/**/*.py"))
}

# A module may import what stands on its own line or above it; the longest matching prefix decides.
LAYERS = [
    ["zbc.errors", "zbc.explain", "zbc.closed_pipe", "zbc.folders", "zbc.linefile", "zbc.cores"],
    ["zbc.userobject"],
    ["zbc.ops"],
    ["zbc.ir", "zbc.toml", "zbc.section", "zbc.topology", "zbc.interop.megatron_layout"],
    ["zbc.idle", "zbc.dealing"],
    ["zbc.model_section", "zbc.learning_rate", "zbc.ramp", "zbc.extent"],
    ["zbc.flops"],
    ["zbc.hfconfig"],
    ["zbc.profile"],
    ["zbc.sections"],
    ["zbc.job"],
    ["zbc.rules"],
    ["zbc.spec"],
    ["zbc.manifest"],
    ["zbc.planfiles"],
    ["zbc.plan", "zbc.forward", "zbc.course"],
    ["zbc.traceline"],
    ["zbc.trace"],
    ["zbc.compiler.footprint", "zbc.compiler.machine", "zbc.compiler.nodes"],
    ["zbc.compiler.work", "zbc.compiler.profiled", "zbc.compiler.balance"],
    ["zbc.compiler.estimate", "zbc.compiler.partition", "zbc.compiler.graph"],
    ["zbc.compiler.stage_bytes"],
    ["zbc.compiler.cost"],
    ["zbc.compiler.ways"],
    ["zbc.compiler.bounds_mirrored"],
    [
        "zbc.compiler.simulate",
        "zbc.compiler.ledger",
        "zbc.compiler.memory",
        "zbc.compiler.bounds",
        "zbc.compiler.check",
    ],
    ["zbc.compiler.warmup", "zbc.compiler.context"],
    [
        "zbc.compiler.report",
        "zbc.interop.refused",
        "zbc.interop.torch_csv",
        "zbc.interop.torch_lowered",
        "zbc.interop.sheet_check",
    ],
    [
        "zbc.compiler.schedules.request",
        "zbc.compiler.schedules.lagged",
        "zbc.compiler.schedules.looped",
        "zbc.compiler.schedules.vshape",
        "zbc.compiler.schedules.slots",
        "zbc.compiler.schedules.dualpipe",
        "zbc.compiler.passes",
    ],
    ["zbc.compiler.steps", "zbc.compiler.lowering"],
    ["zbc.compiler.search"],
    ["zbc.compiler.schedules"],
    ["zbc.compiler"],
    ["zbc.viz", "zbc.interop"],
    ["zbc.api"],
    ["zbc.cli", "zbc.__main__"],
]
RUNTIME = [
    ["zbc.errors", "zbc.closed_pipe", "zbc.folders", "zbc.linefile"],
    ["zbc.userobject"],
    ["zbc.ops"],
    ["zbc.ir", "zbc.topology", "zbc.toml", "zbc.textfiles", "zbc.tokenfile"],
    ["zbc.section"],
    ["zbc.idle", "zbc.dealing"],
    ["zbc.extent", "zbc.model_section", "zbc.hfconfig", "zbc.learning_rate", "zbc.ramp", "zbc.flops"],
    ["zbc.profile"],
    ["zbc.sections"],
    ["zbc.job"],
    ["zbc.rules"],
    ["zbc.spec", "zbc.manifest"],
    ["zbc.planfiles"],
    ["zbc.plan", "zbc.forward", "zbc.course", "zbc.runtime.options"],
    ["zbc.traceline"],
    ["zbc.trace"],
    ["zbc.runtime.frames"],
    ["zbc.runtime.sinks", "zbc.runtime.live", "zbc.runtime.interface", "zbc.runtime.board", "zbc.runtime.rounds"],
    ["zbc.runtime.rundir"],
    ["zbc.runtime.transport", "zbc.runtime.progress", "zbc.runtime.metrics", "zbc.runtime.clock", "zbc.runtime.sends"],
    ["zbc.runtime.stamps", "zbc.runtime.board", "zbc.runtime.scribe"],
    ["zbc.runtime.aligned"],
    ["zbc.runtime.nonfinite"],
    ["zbc.runtime.precision"],
    ["zbc.runtime.permutation", "zbc.runtime.tokens"],
    ["zbc.runtime.seeding"],
    ["zbc.runtime.remembered"],
    ["zbc.runtime.carried"],
    ["zbc.runtime.probe"],
    ["zbc.runtime.slot", "zbc.runtime.alone", "zbc.runtime.corpus", "zbc.runtime.rotary"],
    ["zbc.runtime.gpt"],
    ["zbc.runtime.llama"],
    ["zbc.runtime.split", "zbc.runtime.validate", "zbc.runtime.hub", "zbc.runtime.network"],
    ["zbc.runtime.optimizer", "zbc.runtime.bucket"],
    ["zbc.runtime.sharded"],
    ["zbc.runtime.model", "zbc.runtime.hfnames"],
    ["zbc.runtime.pretrained"],
    ["zbc.runtime.hfexport"],
    ["zbc.runtime.shapes"],
    ["zbc.runtime.compiled"],
    ["zbc.runtime.data", "zbc.runtime.tape", "zbc.runtime.stage"],
    ["zbc.runtime.proof"],
    ["zbc.runtime.pending"],
    ["zbc.runtime.prefetch"],
    ["zbc.runtime.state"],
    ["zbc.runtime.ahead"],
    ["zbc.runtime.handlers", "zbc.runtime.pace"],
    ["zbc.runtime.measure"],
    ["zbc.runtime.evaluate"],
    ["zbc.runtime.checkpoint.folder"],
    ["zbc.runtime.checkpoint.blockfile"],
    ["zbc.runtime.checkpoint.storage", "zbc.runtime.checkpoint.together"],
    [
        "zbc.runtime.checkpoint.planning",
        "zbc.runtime.checkpoint.resume",
        "zbc.runtime.checkpoint.tryout",
        "zbc.runtime.checkpoint.owner",
    ],
    ["zbc.runtime.checkpoint.state"],
    ["zbc.runtime.checkpoint.saving"],
    ["zbc.runtime.checkpoint.loading"],
    ["zbc.runtime.worker", "zbc.runtime.execute"],
    ["zbc.runtime.tracing"],
    ["zbc.runtime"],
]


def level(module, layers):
    """Index of the line with the longest prefix of `module`; None if it is on no line."""
    found = [
        (len(name), index)
        for index, names in enumerate(layers)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    return max(found)[1] if found else None


@cache
def tree(path):
    return ast.parse(path.read_text())


def imports(path, *, top_level=False):
    nodes = tree(path).body if top_level else ast.walk(tree(path))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
            found |= modules if len(modules) == len(node.names) else modules | {node.module}
    return found


def misplaced(module):
    """What this module imports from the right of its place."""
    layers = RUNTIME if module.startswith("zbc.runtime") else LAYERS
    mine = level(module, layers)
    if mine is None:
        return []
    return [
        f"{module} must not import {target}"
        for target in sorted(imports(MODULES[module]))
        if (theirs := level(target, layers)) is not None and theirs > mine
    ]


def of_torch(targets):
    return sorted(t for t in targets if t.split(".")[0] == "torch" or t.startswith("zbc.runtime"))


def test_imports_point_only_to_the_left():
    assert [line for module in MODULES if module != "zbc" for line in misplaced(module)] == []


def test_the_package_itself_imports_nothing_before_it_is_used():
    """It has names for type checkers only."""
    assert not any(target.startswith("zbc.") for target in imports(MODULES["zbc"], top_level=True))


def test_runtime_and_compiler_meet_only_in_the_plan_file():
    compiling = ("zbc.compiler", "zbc.viz", "zbc.interop", "zbc.api", "zbc.cli")
    for module, path in MODULES.items():
        if module.startswith("zbc.runtime"):
            assert not any(target.startswith(compiling) for target in imports(path)), module
        elif not module.startswith("zbc.cli"):
            assert of_torch(imports(path)) == [], module


def test_the_command_line_imports_torch_only_inside_commands():
    for module in (m for m in MODULES if m.startswith("zbc.cli")):
        assert of_torch(imports(MODULES[module], top_level=True)) == [], module


def test_only_the_command_line_prints():
    for module in (m for m in MODULES if not m.startswith("zbc.cli")):
        calls = [n for n in ast.walk(tree(MODULES[module])) if isinstance(n, ast.Call)]
        assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), module


def test_what_is_declared_as_a_dependency_is_imported():
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [need for name, needs in project["optional-dependencies"].items() if name != "dev" for need in needs]
    declared = [re.match(r"[\w-]+", need)[0] for need in [*project["dependencies"], *extras]]
    modules = {"tensorboard": "torch.utils.tensorboard"}  # what torch has for it
    wanted = {modules.get(name, name.replace("-", "_")) for name in declared}
    used = {target for path in MODULES.values() for target in imports(path)}
    assert {name for name in wanted if not any(f"{target}.".startswith(f"{name}.") for target in used)} == set()
