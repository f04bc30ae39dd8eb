"""Two ops of a group that compute in turns, each during the collectives of the other."""
