"""Slices of a sequence, one op each."""
