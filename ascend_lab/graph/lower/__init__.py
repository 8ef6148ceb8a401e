"""Lowering: from pieces of a graph to kernels."""

from ascend_lab.graph.lower.front import CONVOLUTIONS, PRODUCTS, lower
from ascend_lab.graph.lower.piece import Lowered, Piece, piece_of
from ascend_lab.graph.lower.stored import packed

__all__ = ["CONVOLUTIONS", "PRODUCTS", "Lowered", "Piece", "lower", "packed", "piece_of"]
