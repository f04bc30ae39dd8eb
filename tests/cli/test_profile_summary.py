"""What `profile` and `plan --profile` print of measured costs."""

from pathlib import Path

import pytest

from tests.profiles import layer, nbytes, profile_of
from zbc.commands.console import show
from zbc.commands.profiling import summary
from zbc.compiler.compile import load_job
from zbc.job.profile import Measured


@pytest.fixture
def measured(job):
    """Layers with long names, large numbers and times that nobody should trust."""
    large = nbytes(**dict.fromkeys(("weights", "gradients", "masters", "optimizer", "kept_b", "kept_w"), 123456789))
    wide = layer(1.0, 2.0, 3.0, bytes=large, again=1.0, step=1.0)
    wide = wide.model_copy(update={key: Measured(ms=1234.5, spread=8.82) for key in ("f", "b", "w", "again", "step")})
    return profile_of(load_job(Path(job())), layers=dict.fromkeys(("embed", "block", "head"), wide))


def test_what_was_measured_fits_eighty_columns(measured, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    show(*summary(measured))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "118 MiB" in "\n".join(lines) and any("spread too wide to trust" in line for line in lines)


def test_a_plan_of_layers_that_nobody_measured_says_how_to_measure_them(zbc, job):
    job(model={"family": "somewhere:layers", "loss": "mse"}, data={"kind": "somewhere:Data"})
    assert "assumed equal for all layers" in (told := zbc("plan", "zbc.toml").out)
    assert "`zbc profile JOB.toml` measures it" in told


def test_a_plan_says_which_times_not_to_trust_in_eighty_columns(measured, zbc, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "measured.json").write_text(measured.dumps())
    out = zbc("plan", "zbc.toml", "--profile", tmp_path / "measured.json", "-o", tmp_path / "plan").out
    assert max(len(line.rstrip()) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert "882.0%" in out and "more --rounds" in " ".join(out.split())
