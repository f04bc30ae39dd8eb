"""zbc: compile pipeline-parallel training schedules into proven, runnable per-rank plans."""

__version__ = "0.1.0"
