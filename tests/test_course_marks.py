"""Marks that mean something: values before costs, a floor at plain answers, twists that break."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
from test_course import COURSE, NAMES, SECRET, TOY, drawn, key_of, tried
from test_course_wall import GOOD

from ascend_lab.course import load, start, write_report
from ascend_lab.course.assignment import NO_TWIST, Judged, Rules, draw, notebook_of
from ascend_lab.course.grade import (
    Enrolled,
    apply_value_rules,
    mark,
    mark_of,
    rule_lines,
    try_cases,
)
from ascend_lab.course.handin import HandIn, source_of
from ascend_lab.errors import InputError
from bench import honest

FLOOR = 22.0
"""What the plain answer may earn of 80 points: 40 % of those of properties."""


def points_of(name, source):
    return mark_of(drawn(name)[0], tried(name, source))


# -- the floor -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("A1", honest.PLAIN_KERNEL),
        ("A2", honest.PLAIN_SCHEDULE),
        ("A2", honest.SINGLE_SLOTS),
        ("A3", honest.AS_GIVEN),
        ("A4", honest.FIRST_FIT),
        ("A4", honest.STACKED),
        ("A5", honest.PLAIN_PLANS),
    ],
)
def test_the_hand_out_s_own_answer_earns_the_floor_and_no_more(name, source):
    points = points_of(name, source)
    assert points["performance"] == 0
    assert 0 < sum(points.values()) <= FLOOR


def test_what_does_nothing_earns_next_to_nothing():
    assert sum(points_of("A4", honest.ALL_AT_ZERO).values()) < 5
    assert sum(points_of("A2", honest.NO_SCHEDULE).values()) == 0


def test_properties_count_in_full_from_a_share_of_the_scale_on():
    task = replace(load("A0", TOY), rules=Rules(floor=0.4, full_from=0.2))
    cases = [("public", case) for case in task.cases("public", "ada")]
    earned = {}
    for steps in (100, 80, 63, 10):
        source = GOOD.replace('"steps": 10', f'"steps": {steps}')
        earned[steps] = mark_of(task, try_cases(task, source, cases))["public"]
    assert earned[100] == 12.0
    assert earned[100] < earned[80] < earned[63] == earned[10] == 30.0


# -- values before costs ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("A3", honest.key("A3", honest.SWAPS_DIFFERENCES)),
        ("A3", honest.kept_mistake("A3", "drops_output")),
        ("A4", honest.kept_mistake("A4", "starts_only")),
    ],
)
def test_the_first_wrong_value_caps_the_points(name, source):
    task, _ = drawn(name)
    done = tried(name, source)
    assert sum(mark_of(task, done).values()) <= 30.0
    assert "a wrong value in" in "".join(rule_lines(task, done))
    assert all(one.judged.cost is None for one in done if one.judged.wrong)


def test_a_wrong_value_of_one_function_leaves_the_others_theirs():
    points = points_of("A5", honest.key("A5", honest.HALF_ON_RINGS))
    assert 45 < sum(points.values()) < 62


def test_a_kernel_that_knew_its_inputs_normalises_nothing():
    task, cases = drawn("A1")
    few = [(part, case) for part, case in cases if case.call.arguments["rows"] < 300]
    done = try_cases(task, honest.NORMALISES_NOTHING, few)
    assert all(one.judged.properties["values"] for one in done)
    assert any(one.timed for one in done)
    assert sum(mark_of(task, done).values()) == 0


def test_what_an_answer_is_fed_follows_from_secret_and_answer():
    task, _ = drawn("A1")
    case = task.cases("public", "ada")[0]
    (graded,) = (one for one in task.cases("public", "ada", "a secret") if one.name == case.name)
    assert (case.call, case.known["number"]) != (graded.call, graded.known["number"])
    assert case.call == graded.call
    numbers = {draw(one, text).integers(1 << 60) for one in (case, graded) for text in "ab"}
    assert len(numbers) == 4
    assert draw(case, "a").integers(1 << 60) in numbers


@pytest.mark.parametrize(
    ("judged", "wrong", "cost"),
    [
        (Judged({"right": "", "whole": ""}, 9.0, 100, 10, 10), "cost 9 is below 10", None),
        (Judged({"right": "", "whole": ""}, 10.0, 100, 10, 10), "", 10.0),
        (Judged({"right": "", "whole": "no"}, 9.0, 100, 10, 10), "", None),
        (Judged({"right": "no", "whole": ""}, 9.0, 100, 10, 10), "right: no", None),
        (Judged({"right": "no", "whole": "no"}, 9.0, 100, 10, 10), "", None),
    ],
)
def test_nothing_below_a_bound_is_a_success(judged, wrong, cost):
    task = replace(load("A0", TOY), rules=Rules(wrong=("right",), wrong_share=0.375))
    got = apply_value_rules(task, judged)
    assert got.wrong.startswith(wrong) and bool(got.wrong) == bool(wrong)
    assert got.cost == cost
    if wrong.startswith("cost"):
        assert all(said == got.wrong for said in got.properties.values())


# -- optima that are one ---------------------------------------------------------------------------
def test_the_optimum_of_a_woven_graph_is_that_of_all_of_it():
    public = load("A3", COURSE).public
    rules = {"slots": 8, "launch_bytes": 8192}
    for seed in range(4):
        rng = np.random.default_rng(seed)
        case = public.woven_case({"side": 32, **rules}, rng, [4, 4, 3])
        whole = case.call.arguments["graph"]
        assert public.least_bytes(whole, *rules.values()) == case.known["least"]


def test_the_better_search_finds_what_trying_everything_finds():
    task = load("A3", COURSE)
    for seed in range(6):
        graph = task.public.graph(np.random.default_rng(seed), 9, 32)
        least = task.public.least_bytes(graph, 8, 8192)
        assert task.hidden.least_of_many(graph, 8, 8192) == least


# -- twists ----------------------------------------------------------------------------------------
def twisted(name, folder):
    """Copy an assignment and add its twist, by one word of its table."""
    plain = load(name, COURSE)
    adds = next(iter(plain.public.TWISTS))
    target = folder / plain.folder.name
    shutil.copytree(plain.folder, target, dirs_exist_ok=True)
    table = (target / "assignment.toml").read_text("utf-8")
    assert table.count('\nadds = ""\n') == 1
    table = table.replace('\nadds = ""\n', f'\nadds = "{adds}"\n')
    (target / "assignment.toml").write_text(table, "utf-8")
    return load(name, folder)


BREAKS = {"A1": "values", "A2": "foreseen", "A3": "values", "A4": "guard", "A5": "legal"}
LAST_TERM = {
    "A1": [honest.TWO_SLOTS, honest.kept_mistake("A1", "one_slot")],
    "A2": [honest.LARGER_TILES, honest.PLAIN_SCHEDULE],
    "A3": [honest.EXACT_SEARCH],
    "A4": [honest.key("A4", file="greedy.py"), honest.FIRST_FIT],
    "A5": [honest.RULES_OF_THUMB],
}


@pytest.mark.parametrize("name", NAMES)
def test_a_twist_breaks_last_term_s_solutions_and_the_published_key(name, tmp_path):
    plain = load(name, COURSE)
    task = twisted(name, tmp_path)
    cases = [("public", case) for case in task.cases("public", "ada")]
    if name == "A3":  # what its twist adds stands in the graphs to rewrite
        cases = [one for one in cases if one[1].call.function == "rewrite"]
    arguments = {key for _, case in cases for key in case.call.arguments}
    before = {key for case in plain.cases("public", "ada") for key in case.call.arguments}
    assert arguments <= before, "no argument says it"
    for source in (key_of(plain), *LAST_TERM[name]):
        assert any(BREAKS[name] in one.faults for one in try_cases(task, source, cases))
    done = try_cases(task, key_of(task), cases)
    assert not [(one.case, one.faults) for one in done if one.faults]
    shares = [one.share() for one in done if one.timed]
    assert sum(shares) / len(shares) >= 0.8


@pytest.mark.parametrize("name", NAMES)
def test_the_hand_out_says_the_twist(name, tmp_path):
    start(load(name, COURSE), "ada", tmp_path / "plain")
    assert NO_TWIST in (tmp_path / "plain/README.md").read_text("utf-8")
    task = twisted(name, tmp_path / "course")
    start(task, "ada", tmp_path / "twisted")
    page = (tmp_path / "twisted/README.md").read_text("utf-8")
    assert NO_TWIST not in page
    assert task.public.TWISTS[task.twist["adds"]]["says"] in page


def test_an_unknown_twist_is_refused(tmp_path):
    twisted("A4", tmp_path)
    table = next(tmp_path.glob("A4*/assignment.toml"))
    table.write_text(table.read_text().replace('adds = "guard"', 'adds = "gaurd"'))
    with pytest.raises(InputError, match="a twist among guard; got 'gaurd'"):
        load("A4", tmp_path)


# -- alike, and exported ---------------------------------------------------------------------------
@pytest.mark.parametrize("name", NAMES)
def test_a_published_key_and_the_hand_out_s_own_code_are_named(name, tmp_path):
    task = replace(load(name, COURSE), public=None, hidden=None)
    folder = load(name, COURSE).folder
    judge = honest.handed_out(name, *JUDGES[name])
    sources = {"ada": key_of(load(name, COURSE)), "bob": judge}
    marks = [mark_without_cases(student, source) for student, source in sources.items()]
    write_report(task, marks, tmp_path, SECRET)
    table = (tmp_path / "similarity.csv").read_text("utf-8")
    assert f"ada,course/keys/{folder.name}/reference.py,1.00" in table
    assert re.search(rf"bob,course/{folder.name}/public.py,(0\.9\d|1\.00)\n", table)


JUDGES = {
    "A1": ["plain", "one_core"],
    "A2": ["facts", "wrong_values"],
    "A3": ["why_not", "moved_bytes", "least_bytes"],
    "A4": ["first_fit", "lowest", "clear"],
    "A5": ["plans", "fits_bytes", "step_s"],
}


def mark_without_cases(student, source):
    toy = load("A0", TOY)
    return replace(mark(toy, HandIn(student, "a.py", ""), Enrolled(student), ""), source=source)


def exported(cells):
    """Return a script as nbconvert writes it: prose in comments, magics as calls."""
    lines = ["#!/usr/bin/env python", "# coding: utf-8", "", "# # A title", "", ""]
    for number, cell in enumerate(cells, 1):
        magic, _, body = cell.partition("\n")
        called = r"\1get_ipython().run_line_magic('\2', '\3')"
        text = re.sub(r"(?m)^( *)%(\w+) (.*)$", called, cell)
        if magic.startswith("%%"):
            text = f"get_ipython().run_cell_magic({magic[2:]!r}, '', {body + chr(10)!r})"
        lines += [f"# In[{number}]:", "", "", *text.splitlines(), "", ""]
    return "\n".join(lines)


CELLS = (
    "%matplotlib inline\nimport math",
    "OFFSET = 0",
    "def other(values):\n    return math.fsum(values)",
    f"%%time\n{GOOD.strip()}",
    "    %time other([1])\nwhile True: pass",
)


def test_a_script_exported_from_a_notebook_is_graded_as_the_notebook():
    toy = load("A0", TOY)
    document = json.dumps(notebook_of("\n".join(f"# %%\n{cell}" for cell in CELLS)))
    notebook = source_of("work.ipynb", document.encode(), toy.functions)
    script = source_of("work.py", exported(CELLS).encode(), toy.functions)
    assert "sums" in script and "while True" not in script
    assert script == notebook
    marks = [mark(toy, HandIn("ada", "w.py", text), Enrolled("ada"), SECRET)
             for text in (notebook, script)]  # fmt: skip
    assert marks[0].points == marks[1].points
    assert marks[1].total == 80


def test_a_script_that_calls_ipython_in_cells_of_an_editor_is_read_so():
    text = "# %% [markdown]\n# prose\n# %%\nget_ipython().system('ls')\n" + GOOD
    toy = load("A0", TOY)
    assert "get_ipython" not in source_of("w.py", text.encode(), toy.functions)
    assert source_of("w.py", GOOD.encode(), toy.functions) == GOOD
