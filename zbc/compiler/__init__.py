"""Compiles a job to a proven plan."""
