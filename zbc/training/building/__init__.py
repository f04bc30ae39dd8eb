"""A rank's `Worker` from its plan, part by part; worker.py puts them together."""
