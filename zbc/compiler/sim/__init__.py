"""The timeline of every op, and lower bounds for any schedule."""
