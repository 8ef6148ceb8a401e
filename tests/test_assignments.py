"""The assignments as a course: marks that the draw does not move, twists, milestones."""

import re
import shutil

import pytest
from scripts import load_script
from test_course import COURSE, NAMES, tried, with_mistake

from ascend_lab.course import load
from ascend_lab.course.grade import cases_of, mark_of, try_cases


def reference(name):
    (path,) = COURSE.glob(f"keys/{name}_*/reference.py")
    return path.read_text("utf-8")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in "A1 A2 A4" else ()) for n in NAMES]
)
def test_the_draw_moves_a_mark_by_less_than_half_a_point(name):
    task, points = load(name, COURSE), []
    for seed in "abcde":
        cases = cases_of(task, f"student {seed}", f"term {seed}")
        points.append(mark_of(task, try_cases(task, reference(name), cases))["performance"])
    assert min(points) >= 20
    assert max(points) - min(points) < 0.5, points


TWISTS = {
    "A1": ('norm = "absmean"', [('norm == "rms"', "True")], "values"),
    "A2": (
        "cores = [1]",
        [("    m, k, n =", '    chip = {**chip, "cores": 2}\n    m, k, n =')],
        "replays",
    ),
    "A3": ("slots = 5", [("World(graph, slots,", "World(graph, 8,")], "legal"),
    "A4": ("banks = 2", [("if bank_bytes and", "if False and")], "banks"),
    "A5": (
        "most_buckets = 3",
        [("    n = len(gradients)", "    most, n = 8, len(gradients)")],
        "legal",
    ),
}
"""What the table says of a term, how last term's solution counted on the old one, what breaks."""


@pytest.mark.parametrize("name", NAMES)
def test_a_twist_is_one_line_that_breaks_last_term_s_solution_and_not_ours(name, tmp_path):
    line, edits, fails = TWISTS[name]
    folder = tmp_path / load(name, COURSE).folder.name
    shutil.copytree(load(name, COURSE).folder, folder)
    table, head, twist = (folder / "assignment.toml").read_text("utf-8").partition("[twist]")
    key = line.partition(" = ")[0]
    twisted, count = re.subn(rf"^{key} = .*$", line, twist, flags=re.MULTILINE)
    assert count == 1
    (folder / "assignment.toml").write_text(table + head + twisted, "utf-8")
    task = load(name, tmp_path)
    old = reference(name)
    for before, after in edits:
        assert before in old
        old = old.replace(before, after)
    public = [("public", case) for case in task.cases("public", "ada")]
    assert not [one.faults for one in try_cases(task, reference(name), public) if one.faults]
    assert [one for one in try_cases(task, old, public) if fails in one.faults]


@pytest.fixture(scope="module")
def milestone():
    return load_script(COURSE / "milestone.py")


@pytest.mark.parametrize("upto", range(5))
def test_what_is_handed_in_so_far_runs_a_block(milestone, upto):
    block = milestone.Block("ada", {name: reference(name) for name in NAMES[:upto]})
    assert block.run() == ""
    assert list(block.judged) == list(NAMES[:4])
    for name, judged in block.judged.items():
        if name in NAMES[:upto]:
            assert judged.optimum <= judged.cost < judged.base


@pytest.mark.parametrize(
    ("name", "title", "said"),
    [
        ("A1", "forgets_eps", "A1 values: "),
        ("A2", "keeps_in_a_convolution", "A2 replays: "),
        ("A3", "fuses_all", "A3 legal: "),
        ("A4", "no_reuse", ""),
        ("A4", "floats", "A4 list: "),
    ],
)
def test_a_broken_artefact_is_named(milestone, name, title, said):
    block = milestone.Block("ada", {name: with_mistake(name, title)[0]})
    assert block.run().startswith(said)
    assert bool(block.run()) == bool(said)


def test_the_block_is_compared_with_values(milestone, capsys):
    block = milestone.Block("ada", {})
    task, case, offsets = block.offsets
    block.offsets = task, case, [0] * len(offsets)
    assert "of the block is wrong" in block.run()
    assert milestone.main(["ada"]) == 0
    assert "A4 plain bytes of memory" in capsys.readouterr().out


SIMPLE = """
from ascend_lab.chip import load_chip
from ascend_lab.isa import KernelBuilder, Tile

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


def test_two_slots_of_as_many_rows_as_fit_earn_less_than_half():
    done = [one for one in tried("A1", SIMPLE) if one.timed]
    right = [one for one in done if not one.faults]
    assert len(right) == len(done) - 1, "rows beyond UB want more"
    assert 0.3 < sum(one.share() for one in right) / len(right) < 0.5
