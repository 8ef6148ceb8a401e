"""The search space of one loop nest: its decisions, and their legal values after earlier ones."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, islice

from ascend_lab import errors
from ascend_lab.aoe.space import Point, Value
from ascend_lab.aoe.vector.layout import Layout, Nest, lay, nest_needs
from ascend_lab.machine.chip import DTYPE_BYTES
from ascend_lab.machine.isa import ceil_div
from ascend_lab.operators import dsl
from ascend_lab.operators.dsl.auto_tile import block_elements, core_count, long_rows
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
FOLDS = 4
"""The largest number of fold widths to try: the widest that fit, and the narrowest."""
SURE = 0.9
"""A layout whose estimate exceeds this share of UB is written out to see whether it fits."""
DEPTHS = (2, 3, 1)
SMALL_BYTES = 65536
"""Results of fewer bytes may be computed by only a few cores."""
WHOLE = "default"
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
        self.extents = {a.name: a.extent for a in root.axes}
        self.last = root.axes[-1].name
        self.unit = block_elements(state, phase)
        self.repeat = schedule.chip.vector_bytes_per_repeat // DTYPE_BYTES[root.dtype]
        self.cores = core_count(schedule)
        names = [n for n in (*phase.tiles, phase.root) if state.stage(n).fold]
        self.folds = {f"{n}.{a.name}": a.extent for n in names for a in state.stage(n).reduce}
        lanes = any(along_lanes(state.stage(n)) for n in names)
        self.fold_ladder = fold_ladder(self.folds, self.unit if lanes else 1)
        self.small = result_bytes(root) <= SMALL_BYTES
        outer_rows = [n for n in nest.rows if n != self.last and self.extents[n] > 1]
        # Rows of fewer than two blocks are not divided among cores: each would write part of a
        # block.
        narrow = self.extents[self.last] < 2 * self.unit
        self.by_elements = long_rows(state, phase) or (narrow and not outer_rows)
        self.apart = narrow and not self.by_elements
        self._options: dict[Point, tuple[Value, ...]] = {}
        self._needs: dict[Layout, tuple[int, int, int]] = {}
        self._written: dict[object, bool] = {}
        self._roomy: dict[object, list[tuple[int, ...]]] = {}
        self._count = 0
        self._counted = False
        # The layout of the automatic schedule is an option even if the lists of values lack its
        # numbers.
        self.default = default
        self.default_point: Point | None = None
        if default is not None:  # its numbers become options if they are not options yet
            point = self._decisions(default)
            self.default_point = point if self.layout(point) == default else (WHOLE, *LEAST[1:])

    def _decisions(self, layout: Layout) -> Point:
        """Return the decisions whose layout is nearest to `layout`."""
        spread = [(n, share) for n, share, _ in layout.cuts if share < self.extents[n]][:2]
        numbers = [*(share for _, share in spread), 0, 0][:2]
        names = "+".join(n for n, _ in spread)
        cut = ""
        width = 0
        outer = 1
        sizes = {n: w for n, _, w in layout.cuts}
        for name, share, wide in layout.cuts:
            if wide < share and name in self.nest.rows:
                cut = name
                width = wide
        if cut and self.outside(cut):
            outer = sizes[self.outside(cut)[-1]]
        all_widths = self.folds | dict(layout.folds)
        stages = {n.split(".")[0] for n, _ in layout.folds}
        widths = {n: w for n, w in all_widths.items() if not stages or n.split(".")[0] in stages}
        return (names, *numbers, cut, width, outer, largest_fold(widths), layout.depth, "cut")

    # -- decisions to numbers ---------------------------------------------------------------------
    def layout(self, point: Point) -> Layout:
        """Return the layout of a point."""
        spread, share, share2, cut, width, outer, fold, depth, tail = (*point, *LEAST[len(point) :])
        if spread == WHOLE:
            assert self.default is not None
            return self.default
        core_shares = zip([n for n in spread.split("+") if n], (share, share2), strict=False)
        shares = self.extents | dict(core_shares)
        widths = dict(shares)
        if cut:
            # A tile has width 1 along axes outside the cut axis, except the nearest one: with a cut
            # along columns and outer = 4, a tile is 4 rows by `width` columns.
            outside = self.outside(cut)
            widths |= dict.fromkeys(outside, 1)
            widths |= {n: min(outer, shares[n]) for n in outside[-1:]}
            widths[cut] = min(width, shares[cut])
        cuts = tuple((n, shares[n], widths[n]) for n in self.extents)
        folds = fold_widths(self.folds, fold)
        return Layout(cuts, folds, depth, cut if tail == "guard" else "")

    def outside(self, cut: str) -> list[str]:
        """Return the axes outside the axis `cut` that may be cut too."""
        names = list(self.extents)
        return [n for n in names[: names.index(cut)] if n in self.nest.rows]

    # -- legality ---------------------------------------------------------------------------------
    def good(self, prefix: Point) -> bool:
        """Tell whether a layout fits UB and can be written, with open decisions at their least."""
        point = (*prefix, *LEAST[len(prefix) :])
        folds = [point[FOLD]] if len(prefix) > FOLD else self.fold_ladder
        return any(self._legal(self.layout((*point[:FOLD], f, *point[FOLD + 1 :]))) for f in folds)

    def _legal(self, layout: Layout) -> bool:
        pattern = self._pattern(layout)
        sizes = layout.sizes(self.folds)
        # If a layout with larger tiles of the same pattern fits, this one fits: no new program is
        # written.
        for larger in self._roomy.get(pattern, ()):
            if all(a <= b for a, b in zip(sizes, larger, strict=True)):
                return self._written[pattern]
        taken_bytes, event_ids = self.needs(layout)
        chip = self.schedule.chip
        # A queue needs an event id per slot, and two pipes of a core have only a few.
        if taken_bytes > chip.buffers["UB"] or event_ids > chip.event_ids:
            return False
        # whether a nest can be written depends on which axes are cut, and whether at whole blocks
        # The estimate leaves out a few blocks: near the limit the program is written to see whether
        # it fits.
        tight = taken_bytes > SURE * chip.buffers["UB"]
        kind: object = layout if tight else pattern
        if kind not in self._written:
            self._written[kind] = self.lowers(layout)
        if not tight:
            self._roomy.setdefault(pattern, []).append(sizes)
        return self._written[kind]

    def _pattern(self, layout: Layout) -> object:
        unit = self.unit
        folds = tuple((name, width % unit == 0) for name, width in layout.folds)
        cuts = [(s < self.extents[n], w < s, w == 1) for n, s, w in layout.cuts]
        _, share, width = layout.cuts[-1]
        return tuple(cuts), share % unit == 0, width % unit == 0, folds, layout.guard

    def lowers(self, layout: Layout) -> bool:
        """True if the program of the nest can be written."""
        try:
            laid = lay(self.schedule, self.nest, layout)
            return bool(lower_stage(laid, self.nest.phase.root))
        except errors.AscendLabError:
            return False

    def needs(self, layout: Layout) -> tuple[int, int]:
        """Return the bytes of UB and the event ids of a layout, which do not depend on shares."""
        cuts = tuple((n, self.extents[n], w) for n, _, w in layout.cuts)
        # Shares and slots are not in the key: a tile needs the same memory with every share of the
        # core.
        plain = Layout(cuts, layout.folds)
        if plain not in self._needs:
            state = lay(self.schedule, self.nest, plain).state
            self._needs[plain] = nest_needs(state, self.nest.phase.root, self.schedule.chip)
        first_bytes, slot, count = self._needs[plain]
        return first_bytes + (layout.depth - 1) * slot, count * layout.depth

    @cached_property
    def has_points(self) -> bool:
        """Tell whether the nest has at least one layout."""
        return self._reaches(()) if self.default is None else self.lowers(self.default)

    @property
    def open_decisions(self) -> set[int]:
        """The indices of the decisions that may have more than one option."""
        long = [n for n in self.nest.rows if self.extents[n] > 1]
        names = {"spread", "share", "cut", "width", "depth"}
        names |= {"share2", "outer"} if len(long) > 1 else set()
        names |= {"fold"} if self.folds else set()
        names |= {"tail"} if any(n != self.last for n in long) else set()
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
        if self._count <= limit and not self._counted:
            self._count = sum(1 for _ in islice(self.points(), limit + 1))
            self._counted = self._count <= limit
        return min(self._count, limit + 1)

    # -- options ----------------------------------------------------------------------------------
    def options(self, prefix: Point) -> tuple[Value, ...]:
        """Return the legal values of the decision after `prefix`."""
        if prefix not in self._options:
            self._options[prefix] = self._found(prefix)
        return self._options[prefix]

    def _found(self, prefix: Point) -> tuple[Value, ...]:
        at = len(prefix)
        if at and prefix[0] == WHOLE:
            return (LEAST[at],)
        values = list(getattr(self, f"_{DECISIONS[at]}")(prefix))
        default = self.default_point
        if default is not None and prefix == default[:at] and default[at] not in values:
            values.append(default[at])
        return tuple(values)

    def _spread(self, prefix: Point) -> Iterator[str]:
        # An axis that cannot be divided among cores is no option.
        free = [n for n in self.extents if self._shares(n, self.cores)]
        for count in (1, 2):
            for axes in combinations(free, count):
                trial = ("+".join(axes),)
                if self._reaches(trial):
                    yield trial[0]
        if (self.small or not free or self.cores == 1) and self._reaches(("",)):
            yield ""

    def _reaches(self, prefix: Point) -> bool:
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
        axes = prefix[0].split("+")
        if not axes[0]:
            return (0,)
        shares = self._shares(axes[0], self.cores // len(axes))
        return [n for n in shares if self._reaches((*prefix, n))]

    def _share2(self, prefix: Point) -> Sequence[int]:
        outer_axis, _, inner_axis = prefix[0].partition("+")
        if not inner_axis:
            return [0]
        # 32 cores, 8 of them along rows: 4 remain for the columns of each share of rows.
        cores_left = self.cores // -(-self.extents[outer_axis] // prefix[1])
        return [
            n
            for n in self._shares(inner_axis, cores_left, cores_left)
            if self._reaches((*prefix, n))
        ]

    def _shares(self, axis: str, cores: int, least_cores: int = 0) -> list[int]:
        """Return the elements per core to try along an axis; few cores only for small results."""
        if axis not in self.nest.rows or (axis == self.last and self.apart):
            return []
        unit = self.unit if axis == self.last and not self.by_elements else 1
        least_cores = least_cores or (2 if self.small else cores // 4)
        return share_ladder(self.extents[axis], cores, unit, least_cores)

    def _cut(self, prefix: Point) -> Iterator[str]:
        if self.good((*prefix, "")):
            yield ""
        for name in reversed(self.extents):
            if name in self.nest.rows and self._width((*prefix, name)):
                yield name

    def _width(self, prefix: Point) -> Sequence[int]:
        cut = prefix[-1]
        if not cut:
            return (0,)
        share = self.layout(prefix).cuts[list(self.extents).index(cut)][1]
        # Along a row, tiles begin at blocks of 32 bytes; along other axes they may begin anywhere.
        units = (self.unit, self.repeat) if cut == self.last else (1, 1)
        fine = len(self.nest.rows) == 1
        return width_ladder(share, *units, fine, lambda w: self.good((*prefix, w)))

    def _outer(self, prefix: Point) -> Sequence[int]:
        outside = self.outside(prefix[3]) if prefix[3] else []
        if not outside:
            return (1,)
        share = self.layout(prefix).cuts[list(self.extents).index(outside[-1])][1]
        return outer_ladder(share, lambda w: self.good((*prefix, w)))

    def _fold(self, prefix: Point) -> Sequence[int]:
        fitting = [w for w in self.fold_ladder if self.good((*prefix, w))]
        # The widest that fit, and the narrowest: the widths between these differ little.
        return (*fitting[:FOLDS], *fitting[FOLDS:][-1:])

    def _depth(self, prefix: Point) -> list[int]:
        return [d for d in DEPTHS if self.good((*prefix, d))]

    def _tail(self, prefix: Point) -> Sequence[str]:
        cut = prefix[3]
        width = prefix[4]
        if not cut or cut == self.last or self.nest.phase.outputs:
            return ("cut",)
        share = {n: s for n, s, _ in self.layout(prefix).cuts}[cut]
        return ("cut", "guard") if share % width else ("cut",)


# -- ladders: short lists of values worth trying ---------------------------------------------------

TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of tiles per share to try; each is about 1.5 times the previous one."""
FINE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32)
"""The same for nests with one axis to cut; each is about 7/6 of the previous one."""
WIDTHS = 8
"""Largest number of tile widths to try; twice as many if a nest has one axis to cut."""
OUTERS = (1, 2, 4, 8, 16)


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
    halves = {cores >> n for n in range(cores.bit_length())} | {3 * cores // 4}
    counts = {n for n in halves if n >= fewest_cores}
    counts |= {max((d for d in range(1, min(cores, blocks) + 1) if blocks % d == 0), default=0)}
    shares = {min(ceil_div(blocks, n) * unit, extent) for n in counts if 1 < n <= cores}
    # Long shares also in multiples of eight blocks, which one instruction takes in whole repeats.
    long = {ceil_div(s, 8 * unit) * 8 * unit for s in shares if unit > 1 and s >= 32 * unit}
    return sorted(s for s in shares | long if s < extent)


def width_ladder(
    share: int, unit: int, repeat: int, fine: bool, good: Callable[[int], bool]
) -> list[int]:
    """Return the tile widths to try within a share, the widest that fits first."""
    narrowest = min(unit, share)
    if narrowest >= share or not good(narrowest):
        return []
    low = 1
    high = ceil_div(share, unit)
    while low < high:  # the least number of tiles for which a tile fits, by bisection
        middle = (low + high) // 2
        fits = good(min(share, ceil_div(ceil_div(share, middle), unit) * unit))
        low, high = (low, middle) if fits else (middle + 1, high)
    fewest = low
    widths: dict[int, None] = {}
    ladder = FINE if fine else TILES
    # Numbers of tiles: the fewest, those of the ladder, and multiples of the fewest.
    for tiles in (fewest, *(max(fewest, n) for n in ladder), *(n * fewest for n in ladder)):
        width = aligned(ceil_div(share, tiles), unit, repeat)
        if width < share and (tiles > fewest or good(width)):
            widths[width] = None
    widths = widths or {narrowest: None}
    return sorted(widths, reverse=True)[: 2 * WIDTHS if fine else WIDTHS]


def aligned(width: int, unit: int, repeat: int) -> int:
    """Return a width rounded up to whole blocks, or to whole repeats if that adds little."""
    # 1,000 numbers in fp16 become 1,008, whole blocks of 16; 2,000 become 2,048, whole repeats of
    # 128.
    step = repeat if width >= 8 * repeat else unit
    return ceil_div(width, step) * step


def outer_ladder(share: int, good: Callable[[int], bool]) -> list[int]:
    """Return the tile widths to try along the next outer axis: the rows in one tile."""
    widths = [1]
    for width in (*OUTERS[1:], share):
        if widths[-1] < width <= share and good(width):
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
