"""Huge inputs: feature maps that exceed the device memory are computed tile by tile, with halos."""

from ascend_lab.graph.tiling.bytes import peak_bytes
from ascend_lab.graph.tiling.grid import Step, Tile
from ascend_lab.graph.tiling.plan import Tiled, tile_graph
from ascend_lab.graph.tiling.run import evaluate_tiled
from ascend_lab.graph.tiling.timing import TiledTimeline, simulate_tiled, simulate_within, tile_for

__all__ = [
    "Step",
    "Tile",
    "Tiled",
    "TiledTimeline",
    "evaluate_tiled",
    "peak_bytes",
    "simulate_tiled",
    "simulate_within",
    "tile_for",
    "tile_graph",
]
