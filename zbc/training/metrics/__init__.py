"""Metrics of a run, for files and the console."""
