"""A vocabulary shared by the ranks of a pipeline, and losses of its logits."""
