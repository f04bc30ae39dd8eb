"""Reads jobs from TOML, and reports every problem with its place."""
