"""The search space of one loop nest: its decisions, and their legal values after earlier ones.

The nest of y[i, j] = exp(x[i, j]) with 4,096 rows may be divided among 8 cores along i ("spread":
512 rows each), and each core's share may be cut into tiles of 64 rows ("cut", "width"). A layout
is legal if its tiles fit UB and its program can be written.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, islice

from ascend_lab import errors
from ascend_lab.aoe.space import Point, Value
from ascend_lab.aoe.vector.layout import Layout, Nest, lay_out, nest_needs
from ascend_lab.machine.chip import DTYPE_BYTES
from ascend_lab.machine.isa import ceil_div
from ascend_lab.operators import dsl
from ascend_lab.operators.dsl.auto_tile import block_elements, long_rows, vector_core_count
from ascend_lab.operators.dsl.lower import lower_stage
from ascend_lab.operators.dsl.stages import Stage

DECISIONS = ("spread", "share", "share2", "cut", "width", "outer", "fold", "depth", "tail")
"""The decisions about a nest, in order.

- spread: the axes that are divided among the cores; share, share2: the elements per core along each
- cut: the axis that is cut into tiles; width, outer: the size of a tile along it and along the next
  outer axis. Along axes further out a tile has width 1, along axes further in it is whole.
- fold: the elements that a reduction takes at a time
- depth: the slots of a tile
- tail: how the last tile is treated
"""
LEAST: Point = ("", 0, 0, "", 0, 1, 1, 1, "cut")
"""The least value of each decision, assumed for decisions that are still open."""
CUT = DECISIONS.index("cut")
FOLD = DECISIONS.index("fold")
"""Positions of two decisions in a point."""
MAX_FOLD_WIDTHS = 4
"""The largest number of fold widths to try: the widest that fit, and the narrowest."""
ESTIMATE_LIMIT = 0.9
"""A layout whose estimate exceeds this share of UB is written out to see whether it fits."""
DEPTHS = (2, 3, 1)
"""Numbers of slots to try, the usual one first."""
SMALL_BYTES = 65536
"""Results of fewer bytes may be computed by only a few cores."""
DEFAULT_LAYOUT = "default"
"""The value of "spread" for the default's layout, if no decisions give that layout."""


class NestSpace:
    """All layouts of one nest of a schedule in which no nest has a layout yet."""

    def __init__(self, schedule: dsl.Schedule, nest: Nest, default: Layout | None = None) -> None:
        """Take the schedule, the nest, and the nest's layout in the default schedule, if any."""
        self.schedule = schedule
        self.nest = nest
        state = schedule.state
        phase = nest.phase
        root = state.stage(phase.root)
        self.cores = vector_core_count(schedule)
        self.extents = {a.name: a.extent for a in root.axes}
        self.last_axis = root.axes[-1].name
        # elements of a block of 32 bytes and of a repeat of 256 bytes
        self.unit = block_elements(state, phase)
        self.repeat = schedule.chip.vector_bytes_per_repeat // DTYPE_BYTES[root.dtype]
        self.is_small = result_bytes(root) <= SMALL_BYTES
        fold_stages = [n for n in (*phase.tiles, phase.root) if state.stage(n).fold]
        self.folds: dict[str, int] = {}
        for name in fold_stages:
            self.folds |= {f"{name}.{axis.name}": axis.extent for axis in state.stage(name).reduce}
        in_blocks = any(along_lanes(state.stage(name)) for name in fold_stages)
        self.fold_ladder = fold_ladder(self.folds, self.unit if in_blocks else 1)
        # Rows of fewer than two blocks are not divided among cores: each would write part of a
        # block. Where there is no other axis to divide, cores share single elements instead.
        outer_rows = [n for n in nest.rows if n != self.last_axis and self.extents[n] > 1]
        is_narrow = self.extents[self.last_axis] < 2 * self.unit
        self.shares_elements = long_rows(state, phase) or (is_narrow and not outer_rows)
        self.keeps_rows_whole = is_narrow and not self.shares_elements
        # The layout of the automatic schedule is an option even if the lists of values lack its
        # numbers.
        self.default = default
        self.default_point: Point | None = None
        # caches: options by prefix; UB bytes by layout; whether the program of a pattern of layouts
        # can be written, and the sizes for which one of the pattern fits; the number of points
        self._options: dict[Point, tuple[Value, ...]] = {}
        self._needs: dict[Layout, tuple[int, int, int]] = {}
        self._can_write: dict[object, bool] = {}
        self._fitting_sizes: dict[object, list[tuple[int, ...]]] = {}
        self._point_count = 0
        self._is_counted = False
        if default is not None:
            point = self._decisions(default)
            is_same = self.layout(point) == default
            self.default_point = point if is_same else (DEFAULT_LAYOUT, *LEAST[1:])

    def _decisions(self, layout: Layout) -> Point:
        """Return the decisions whose layout is nearest to `layout`."""
        # at most two axes are divided among the cores; missing shares are 0
        divided = [(n, share) for n, share, _ in layout.cuts if share < self.extents[n]][:2]
        share, share2 = [*(share for _, share in divided), 0, 0][:2]
        spread = "+".join(name for name, _ in divided)
        cut = ""
        width = 0
        for name, axis_share, tile_width in layout.cuts:
            if tile_width < axis_share and name in self.nest.rows:
                cut = name
                width = tile_width
        outer = 1
        if cut and self.outside(cut):
            tile_widths = {name: tile_width for name, _, tile_width in layout.cuts}
            outer = tile_widths[self.outside(cut)[-1]]
        # if some reductions are in parts, the others do not limit the width
        cut_stages = {name.split(".")[0] for name, _ in layout.folds}
        fold_extents = self.folds | dict(layout.folds)
        if cut_stages:
            fold_extents = {n: w for n, w in fold_extents.items() if n.split(".")[0] in cut_stages}
        fold = largest_fold(fold_extents)
        return (spread, share, share2, cut, width, outer, fold, layout.depth, "cut")

    # -- decisions to numbers ---------------------------------------------------------------------
    def layout(self, point: Point) -> Layout:
        """Return the layout of a point."""
        complete = (*point, *LEAST[len(point) :])
        spread, share, share2, cut, width, outer, fold, depth, tail = complete
        if spread == DEFAULT_LAYOUT:
            assert self.default is not None
            return self.default
        divided_axes = [name for name in spread.split("+") if name]
        shares = self.extents | dict(zip(divided_axes, (share, share2), strict=False))
        widths = dict(shares)
        if cut:
            # A tile has width 1 along axes outside the cut axis, except the nearest one: with a cut
            # along columns and outer = 4, a tile is 4 rows by `width` columns.
            outside = self.outside(cut)
            widths |= dict.fromkeys(outside, 1)
            if outside:
                widths[outside[-1]] = min(outer, shares[outside[-1]])
            widths[cut] = min(width, shares[cut])
        cuts = tuple((name, shares[name], widths[name]) for name in self.extents)
        folds = fold_widths(self.folds, fold)
        return Layout(cuts, folds, depth, cut if tail == "guard" else "")

    def outside(self, cut: str) -> list[str]:
        """Return the axes outside the axis `cut` that may be cut too."""
        names = list(self.extents)
        return [n for n in names[: names.index(cut)] if n in self.nest.rows]

    # -- legality ---------------------------------------------------------------------------------
    def is_legal(self, prefix: Point) -> bool:
        """Tell whether a layout fits UB and can be written, with open decisions at their least.

        While the width of the folds is open, one legal width is enough.
        """
        point = (*prefix, *LEAST[len(prefix) :])
        folds = [point[FOLD]] if len(prefix) > FOLD else self.fold_ladder
        for fold in folds:
            if self._layout_is_legal(self.layout((*point[:FOLD], fold, *point[FOLD + 1 :]))):
                return True
        return False

    def _layout_is_legal(self, layout: Layout) -> bool:
        """Tell whether a layout fits UB, has enough event ids, and can be written as a program."""
        pattern = self._pattern(layout)
        sizes = layout.sizes(self.folds)
        # If a layout with larger tiles of the same pattern fits, this one fits: no new program is
        # written.
        for larger in self._fitting_sizes.get(pattern, ()):
            if all(a <= b for a, b in zip(sizes, larger, strict=True)):
                return self._can_write[pattern]
        ub_bytes, event_ids = self.needs(layout)
        chip = self.schedule.chip
        # A queue needs an event id per slot, and two pipes of a core have only a few.
        if ub_bytes > chip.buffers["UB"] or event_ids > chip.event_ids:
            return False
        # Whether a nest can be written depends on its pattern only. But the estimate of its bytes
        # leaves out a few blocks: near the limit the program itself shows whether it fits.
        is_tight = ub_bytes > ESTIMATE_LIMIT * chip.buffers["UB"]
        key: object = layout if is_tight else pattern
        if key not in self._can_write:
            self._can_write[key] = self.can_be_written(layout)
        if not is_tight:
            self._fitting_sizes.setdefault(pattern, []).append(sizes)
        return self._can_write[key]

    def _pattern(self, layout: Layout) -> object:
        """Return which axes are divided and cut, and which of the sizes are whole blocks."""
        unit = self.unit
        folds = tuple((name, width % unit == 0) for name, width in layout.folds)
        cuts = [(s < self.extents[n], w < s, w == 1) for n, s, w in layout.cuts]
        _, share, width = layout.cuts[-1]
        return tuple(cuts), share % unit == 0, width % unit == 0, folds, layout.guard

    def can_be_written(self, layout: Layout) -> bool:
        """True if the program of the nest can be written."""
        try:
            laid = lay_out(self.schedule, self.nest, layout)
            return bool(lower_stage(laid, self.nest.phase.root))
        except errors.AscendLabError:
            return False

    def needs(self, layout: Layout) -> tuple[int, int]:
        """Return the bytes of UB and the event ids of a layout, which do not depend on shares."""
        cuts = tuple((n, self.extents[n], w) for n, _, w in layout.cuts)
        # Shares and slots are not in the key: a tile needs the same memory with every share of the
        # core.
        one_slot_layout = Layout(cuts, layout.folds)
        if one_slot_layout not in self._needs:
            state = lay_out(self.schedule, self.nest, one_slot_layout).state
            self._needs[one_slot_layout] = nest_needs(
                state, self.nest.phase.root, self.schedule.chip
            )
        first_bytes, slot_bytes, queue_count = self._needs[one_slot_layout]
        return first_bytes + (layout.depth - 1) * slot_bytes, queue_count * layout.depth

    @cached_property
    def has_points(self) -> bool:
        """Tell whether the nest has at least one layout."""
        return self._can_complete(()) if self.default is None else self.can_be_written(self.default)

    @property
    def open_decisions(self) -> set[int]:
        """The indices of the decisions that may have more than one option."""
        long_axes = [n for n in self.nest.rows if self.extents[n] > 1]
        names = {"spread", "share", "cut", "width", "depth"}
        names |= {"share2", "outer"} if len(long_axes) > 1 else set()
        names |= {"fold"} if self.folds else set()
        names |= {"tail"} if any(n != self.last_axis for n in long_axes) else set()
        return {DECISIONS.index(name) for name in names}

    # -- all layouts ------------------------------------------------------------------------------
    def points(self, prefix: Point = ()) -> Iterator[Point]:
        """Yield all layouts that begin with `prefix`, as decisions."""
        if len(prefix) == len(DECISIONS):
            yield prefix
            return
        for value in self.options(prefix):
            yield from self.points((*prefix, value))

    def count(self, limit: int) -> int:
        """Return the number of layouts, `limit` + 1 if there are more than `limit`."""
        if self._point_count <= limit and not self._is_counted:
            self._point_count = sum(1 for _ in islice(self.points(), limit + 1))
            self._is_counted = self._point_count <= limit
        return min(self._point_count, limit + 1)

    # -- options ----------------------------------------------------------------------------------
    def options(self, prefix: Point) -> tuple[Value, ...]:
        """Return the legal values of the decision after `prefix`."""
        if prefix not in self._options:
            self._options[prefix] = self._compute_options(prefix)
        return self._options[prefix]

    def _compute_options(self, prefix: Point) -> tuple[Value, ...]:
        index = len(prefix)
        if index and prefix[0] == DEFAULT_LAYOUT:
            return (LEAST[index],)
        # the methods below, `_spread` to `_tail`, list the values of the decision of that name
        values = list(getattr(self, f"_{DECISIONS[index]}")(prefix))
        default = self.default_point
        if default is not None and prefix == default[:index] and default[index] not in values:
            values.append(default[index])
        return tuple(values)

    def _spread(self, prefix: Point) -> Iterator[str]:
        """Yield the axes to divide among the cores, such as "i" or "i+j"."""
        # An axis that cannot be divided among cores is no option.
        axes_to_divide = [n for n in self.extents if self._shares(n, self.cores)]
        for count in (1, 2):
            for axes in combinations(axes_to_divide, count):
                spread = "+".join(axes)
                if self._can_complete((spread,)):
                    yield spread
        may_use_one_core = self.is_small or not axes_to_divide or self.cores == 1
        if may_use_one_core and self._can_complete(("",)):
            yield ""

    def _can_complete(self, prefix: Point) -> bool:
        """Tell whether taking the first option of each later decision completes `prefix`."""
        # From the axis that is cut on, every prefix with a legal cut has a legal completion.
        while len(prefix) <= CUT:
            options = iter(getattr(self, f"_{DECISIONS[len(prefix)]}")(prefix))
            value = next(options, None)
            if value is None:
                return False
            prefix = (*prefix, value)
        return True

    def _share(self, prefix: Point) -> Sequence[int]:
        """Return the elements per core to try along the first axis that is divided."""
        axes = prefix[0].split("+")
        if not axes[0]:
            return (0,)
        shares = self._shares(axes[0], self.cores // len(axes))
        return [n for n in shares if self._can_complete((*prefix, n))]

    def _share2(self, prefix: Point) -> Sequence[int]:
        """Return the elements per core to try along the second axis that is divided."""
        outer_axis, _, inner_axis = prefix[0].partition("+")
        if not inner_axis:
            return [0]
        # 32 cores, 8 of them along rows: 4 remain for the columns of each share of rows.
        cores_left = self.cores // -(-self.extents[outer_axis] // prefix[1])
        shares = self._shares(inner_axis, cores_left, cores_left)
        return [n for n in shares if self._can_complete((*prefix, n))]

    def _shares(self, axis: str, cores: int, least_cores: int = 0) -> list[int]:
        """Return the elements per core to try along an axis; few cores only for small results."""
        if axis not in self.nest.rows or (axis == self.last_axis and self.keeps_rows_whole):
            return []
        unit = self.unit if axis == self.last_axis and not self.shares_elements else 1
        least_cores = least_cores or (2 if self.is_small else cores // 4)
        return share_ladder(self.extents[axis], cores, unit, least_cores)

    def _cut(self, prefix: Point) -> Iterator[str]:
        """Yield the axes to cut into tiles, the innermost first; "" for one tile per core."""
        if self.is_legal((*prefix, "")):
            yield ""
        for name in reversed(self.extents):
            if name in self.nest.rows and self._width((*prefix, name)):
                yield name

    def _width(self, prefix: Point) -> Sequence[int]:
        """Return the widths of a tile to try along the axis that is cut."""
        cut = prefix[-1]
        if not cut:
            return (0,)
        share = self.layout(prefix).cuts[list(self.extents).index(cut)][1]
        # Along a row, tiles begin at blocks of 32 bytes; along other axes they may begin anywhere.
        unit, repeat = (self.unit, self.repeat) if cut == self.last_axis else (1, 1)
        is_fine = len(self.nest.rows) == 1
        return width_ladder(share, unit, repeat, is_fine, lambda w: self.is_legal((*prefix, w)))

    def _outer(self, prefix: Point) -> Sequence[int]:
        """Return the widths of a tile to try along the next outer axis."""
        outside = self.outside(prefix[3]) if prefix[3] else []
        if not outside:
            return (1,)
        share = self.layout(prefix).cuts[list(self.extents).index(outside[-1])][1]
        return outer_ladder(share, lambda w: self.is_legal((*prefix, w)))

    def _fold(self, prefix: Point) -> Sequence[int]:
        """Return the elements that a reduction may take at a time."""
        fitting = [w for w in self.fold_ladder if self.is_legal((*prefix, w))]
        # The widest that fit, and the narrowest: the widths between these differ little.
        return (*fitting[:MAX_FOLD_WIDTHS], *fitting[MAX_FOLD_WIDTHS:][-1:])

    def _depth(self, prefix: Point) -> list[int]:
        """Return the numbers of slots that fit."""
        return [d for d in DEPTHS if self.is_legal((*prefix, d))]

    def _tail(self, prefix: Point) -> Sequence[str]:
        """Return how a shorter last tile may be treated: cut off, or moved back to be whole."""
        cut = prefix[3]
        width = prefix[4]
        if not cut or cut == self.last_axis or self.nest.phase.outputs:
            return ("cut",)
        shares = {name: share for name, share, _ in self.layout(prefix).cuts}
        return ("cut", "guard") if shares[cut] % width else ("cut",)


# -- ladders: short lists of values worth trying ---------------------------------------------------

TILE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of tiles per share to try; each is about 1.5 times the previous one."""
FINE_TILE_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""The same for nests with one axis to cut; each is about 7/6 of the previous one."""
MAX_WIDTHS = 8
"""Largest number of tile widths to try; twice as many if a nest has one axis to cut."""
OUTER_WIDTHS = (1, 2, 4, 8, 16)


def result_bytes(stage: Stage) -> int:
    """Return the bytes of a stage's result, or of the operand that it reduces if that is larger."""
    read = max((DTYPE_BYTES[r.dtype] for r in stage.reads), default=1)
    result = math.prod(stage.shape) * DTYPE_BYTES[stage.dtype]
    return max(result, math.prod(stage.shape) * math.prod(a.extent for a in stage.reduce) * read)


def share_ladder(extent: int, cores: int, unit: int, fewest_cores: int) -> list[int]:
    """Return the elements per core to try along an axis, multiples of `unit`, most cores first.

    The numbers of cores are all `cores`, three quarters, a half, a quarter and so on, but at least
    `fewest_cores`; and the largest number of cores that get equal shares.
    """
    blocks = ceil_div(extent, unit)
    # For 32 cores: 32, 24, 16, 8, 4, 2, 1. Fewer cores may be quicker if each would have little
    # work.
    core_counts = {cores >> n for n in range(cores.bit_length())} | {3 * cores // 4}
    allowed_counts = {n for n in core_counts if n >= fewest_cores}
    divisors = [d for d in range(1, min(cores, blocks) + 1) if blocks % d == 0]
    allowed_counts |= set(divisors[-1:])
    shares = {min(ceil_div(blocks, n) * unit, extent) for n in allowed_counts if 1 < n <= cores}
    # Long shares also in multiples of eight blocks, which one instruction takes in whole repeats.
    long_shares = {ceil_div(s, 8 * unit) * 8 * unit for s in shares if unit > 1 and s >= 32 * unit}
    return sorted(s for s in shares | long_shares if s < extent)


def width_ladder(
    share: int, unit: int, repeat: int, is_fine: bool, is_legal: Callable[[int], bool]
) -> list[int]:
    """Return the tile widths to try within a share, the widest that fits first."""

    def block_width(tiles: int) -> int:
        return min(share, ceil_div(ceil_div(share, tiles), unit) * unit)

    narrowest = min(unit, share)
    if narrowest >= share or not is_legal(narrowest):
        return []
    # the least number of tiles for which a tile fits, by bisection
    fewest_tiles = 1
    enough_tiles = ceil_div(share, unit)
    while fewest_tiles < enough_tiles:
        middle = (fewest_tiles + enough_tiles) // 2
        if is_legal(block_width(middle)):
            enough_tiles = middle
        else:
            fewest_tiles = middle + 1
    ladder = FINE_TILE_COUNTS if is_fine else TILE_COUNTS
    # Numbers of tiles: the fewest, those of the ladder, and multiples of the fewest.
    tile_counts = [fewest_tiles]
    tile_counts += [max(fewest_tiles, count) for count in ladder]
    tile_counts += [count * fewest_tiles for count in ladder]
    widths = set()
    for tiles in tile_counts:
        width = aligned(ceil_div(share, tiles), unit, repeat)
        if width < share and (tiles > fewest_tiles or is_legal(width)):
            widths.add(width)
    max_widths = 2 * MAX_WIDTHS if is_fine else MAX_WIDTHS
    return sorted(widths or {narrowest}, reverse=True)[:max_widths]


def aligned(width: int, unit: int, repeat: int) -> int:
    """Return a width rounded up to whole blocks, or to whole repeats if that adds little."""
    # 1,000 numbers in fp16 become 1,008, whole blocks of 16; 2,000 become 2,048, whole repeats of
    # 128.
    step = repeat if width >= 8 * repeat else unit
    return ceil_div(width, step) * step


def outer_ladder(share: int, is_legal: Callable[[int], bool]) -> list[int]:
    """Return the tile widths to try along the next outer axis: the rows in one tile."""
    widths = [1]
    for width in (*OUTER_WIDTHS[1:], share):
        if widths[-1] < width <= share and is_legal(width):
            widths.append(width)
    return widths


def fold_ladder(extents: Mapping[str, int], unit: int) -> tuple[int, ...]:
    """Return how many elements a reduction may take at a time: all, half, ... in whole blocks."""
    width = largest_fold(extents)
    widths = [width]
    while width > min(unit, 2):
        # 1,000 numbers, blocks of 16: 1000, 512, 256, 128, 64, 32, 16.
        half = ceil_div(width, 2)
        width = ceil_div(half, unit) * unit if half >= unit else half
        if width == widths[-1]:
            break
        widths.append(width)
        if width <= unit:
            break
    return tuple(widths)


def largest_fold(extents: Mapping[str, int]) -> int:
    """Return the elements of the largest fold (reduction) over all its axes; 1 without folds."""
    elements: dict[str, int] = {}
    for name, extent in extents.items():
        stage = name.split(".")[0]
        elements[stage] = elements.get(stage, 1) * extent
    return max(elements.values(), default=1)


def fold_widths(extents: Mapping[str, int], elements: int) -> tuple[tuple[str, int], ...]:
    """Return the width of each fold axis if `elements` are taken at a time, inner axes first."""
    widths: list[tuple[str, int]] = []
    unfilled: dict[str, int] = {}
    for name, extent in reversed(list(extents.items())):
        stage = name.split(".")[0]
        room = unfilled.get(stage, elements)
        if room < extent:
            widths.append((name, max(room, 1)))
        unfilled[stage] = room // extent
    return tuple(reversed(widths))


def along_lanes(stage: Stage) -> bool:
    """Tell whether a fold reduces its source along the contiguous axis."""
    last_axis = stage.reduce[-1].name
    return any(dict(r.index[-1].terms).get(last_axis) == 1 for r in stage.reads if r.index)
