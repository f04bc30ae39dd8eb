"""Some hundred damaged inputs of each kind, and random jobs; bench/fuzz.py inputs tries more for minutes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzzing import Inputs, survives
from zbc.errors import ZbcError
from zbc.job import spec

COUNTS = {"job": 12, "plan": 80, "csv": 150, "toml": 80, "profile": 60}
COUNTS |= {"tokens": 150, "config": 150, "index": 100, "checkpoint": 100}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return Inputs(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.long("job", "plan")
@pytest.mark.parametrize("kind", COUNTS)
def test_damaged_inputs_are_read_or_refused_in_words(inputs, kind):
    found = [survives(inputs, kind, seed) for seed in range(COUNTS[kind])]
    assert not all(found), "some damage has to be noticed"


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_as_a_job_file(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("bytes") / "job.toml"
    path.write_bytes(raw)
    with pytest.raises(ZbcError):
        spec.draft(path).finish()
