"""Reports on a plan, and differences of two."""
