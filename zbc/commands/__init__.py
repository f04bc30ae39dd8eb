"""The commands: one module for each, or for a few that belong together. They parse, make one call and print."""
