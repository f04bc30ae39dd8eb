"""Checkpoints, from which a run with any partition and schedule can resume."""
