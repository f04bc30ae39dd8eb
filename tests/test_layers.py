"""Imports point only upwards, only TORCH and zbc.forwarding import torch, and neighbours come from the placement."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import tomli

import zbc
from zbc.runtime import features
from zbc.runtime.core.feature import Feature

ROOT = Path(__file__).parent.parent
MODULES = {
    ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f
    for f in sorted(ROOT.glob("zbc/**/*.py"))
}

# A module may import from its own package, or from a line above; compiler.X are the parts of zbc/compiler.
ORDER = """
errors  text  topology
excludes
ops  explain
host  ir
job
plan
trace
compiler.graph  compiler.cost  compiler.blocks
compiler.sim  runtime
compiler.memory
compiler.passes  training
compiler.recall
compiler.check  compiler.search  compiler.lowering
compiler.report  compiler.schedules  compiler.steps
compiler.partition
compiler.planner
interop  exact
compiler.order
compiler.deciding compiler.seating  compiler.freezing
compiler.numbering  compiler.compiled  compiler.reading
compiler.ramps  compiler.alternatives
compiler.compile
compiler.shapes
compiler.recorded  compiler.whatif
viz
api
pipelining  forwarding
commands
cli
__main__
"""
LINES = {name: line for line, names in enumerate(ORDER.split("\n")) for name in names.split()}


def package(module):
    """The name in `ORDER` of the package of a module of zbc."""
    _, _, rest = module.partition(".")
    return ".".join(rest.split(".")[: 2 if rest.startswith("compiler.") else 1])


@cache
def tree(path):
    return ast.parse(path.read_text())


def imported(node):
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if not isinstance(node, ast.ImportFrom):
        return {name for child in ast.iter_child_nodes(node) for name in imported(child)}
    modules = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES.keys()
    return modules if len(modules) == len(node.names) else modules | {node.module}


@cache
def imports(path, *, top_level=False):
    nodes = tree(path).body if top_level else [tree(path)]
    return {
        name
        for node in nodes
        if not top_level or isinstance(node, ast.Import | ast.ImportFrom)
        for name in imported(node)
    }


def misplaced(module):
    """The imports of this module from packages on the same line of `ORDER` or below."""
    mine = package(module)
    theirs = {target: package(target) for target in imports(MODULES[module]) if target.startswith("zbc.")}
    return [
        f"{module} must not import {target}"
        for target, home in sorted(theirs.items())
        if home != mine and LINES[home] >= LINES[mine]
    ]


TORCH = ("zbc.runtime", "zbc.training", "zbc.pipelining")  # packages that load it


def of_torch(targets):
    return sorted(t for t in targets if t.split(".")[0] == "torch" or t.startswith(TORCH))


@pytest.mark.long
def test_imports_point_only_upwards():
    assert [line for module in MODULES if module != "zbc" for line in misplaced(module)] == []


def test_every_package_stands_in_the_order():
    parts = {package(module) for module in MODULES} - {"", "compiler"}
    assert parts == LINES.keys()


def test_the_package_itself_imports_nothing_before_it_is_used():
    """Its imports are for type checkers only."""
    assert not any(target.startswith("zbc.") for target in imports(MODULES["zbc"], top_level=True))


@pytest.mark.always
def test_runtime_and_compiler_meet_only_in_the_plan_file():
    compiling = ("zbc.compiler", "zbc.viz", "zbc.interop", "zbc.api", "zbc.commands", "zbc.cli")
    for module, path in MODULES.items():
        if module.startswith(("zbc.runtime", "zbc.training")):
            assert not any(target.startswith(compiling) for target in imports(path)), module
        elif module != "zbc" and not module.startswith(("zbc.commands", "zbc.pipelining", "zbc.forwarding")):
            assert of_torch(imports(path)) == [], module


def test_the_command_line_imports_torch_only_inside_commands():
    for module in (m for m in MODULES if m.startswith(("zbc.commands", "zbc.cli"))):
        assert of_torch(imports(MODULES[module], top_level=True)) == [], module


def test_only_the_command_line_prints():
    for module in (m for m in MODULES if not m.startswith("zbc.commands")):
        calls = [n for n in ast.walk(tree(MODULES[module])) if isinstance(n, ast.Call)]
        assert not any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls), module


def test_what_is_declared_as_a_dependency_is_imported():
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [need for name, needs in project["optional-dependencies"].items() if name != "dev" for need in needs]
    declared = [re.match(r"[\w-]+", need)[0] for need in [*project["dependencies"], *extras]]
    modules = {"tensorboard": "torch.utils.tensorboard"}  # torch's module that needs it
    wanted = {modules.get(name, name.replace("-", "_")) for name in declared}
    used = {target for path in MODULES.values() for target in imports(path)}
    assert {name for name in wanted if not any(f"{target}.".startswith(f"{name}.") for target in used)} == set()


def test_the_core_of_the_runtime_and_what_builds_a_worker_name_no_feature():
    """They ask the features' own table, `zbc.runtime.features`. Imports for types alone do not count."""
    for module in (
        m for m in MODULES if m.startswith(("zbc.runtime.core", "zbc.training.building", "zbc.training.worker"))
    ):
        whole = tree(MODULES[module])
        typed = [n for n in ast.walk(whole) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        known = imports(MODULES[module]) - {name for node in typed for name in imported(node)}
        assert not [target for target in known if target.startswith("zbc.runtime.features.")], module


def test_features_build_themselves_in_an_order_that_is_written_down():
    builders = set()
    for module, path in MODULES.items():
        if module.startswith("zbc.runtime.features."):
            named = {node.name for node in tree(path).body if isinstance(node, ast.FunctionDef)}
            builders |= {module.removeprefix("zbc.runtime.features.")} if "build" in named else set()
    assert sorted(builders) == sorted(features.ORDER)


def test_few_hooks_and_a_worker_that_is_made_at_once():
    hooks = [name for name, value in vars(Feature).items() if callable(value) and not name.startswith("_")]
    assert len(hooks) == 12
    for module in (m for m in MODULES if m.startswith(("zbc.training.building", "zbc.training.worker"))):
        nodes = [*ast.walk(tree(MODULES[module]))]
        targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
        targets += [node.target for node in nodes if isinstance(node, ast.AugAssign)]
        changed = {ast.unparse(target.value) for target in targets if isinstance(target, ast.Attribute)}
        assert not changed & {"worker", "run"}, module


def lines(*names, but=()):
    """The lines of all Python files in these folders, or of these files, but of some others."""
    found = {
        path for name in names for path in ((ROOT / name).rglob("*.py") if (ROOT / name).is_dir() else [ROOT / name])
    }
    return sum(len(path.read_text().splitlines()) for path in found - {ROOT / name for name in but})


DRY = ("zbc/training/profiling/dry.py", "zbc/training/profiling/kernels.py")
HF = tuple(f"zbc/training/models/{name}.py" for name in ("transformers", "registered", "hfweights"))
COMPILER = ("zbc/compiler", "zbc/ir.py", "zbc/ops.py", "zbc/excludes.py", "zbc/topology.py", "zbc/plan")
# Upper bounds of lines, which fall with each step and are never raised.
BOUNDS = {
    "the dry rig": (lambda: lines(*DRY), 400),
    "models of transformers": (lambda: lines(*HF), 880),
    "runtime and training": (lambda: lines("zbc/runtime", "zbc/training", but=DRY + HF), 26048),
    "costs and memory": (lambda: lines("zbc/compiler/cost", "zbc/compiler/memory"), 3662),
    "the compiler without costs": (lambda: lines(*COMPILER) - lines("zbc/compiler/cost"), 21120),
    "all of zbc": (lambda: lines("zbc"), 67680),
    "tests": (lambda: lines("tests"), 43806),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_code_stays_as_light_as_it_is(name):
    counted, most = BOUNDS[name]
    assert counted() <= most


AT_HOME = re.compile(r"zbc\.(ops|ir|runtime\.handlers|(compiler\.(passes|schedules|features)|runtime\.features)\..*)")
NAMED = re.compile(r"""\bKind(\.[A-Z]|\[|\(["'])""")
WHY = re.compile(r"# Names (a kind|kinds): \w")
NAMING_KINDS, NOT_AT_HOME = 28, 7  # modules; the limit is 30


def naming():
    """The modules that name a kind of op -> whether a comment at or above the first name says why."""
    found = dict[str, bool]()
    for module, path in MODULES.items():
        lines = path.read_text().splitlines()
        first = next((i for i, line in enumerate(lines) if NAMED.search(line)), -1)
        if first >= 0:
            found[module] = any(map(WHY.search, lines[: first + 1]))
    return found


def test_kinds_of_ops_are_named_in_few_modules():
    """Other code asks the row of a kind, so that it goes for the next kind, too."""
    assert len(naming()) <= NAMING_KINDS, sorted(naming())


def test_a_module_that_names_kinds_where_they_are_not_at_home_says_why():
    others = {module: why for module, why in naming().items() if not AT_HOME.fullmatch(module)}
    assert [module for module, why in others.items() if not why] == []
    assert len(others) <= NOT_AT_HOME, sorted(others)


SOURCE = Path(zbc.__file__).parent
NEXT = re.compile(
    r"\b(?:stage|s)\]?\s*[-+]\s*1\b|\bstages\)?\s*-\s*1\b|\bstages\s*//|\bpairwise\((?:pipe|homes|stages)\b"
)

MAKERS = ("compiler/schedules/", "compiler/search/", "exact/")  # orders of stages in a row
CUTS = {  # layers of a model are in a row: the boundaries of stages in it are one more than stages
    "compiler/partition/balance.py",
}
COUNTED = {  # numbers of stages, and of their boundaries, in words
    "compiler/cost/pricing.py": "stages are numbered from 0 to",
    "compiler/partition/initial.py": "bars",
    "plan/reading.py": "boundaries",
}


def _found() -> dict[str, list[str]]:
    found = dict[str, list[str]]()
    for path in sorted(SOURCE.rglob("*.py")):
        lines = [line.strip() for line in path.read_text().splitlines() if NEXT.search(line)]
        if lines:
            found[path.relative_to(SOURCE).as_posix()] = lines
    return found


def test_nobody_else_adds_one_to_a_stage_or_divides_stages_by_ranks():
    for name, lines in _found().items():
        if name.startswith(MAKERS) or name in CUTS:
            continue
        assert all(name in COUNTED and COUNTED[name] in line for line in lines), (name, lines)


def test_what_is_excepted_is_still_there():
    found = _found()
    gone = {name for name in {*CUTS, *COUNTED} if (SOURCE / name).exists() and name not in found}
    assert not gone, "drop them from the lists"
