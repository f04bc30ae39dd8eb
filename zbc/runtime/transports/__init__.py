"""Transports for messages and collectives between ranks: for processes, for threads, and wrappers of these."""
