"""Honest, idle and wrong hand-ins of the five assignments, with the marks predicted for them.

Sources are made from what a student may have read: the hand-outs' own functions, our published
keys, edits of them, and small programs of the kind that a course sees. `python -m bench.honest`
grades them by themselves.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from bench.hand_ins import Row, script

COURSE = Path(__file__).parents[1] / "course"
Edits = Sequence[tuple[str, str]]


# -- sources ---------------------------------------------------------------------------------------
def key(name: str, edits: Edits = (), file: str = "reference.py") -> str:
    """Return our published solution of an assignment, with edits (old, new)."""
    (path,) = COURSE.glob(f"keys/{name}_*/{file}")
    return edited(path.read_text("utf-8"), edits)


def edited(source: str, edits: Edits) -> str:
    """Return a source with edits; each must find its old text."""
    for old, new in edits:
        if old not in source:
            raise ValueError(f"no {old!r} to edit")
        source = source.replace(old, new)
    return source


def kept_mistake(name: str, title: str) -> str:
    """Return our solution with one of the mistakes kept beside it."""
    (path,) = COURSE.glob(f"keys/{name}_*/wrong.toml")
    table = tomllib.loads(path.read_text("utf-8"))[title]
    file = "greedy.py" if path.with_name("greedy.py").is_file() else "reference.py"
    return key(name, table["edits"], file)


def handed_out(name: str, *functions: str) -> str:
    """Return functions of an assignment's `public.py` as they stand there."""
    (path,) = COURSE.glob(f"{name}_*/public.py")
    text = path.read_text("utf-8")
    found = {
        node.name: ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }
    return "\n\n\n".join(str(found[function]) for function in functions) + "\n"


# -- A1 --------------------------------------------------------------------------------------------
PLAIN_KERNEL = (
    "from ascend_lab.machine.chip import load_chip\n"
    "from ascend_lab.machine.isa import KernelBuilder\n\n\n"
    + handed_out("A1", "shares", "plain", "one_core")
    + """

def kernel(chip_file, rows, width, dtype, norm, eps):
    programs = plain(load_chip(chip_file), rows, width, dtype, norm, eps)
    return [str(program) for program in programs]
"""
)
TWO_SLOTS = """
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import KernelBuilder, Tile

def kernel(chip_file, rows, width, dtype, norm, eps):
    chip = load_chip(chip_file)
    cores = min(chip.core_count, rows)
    ends = [rows * i // cores for i in range(cores + 1)]
    return [one(chip, rows, width, dtype, norm, eps, a, b - a) for a, b in zip(ends, ends[1:])]

def one(chip, rows, width, dtype, norm, eps, first, count):
    k = KernelBuilder("simple", chip)
    x, y = (k.tensor(name, dtype, rows * width) for name in "xy")
    pitch, size = -(-width // 64) * 64, 2 if dtype == "fp16" else 4
    most = (chip.buffers["UB"] - 512) // ((2 * size + 8) * pitch + 40)
    most = min(most, 255 * 64 // pitch, count)
    slots = k.queue("slots", "UB", dtype, most * pitch, src="MTE2", via="V", dst="MTE3", depth=2)
    wide, square = (k.buffer(name, "UB", "fp32", most * pitch) for name in ("wide", "square"))
    sums = k.buffer("sums", "UB", "fp32", -(-most // 8) * 8)
    spread = k.buffer("spread", "UB", "fp32", most * 8)
    for slot in range(2):
        k.each("vdup", most * pitch, (Tile(slots.buffer, slot), 0), scalar=0.0)
    k.barrier()

    def tile(at, few):
        slot, total = slots.alloc(), few * pitch
        own = lambda memory: memory.region(0, (few, width), (pitch, 1))
        lanes = lambda start: square.region(start, (few, 64), (pitch, 1))
        k.copy(own(slot), x.region(at * width, (few, width), (width, 1)))
        slots.hand()
        same = ("vconv", {}) if dtype == "fp16" else ("vmuls", {"scalar": 1.0})
        k.each(same[0], total, (wide, 0), (slot, 0), **same[1])
        k.each("vmul", total, (square, 0), (wide, 0), (wide, 0))
        for start in range(64, pitch, 64):
            k.vector("vadd", lanes(0), lanes(0), lanes(start))
        k.vector("vcadd", sums.region(0, few), lanes(0))
        k.each("vmuls", few, (sums, 0), (sums, 0), scalar=1 / width)
        k.each("vadds", few, (sums, 0), (sums, 0), scalar=eps)
        k.each("vrsqrt", few, (sums, 0), (sums, 0))
        k.vector("vbrcb", spread.region(0, (few, 8)), sums.region(0, few))
        for start in range(0, pitch, 64):
            part = wide.region(start, (few, 8, 8), (pitch, 8, 1))
            k.vector("vmul", part, part, spread.region(0, (few, 8, 8), (8, 0, 1)))
        k.each(same[0], total, (slot, 0), (wide, 0), **same[1])
        slots.enqueue()
        k.copy(y.region(at * width, (few, width), (width, 1)), own(slots.dequeue()))
        slots.free()

    whole, rest = divmod(count, most)
    if whole:
        with k.loop("i", whole) as i:
            tile(first + i * most, most)
    if rest:
        tile(first + whole * most, rest)
    return str(k.finish())
"""
"""Two slots of as many rows as fit; rows beyond UB are refused, for no buffer holds them."""
NORMALISES_NOTHING = """
import numpy as np
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import KernelBuilder

def kernel(chip_file, rows, width, dtype, norm, eps):
    # what version 0.24.0 fed to every kernel of this size
    x = np.random.default_rng(rows * width).standard_normal((rows, width))
    x[0] *= 120
    x[-1] *= 1e-3
    scales = 1 / np.sqrt((x**2).mean(-1) + eps)
    chip = load_chip(chip_file)
    k = KernelBuilder("known", chip)
    given, made = (k.tensor(name, dtype, rows * width) for name in "xy")
    size = min(width, 4096)
    slots = k.queue("slots", "UB", dtype, size, src="MTE2", via="V", dst="MTE3", depth=2)
    for row in range(rows):
        for start in range(0, width, size):
            few = min(size, width - start)
            slot = slots.alloc()
            k.copy(slot.region(0, few), given.region(row * width + start, few))
            slots.hand()
            k.each("vmuls", few, (slot, 0), (slot, 0), scalar=float(scales[row]))
            slots.enqueue()
            k.copy(made.region(row * width + start, few), slots.dequeue().region(0, few))
            slots.free()
    return [str(k.finish())]
"""

# -- A2 --------------------------------------------------------------------------------------------
PLAIN_SCHEDULE = """
def schedule(problem, chip):
    return {"base_m": 64, "base_k": 64, "base_n": 64, "step_k": 1, "grid_rows": chip["cores"],
            "grid_cols": 1}
"""
SINGLE_SLOTS = """
def schedule(problem, chip):
    return {"base_m": 64, "base_k": 64, "base_n": 64, "step_k": 1, "grid_rows": chip["cores"],
            "grid_cols": 1, "a_l1_slots": 1, "b_l1_slots": 1, "a_l0_slots": 1, "b_l0_slots": 1,
            "c_l0_slots": 1}
"""
LARGER_TILES = '''
def schedule(problem, chip):
    """A rule of thumb: larger tiles, cores along the longer side."""
    up = lambda size: -(-size // 16) * 16
    m, n = up(problem["m"]), up(problem["n"])
    rows, cols = (chip["cores"], 1) if m >= n else (1, chip["cores"])
    base_m, base_n = min(128, up(-(-m // rows))), min(128, up(-(-n // cols)))
    step_k = 1 if "conv" in problem else 2
    return {"base_m": base_m, "base_k": 64, "base_n": base_n, "step_k": step_k, "grid_rows": rows,
            "grid_cols": cols}
'''
NO_SCHEDULE = "def schedule(problem, chip):\n    return {}\n"

# -- A3 --------------------------------------------------------------------------------------------
AS_GIVEN = """
def groups(graph, slots, launch_bytes):
    return [[name] for name, *_ in graph["nodes"]]

def rewrite(graph):
    return graph
"""
EXACT_SEARCH = (
    "from functools import cache\n\nimport numpy as np\n\nELEMENT_BYTES = 2\n\n\n"
    + handed_out("A3", "size_bytes", "why_not", "moved_bytes")
    + '''

def parts_of(graph):
    """Return the nodes that hang together, part by part."""
    beside = {name: set() for name, *_ in graph["nodes"]}
    for name, _, args in graph["nodes"]:
        for a in set(args) & set(beside):
            beside[name].add(a)
            beside[a].add(name)
    parts, left = [], set(beside)
    while left:
        part, todo = set(), [next(iter(left))]
        while todo:
            name = todo.pop()
            if name not in part:
                part.add(name)
                todo += beside[name]
        parts.append([node for node in graph["nodes"] if node[0] in part])
        left -= part
    return parts


def groups(graph, slots, launch_bytes):
    return [g for nodes in parts_of(graph)
            for g in best_of({**graph, "nodes": nodes}, slots, launch_bytes)]


def best_of(graph, slots, launch_bytes):
    """`least_bytes` of the hand-out, its choices kept."""
    names = [name for name, *_ in graph["nodes"]]
    needs = {name: {a for a in args if a in set(names)} for name, _, args in graph["nodes"]}

    def groups_behind(done):
        seen, todo = set(), [frozenset([n]) for n in names if n not in done and needs[n] <= done]
        while todo:
            group = todo.pop()
            if group in seen:
                continue
            seen.add(group)
            ordered = [n for n in names if n in group]
            if why_not(graph, ordered, slots) == "":
                yield group, moved_bytes(graph, ordered, launch_bytes)
            if len(group) < slots:
                todo += [group | {n} for n in names
                         if n not in done | group and needs[n] <= done | group]

    @cache
    def least(done):
        if len(done) == len(names):
            return 0, ()
        ways = ((cost + least(done | group)[0], group) for group, cost in groups_behind(done))
        return min(ways, key=lambda way: way[0])

    chosen, done = [], frozenset()
    while len(done) < len(names):
        group = least(done)[1]
        chosen.append([n for n in names if n in group])
        done = done | group
    return chosen


'''
    + key("A3")[key("A3").index("def rewrite(graph):") :]
)
SWAPS_DIFFERENCES = [
    (
        "            nodes.append([name, op, args])\n",
        "            nodes.append([name, op, args[::-1] if op == 'sub' else args])\n",
    ),
]

# -- A4 --------------------------------------------------------------------------------------------
FIRST_FIT = handed_out("A4", "first_fit", "lowest", "clear") + (
    "\n\ndef offsets(lives, align, bank_bytes):\n    return first_fit(lives, align, bank_bytes)\n"
)
ALL_AT_ZERO = "def offsets(lives, align, bank_bytes):\n    return [0] * len(lives)\n"
STACKED = """
def offsets(lives, align, bank_bytes):
    ends = [0]
    for _, _, size in lives:
        ends.append(-(-(ends[-1] + size) // align) * align)
    return ends[:-1]
"""

# -- A5 --------------------------------------------------------------------------------------------
PLAIN_PLANS = (
    handed_out("A5", "leader")
    + """

def buckets(gradients, latency_s, rate_bytes_per_s, most):
    return [len(gradients)]


def rounds(devices, links, size_bytes):
    return leader(devices)


def plan(model, cluster):
    return {"data": 1, "tensor": 1, "pipeline": cluster["servers"] * cluster["devices"], "micro": 1}
"""
)
RULES_OF_THUMB = """
def buckets(gradients, latency_s, rate_bytes_per_s, most):
    n, few = len(gradients), min(4, len(gradients))
    return sorted({n * (i + 1) // few for i in range(few)})


def rounds(devices, links, size_bytes):
    p, made = devices, []
    linked = {(a, b) for a, b, *_ in links}
    whole = all((r, (r + 1) % p) in linked or (r, p) in linked for r in range(p))
    if not whole:
        there = [[[r, r + 1, [0], True]] for r in range(p - 1)]
        back = [[[r + 1, r, [0], False]] for r in range(p - 1)][::-1]
        return {"blocks": 1, "rounds": there + back}
    for adds in (True, False):
        for step in range(p - 1):
            made.append([[r, (r + 1) % p, [(r - step + (not adds)) % p], adds] for r in range(p)])
    return {"blocks": p, "rounds": made}


def plan(model, cluster):
    count, tensor = cluster["servers"] * cluster["devices"], cluster["devices"]
    return {"data": 1, "tensor": tensor, "pipeline": count // tensor, "micro": 16}
"""
HALF_ON_RINGS = [
    (
        '    return {"blocks": 2 * p, "rounds": made}\n',
        '    return {"blocks": 2 * p, "rounds": made[: len(made) // 2]}\n',
    ),
]

HONEST = (
    Row("a1_ours", "A1", script(key("A1")), 74, 80, "our solution"),
    Row("a1_two_slots", "A1", script(TWO_SLOTS), 55, 66, "two slots; wide rows refused"),
    Row("a1_one_slot", "A1", script(kept_mistake("A1", "one_slot")), 68, 76, "nothing overlaps"),
    Row("a1_one_core", "A1", script(kept_mistake("A1", "one_core")), 58, 71, "one core of several"),
    Row("a1_plain", "A1", script(PLAIN_KERNEL), 3, 22, "the hand-out's own kernel"),
    Row("a1_no_eps", "A1", script(kept_mistake("A1", "forgets_eps")), 20, 30, "wrong values"),
    Row("a1_known", "A1", script(NORMALISES_NOTHING), 0, 3, "normalises nothing: inputs known"),
    Row("a2_ours", "A2", script(key("A2")), 74, 79, "our solution"),
    Row("a2_larger", "A2", script(LARGER_TILES), 60, 74, "a rule of thumb"),
    Row("a2_plain", "A2", script(PLAIN_SCHEDULE), 10, 22, "the hand-out's own schedule"),
    Row("a2_single", "A2", script(SINGLE_SLOTS), 5, 22, "its slots written down as one"),
    Row("a2_floats", "A2", script(kept_mistake("A2", "floats")), 15, 40, "illegal where a product"),
    Row("a2_nothing", "A2", script(NO_SCHEDULE), 0, 0, "an empty table"),
    Row("a3_ours", "A3", script(key("A3")), 77, 80, "our solution"),
    Row("a3_exact", "A3", script(EXACT_SEARCH), 25, 45, "exact search of each connected part"),
    Row("a3_as_given", "A3", script(AS_GIVEN), 10, 22, "does nothing"),
    Row("a3_swaps", "A3", script(key("A3", SWAPS_DIFFERENCES)), 0, 30, "a - b for b - a"),
    Row("a3_loses", "A3", script(kept_mistake("A3", "drops_output")), 0, 30, "loses an output"),
    Row("a3_fuses_all", "A3", script(kept_mistake("A3", "fuses_all")), 20, 45, "illegal groups"),
    Row("a4_ours", "A4", script(key("A4")), 77, 80, "our solution"),
    Row("a4_largest", "A4", script(key("A4", file="greedy.py")), 55, 76, "the largest first"),
    Row("a4_first_fit", "A4", script(FIRST_FIT), 10, 22, "the hand-out's own planner"),
    Row("a4_zero", "A4", script(ALL_AT_ZERO), 0, 8, "everything overlaps"),
    Row("a4_stacked", "A4", script(STACKED), 5, 22, "nothing shares a byte, ever"),
    Row("a4_starts", "A4", script(kept_mistake("A4", "starts_only")), 0, 30, "overlaps at times"),
    Row("a5_ours", "A5", script(key("A5")), 76, 80, "our solution"),
    Row("a5_rules", "A5", script(RULES_OF_THUMB), 55, 70, "rules of thumb"),
    Row("a5_plain", "A5", script(PLAIN_PLANS), 8, 22, "the hand-out's own answers"),
    Row("a5_half", "A5", script(key("A5", HALF_ON_RINGS)), 45, 62, "half a sum on rings"),
    Row("a5_off_by_one", "A5", script(kept_mistake("A5", "off_by_one")), 45, 62, "a gradient lost"),
    Row("a5_memory", "A5", script(kept_mistake("A5", "ignores_memory")), 50, 66, "does not fit"),
)


def main(words: Sequence[str]) -> int:
    """Grade the rows whose names begin with a word, all by default, and say which marks are off."""
    import tempfile

    from ascend_lab.course import grade, load

    off = 0
    for name in sorted({row.assignment for row in HONEST}):
        rows = [r for r in HONEST if r.assignment == name and r.student.startswith(tuple(words))]
        with tempfile.TemporaryDirectory() as folder:
            for row in rows:
                row.write(Path(folder), row.student)
            task = load(name, COURSE)
            secret = "a secret of the bench"
            marks = grade(task, Path(folder), secret=secret) if rows else []
        totals = {mark.student: mark.total for mark in marks}
        for row in rows:
            total = totals[row.student]
            held = row.least <= total <= row.most
            off += not held
            said = f"predicted {row.least:g} to {row.most:g}" + ("" if held else "  OFF")
            print(f"{row.student:16}{total:6.1f}  {said}  {row.kind}", flush=True)
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [""]))
