"""Costs of ops, in ms and bytes: given, estimated from model and hardware, or profiled."""
