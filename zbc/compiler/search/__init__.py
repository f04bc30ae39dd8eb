"""Schedules for real costs under a memory limit; `portfolio.search` is the entry."""
