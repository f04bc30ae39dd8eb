"""Every command block of the README and the docs runs, in order, in a folder with the files of a clone."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

import zbc.cli
from docs import make
from docs.make import BIDIRECTIONAL, README, TWO_PIPES_BLOCKS, fill
from tests.jobs import write_job
from tests.limits import at_most, ended
from tests.tiers import few
from zbc.compiler.compile import compile_job
from zbc.compiler.schedules import SCHEDULES
from zbc.compiler.shapes import load_job
from zbc.explain import glossary

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BIN = Path(sys.executable).parent
LIMIT_S = 240


@dataclass(frozen=True)
class Chain:
    """Blocks of a page that use files made by one of them, as the lines that a reader types."""

    page: Path
    number: int
    lines: tuple[str, ...]

    def __str__(self):
        return f"{self.page.name}-{self.number}"


def commands(page):
    """The lines of each block."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [[line for line in block.splitlines() if line.strip()] for block in blocks]


def chains(page):
    """The chains of a page; a block belongs to the chain that made a file or folder it names."""
    found = []
    for block in commands(page):
        words = [word for line in block for word in line.split()[2:]]
        earlier = [chain for chain in found if {word.split("/")[0] for word in words} & made(chain)]
        together = [line for chain in earlier for line in chain]
        found = [chain for chain in found if chain not in earlier] + [together + block]
    return [Chain(page, number, tuple(lines)) for number, lines in enumerate(found, start=1)]


def made(lines):
    """Names of the files and folders that these lines write."""
    pairs = [pair for line in lines for pair in pairwise(line.split())]
    return {name.split("/")[0] for option, name in pairs if option in ("-o", "--save-hf", "init", ">")}


CHAINS = sorted((chain for page in PAGES for chain in chains(page)), key=lambda chain: -len(chain.lines))


def runnable(line):
    """`make` with the environment of this run in place of a fresh one; the tests are not run from within the tests."""
    if line == "make demo":
        return f"make demo -o '{BIN.parent}/.run' VENV='{BIN.parent}' STEPS=2"
    return f"make --dry-run test -o '{BIN.parent}/.dev' VENV='{BIN.parent}'" if line == "make test" else line


def run_line(line):
    """Runs a plain line of zbc in this process, which has everything loaded; any other line in a shell."""
    name, *arguments = shlex.shlex(line, posix=True, punctuation_chars=True)
    if name == "zbc" and not any(set(word) <= set("();<>|&") for word in arguments):
        with pytest.raises(SystemExit) as left:
            zbc.cli.main(shlex.split(line)[1:])
        return left.value.code or 0
    return subprocess.run(runnable(line), shell=True, timeout=LIMIT_S).returncode


@pytest.fixture(autouse=True)
def limit():
    with at_most(LIMIT_S):
        yield


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """Makes the current folder a copy of a clone of the repository."""
    for name in ("plans", "Makefile", "pyproject.toml", "constraints.txt"):
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        copy = tmp_path / name
        shutil.copytree(source, copy, ignore=ignore) if source.is_dir() else shutil.copy(source, copy)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    return tmp_path


LONG = ("zbc run", "zbc profile", "zbc compare", "torchrun", "--template")


def first(chain):
    """Whether a reader begins with this chain, or it trains nothing and plans nothing large."""
    if chain.page.name in (README.name, "tutorial.md") and chain.number == 1:
        return True
    return not any(word in line for line in chain.lines for word in LONG)


@pytest.mark.long(
    "torch.md-4",
    "costs.md-2",
    "costs.md-3",
    "README.md-4",
    "memory.md-3",
    "README.md-1",
    "advise.md-2",
    "memory.md-2",
    "models.md-5",
    "models.md-6",
    "reading.md-2",
    "reading.md-1",
    "compare.md-4",
    "results.md-1",
    "tutorial.md-1",
    "architecture.md-1",
    "tensor_parallel.md-1",
)
@pytest.mark.parametrize("chain", few(CHAINS, first), ids=str)
def test_the_command_blocks_of_a_page_work(chain, clone):
    for block in blocks_of("torch.md") if chain.page.name == "torch.md" else ():
        follow(block, clone)
    for line in chain.lines:
        assert run_line(line) == 0, f"{chain.page.name}: {line}"


def test_blocks_that_go_on_with_what_another_made_are_one_chain():
    assert [len(chains(README)), len(chains(ROOT / "docs" / "report.md"))] == [5, 1]
    assert sum(len(block) for page in PAGES for block in commands(page)) == sum(len(chain.lines) for chain in CHAINS)


def test_every_code_block_says_what_it_is_or_is_a_picture():
    for page in PAGES:
        kinds = re.findall(r"^```(\w*)\n", page.read_text(), re.MULTILINE)
        assert set(kinds) <= {"sh", "toml", "python", ""}, page.name


@pytest.mark.long
def test_the_picture_and_the_table_of_the_readme_are_what_zbc_prints():
    text = README.read_text()
    assert fill(text, ("picture", "compare")) == text


@pytest.mark.repeats
def test_the_tables_of_two_pipes_are_what_zbc_prints_and_say_what_the_page_says():
    text = BIDIRECTIONAL.read_text()
    assert fill(text, TWO_PIPES_BLOCKS) == text
    for first, row in (("p = 8, m = 8", "| zb-v | 27.50 |"), ("p = 8, m = 32", "| zb-v | 99.5 |")):
        assert row in text.partition(f"<!-- two pipes, {first} -->")[2].partition("<!-- end -->")[0]


@pytest.mark.long
def test_tables_that_make_docs_writes_are_those_of_the_pages():
    assert make.SURVIVAL.search((ROOT / "docs" / "gpu.md").read_text())[1] == make.survival_table()
    words = (ROOT / "docs" / "words.md").read_text()
    assert (ROOT / "docs" / "reference.md").read_text() == make.reference() and words == make.words(words)
    named = re.findall(r"^\|.*`(\w+)\.([\w.]+)` \|$", words, re.MULTILINE)
    assert len(named) > 40 and all(f"| `{key}` |" in make.reference().split(f"[{table}]")[1] for table, key in named)


def test_the_plugin_and_the_pass_of_the_docs_plan(tmp_path, monkeypatch):
    """docs/extending.md claims that they work; zbc proves it."""
    for name, block in zip(("my_order", "my_passes"), blocks_of("extending.md"), strict=False):
        (tmp_path / f"{name}.py").write_text(block)
    schedule = {"kind": "my_order:make", "passes": ["my_passes:receive_first"]}
    monkeypatch.syspath_prepend(tmp_path)
    found = compile_job(load_job(write_job(tmp_path, schedule=schedule)))
    assert found.report.deadlock_free and found.program.history[-1] == "receive-first"
    assert all(op.kind.is_recv for ops in found.program.ranks for op in ops[:8])


def blocks_of(name):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / name).read_text(), re.M | re.S)


def follow(block, folder):
    """Follows the first line of a block, with the rest of it as contents."""
    head, _, code = block.partition("\n")
    new = re.fullmatch(r"# new file: (\S+)", head)
    if new:
        (folder / new[1]).write_text(code)
        return
    path, how, line = re.fullmatch(r"# (\S+), (below|replacing): (.*)", head).groups()
    text = (folder / path).read_text()
    assert text.count(f"{line}\n") == 1, f"{path} has no line {line!r}"
    fresh = code if how == "replacing" else f"{line}\n{code}"
    (folder / path).write_text(text.replace(f"{line}\n", fresh, 1))


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of zbc with all changes of docs/extending.md."""
    folder = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "zbc", folder / "zbc", ignore=shutil.ignore_patterns("__pycache__"))
    for block in blocks_of("extending.md")[2:]:
        follow(block, folder)
    (folder / "job.toml").write_text((ROOT / "plans" / "lesson.toml").read_text())
    return folder


def python(folder, script, source=None):
    """What Python prints of a script in this folder, which has a zbc of its own unless `source` has it."""
    environment = {**os.environ, "PYTHONPATH": str(source or folder)}
    done = ended(sys.executable, "-c", script, seconds=LIMIT_S, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.long
def test_the_schedule_and_the_pass_of_the_docs_plan_when_the_page_is_followed(extended):
    """33 ms are 3m + 3(p-1), as the card says; the page's COLLECT takes the rest."""
    out = python(
        extended,
        "import zbc\n"
        "plan = zbc.plan(zbc.load('job.toml', schedule='ahead-1f1b'))\n"
        "plan.check()\n"
        "first = plan.program.ranks[1][0].kind\n"
        "print(plan.name, plan.simulate().makespan, 'receive-first' in plan.program.history, first.is_recv)\n"
        "print(max(rank.peak_activation_units for rank in plan.compiled.report.per_rank))\n",
    )
    assert out.split() == ["ahead-1f1b", "33.5", "True", "True", "5.0"]


@pytest.mark.long
def test_the_op_of_the_docs_is_planned_checked_timed_and_handled_when_the_page_is_followed(extended):
    """The last rank of 1F1B never waits, so the whole step is longer by the time of its COLLECT: 33 + 0.5 ms."""
    out = python(
        extended,
        "import zbc\n"
        "from zbc.ir import Kind, Op\n"
        "from zbc.runtime.handlers import HANDLERS\n"
        "assert HANDLERS.keys() == set(Kind)\n"
        "plan = zbc.plan(zbc.load('job.toml'))\n"
        "plan.write('with-collect')\n"
        "read = zbc.Plan.read('with-collect')\n"
        "read.check()\n"
        "collects = [ops.count(Op.parse('COLLECT')) for ops in read.program.ranks]\n"
        "nodes = zbc.graph(read).nodes\n"
        "took = {round(n['end'] - n['start'], 6) for _, n in nodes(data=True) if n['kind'] == 'COLLECT'}\n"
        "print(collects, took, read.simulate().makespan)\n",
    )
    assert out.strip() == "[1, 1, 1, 1] {0.5} 33.5"


@pytest.mark.repeats
def test_a_plan_with_the_op_of_the_docs_trains_when_the_page_is_followed(extended):
    python(
        extended,
        "import zbc\n"
        "zbc.plan(zbc.load('job.toml', ['parallel.pp=2'])).write('two')\n"
        "from zbc.cli import main\n"
        "main(['run', 'two', '--local', '2', '--steps', '2', '-o', 'ran'])\n",
    )
    assert len((extended / "ran" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.long
def test_the_python_of_the_docs_runs(clone):
    out = python(clone, "".join(blocks_of("python.md")), ROOT)
    assert "zb-h1: 4 ranks" in out and "39.0 ms: BW s0 m11 <- W s0 m10 <-" in out
    assert (clone / "from-python.svg").read_text().startswith("<svg")


def test_the_files_that_the_architecture_names_are_there():
    named = re.findall(r"`([a-z_]+(?:/[a-z_]+)*(?:\.py|/))`", (ROOT / "docs" / "architecture.md").read_text())
    assert len(named) > 50
    assert [name for name in named if not any((ROOT / top / name).exists() for top in ("zbc", ""))] == []


def test_every_schedule_has_its_page():
    folder = ROOT / "docs" / "schedules"
    assert {path.stem for path in folder.glob("*.md")} == {"README", *SCHEDULES}
    for name, card in SCHEDULES.items():
        text = " ".join((folder / f"{name}.md").read_text().split())  # long lines are wrapped
        for words in (card.summary[1:], card.source, card.makespan, card.span, card.memory):
            assert words in text, f"{name}: make docs"
        assert (folder / "pictures" / f"{name}.svg").exists()


def anchors(page):
    """What links may name in a page: its headings, as GitHub writes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall("^#+ (.*)$", text, re.M)}


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, *(ROOT / "docs").glob("schedules/*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for target, anchor in re.findall(r"\]\(([^)#: ]*)#?([^)#: ]*)\)", page.read_text()):
            there = page.parent / target if target else page
            assert there.exists() and (not anchor or anchor in anchors(there)), f"{page.name}: {target}#{anchor}"
    words = {word.page.partition("#")[::2] for word in glossary.WORDS}
    assert [word for word in words if word[1] not in {"", *anchors(ROOT / "docs" / word[0])}] == []
