"""Memory of every rank over a step."""
