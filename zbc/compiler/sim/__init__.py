"""When every op runs, and what no schedule can beat."""
