"""Which layers make a stage, which stages recompute, and which order that gets."""
