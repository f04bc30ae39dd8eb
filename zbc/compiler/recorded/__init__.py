"""What a recorded run says: how long ops took, where the time of ranks went, and what was predicted of both."""
