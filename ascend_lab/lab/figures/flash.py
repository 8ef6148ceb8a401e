"""Figures of FlashAttention: online softmax, the bytes that attention moves, blocks, pipelines."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ascend_lab.fused import flash_attention
from ascend_lab.lab.figures import nests, style as st
from ascend_lab.machine import isa, sim
from ascend_lab.machine.chip import Chip, load_chip
from ascend_lab.machine.sim.compiled import WORK
from ascend_lab.operators.kernels import FlashShape, FlashTiling, flash_shape as fs
from ascend_lab.operators.ops import expressions

MIB = 2**20
DTYPE_SIZE = 2


def fig_online_softmax(
    scores: Sequence[float] = (1.0, 3.0, 2.0, 5.0), block: int = 2
) -> st.LabFigure:
    """Draw online softmax after every block of `block` scores, and the quotient at the end."""
    values = np.asarray(scores, float)
    ends = list(range(block, len(scores) + block, block))
    fig, axes = st.new_figure(ncols=len(ends) + 1, height_in=2.6, sharey=True)
    alt_parts = []
    earlier_bars = np.zeros(0)
    total = 0.0
    maximum = -math.inf
    for ax, end in zip(axes, ends, strict=False):
        earlier_maximum = maximum
        maximum = max(maximum, float(values[:end].max()))
        factor = math.exp(earlier_maximum - maximum)
        bars = np.exp(values[:end] - maximum)
        total = factor * total + float(bars[len(earlier_bars) :].sum())
        _bars(ax, bars, len(earlier_bars), earlier_bars if factor < 1 else np.zeros(0), len(values))
        ax.set_title(f"m = {maximum:g}, l = {total:.3f}", loc="left")
        ax.set_xlabel(f"f = {factor:.3f}" if factor else "f = 0, nothing before")
        alt_parts.append(f"m {maximum:g}, l {total:.3f}, factor {factor:.3f}")
        earlier_bars = bars
    _bars(axes[-1], earlier_bars / total, 0, np.zeros(0), len(values), st.GREEN)
    axes[-1].set_title("divided by l", loc="left")
    axes[-1].set_xlabel("weights")
    axes[0].set_ylabel("e^(s - m)")
    weights = ", ".join(f"{w:.3f}" for w in earlier_bars / total)
    alt = f"Scores {', '.join(f'{s:g}' for s in values)} in blocks of {block}: after each block "
    return st.finish(fig, alt=f"{alt}{'; '.join(alt_parts)}. The weights at the end are {weights}.")


def _bars(
    ax: Any, bars: Any, earlier_count: int, earlier_bars: Any, count: int, colour: str = st.ORANGE
) -> None:
    """Draw bars, the first of them from earlier blocks, and outlines of their former heights."""
    colours = [st.SKY] * earlier_count + [colour] * (len(bars) - earlier_count)
    ax.bar(range(len(bars)), bars, color=colours, edgecolor=st.INK, width=0.7)
    if len(earlier_bars):
        outline: dict[str, Any] = {"fc": "none", "ec": st.GREY, "ls": (0, (3, 2)), "lw": 0.9}
        ax.bar(range(len(earlier_bars)), earlier_bars, width=0.7, **outline)
    ax.set(xlim=(-0.6, count - 0.4), ylim=(0, 1.18), xticks=range(count))
    for place, height in enumerate(bars):
        text = f"{height:.3f}".rstrip("0").rstrip(".")
        ax.text(place, height + 0.02, text, ha="center", fontsize=7)


# -- what attention costs: one kernel, or three that store the scores -----------------------------
@dataclass(frozen=True, slots=True)
class AttentionTraffic:
    """Cost of one attention on a chip, counted from the programs of all cores.

    `gm_bytes` cross between the cores and L2 or device memory, `memory_bytes` the device memory's
    own interface, where no phase finds in L2 what another left; `ub_bytes` is what the kernel keeps
    in UB (None where it is no single launch).
    """

    gm_bytes: int
    memory_bytes: int
    cycles: int
    ub_bytes: int | None = None


def flash_traffic(
    shape: FlashShape, chip: Chip, tiling: FlashTiling | None = None
) -> AttentionTraffic:
    """Return the cost of the FlashAttention kernel; raises as `flash_kernel`."""
    tiling = fs.default_tiling(shape, chip) if chip.combined and tiling is None else tiling
    timeline = sim.simulate_kernel(flash_attention.flash_kernel(shape, chip, tiling), chip)
    ub_bytes = fs.tile_bytes(shape, tiling)["UB"] if tiling and chip.combined else None
    return AttentionTraffic(
        nests.gm_bytes(timeline), timeline.memory_bytes, timeline.cycles, ub_bytes
    )


def separate_kernels(shape: FlashShape, chip: Chip) -> tuple[isa.Kernel, ...]:
    """Return the kernels of attention as three operators: scores, softmax, weighted sum."""
    n = shape.rows
    t = shape.keys
    q = (shape.batch, n, shape.depth)
    k = (shape.batch, t, shape.depth)
    v = (t, shape.width)
    scores = (shape.batch, n, t)
    dtypes = (shape.dtype, shape.dtype)
    masks = {"": [], "rows": [(shape.batch, 1, t)], "full": [scores]}[shape.mask]
    name = "masked_softmax" if masks else "softmax"
    return (
        expressions.compile("attention_scores", [q, k], dtypes, chip, scale=shape.scale),
        expressions.compile(name, [scores, *masks], dtypes[: 1 + len(masks)], chip),
        expressions.compile("attention_context", [scores, (shape.batch, *v)], dtypes, chip),
    )


def separate_traffic(shape: FlashShape, chip: Chip) -> AttentionTraffic:
    """Return the cost of attention as three operators, whose scores pass through GM."""
    timelines = [sim.simulate_kernel(kernel, chip) for kernel in separate_kernels(shape, chip)]
    costs = [(nests.gm_bytes(line), line.memory_bytes, line.cycles) for line in timelines]
    return AttentionTraffic(*map(sum, zip(*costs, strict=True)))


def fig_attention_bytes(lengths: Sequence[int]) -> st.LabFigure:
    """Draw bytes against the length, three operators and one kernel: cores and GM, device memory.

    Dots are counted from programs; lines on the left are 8 n^2 (scores and weights of fp16 written
    and read once) and `traffic_bytes` for blocks of 128 rows, dashes q, k, v and the result once.
    """
    rows = 128
    depth = 64
    chip = "Ascend910A"
    device = load_chip(chip)
    shapes = [FlashShape(1, n, n, depth, depth, fs.default_scale(depth)) for n in lengths]
    tiling = FlashTiling(rows, 128)
    separate_costs = [separate_traffic(s, device) for s in shapes]
    flash_costs = [flash_traffic(s, device, tiling) for s in shapes]
    least_bytes = [4 * DTYPE_SIZE * n * depth for n in lengths]
    formula_bytes = [8 * n * n for n in lengths], [fs.traffic_bytes(s, tiling) for s in shapes]
    fig, axes = st.new_figure(ncols=2, height_in=3.2, sharey=True)
    panels = (("between cores and GM", "gm_bytes"), ("device memory", "memory_bytes"))
    alt_parts = []
    for ax, (name, field) in zip(axes, panels, strict=True):
        separate_bytes = [getattr(cost, field) for cost in separate_costs]
        flash_bytes = [getattr(cost, field) for cost in flash_costs]
        ax.plot(lengths, separate_bytes, "s", color=st.VERMILLION, ms=5, label="three operators")
        ax.plot(lengths, flash_bytes, "o", color=st.BLUE, ms=5, label="FlashAttention")
        ax.plot(lengths, least_bytes, color=st.GREY, ls=(0, (3, 2)), label="q, k, v, result once")
        _scale_axes(ax, lengths)
        ax.set_title(name, loc="left")
        alt_parts.append(
            f"{name}: three operators {_span(separate_bytes)}, FlashAttention {_span(flash_bytes)}"
        )
    for curve, colour, text in zip(
        formula_bytes, (st.VERMILLION, st.BLUE), ("8 n²", "the law"), strict=True
    ):
        at = (lengths[-1], curve[-1])
        look = {"textcoords": "offset points", "fontsize": 8}
        axes[0].plot(lengths, curve, color=colour, ls="-", lw=1)
        axes[0].annotate(text, at, (6, -3), **look)
    axes[0].set_ylabel("MiB")
    axes[0].legend(loc="upper left")
    span = f"n from {lengths[0]:,} to {lengths[-1]:,}, width {depth}, blocks of {rows} rows"
    end = f"q, k, v and result once: {_span(least_bytes)}"
    return st.finish(fig, alt=f"Bytes on {chip}, {span}. {'. '.join(alt_parts)}; {end}.")


def _scale_axes(ax: Any, lengths: Sequence[int]) -> None:
    """Make both axes logarithmic: lengths across, sizes in MiB up."""
    sizes_mib = [2**p for p in range(-2, 17, 2)]
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(xlim=(lengths[0] / 1.4, lengths[-1] * 3), xlabel="length n")
    ax.set_xticks(lengths, [f"{n:,}" for n in lengths])
    ax.set_yticks([size * MIB for size in sizes_mib], [f"{size:,}" for size in sizes_mib])
    ax.set_ylim(top=2**18 * MIB)


def _span(sizes: Sequence[int]) -> str:
    """Return the first and the last of some sizes in words."""
    return f"{_mib(sizes[0])} to {_mib(sizes[-1])}"


def _mib(size: float) -> str:
    """Return bytes as MiB with three digits, or without a fraction from 100 on."""
    return f"{size / MIB:,.0f} MiB" if size >= 100 * MIB else f"{size / MIB:.3g} MiB"


def fig_flash_blocks(
    length: int = 1024, width: int = 64, rows: int = 128, keys: int = 128, chip: str = "Ascend910A"
) -> st.LabFigure:
    """Draw the blocks of the scores that exist one at a time, and what they take on the core."""
    device = load_chip(chip)
    shape = FlashShape(1, length, length, width, width, fs.default_scale(width))
    blocks = -(-length // rows)
    tiling = FlashTiling(rows, keys, 1, min(blocks, device.core_count))
    fig, (scores_ax, buffers_ax) = st.new_figure(ncols=2, height_in=2.9, width_ratios=(1, 1.25))
    block_rows = min(rows, length)
    block_keys = min(keys, length)
    core_blocks = -(-blocks // tiling.grid_rows)
    st.box(scores_ax, 0, 0, length, length, fc=st.LIGHT, ec=st.INK)
    st.box(scores_ax, 0, 0, length, min(core_blocks * rows, length), fc=st.SKY, ec="none")
    for at in range(rows, length, rows):
        scores_ax.plot([0, length], [at, at], color=st.INK, lw=0.5, ls="-")
    for at in range(keys, length, keys):
        scores_ax.plot([at, at], [0, block_rows], color=st.INK, lw=0.5, ls="-")
    st.box(scores_ax, 0, 0, block_keys, block_rows, fc=st.ORANGE, ec=st.INK)
    scores_ax.set(
        xlim=(0, length), ylim=(length, 0), aspect="equal", xlabel="keys", ylabel="rows of q"
    )
    scores_ax.set(xticks=[0, length], yticks=[0, length])
    scores_ax.set_title("blue: first core, orange: a block", loc="left")
    shares = {s: n / device.buffers[s] for s, n in fs.tile_bytes(shape, tiling).items()}
    _draw_shares(buffers_ax, shares, device)
    text = "does not fit"
    if fs.fits(shape, tiling, device):
        cost = flash_traffic(shape, device, tiling)
        text = f"{_mib(cost.gm_bytes)}, {cost.cycles:,} cycles"
    buffers_ax.set_title(text, loc="left")
    parts = ", ".join(f"{space} {share:.0%}" for space, share in shares.items())
    alt = f"Scores {length} x {length} in blocks of {rows} x {keys} on {chip}, {text}"
    return st.finish(fig, alt=f"{alt}. Use: {parts}.")


def _draw_shares(ax: Any, shares: dict[str, float], chip: Chip) -> None:
    """Draw how full each buffer is; one that overflows is red and hatched."""
    for place, share in enumerate(shares.values()):
        overflows = share > 1
        look = {"fc": st.VERMILLION, "hatch": "//"} if overflows else {"fc": st.BLUE}
        ax.barh(place, min(share, 1.3), ec=st.INK, height=0.6, **look)
        ax.text(min(share, 1.3) + 0.02, place, f"{share:.0%}", va="center", fontsize=8)
    ax.axvline(1.0, color=st.INK, lw=0.9, ls="-")
    ax.set_yticks(range(len(shares)), [f"{s} {chip.buffers[s] // 1024} KiB" for s in shares])
    ax.set(xlim=(0, 1.55), ylim=(len(shares) - 0.5, -0.5))
    ax.set_xticks([0, 0.5, 1], ["0", "half", "full"])
    ax.spines["left"].set_visible(False)


# -- the pipeline of separate cube and vector cores ------------------------------------------------
STAGES = {"QK": st.BLUE, "P": st.ORANGE, "PV": st.SKY, "GU": st.GREEN}
STAGE_OF_TENSOR = {
    "AIC": {**dict.fromkeys(("q", "k", "s"), "QK"), **dict.fromkeys(("v", "p", "o"), "PV")},
    "AIV": {**dict.fromkeys(("s", "p"), "P"), **dict.fromkeys(("o", "y"), "GU")},
}
"""Which stage moves a tensor, by the kind of core."""
STAGE_OF_FLAG = {1: "QK", 0: "P", 2: "PV", 4: "GU"}
"""Flags that a stage waits for before a tile: see `kernels.flash_split`."""
EARLY = ("q", "k", "v")
"""Tensors that are loaded before a tile's wait."""
GAP_CYCLES = 64
"""Work with less between is drawn as one piece."""
ROWS = {
    "AIC.MTE2": "cube: loads",
    "AIC.M": "cube",
    "AIC.FIX": "fix pipe",
    "AIV.MTE2": "vector: loads",
    "AIV.V": "vector unit",
}


def fig_flash_pipeline(timeline: sim.Timeline, window: tuple[int, int]) -> st.LabFigure:
    """Draw what the pipes of an AI core do in `window` (cycles), coloured by stage.

    Numbers on what a stage does are those of its tile. `timeline` is that of one block of rows.
    """
    first, last = window
    pieces = _stage_pieces(timeline)
    fig, ax = st.new_figure(height_in=2.7)
    busy = dict.fromkeys(ROWS, 0)
    for pipe, stage, tile, start, end in pieces:
        low = max(start, first)
        high = min(end, last)
        if low >= high:
            continue
        busy[pipe] += high - low
        row = list(ROWS).index(pipe)
        ax.barh(row, high - low, 0.66, left=low, color=STAGES[stage], ec=st.INK, lw=0.4)
        if high - low > (last - first) / 60:
            ink = st.PAPER if stage == "QK" else st.INK
            st.put(ax, (low + high) / 2, row, str(tile), fontsize=7, color=ink)
    st.name_rows(ax, ROWS.values())
    ax.set(xlim=window, xlabel="cycles")
    looks = {stage: {"fc": colour, "ec": st.INK} for stage, colour in STAGES.items()}
    st.key(fig, looks, loc="outside upper center", ncols=len(looks))
    shares = ", ".join(f"{ROWS[p]} {c / (last - first):.0%}" for p, c in busy.items())
    visible_tiles = [(stage, tile) for _, stage, tile, a, b in pieces if a < last and b > first]
    tiles_by_stage = {s: [tile for stage, tile in visible_tiles if stage == s] for s in STAGES}
    tiles = ", ".join(f"{s} tiles {min(t)} to {max(t)}" for s, t in tiles_by_stage.items() if t)
    alt = f"Gantt chart of {timeline.name}, cycles {first} to {last}: {tiles}. Busy: {shares}."
    return st.finish(fig, alt=alt)


def _stage_pieces(timeline: sim.Timeline) -> list[tuple[str, str, int, int, int]]:
    """Return (pipe, stage, tile, start, end) of work without gaps; times in cycles.

    A copy belongs to the stage of its tensor in GM, and so do the steps written after it in the
    program, up to the next copy. A tile begins with a wait for a flag; only q, k and v are loaded
    before that wait.
    """
    program = timeline.compiled
    record = sim.run_reference(program, record=True)[2]
    assert record is not None
    stages = list[str]()
    stage = ""
    previous_core = ""
    for step in program.steps:
        core = program.pipes[step.pipe].partition(".")[0]
        stage = stage if core == previous_core else ""
        previous_core = core
        moved = [r.buffer.name for r in program.sources[step.source].regions if r.space == "GM"]
        stage = STAGE_OF_TENSOR[core][moved[0]] if moved else stage
        stages.append(stage)
    wait_counts = Counter[tuple[str, str]]()
    pieces = list[tuple[str, str, int, int, int]]()
    for number, start, end in zip(record.step, record.start, record.end, strict=True):
        step = program.steps[number]
        stage = stages[number]
        pipe = program.pipes[step.pipe]
        source = program.sources[step.source]
        if source.op == "cross_wait":
            wait_counts[pipe, STAGE_OF_FLAG.get(source.int_attr("id"), "")] += 1
        elif step.kind == WORK and source.op != "cross_set" and stage and pipe in ROWS:
            is_early_load = source.op == "data_copy" and source.srcs[0].buffer.name in EARLY
            # an early load is for the tile of the next wait, other work for that of the last one
            waits = wait_counts[pipe, stage]
            tile = waits if is_early_load else waits - 1
            same_piece = bool(pieces) and pieces[-1][:3] == (pipe, stage, tile)
            if same_piece and start - pieces[-1][4] < GAP_CYCLES:
                start_of_piece = pieces.pop()[3]
            else:
                start_of_piece = start
            pieces.append((pipe, stage, tile, start_of_piece, end))
    return pieces


# -- a ring between two sides, tile by tile --------------------------------------------------------
def fig_ring(
    slots: int = 2, make: int = 100, use: int = 100, trip: int = 300, tiles: int = 8
) -> st.LabFigure:
    """Draw when each tile is made and used: two sides, a ring of slots, a way of `trip` cycles."""
    made_at_cycles = list[int]()
    used_at_cycles = list[int]()
    made_at = 0
    used_at = 0
    for tile in range(tiles):
        # a slot is free once the tile before it in this slot was used, and the maker knows it
        slot_free_at = used_at_cycles[tile - slots] + trip if tile >= slots else 0
        made_at = max(made_at, slot_free_at) + make
        used_at = max(used_at, made_at + trip) + use
        made_at_cycles.append(made_at)
        used_at_cycles.append(used_at)
    fig, ax = st.new_figure(height_in=1.9)
    for row, ends, length, colour in (
        (0, made_at_cycles, make, st.BLUE),
        (1, used_at_cycles, use, st.ORANGE),
    ):
        for tile, end in enumerate(ends):
            ax.barh(row, length, 0.6, left=end - length, color=colour, ec=st.INK, lw=0.4)
            ink = st.PAPER if colour == st.BLUE else st.INK
            st.put(ax, end - length / 2, row, str(tile), fontsize=7, color=ink)
    for made_at, used_at in zip(made_at_cycles, used_at_cycles, strict=True):
        ax.plot([made_at, used_at - use], [0.3, 0.7], color=st.GREY, lw=0.8)
    st.name_rows(ax, ("maker", "user"))
    round_trip = make + use + 2 * trip
    period = max(make, use, round_trip / slots)
    ax.set(xlim=(0, used_at_cycles[-1] * 1.02), xlabel="cycles")
    ax.set_title(f"{slots} slots: {period:g} cycles a tile in the long run", loc="left")
    alt = (
        f"Tiles made in {make} and used in {use} cycles, {trip} cycles apart, in a ring of {slots} "
        f"slots: the last of {tiles} is used at {used_at_cycles[-1]:,}; {period:g} cycles a tile."
    )
    return st.finish(fig, alt=alt)
