"""Lowering: from pieces of a graph to kernels."""

from ascend_lab.graph.lower.choice import Choice, choice_of
from ascend_lab.graph.lower.front import CONVOLUTIONS, PRODUCTS, by_template, lower
from ascend_lab.graph.lower.piece import Lowered, Piece, piece_of
from ascend_lab.graph.lower.stored import packed

__all__ = [
    "CONVOLUTIONS",
    "PRODUCTS",
    "Choice",
    "Lowered",
    "Piece",
    "by_template",
    "choice_of",
    "lower",
    "packed",
    "piece_of",
]
