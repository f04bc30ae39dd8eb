"""Start, rendezvous and end of the processes of a run."""
