"""Exchange with other tools: one format a file."""
