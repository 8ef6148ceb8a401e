"""Tilings of matrix products and convolutions as a space: bounds, walks, proofs."""
