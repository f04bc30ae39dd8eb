"""What is said of a plan, and of two."""
