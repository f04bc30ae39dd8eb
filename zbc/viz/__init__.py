"""Pictures of a plan or a run."""
