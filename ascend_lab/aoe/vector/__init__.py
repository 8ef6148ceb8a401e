"""The decision space of vector operators: which stages share a nest, and how each is laid out."""

from ascend_lab.aoe.vector.bound import vector_bound
from ascend_lab.aoe.vector.job import NestCosts, VectorJob, VectorMeasure, optimum
from ascend_lab.aoe.vector.space import VectorSpace, vector_space

__all__ = [
    "NestCosts",
    "VectorJob",
    "VectorMeasure",
    "VectorSpace",
    "optimum",
    "vector_bound",
    "vector_space",
]
