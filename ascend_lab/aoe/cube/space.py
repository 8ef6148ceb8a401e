"""Builds the search space of a matrix product's tilings, as a table of decisions (genes).

A table has a column for each gene and a row for each tiling. The genes in the order of decision:
core grid, L0 tile, loop order, which operand stays in L1, which bypasses L1, K tile, K tiles in a
stage, slots of L1 and of L0. Sizes are in fractals.

The space leaves out only tilings that cannot win:
- Of all tile sizes that give every core the same number of tiles, the smallest represents the
  others, because each of its instructions is as short or shorter. 10 fractals on 2 cores: tiles of
  3 and of 4 both give 2 tiles to a core, so 4 is left out.
- If two slots fit, one slot is left out: with two no wait gets longer, and the flags of the second
  slot cost a few cycles at most.
- Only one loop order is kept if no operand stays in L1, all tiles are equal, and everything fits
  L2: the order then has no effect.
- K tiles and stages divide K as evenly as possible, with one size for each number of parts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ascend_lab.aoe.space import Point, TableSpace
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.isa import FRACTAL, c0_of
from ascend_lab.operators.kernels.conv_shape import ConvShape
from ascend_lab.operators.kernels.default_schedules import (
    candidates,
    default_schedule,
    estimate,
    no_room,
)
from ascend_lab.operators.kernels.epilogue_plan import Demand, chip_left, fitting
from ascend_lab.operators.kernels.gemm_schedule import GemmSchedule, GemmShape, Tilings
from ascend_lab.operators.kernels.tiles import chunks

Array = NDArray[np.int64]
Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]
Columns = dict[str, Array]
Shape = GemmShape | ConvShape
TEXT_GENES: Mapping[str, tuple[str, ...]] = {
    "order": ("mn", "nm"),
    "keep": ("", "a", "b"),
    "bypass": ("", "a", "ab", "b"),
    "window": ("flat", "strip", "stacked"),
}
"""Genes that are words; a table holds their index in these tuples: "nm" is order 1."""
MAX_POINTS = 1 << 19
"""A space has at most this many points, 524,288; larger tables are thinned out."""
SPACING_RATIOS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
"""The smallest ratio between neighbouring tile sizes; the first that makes a table small enough
is taken, and 1.0 keeps every size."""


def ceil_div_array(value: Array | int, unit: Array | int) -> Array:
    """Return value / unit rounded up."""
    return np.asarray(-(-np.asarray(value, np.int64) // unit))


def even_sizes(total: int) -> Array:
    """Return the smallest size for each number of parts of `total`: 1, 2, 3, 5 for 5.

    5 in 1 part is 5, in 2 parts 3 + 2, in 3 parts 2 + 2 + 1, in 5 parts 1 each.
    """
    return np.unique(ceil_div_array(total, np.arange(1, total + 1)))


def thinned(values: Array, ratio: float) -> Array:
    """Return ascending values thinned out: each is at least `ratio` times the one before.

    1, 2, 3, 5, 8 with ratio 2 become 1, 2, 5.
    """
    spaced_values: list[int] = []
    for value in values.tolist():
        if not spaced_values or value >= ratio * spaced_values[-1]:
            spaced_values.append(value)
    return np.array(spaced_values, np.int64)


def core_counts(core_count: int, ratio: float) -> list[int]:
    """Return the numbers of cores to try along a side, thinned out; 1 and all are included."""
    counts: list[int] = np.union1d(
        thinned(np.arange(1, core_count + 1), ratio), [core_count]
    ).tolist()
    return counts


def coded(column: Array) -> tuple[Array, Array]:
    """Return the distinct values in ascending order, and each entry's index among them."""
    # (8, 2, 8) has the values (2, 8), at which its entries have the indices 1, 0, 1
    is_present = np.bincount(column.astype(np.intp)) > 0
    return np.flatnonzero(is_present), (np.cumsum(is_present) - 1)[column]


def distinct_rows(columns: Sequence[Array]) -> tuple[list[Array], Array, Array]:
    """Return the distinct rows in order (as columns), the first index of each, and row numbers.

    The row number tells for every row of the input which of the distinct rows it equals.
    """
    # one integer for each row: digits in mixed radix, as 10 * tens + ones
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, row_number = np.unique(key, return_index=True, return_inverse=True)
    return [column[first] for column in columns], first, row_number


def rows_at(table: Columns, index: Array | Mask) -> Columns:
    """Return the rows at `index`."""
    return {name: column[index] for name, column in table.items()}


def cross_product(table: Columns, more: Columns) -> Columns:
    """Return every row of one table with every row of another."""
    count = len(next(iter(table.values())))
    times = len(next(iter(more.values())))
    # rows 1, 2 with a, b: the first table is repeated as 1, 1, 2, 2, the second tiled as a, b, a, b
    out = {name: np.repeat(column, times) for name, column in table.items()}
    return out | {name: np.tile(column, count) for name, column in more.items()}


def with_column(table: Columns, name: str, lists: Sequence[Array], list_of_row: Array) -> Columns:
    """Return each row once for every value of list number `list_of_row[row]`, as column `name`.

    Rows (r0, r1) with the lists [1, 2] and [3] become (r0, 1), (r0, 2), (r1, 3).
    """
    lengths = np.array([len(values) for values in lists], np.intp)
    # the lists lie end to end in `flat`: lengths (2, 1) start at 0 and 2
    flat = np.concatenate([np.asarray(values, np.int64) for values in lists])
    starts = np.cumsum(lengths) - lengths
    copies = lengths[list_of_row]
    row = np.repeat(np.arange(len(list_of_row)), copies)
    # 0, 1, 2, ... inside the copies of a row
    first_copy = np.cumsum(copies) - copies
    position = np.arange(len(row)) - np.repeat(first_copy, copies)
    return rows_at(table, row) | {name: flat[starts[list_of_row[row]] + position]}


class CubeSpace(TableSpace):
    """All tilings of one cube operator on one chip; `genes` are the columns by name, as numbers.

    `chip.buffers` are the bytes that remain for the operands after the epilogue's `demand`.
    """

    def __init__(
        self, shape: Shape, chip: Chip, demand: Demand | None, names: Sequence[str], table: Columns
    ) -> None:
        """Sort the rows and drop duplicates; raise `InputError` for an empty table."""
        if not len(table[names[0]]):
            raise InputError("a tiling that fits", f"none of {shape} on {chip.name}", "split it")
        self.shape = shape
        self.chip = chip
        self.demand = demand
        # codes are small numbers, so that the keys of `distinct_rows` fit 64 bits
        coded_columns = [coded(table[name]) for name in names]
        _, first, _ = distinct_rows([code for _, code in coded_columns])
        self.genes: Columns = {name: table[name][first] for name in names}
        values = []
        for name, (numbers, _) in zip(names, coded_columns, strict=True):
            values.append(tuple(word_of(name, int(number)) for number in numbers))
        codes = np.stack([code[first] for _, code in coded_columns], axis=1)
        self._set_table(names, tuple(values), codes.astype(np.int32))


def word_of(name: str, number: int) -> int | str:
    """Return the value of a gene from its number in a table: 1 of "order" is "nm"."""
    return TEXT_GENES[name][number] if name in TEXT_GENES else number


def number_of(name: str, value: int | str) -> int:
    """Return the number that stands for the value of a gene in a table."""
    return TEXT_GENES[name].index(str(value)) if name in TEXT_GENES else int(value)


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """The functions in which products and convolutions differ.

    - names: the genes in the order of decision
    - space: all tilings of a shape on a chip
    - row: the genes of a schedule as a table of one row
    - schedule: the schedule of a point
    - default: the schedule that is used without a search
    - roles: the tensors that are the operands "a" and "b", if they have other names
    """

    names: tuple[str, ...]
    space: Callable[..., CubeSpace]
    row: Callable[..., Columns]
    schedule: Callable[..., GemmSchedule]
    default: Callable[..., GemmSchedule]
    roles: Mapping[str, str]


GEMM_NAMES = (
    *("rows", "cols", "m", "n", "order", "keep", "bypass"),
    *("k", "step", "a_l1", "b_l1", "a_l0", "b_l0"),
)
"""The genes of a product: rows and columns of cores, L0 tile, loop order, operands that stay in L1
or bypass it, K tile, K tiles in a stage, and numbers of slots."""
LOOP_GENES = ("order", "keep", "bypass")
SLOT_GENES = ("a_l1", "b_l1", "a_l0", "b_l0")
LOOP_CHOICES = tuple(
    (order, keep, bypass)
    for order in range(2)
    for keep in ((0, 1) if order == 0 else (0, 2))
    for bypass, word in enumerate(TEXT_GENES["bypass"])
    if not keep or TEXT_GENES["keep"][keep] not in word
)
"""Compatible (order, keep, bypass), as numbers: the outer loop's operand may stay in L1 (A in order
"mn", B in "nm"), and an operand that stays there does not bypass it."""


def gemm_space(
    shape: GemmShape,
    chip: Chip,
    demand: Demand | None = None,
    max_points: int = MAX_POINTS,
    *,
    default: bool | GemmSchedule = True,
) -> CubeSpace:
    """Return all tilings of a product; raises `CapacityError` if not even the smallest fits.

    A space of more than `max_points` points is thinned out: tile sizes keep one of
    `SPACING_RATIOS` between them. `default` adds a schedule that thinning must not drop: True for
    the best in closed form.
    """
    chip = chip_left(chip, demand)
    row = _default_row(shape, chip, demand) if default is True else {}
    row = gemm_row(shape, chip, default) if isinstance(default, GemmSchedule) else row
    for ratio in SPACING_RATIOS:
        table = _depths(shape, chip, _tiles(shape, chip, demand, ratio), ratio)
        # loop orders, kept operands and slots multiply the rows by 4 or more: do not even try
        if 4 * len(table["m"]) > max_points and ratio < SPACING_RATIOS[-1]:
            continue
        table = _orders_and_slots(shape, chip, demand, table)
        if len(table["m"]) < max_points:
            break
    all_rows = {n: np.append(table[n], row.get(n, np.zeros(0, np.int64))) for n in GEMM_NAMES}
    return CubeSpace(shape, chip, demand, GEMM_NAMES, all_rows)


def area_of(dtype: str) -> int:
    """Return the bytes of a fractal of an operand."""
    return FRACTAL * c0_of(dtype) * DTYPE_BYTES[dtype]


def side_options(total: int, max_tile: int, cores: int, ratio: float) -> Array:
    """Return (cores used, tile) pairs for one side: the smallest tile for each number of tiles."""
    pairs = set()
    for count in core_counts(cores, ratio):
        # 10 fractals on 2 cores: tiles of 5, 3, 2 and 1 give a core 1, 2, 3 and 5 of them
        tiles = np.unique(ceil_div_array(total, count * np.arange(1, -(-total // count) + 1)))
        for tile in thinned(tiles[tiles <= max_tile], ratio):
            # in tiles of 5 the 10 fractals occupy 2 cores, however many may be used
            pairs.add((len(chunks(total, int(tile), count)), int(tile)))
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def tile_fits(shape: GemmShape, chip: Chip, demand: Demand | None, table: Columns) -> Mask:
    """Tell which tiles of C fit L0C and, on their way out, UB or the bias table."""
    # a fractal of sums, fp32 or int32, has 16 x 16 x 4 bytes = 1 KiB
    fits: Mask = table["m"] * table["n"] * FRACTAL * FRACTAL * 4 <= chip.buffers["L0C"]
    if demand is None:
        # C leaves through UB at least one column of fractals at a time, in two slots
        column = table["m"] * FRACTAL * FRACTAL * DTYPE_BYTES[shape.out_dtype]
        return fits & (2 * column <= chip.buffers["UB"]) if chip.combined else fits
    ones = np.ones_like(table["m"])
    fitting_rows = fitting(demand, chip, Tilings(table["m"], ones, table["n"], ones, ones, ones))
    return fits & np.isin(np.arange(len(ones)), fitting_rows)


def _tiles(shape: GemmShape, chip: Chip, demand: Demand | None, ratio: float) -> Columns:
    """Return core grids and tiles of C."""
    m1, _, n1 = shape.fractals
    area = area_of(shape.dtype)
    # a tile of C is highest where its K tile is a single fractal deep
    rows = side_options(m1, chip.buffers["L0A"] // area, chip.core_count, ratio)
    cols = side_options(n1, chip.buffers["L0B"] // area, chip.core_count, ratio)
    table = cross_product(
        {"rows": rows[:, 0], "m": rows[:, 1]}, {"cols": cols[:, 0], "n": cols[:, 1]}
    )
    table = rows_at(table, table["rows"] * table["cols"] <= chip.core_count)
    return rows_at(table, tile_fits(shape, chip, demand, table))


def _depths(shape: GemmShape, chip: Chip, table: Columns, ratio: float) -> Columns:
    """Add K tiles and the slots of L0, and the K tiles of a stage."""
    k1 = shape.fractals[1]
    ks = thinned(even_sizes(k1), ratio)
    table = with_l0_slots(cross_product(table, {"k": ks}), chip, area_of(shape.dtype))
    lists = [thinned(even_sizes(-(-k1 // int(k))), ratio) for k in ks]
    return with_column(table, "step", lists, np.searchsorted(ks, table["k"]))


def with_l0_slots(table: Columns, chip: Chip, area: int) -> Columns:
    """Return the rows whose tiles fit L0, with as many slots as fit."""
    for side, name, buffer in (("m", "a_l0", "L0A"), ("n", "b_l0", "L0B")):
        # 64 KiB of L0A hold one tile of 40 KiB, and two of 20 KiB: a third slot is not used
        table[name] = np.minimum(chip.buffers[buffer] // (table[side] * table["k"] * area), 2)
    return rows_at(table, (table["a_l0"] > 0) & (table["b_l0"] > 0))


def _orders_and_slots(
    shape: GemmShape, chip: Chip, demand: Demand | None, table: Columns
) -> Columns:
    """Add loop order, the operands that stay in or bypass L1, and the slots of L1."""
    tables = []
    irrelevant = _order_is_irrelevant(shape, chip, demand, table)
    for order, keep, bypass in LOOP_CHOICES:
        operands = TEXT_GENES["bypass"][bypass].upper()
        # without a path from GM to L0A no tiling lets A bypass L1
        if any(("GM", f"L0{operand}") not in chip.paths for operand in operands):
            continue
        numbers = {"order": order, "keep": keep, "bypass": bypass}
        choice_table = dict(table)
        for name, number in numbers.items():
            choice_table[name] = np.full_like(table["m"], number)
        canonical_genes = _canonical(shape, choice_table)
        agreements = [choice_table[name] == column for name, column in canonical_genes.items()]
        # order nm is left out if it has no effect, unless B stays in L1 with it
        if order and not keep:
            agreements.append(~irrelevant)
        canonical_rows = rows_at(choice_table, np.all(agreements, axis=0))
        a_bytes, b_bytes = slot_bytes(shape, canonical_rows)
        tables.append(with_l1_slots(canonical_rows, chip, a_bytes, b_bytes))
    return {name: np.concatenate([part[name] for part in tables]) for name in tables[0]}


def _order_is_irrelevant(
    shape: GemmShape, chip: Chip, demand: Demand | None, table: Columns
) -> Mask:
    """Tell where the loop order has no effect: equal tiles on the largest core, all in L2."""
    m1, k1, n1 = shape.fractals
    stored = demand.stored_bytes + demand.loaded_bytes if demand else DTYPE_BYTES[shape.out_dtype]
    total_bytes = (m1 + n1) * k1 * area_of(shape.dtype) + m1 * n1 * FRACTAL * FRACTAL * stored
    # of several rows of cores the first has full tiles only: a ragged one is on the last row
    even_m = (table["rows"] > 1) | (m1 % table["m"] == 0)
    even_n = (table["cols"] > 1) | (n1 % table["n"] == 0)
    irrelevant: Mask = even_m & even_n & (total_bytes <= chip.l2.size_bytes)
    return irrelevant


def uses(table: Columns, gene: str, name: str) -> Mask:
    """Tell where the word of a gene names operand "a" or "b"."""
    word_names_it = np.array([name in word for word in TEXT_GENES[gene]])
    mask: Mask = word_names_it[table[gene]]
    return mask


def slot_bytes(shape: GemmShape, table: Columns) -> tuple[Array, Array]:
    """Return the bytes of one slot of A and of B in L1."""
    k1 = shape.fractals[1]
    area = area_of(shape.dtype)
    stage = table["k"] * table["step"]
    sizes = []
    for side, name in (("m", "a"), ("n", "b")):
        # an operand that stays in L1 is there with its whole depth, not only with a stage
        depth = np.where(uses(table, "keep", name), k1, stage)
        sizes.append(np.where(uses(table, "bypass", name), 0, table[side] * depth * area))
    return sizes[0], sizes[1]


def with_l1_slots(table: Columns, chip: Chip, a: Array, b: Array) -> Columns:
    """Return the rows that fit L1, once for each maximal choice of slots.

    If two slots fit for A or for B, but not for both, the row occurs twice.
    """
    l1_bytes = chip.buffers["L1"]
    # L1 of 1024 KiB, A 400 and B 200: two of A (1000) or two of B (800) fit, two of each do not
    two_of_each = 2 * (a + b) <= l1_bytes
    two_of_a = ~two_of_each & (2 * a + b <= l1_bytes)
    two_of_b = ~two_of_each & (a + 2 * b <= l1_bytes)
    table |= {
        "a_l1": np.where(two_of_each | two_of_a, 2, 1),
        "b_l1": np.where(two_of_each | (two_of_b & ~two_of_a), 2, 1),
    }
    second_choice = rows_at(table, two_of_a & two_of_b)
    second_choice |= {
        "a_l1": np.ones_like(second_choice["m"]),
        "b_l1": np.full_like(second_choice["m"], 2),
    }
    fitting_rows = rows_at(table, a + b <= l1_bytes)
    return {name: np.concatenate([c, second_choice[name]]) for name, c in fitting_rows.items()}


def _canonical(shape: GemmShape, table: Columns) -> Columns:
    """Return the genes keep, order and step that represent all tilings with the same kernel.

    With one stage and one tile of n on a core, A is loaded once anyway: "keep a" equals "".
    """
    m1, k1, n1 = shape.fractals
    # 10 fractals in tiles of 4 on 2 rows of cores: 3 tiles, of which the busier row has 2
    m_tiles = ceil_div_array(ceil_div_array(m1, table["m"]), table["rows"])
    n_tiles = ceil_div_array(ceil_div_array(n1, table["n"]), table["cols"])
    one_stage = table["k"] * table["step"] >= k1
    keep = np.where(one_stage & (table["keep"] == 1) & (n_tiles == 1), 0, table["keep"])
    keep = np.where(one_stage & (table["keep"] == 2) & (m_tiles == 1), 0, keep)
    stays = {n: uses(table | {"keep": keep}, "keep", n) | uses(table, "bypass", n) for n in "ab"}
    one_tile = (m_tiles == 1) | (n_tiles == 1)
    return {
        "keep": keep,
        "order": np.where(one_tile & (keep == 0), 0, table["order"]),
        # nothing is loaded stage by stage: the number of K tiles in a stage has no effect
        "step": np.where(stays["a"] & stays["b"], 1, table["step"]),
    }


def _default_row(shape: GemmShape, chip: Chip, demand: Demand | None) -> Columns:
    """Return the genes of the best schedule by the closed form; raise an error if none fits."""
    tilings = candidates(shape, chip)
    tilings = tilings.take(fitting(demand, chip, tilings))
    if not len(tilings.m):
        raise no_room(chip)
    best = int(np.argmin(estimate(shape, chip, tilings, demand)))
    return gemm_row(shape, chip, tilings.schedule(best, shape.dtype))


def gemm_row(shape: GemmShape, _: Chip, schedule: GemmSchedule) -> Columns:
    """Return the genes of a product's schedule as a table of one row."""
    m1, k1, n1 = shape.fractals
    m = schedule.base_m // FRACTAL
    n = schedule.base_n // FRACTAL
    rows = chunks(m1, m, schedule.grid_rows)
    cols = chunks(n1, n, schedule.grid_cols)
    k = min(max(schedule.base_k // c0_of(shape.dtype), 1), k1)  # also for other number formats
    genes: dict[str, int | str] = {
        "rows": len(rows),
        "cols": len(cols),
        "m": min(m, rows[0]),
        "n": min(n, cols[0]),
        "k": k,
        "step": min(schedule.step_k, -(-k1 // k)),
        "order": schedule.order,
        "keep": schedule.keep,
        "bypass": schedule.bypass,
        **{name: getattr(schedule, f"{name}_slots") for name in SLOT_GENES},
    }
    row = {name: np.array([number_of(name, genes[name])], np.int64) for name in GEMM_NAMES}
    for name in "ab":  # slots that are not used
        row[f"{name}_l1"] = np.where(uses(row, "bypass", name), 2, row[f"{name}_l1"])
    row |= _canonical(shape, row)
    # if an operand is no longer kept, other genes may have become irrelevant
    return row | _canonical(shape, row)


def gemm_schedule_of(shape: GemmShape, point: Point) -> GemmSchedule:
    """Return the schedule of a point of a product's space."""
    g = dict(zip(GEMM_NAMES, point, strict=True))
    c0 = c0_of(shape.dtype)
    schedule = GemmSchedule(
        g["m"] * FRACTAL, g["k"] * c0, g["n"] * FRACTAL, g["step"], g["rows"], g["cols"]
    )
    slots = {f"{name}_slots": g[name] for name in SLOT_GENES}
    return replace(schedule, **{name: g[name] for name in LOOP_GENES}, **slots)


GEMM = OperatorKind(GEMM_NAMES, gemm_space, gemm_row, gemm_schedule_of, default_schedule, {})
