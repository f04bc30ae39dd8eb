"""The parts of a rank's `Worker`, built from its plan; worker.py assembles them."""
