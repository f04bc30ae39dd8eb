"""Decides the open settings of a job in one loop: variants, one evaluation of each, moves around the best."""
