"""The commands: one module per command, or for a few that belong together. They parse, make one call and print."""
