"""The decision space of vector operators: which stages share a nest, and how each is laid out."""

from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.space import VectorJob, VectorMeasure, VectorSpace

__all__ = ["VectorJob", "VectorMeasure", "VectorSpace", "vector_bound"]
