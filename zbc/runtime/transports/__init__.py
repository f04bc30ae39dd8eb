"""How messages and collectives go between ranks: processes, threads, and what stands around either."""
