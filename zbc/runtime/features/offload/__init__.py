"""Activations that wait in host memory."""
