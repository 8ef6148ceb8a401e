"""Chapter 6a: the rule for flags, implied flags, the figures, the goal of the small lowering."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from notebook_pages import read_code_cells

from ascend_lab.errors import CapacityError, InputError
from ascend_lab.lab import five_programs, residual_sum, rewritten, same_order
from ascend_lab.lab.checks import chapter06_06a as chapter
from ascend_lab.lab.figures import fig_addresses, fig_flags
from ascend_lab.machine.chip import load_chip
from ascend_lab.machine.isa import Event, KernelBuilder, sanitize, set_flag, wait_flag
from ascend_lab.machine.sim import execute, simulate

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "06a_nest_to_flags.ipynb"
CHIP = load_chip("Ascend910B2")
RULE = "def touches", "def bare", "def hand_overs", "def queues", "def flagged", "def synchronised"


@pytest.fixture(scope="module")
def rule():
    """What the cells of the chapter define, up to the rule for flags."""
    names: dict = {}
    for cell in read_code_cells(NOTEBOOK):
        if cell.source.startswith(("from", *RULE)):
            exec(cell.source, names)
    return names


def test_the_rule_has_few_lines_and_gives_the_package_its_flags(rule) -> None:
    cells = [c.source for c in read_code_cells(NOTEBOOK) if c.source.startswith(RULE)]
    assert len(cells) == len(RULE)
    lines = [line.strip() for cell in cells for line in cell.splitlines()]
    assert sum(bool(line) and not line.startswith("#") for line in lines) <= 66
    for name, (program, chip) in five_programs().items():
        ours = rule["synchronised"](program, chip)
        assert sanitize(ours, chip) == []
        flags = [Counter(str(i) for i, _ in p.instructions() if i.event) for p in (ours, program)]
        assert flags[0] == flags[1], name
        assert same_order(ours, program) == (name in ("sum", "table"))
        assert simulate(ours, chip).cycles <= simulate(program, chip).cycles * 1.0001 + 1


def test_values_stay_whatever_order_the_flags_allow(rule) -> None:
    program = rule["synchronised"](residual_sum(2048, 256, 2, "Ascend910B2"), CHIP)
    feed = {name: np.random.default_rng(3).normal(size=2048).astype(np.float16) for name in "ab"}
    expected = np.maximum(feed["a"] + feed["b"], 0)
    for seed in range(5):
        assert np.array_equal(execute(program, feed, CHIP, seed=seed)["y"], expected)


def straight_line(work, pairs):
    """One instruction each for the entries of `work`, flags for `pairs`, as a program."""
    k = KernelBuilder("line", load_chip("Toy"))
    tiles = {name: k.buffer(name, "UB", "fp16", 16) for name in "abcd"}
    fresh = k.tensor("x", "fp16", 16), k.tensor("y", "fp16", 16 * len(work))
    ids = {pair: i for i, pair in enumerate(pairs)}
    for j, (pipe, reads, writes) in enumerate(work):
        for (i, _), number in ((p, n) for p, n in ids.items() if p[1] == j):
            k.emit(wait_flag(k.chip, Event(work[i][0], pipe, number)))
        if writes:
            k.copy(tiles[min(writes)].region(0, 16), fresh[0].region(0, 16))
        else:
            k.copy(fresh[1].region(16 * j, 16), tiles[min(reads)].region(0, 16))
        for (_, to), number in ((p, n) for p, n in ids.items() if p[0] == j):
            k.emit(set_flag(k.chip, Event(pipe, work[to][0], number)))
    return k.finish()


def test_implied_flags_are_those_the_sanitizer_does_not_miss() -> None:
    draw = random.Random(5)
    seen = 0
    for _ in range(25):
        work = []
        for _ in range(draw.randint(3, 6)):
            name = {draw.choice("ab")}
            load = draw.random() < 0.5
            work.append(("MTE2", set(), name) if load else ("MTE3", name, set()))
        if not work[0][2]:
            continue
        work = [("MTE2", set(), {"a"}), ("MTE2", set(), {"b"}), *work]
        pairs = chapter.implied_by_none(work)
        assert sanitize(straight_line(work, pairs), load_chip("Toy")) == []
        for left_out in pairs:
            kept = [pair for pair in pairs if pair != left_out]
            assert sanitize(straight_line(work, kept), load_chip("Toy"))
            seen += 1
    assert seen > 20


def test_figures_and_texts_say_what_they_show() -> None:
    assert "a_ub at 0, 2 x 12,544" in repr(fig_addresses())
    assert "in a later turn" in repr(fig_flags(residual_sum(1024, 256, 2, "Ascend910B2")))
    with pytest.raises(CapacityError):
        fig_addresses(tile=16384, slots=4)
    with pytest.raises(InputError, match="text of the program"):
        rewritten(residual_sum(256, 256, 1, "Toy"), ("at=7 ", ""))
