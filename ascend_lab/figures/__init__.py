"""Figures: pure functions `fig_*(...) -> Figure`, loaded when first used.

To add a figure write it in a module of this package and add one line to `FIGURES`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

FIGURES: dict[str, str] = {
    # figure function -> module of this package that defines it
    "fig_streams": "machines",
    "fig_bound": "machines",
    "fig_tops_per_watt": "machines",
    "fig_divergence": "lanes",
    "fig_sectors": "lanes",
    "fig_warps": "lanes",
    "fig_systolic": "lanes",
    "fig_core_map": "core_map",
    "fig_core_path": "core_map",
    "fig_roofline": "roofline",
    "fig_gantt": "gantt",
    "fig_buffer_depths": "overlap",
    "fig_circuits": "overlap",
    "fig_more_buffers": "overlap",
    "fig_overlap": "overlap",
    "fig_validation": "validation",
    "fig_energy": "memory",
    "fig_nest": "schedules",
    "fig_pairs": "schedules",
    "fig_tails": "splits",
    "fig_choices": "splits",
    "fig_nested_rooflines": "memory",
    "fig_sharing": "memory",
    "fig_tile_roofline": "memory",
    "fig_tile_sides": "memory",
    "fig_working_set": "memory",
    "fig_addresses": "layout",
    "fig_element": "layout",
    "fig_padding": "layout",
    "fig_blocks": "matmul",
    "fig_rule": "matmul",
    "fig_tile_fit": "matmul",
    "fig_traffic": "matmul",
    "fig_useful_share": "matmul",
    "fig_windows": "conv",
    "fig_stored": "conv",
    "fig_reuse": "conv",
    "fig_groups": "conv",
    "fig_expression": "expressions",
    "fig_graph": "graphs",
    "fig_three_nests": "expressions",
    "fig_fold_crossover": "many_cores",
    "fig_many_cores": "many_cores",
    "fig_shares": "many_cores",
    "fig_blocks_and_conflicts": "movement",
    "fig_scatter_ways": "movement",
    "fig_levels": "fusing",
    "fig_fusion": "fusing",
    "fig_chain_lengths": "fusing",
    "fig_owners": "owners",
    "fig_attention_bytes": "flash",
    "fig_flash_blocks": "flash",
    "fig_online_softmax": "flash",
    "fig_batches": "graph_ir",
    "fig_dispatch": "graph_ir",
    "fig_network": "graph_ir",
    "fig_passes": "rewrites",
    "fig_arena": "packing",
    "fig_arenas": "packing",
    "fig_arena_traffic": "packing",
    "fig_plans": "packing",
    "fig_anytime": "cube_tuner",
    "fig_crossover": "cube_tuner",
    "fig_evolution": "cube_tuner",
    "fig_population": "cube_tuner",
    "fig_toy_tiles": "cube_tuner",
    "fig_before_after": "vector_tuner",
    "fig_grown_tree": "vector_tuner",
    "fig_search_tree": "vector_tuner",
    "fig_toy_tree": "vector_tuner",
    "fig_best_collective": "collectives",
    "fig_buckets": "gradient_tuner",
    "fig_caps": "gradient_tuner",
    "fig_holdings": "collectives",
    "fig_bands": "subgraph_tuner",
    "fig_halo": "subgraph_tuner",
    "fig_slice_times": "subgraph_tuner",
    "fig_credit": "tuned_networks",
    "fig_switches": "tuned_networks",
    "fig_time_left": "tuned_networks",
    "fig_waterfall": "tuned_networks",
    "fig_topology": "clusters",
    "fig_plan_cube": "parallel",
    "fig_loss_scale": "parallel",
    "fig_placements": "parallel",
    "fig_plan_memory": "parallel",
}


def __getattr__(name: str) -> Any:
    if name in FIGURES:
        return getattr(import_module(f"{__name__}.{FIGURES[name]}"), name)
    known = ", ".join(sorted(FIGURES)) or "none yet"
    raise AttributeError(f"ascend_lab.figures has no figure {name!r}; there are: {known}")


def __dir__() -> list[str]:
    return sorted([*FIGURES, "FIGURES"])
