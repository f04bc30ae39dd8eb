"""`zbc plan --exact`: orders proven optimal by CP-SAT, an optional solver (`zbc[solve]`)."""
