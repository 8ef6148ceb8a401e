"""Tuners: spaces of schedules, searches over them, and how far from optimal they end."""
