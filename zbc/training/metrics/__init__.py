"""The numbers of a run, for files and people."""
