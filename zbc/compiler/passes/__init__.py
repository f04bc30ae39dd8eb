"""Passes: each maps a program to a program and changes nothing else. Their order is in lowering.py."""
