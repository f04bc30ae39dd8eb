"""Recorded runs: times of ops, the time of ranks by cause, and the predictions of both."""
