"""Partitions layers into stages, chooses the stages that recompute, and the order for them."""
