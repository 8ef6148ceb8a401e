"""The assignments as a course: marks that the draw does not move, milestones."""

import shutil

import pytest
from scripts import load_script
from test_course import COURSE, NAMES, key_of, tried, with_mistake
from test_course_marks import twisted

from ascend_lab.course import load
from ascend_lab.course.grade import cases_of, mark_of, try_cases
from bench.honest import TWO_SLOTS


def reference(name):
    (path,) = COURSE.glob(f"keys/{name}_*/reference.py")
    return path.read_text("utf-8")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in "A1 A2 A4" else ()) for n in NAMES]
)
def test_the_draw_moves_a_mark_by_less_than_half_a_point(name):
    task = load(name, COURSE)
    points = []
    for seed in "abcde":
        cases = cases_of(task, f"student {seed}", f"term {seed}")
        points.append(mark_of(task, try_cases(task, reference(name), cases))["performance"])
    assert min(points) >= 20
    assert max(points) - min(points) < 0.5, points


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
            assert judged.optimum <= judged.cost <= judged.base


def test_under_all_twists_ours_and_the_plain_answers_still_run_a_block(tmp_path):
    ours = {name: key_of(twisted(name, tmp_path)) for name in NAMES[:4]}
    shutil.copy(COURSE / "milestone.py", tmp_path)
    script = load_script(tmp_path / "milestone.py")
    assert script.Block("ada", {}).run() == ""
    assert script.Block("ada", ours).run() == ""
    assert script.Block("ada", {"A1": reference("A1")}).run().startswith("A1 values: ")


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


def test_two_slots_of_as_many_rows_as_fit_earn_about_two_thirds():
    done = [one for one in tried("A1", TWO_SLOTS) if one.timed]
    right = [one for one in done if not one.faults]
    assert len(right) == len(done) - 1, "rows beyond UB want more"
    assert 0.6 < sum(one.share() for one in right) / len(right) < 0.75
