"""Parallel plans: memory, time, and the search for the best."""
