"""Experts shared out to ranks, and the loads of their routers."""
