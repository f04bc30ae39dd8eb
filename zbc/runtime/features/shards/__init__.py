"""Weights and gradients sharded over replicas: gathered before ops read them, by collectives or one-sided."""
