"""Training: gradients of whole graphs, and the time of a step."""
