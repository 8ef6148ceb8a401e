"""Reads and writes the runtime knowledge bank of CANN, and compares its tilings with our tuner's.

CANN looks a tiling up in this bank before it uses its own tiling rules. A file is for one operator,
chip and number of cores, which are in its name, and has one entry per line:

    Ascend910B2_24_AiCore_MatMulV3_runtime_kb.json
    {"id": 7, "op": "MatMulV3", "version": 0, "info_dict": {"m": 512, ...}, "knowledge": {...}}

`info_dict` is the problem and `knowledge` the tiling; times are not stored. In our terms:

    baseM baseN baseK       the tile of L0
    stepKa stepKb           tiles along K that one load brings to L1; we have one number for both
    depthA1 / stepM stepKa  slots of L1; dbL0A, dbL0B, dbL0C those of L0
    singleCoreM singleCoreN part of C that a core computes in one round: our core grid
    iterateOrder            0: along m first
    tilingEnable            ones digit: 2 one core splits K, 3 and 4 several cores share K;
                            tens digit: 1 A stays in L1, 2 B does

Properties that our schedules cannot express are dropped and listed in `Translated.lost`: the order
of tiles in L2 and of cores, and different steps of A and B along K. If one core splits K, the
tiling is rejected. The sizes m, n and k of a key are rounded up to multiples of 16. Sources:
hicann/ops-nn, gemm_tuning_tiling.h and matmul_v3_base_tiling.cpp (GetTilingFromRepo), for names and
meaning.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ascend_lab import limits
from ascend_lab.aoe.bank import BankEntry
from ascend_lab.aoe.cube import CubeMeasure, cube_space, point_of
from ascend_lab.aoe.cube.bound import Bounds
from ascend_lab.aoe.entries import features_of, key_of
from ascend_lab.aoe.operators import Tunable, operators_of
from ascend_lab.compiler import GraphBuilder
from ascend_lab.compiler.compile import Road
from ascend_lab.compiler.lower import Choice
from ascend_lab.errors import AscendLabError, InputError, UnsupportedError
from ascend_lab.machine.chip import PRESETS, Chip, load_chip
from ascend_lab.operators.kernels.gemm_schedule import GemmSchedule, GemmShape, check_schedule
from ascend_lab.operators.ops.matmul import default_product, product_kernel, warm_cycles
from ascend_lab.output import write_whole

ENDING = "_runtime_kb.json"
DTYPE_CODES = {0: "fp32", 1: "fp16", 2: "int8", 3: "int32", 27: "bf16"}
"""Number formats by their code in a key (ge::DataType)."""
PROBLEM = ("m", "k", "n", "a_dtype", "out_dtype")
"""Fields of a key that are used here."""
KNOWLEDGE = {
    "usedCoreNum": "used_cores",
    "singleCoreM": "single_core_m",
    "singleCoreN": "single_core_n",
    "singleCoreK": "single_core_k",
    "baseM": "base_m",
    "baseN": "base_n",
    "baseK": "base_k",
    "depthA1": "depth_a",
    "depthB1": "depth_b",
    "stepM": "step_m",
    "stepN": "step_n",
    "iterateOrder": "iterate_order",
    "stepKa": "step_ka",
    "stepKb": "step_kb",
    "dbL0A": "db_l0a",
    "dbL0B": "db_l0b",
    "dbL0C": "db_l0c",
    "tilingEnable": "enable",
}
"""Fields of a MatMulV3 tiling that are used here -> their columns in a table."""
MAY_BE_ZERO = ("a_dtype", "out_dtype", "iterateOrder", "tilingEnable")
"""Fields of an entry that encode a choice and may be 0; all others are positive counts."""


# -- entries of the vendor's files -----------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Decision:
    """One entry of the vendor's bank: a problem and its tiling.

    `sizes` are (m, k, n), `dtypes` the number formats of A and of C. `knowledge` maps the vendor's
    names to numbers, and `line` is the text of the entry.
    """

    chip: str
    core_count: int
    operator: str
    sizes: tuple[int, int, int]
    dtypes: tuple[str, str]
    knowledge: Mapping[str, int]
    line: str = ""

    @property
    def shape(self) -> GemmShape:
        """The shape of the product; int8 inputs give int32 sums, which are dequantised later.

        Raises `InputError` for formats that our cube model does not multiply.
        """
        dtype, out_dtype = self.dtypes
        return GemmShape(*self.sizes, dtype, "int32" if dtype == "int8" else out_dtype)


def read_decisions(path: str | Path) -> list[Decision]:
    """Return the entries of a file, a runtime bank or a table with the columns of `KNOWLEDGE`.

    Raises `InputError`, which names the wrong line.
    """
    data = limits.read_file(path, "a runtime knowledge bank, or a table", limits.TABLE_BYTES)
    if Path(path).name.endswith(ENDING):
        chip, core_count = _chip_and_cores(Path(path).name)
        lines = data.decode("utf-8", "replace").splitlines()
        entries = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        return [_from_line(line, f"line {n}", chip, core_count) for n, line in entries]
    numbered = limits.csv_of(data, path)
    header = numbered[0][1] if numbered else []
    rows = ((number, dict(zip(header, row, strict=False))) for number, row in numbered[1:])
    return [_from_row(row, f"row {number}") for number, row in rows]


def write_decisions(decisions: Iterable[Decision], path: str | Path) -> int:
    """Write entries that were read from a runtime bank, unchanged; return their number."""
    lines = [decision.line for decision in decisions if decision.line]
    write_whole(path, "".join(f"{line}\n" for line in lines))
    return len(lines)


def _chip_and_cores(name: str) -> tuple[str, int]:
    """Return chip and cores from a bank's file name, CHIP_CORES_AiCore_OPERATOR + ENDING."""
    chip, _, tail = name.partition("_")
    cores = tail.partition("_")[0]
    if not cores.isdigit() or "_AiCore_" not in name:
        raise InputError(f"CHIP_CORES_AiCore_OPERATOR{ENDING}", name, "leave the file its name")
    return chip, int(cores)


def _from_line(line: str, where: str, chip: str, core_count: int) -> Decision:
    """Return the entry in a line of JSON."""
    entry = limits.json_of(line, where, "correct that line")
    if not isinstance(entry, dict):
        raise InputError(f"{where}: an object", limits.shown(line), "correct it")
    problem = entry.get("info_dict")
    knowledge = entry.get("knowledge")
    if not isinstance(problem, dict) or not isinstance(knowledge, dict):
        raise InputError(f"{where}: info_dict and knowledge", limits.shown(line), "correct it")
    if entry.get("op") != "MatMulV3":
        needed = f"{where}: an entry of MatMulV3"
        remedy = "entries of other operators can be held against ours as a table"
        raise UnsupportedError(needed, limits.shown(entry.get("op")), remedy)
    m, k, n, dtype, out_dtype = (_whole(problem, name, where) for name in PROBLEM)
    b_dtype = problem.get("b_dtype", dtype)
    if b_dtype != dtype:
        needed = f"{where}: A and B of one type"
        raise UnsupportedError(needed, f"{dtype} and {limits.shown(b_dtype)}", "no cube mixes them")
    if knowledge.get("usedCoreNum", 0) > core_count:
        needed = f"{where}: usedCoreNum of at most {core_count}, what the file's name says"
        raise InputError(needed, limits.shown(knowledge["usedCoreNum"]), "correct one of them")
    dtypes = (
        DTYPE_CODES.get(dtype, f"type {dtype}"),
        DTYPE_CODES.get(out_dtype, f"type {out_dtype}"),
    )
    return Decision(
        chip=chip,
        core_count=core_count,
        operator="MatMulV3",
        sizes=(m, k, n),
        dtypes=dtypes,
        knowledge={name: _whole(knowledge, name, where) for name in KNOWLEDGE},
        line=line,
    )


def _whole(data: Mapping[str, Any], name: str, where: str) -> int:
    """Return a whole number of an entry; raise `InputError` if it is none or too small."""
    value = data.get(name)
    minimum = 0 if name in MAY_BE_ZERO else 1
    if type(value) is not int or not minimum <= value <= limits.WHOLE:
        needed = f"{where}: {name} as a whole number of at least {minimum}"
        raise InputError(needed, limits.shown(value), "correct it")
    return value


def _from_row(row: Mapping[str, str], where: str) -> Decision:
    """Return the entry in a row of a table."""
    try:
        sizes = int(row["m"]), int(row["k"]), int(row["n"])
        knowledge = {name: int(row[column] or 0) for name, column in KNOWLEDGE.items()}
        cores = int(row["bin_cores"].partition("|")[0])
        names = [name.strip() for name in row["chip"].split("|")]  # bins with the same decision
        chip = next((name for name in names if name in PRESETS), names[0])
        dtypes = row["a_dtype"], row["out_dtype"]
        operator = row["operator"]
    except (KeyError, ValueError) as error:
        needed = f"{where}: the columns of a table of matrix products"
        raise InputError(
            needed, str(error), "give m, k, n, bin_cores, chip, types and tilings"
        ) from None
    return Decision(chip, cores, operator, sizes, dtypes, knowledge)


# -- translation to our schedules ------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Translated:
    """A tiling as our schedule, and the names of the vendor's properties that it cannot express."""

    schedule: GemmSchedule
    lost: tuple[str, ...] = ()


def translated(decision: Decision, chip: Chip) -> Translated:
    """Return a decision as our schedule.

    Raises `UnsupportedError` if a single core splits K, which none of our kernels does, and raises
    as `check_schedule` if the tiling does not fit the chip's memories.
    """
    shape = decision.shape
    knowledge = decision.knowledge
    k_split = knowledge["tilingEnable"] % 10
    kept_operand = knowledge["tilingEnable"] // 10 % 10
    if k_split == 2:
        needed = "a tiling whose sums stay in L0C"
        raise UnsupportedError(needed, "one core that splits K", "no kernel here does that")
    # K of 4,096 with singleCoreK 1,024: four cores share each sum.
    parts = 1
    if k_split in (3, 4) and knowledge["singleCoreK"]:
        parts = -(-shape.k // knowledge["singleCoreK"])
    # If the entry does not state it, an operand is kept in L1 if one load along K brings all of it.
    keep = {1: "a", 2: "b"}.get(kept_operand, "") or _whole_side(decision)
    order = {"a": "mn", "b": "nm"}.get(keep, "mn" if knowledge["iterateOrder"] else "nm")
    steps = {"a": knowledge["stepKa"], "b": knowledge["stepKb"]}
    steps.pop(keep, None)  # an operand that stays in L1 has no steps
    cores = min(knowledge["usedCoreNum"], chip.core_count)
    rows, columns = _grid(decision, max(1, cores // parts))
    schedule = GemmSchedule(
        base_m=knowledge["baseM"],
        base_k=knowledge["baseK"],
        base_n=knowledge["baseN"],
        step_k=max(1, min(steps.values())),
        grid_rows=rows,
        grid_cols=columns,
        order=order,
        keep=keep,
        a_l1_slots=_slots(knowledge["depthA1"], knowledge["stepM"] * knowledge["stepKa"]),
        b_l1_slots=_slots(knowledge["depthB1"], knowledge["stepN"] * knowledge["stepKb"]),
        a_l0_slots=knowledge["dbL0A"],
        b_l0_slots=knowledge["dbL0B"],
        # 0: two if they fit; some entries ask for more
        c_l0_slots=1 if knowledge["dbL0C"] == 1 else 0,
        split_k=parts,
    )
    check_schedule(shape, schedule, chip)
    lost = ("two steps along K",) if len(set(steps.values())) > 1 else ()
    return Translated(schedule, lost)


def _whole_side(decision: Decision) -> str:
    """Return the operand ("a" or "b") of which one load along K brings all; "" if none or both."""
    knowledge = decision.knowledge
    depth = {name: knowledge[f"stepK{name}"] * knowledge["baseK"] for name in "ab"}
    sides = [name for name in "ab" if depth[name] >= decision.sizes[1]]
    return sides[0] if len(sides) == 1 else ""


def _slots(depth: int, stage: int) -> int:
    """Return the number of L1 buffers, 1 or 2, for a depth given in tiles."""
    return 2 if depth >= 2 * max(stage, 1) else 1


def _grid(decision: Decision, cores: int) -> tuple[int, int]:
    """Return the grid of at most `cores` cores that computes all parts in the fewest rounds."""
    knowledge = decision.knowledge
    shape = decision.shape
    # The numbers of parts of C along m and n; a core computes one part at a time.
    down = -(-shape.m // max(knowledge["singleCoreM"], knowledge["baseM"]))
    across = -(-shape.n // max(knowledge["singleCoreN"], knowledge["baseN"]))
    best = (1, 1)
    fewest_rounds = down * across + 1
    # 5 x 3 parts on 8 cores: a grid of 2 x 3 takes 3 * 1 rounds, one of 4 x 2 takes 2 * 2.
    for rows in range(1, min(cores, down) + 1):
        columns = min(cores // rows, across)
        rounds = -(-down // rows) * -(-across // columns)
        if rounds < fewest_rounds:
            best = (rows, columns)
            fewest_rounds = rounds
    return best


# -- comparison with our tuner ---------------------------------------------------------------------
EQUAL_SHARE = 0.01
"""Share by which a tiling of the space may be slower than the vendor's tiling it represents."""
TIMED_COUNT = 4
"""Number of tilings with the lowest bounds that are timed in addition to the default."""


@dataclass(frozen=True, slots=True)
class Held:
    """A vendor's tiling compared with ours; `refused` says why a comparison is impossible.

    Cycles start from an empty L2 and include the launch. `in_space` says that no property is lost,
    and that the nearest tiling of the tuner's space, which has tiles of even size, is not slower,
    up to `EQUAL_SHARE`. `share` is the part of that space whose lower bound is below the vendor's
    cycles: with 0.01, 99 % of the space is certainly not faster.
    """

    decision: Decision
    theirs: float | None = None
    ours: float | None = None
    in_space: bool = False
    share: float | None = None
    lost: tuple[str, ...] = ()
    refused: str = ""

    @property
    def factor(self) -> float | None:
        """Cycles of the vendor's tiling / cycles of ours."""
        return self.theirs / self.ours if self.theirs and self.ours else None


def held_against(decisions: Iterable[Decision], chip: Chip | None = None) -> Iterator[Held]:
    """Yield the comparison of each decision with our best, on `chip` or the preset it names."""
    for decision in decisions:
        try:
            yield _held(decision, chip or _chip(decision))
        except AscendLabError as error:
            yield Held(decision, refused=str(error))


def _chip(decision: Decision) -> Chip:
    """Return the preset that a decision names, with the number of cores of its bank."""
    if decision.chip not in PRESETS:
        names = ", ".join(PRESETS)
        raise InputError(f"chip: one of {names}", decision.chip, "none is guessed")
    preset = load_chip(decision.chip)
    return replace(preset, core_count=min(preset.core_count, decision.core_count))


def _held(decision: Decision, chip: Chip) -> Held:
    """Return the comparison of one decision; raises if its tiling cannot be translated."""
    shape = decision.shape
    translation = translated(decision, chip)
    theirs = warm_cycles(product_kernel(shape, chip, translation.schedule), chip, ())
    measure = CubeMeasure(shape, chip, None, frozenset())
    # the space has no schedules that divide K among cores
    splits_k = translation.schedule.split_k > 1
    unsplit = replace(translation.schedule, split_k=1)
    space = cube_space(shape, chip, default=unsplit)  # thinning keeps this one
    nearest_cycles = measure(point_of(space, unsplit))
    bounds = Bounds(measure, space.genes).closed_form
    best = warm_cycles(product_kernel(shape, chip, default_product(shape, chip)), chip, ())
    # The tuner itself would begin with these tilings, which have the lowest bounds.
    for row in np.argsort(bounds, kind="stable")[:TIMED_COUNT]:
        best = min(best, int(measure(space.point(int(row)))))
    is_represented = splits_k or nearest_cycles <= (1 + EQUAL_SHARE) * theirs
    return Held(
        decision=decision,
        theirs=theirs,
        ours=min(best, int(nearest_cycles)),
        in_space=not translation.lost and is_represented,
        share=float((bounds < theirs).mean()),
        lost=translation.lost,
    )


def summary(comparisons: Sequence[Held]) -> dict[str, Any]:
    """Return counts and shares of the comparisons, ready for JSON."""
    timed = [comparison for comparison in comparisons if comparison.factor is not None]
    factors = np.array([comparison.factor for comparison in timed], np.float64)

    def share(which: Iterable[bool]) -> float | None:
        return float(np.mean(list(which))) if timed else None

    return {
        "entries": len(comparisons),
        "timed": len(timed),
        "in_space": share(comparison.in_space for comparison in timed),
        "ours_no_slower": share(bool(f >= 1.0) for f in factors),
        "within_10_percent": share(bool(f <= 1.1) for f in factors),
        "median_factor": float(np.median(factors)) if timed else None,
        "median_share": float(np.median([comparison.share or 0.0 for comparison in timed]))
        if timed
        else None,
        "lost": dict(_counted(name for comparison in timed for name in comparison.lost)),
        "refused": dict(
            _counted(comparison.refused for comparison in comparisons if comparison.refused)
        ),
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts


def lines(totals: Mapping[str, Any]) -> list[str]:
    """Return a summary as lines of text."""
    text = [f"{totals['timed']} of {totals['entries']} decisions timed, L2 cold"]
    if totals["timed"]:
        text += [
            f"  in our space            {totals['in_space']:6.1%}",
            f"  our best no slower      {totals['ours_no_slower']:6.1%}",
            f"  within 10 % of our best {totals['within_10_percent']:6.1%}",
            f"  theirs / our best       {totals['median_factor']:6.3f} (median)",
            f"  better part of space    {totals['median_share']:6.2%} (median)",
        ]
    text += [f"  {count} lost: {name}" for name, count in totals["lost"].items()]
    text += [f"  {count} not timed: {why}" for why, count in totals["refused"].items()]
    return text


# -- conversion to entries of our bank and back ----------------------------------------------------
VENDOR_LINE = "cann"
"""Key in an entry's schedule under which the vendor's original line is stored."""


def bank_entry(decision: Decision, chip: Chip | None = None) -> BankEntry | None:
    """Return a decision as an entry of our bank; None if it is slower than our default.

    The problem is a product without epilogue whose second operand is constant, as in networks, so
    that the entry has the key of such an operator. Raises what translating and lowering raise.
    """
    chip = chip or _chip(decision)
    operator = _operator(decision.shape, chip)
    choice = Choice(tiling=translated(decision, chip).schedule)
    cycles = operator.cycles_of(choice)
    # An entry slower than the default would only keep a search from looking further.
    if cycles >= operator.default_cycles:
        return None
    schedule = choice.as_dict() | {VENDOR_LINE: decision.line}
    return BankEntry(
        key=key_of(operator),
        schedule=schedule,
        before_cycles=operator.default_cycles,
        after_cycles=cycles,
        bound_cycles=None,
        proven=False,
        search=VENDOR_LINE,
        seed=0,
        trials=1,
        features=features_of(operator),
    )


def _operator(shape: GemmShape, chip: Chip) -> Tunable:
    """Return the tuning task of a product with a constant second operand, as in networks."""
    draft = GraphBuilder("product", shape.dtype)
    x = draft.input("x", (shape.m, shape.k))
    draft.output(draft.matmul(x, draft.weight((shape.k, shape.n), "w")))
    compiled = Road(dtype=shape.dtype).stages(draft.build(), chip).compiled
    return next(operator for operator in operators_of(compiled) if operator.op.startswith("matmul"))


def written_lines(entries: Iterable[BankEntry]) -> list[str]:
    """Return the vendor's original lines of the entries that came from its bank."""
    return [
        entry.schedule[VENDOR_LINE]
        for entry in entries
        if isinstance(entry.schedule, dict) and entry.schedule.get(VENDOR_LINE)
    ]
