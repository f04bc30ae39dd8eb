"""Training data: samples, their order, and the microbatches of a step."""
