"""Written files read back the same: plan files, JSON documents and job files, over random programs and jobs."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.compiler.grid import FIXED, chunk_counts, make
from tests.jobs import write_job
from tests.lowered import lower
from zbc.commands.explaining import listing
from zbc.compiler.cost.cost import Costs
from zbc.compiler.shapes import load_job
from zbc.compiler.sim.simulate import simulate
from zbc.interop import as_json
from zbc.ir import Op, Placement
from zbc.job import links
from zbc.job.spec import SECTIONS

few = settings(max_examples=15, deadline=None, derandomize=True)
names = st.sampled_from(FIXED)


def drawn(data):
    """A complete program of a schedule by formula."""
    name = data.draw(names)
    chunks = data.draw(st.sampled_from(chunk_counts(name)))
    return lower(make(name, 2 * data.draw(st.integers(1, 2)), data.draw(st.integers(1, 7)), chunks))


@few
@given(st.floats(1e-7, 1e5), st.floats(0, 1e6), st.sampled_from(["rank", "node"]))
@example(0.0004, 30000.0, "rank")  # 3.2 Mbit/s
def test_tables_of_links_survive_their_file_to_a_millionth(gbps, us, per):
    table = links.LinkTable(per, ((gbps, gbps), (gbps, gbps)), ((0.0, us), (us, 0.0)))
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "links.toml"
        path.write_text(table.dumps())
        read = links.read(path, "zbc.toml:1")
    assert read.per == per
    assert read.gbps[0][1] == pytest.approx(gbps, rel=1e-5) and read.us[1][0] == pytest.approx(us, rel=1e-5)
    assert read.dumps() == table.dumps()


@few
@given(data=st.data())
def test_programs_and_times_survive_json(data):
    program = drawn(data)
    times = [data.draw(st.floats(0.1, 50)) for _ in range(3)]
    timeline = simulate(program, Costs.uniform(program.placement, *times, comm=data.draw(st.floats(0, 5))))
    document = json.loads(as_json.dumps(program, timeline))
    ranks = tuple(tuple(Op.parse(text) for text in rank["ops"]) for rank in document["ranks"])
    assert ranks == program.ranks
    assert Placement(tuple(map(tuple, document["placement"]))) == program.placement
    spans = {(rank["rank"], row["op"]): row for rank in document["ranks"] for row in rank["compute"]}
    for span in timeline:
        row = spans[span.rank, str(span.op)]
        assert (row["start_ms"], row["end_ms"]) == pytest.approx((span.start, span.end), abs=1e-8)


jobs = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries({"layers": st.integers(4, 40), "hidden": st.sampled_from([32, 64])}),
        "schedule": st.fixed_dictionaries(
            {"kind": st.sampled_from(["1f1b", "zb-v", "zb-h2"]), "microbatches": st.integers(1, 99)}
        ),
        "costs": st.one_of(
            st.just({}), st.fixed_dictionaries({key: st.floats(0.001, 1e4) for key in ("f", "b", "w", "comm")})
        ),
        "train": st.fixed_dictionaries({"steps": st.integers(1, 10**6), "seed": st.integers(0, 2**63 - 1)}),
        "optimizer": st.fixed_dictionaries({"lr": st.floats(0, 10), "clip_grad_norm": st.floats(1e-3, 10)}),
    }
)


@few
@given(jobs)
def test_jobs_survive_being_listed_as_a_job_file(values):
    """`zbc explain` prints an equivalent job file."""
    with tempfile.TemporaryDirectory() as name:
        second, job = Path(name, "second.toml"), load_job(write_job(Path(name), **values))
        second.write_text("\n".join(listing(job)), encoding="utf-8")
        again = load_job(second)
    for section in SECTIONS:
        assert getattr(again, section) == getattr(job, section), section
