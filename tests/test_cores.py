"""Threads of a rank's kernels."""

import pytest

from zbc.host import cores


@pytest.mark.parametrize(("asked", "threads"), [(None, 4), ("3", 3), ("16", 16), ("0", 4), ("many", 4)])
def test_ranks_have_the_threads_that_openmp_is_told_or_their_share(asked, threads, monkeypatch):
    monkeypatch.setattr(cores, "cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", asked) if asked else monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cores.threads_of(2) == threads
