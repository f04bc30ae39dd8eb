"""Draws pictures of plans and runs."""
