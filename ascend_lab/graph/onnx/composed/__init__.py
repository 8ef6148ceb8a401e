"""Converters that compose many nodes or compute tables while importing; they fill `CONVERTERS`."""
