"""Trials of user-defined layers before training starts: shapes, side effects, gradients."""
