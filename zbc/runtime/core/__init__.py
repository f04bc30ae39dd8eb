"""The executor: ops of the pipeline itself, and what they read and leave. It names no feature."""
