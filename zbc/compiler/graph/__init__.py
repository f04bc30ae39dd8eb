"""A program as integers, made once from the rows of its ops: what waits for what, for the proof, the clock, memory."""
