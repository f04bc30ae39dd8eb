"""The executor: ops of the pipeline itself, and the state that they read and write. It names no feature."""
