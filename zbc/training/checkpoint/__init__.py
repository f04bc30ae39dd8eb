"""Checkpoints: what a run writes down so that another one, cut and scheduled as it likes, can go on from there."""
