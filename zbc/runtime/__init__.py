"""Runs the ops of a plan, exactly as they are written."""
