"""Exchange with other tools: one module per format."""
