"""The machine that a command runs on: its folders, files, streams and cores."""
