"""What the pages for instructors and students show is so: commands, twist, quiz, slides, script."""

import builtins
import re
import shlex
import shutil
import symtable
import tomllib
import xml.etree.ElementTree as ET
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
import test_course
from notebook_pages import exercises_of, read_code_cells
from test_course_exercises import CODED, TRAVEL, answer_to, mistakes_in
from test_course_marks import BREAKS

from ascend_lab.cli import ascend_lab
from ascend_lab.course import check, load
from bench import honest

ROOT = Path(__file__).resolve().parent.parent
COURSE = ROOT / "course"
A1 = ROOT / "course" / "A1_kernel"
PAGE = (ROOT / "book" / "instructor.md").read_text("utf-8")
STUDENT = (ROOT / "book" / "student.md").read_text("utf-8")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[012]*.ipynb"))


def fenced(page, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def shown(page):
    """Return (words, output) of each command that a page's consoles show."""
    runs = re.findall(r"^\$ ascend-lab (.*)\n((?:[^$\n].*\n)*)", "".join(fenced(page, "console")),
                      re.MULTILINE)  # fmt: skip
    return [(shlex.split(words), output) for words, output in runs]


def says(output, pattern):
    """Whether an output is what a page shows, where `...` is left out."""
    lines = ("\n".join(line.rstrip() for line in text.splitlines()) for text in (pattern, output))
    shown, got = lines
    return bool(re.fullmatch(re.escape(shown).replace(r"\.\.\.", ".*"), got, re.DOTALL))


def test_the_commands_say_what_the_pages_show(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ours = (COURSE / "keys/A1_kernel/reference.py").read_text("utf-8")
    edits = tomllib.loads((COURSE / "keys/A1_kernel/wrong.toml").read_text("utf-8"))
    without = ours.replace(*edits["forgets_eps"]["edits"][0])
    for name, source in {"ada": ours, "bob": without}.items():
        (tmp_path / "handed_in" / name).mkdir(parents=True)
        (tmp_path / "handed_in" / name / "start.py").write_text(source, "utf-8")
    (secret,) = re.findall(r"`(secret = \".*?\")`", PAGE)
    (tmp_path / "term.toml").write_text(secret)
    (roster,) = (text for text in fenced(PAGE, "text") if text.startswith("id,"))
    (tmp_path / "roster.csv").write_text(roster)
    (tmp_path / "practice").mkdir()
    sums = answer_to("ex_01_2")
    where = answer_to("ex_05_2")
    for name, answer in {"ada": where[1], "bob": mistakes_in("ex_05_2")[0][0]}.items():
        chunks = [*sums, where[0], answer]
        (tmp_path / "practice" / f"{name}.py").write_text("\n\n".join(chunks), "utf-8")
    runs = shown(PAGE)
    assert [words[1] for words, _ in runs] == ["start", "grade", "grade", "pack", "grade"]
    for words, output in runs:
        assert ascend_lab(words) == 0
        got = capsys.readouterr().out
        assert says(got, output), got
    (tmp_path / "ada").rename(tmp_path / "A1")
    (tmp_path / "A1" / "start.py").write_text(ours.replace(*edits["ignores_tail"]["edits"][0]))
    ((words, output),) = shown(STUDENT)
    assert ascend_lab(words) == 1
    got = capsys.readouterr().out
    assert says(got, output), got


def test_the_page_counts_the_exercises_that_a_machine_grades():
    assert f"{len(TRAVEL)} of {len(CODED)} coded exercises are graded so; 16.4 is left out" in PAGE


@pytest.fixture
def twisted(tmp_path, monkeypatch):
    """The checkout's course with the twist of the page, typed as it is printed."""
    course = tmp_path / "course"
    shutil.copytree(COURSE, course)
    (edit,) = fenced(PAGE, "toml")
    version, _, twist = edit.partition("\n")
    path = course / "A1_kernel" / "assignment.toml"
    table = path.read_text().partition("[twist]")[0]
    path.write_text(re.sub(r'^version = ".*"', version, table, flags=re.MULTILINE) + twist)
    assert tomllib.loads(path.read_text())["twist"] != load("A1", COURSE).twist
    monkeypatch.setattr(test_course, "COURSE", course)
    test_course.drawn.cache_clear()
    yield load("A1", course)
    test_course.drawn.cache_clear()


def test_the_twist_of_the_page_breaks_last_term_s_kernel_and_not_ours(twisted):
    key = (COURSE / "keys/A1_kernel/reference.py").read_text()
    assert [one for one in check(twisted, key, "ada") if "values" in one.faults]
    ours = test_course.key_of(twisted)
    assert not [one for one in check(twisted, ours, "ada") if one.faults]


@pytest.mark.full
def test_the_twist_of_the_page_passes_the_page_s_own_command(twisted):
    (command,) = (text for text in fenced(PAGE, "text") if "-k A1" in text)
    assert command == ".venv/bin/pytest tests/test_course.py -k A1\n"
    test_course.test_a_start_file_earns_nothing_and_the_reference_most("A1")
    test_course.test_at_least_six_wrong_answers("A1")
    test_course.test_students_have_instances_of_their_own("A1")
    for one in test_course.WRONG:
        if one.values[0] == "A1":
            test_course.test_a_wrong_answer_fails_in_the_part_it_should(*one.values)


def test_the_page_names_the_twists_and_what_they_break():
    rows = re.findall(r"^\| (A\d) \| `(\w+)` \| .+? \| `(\w+)` \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(test_course.NAMES)
    for name, adds, fails in rows:
        assert adds in load(name, COURSE).public.TWISTS
        assert fails == BREAKS[name]


def test_the_page_says_the_rules_of_the_tables():
    for name in test_course.NAMES:
        task = load(name, COURSE)
        properties = task.points["public"] + task.points["hidden"]
        assert f"properties count {task.rules.floor:.0%}".replace("%", " %") in PAGE
        assert f"{task.rules.floor * properties:g} points at most" in PAGE
        assert task.rules.full_from == 1 / 5
        assert task.rules.wrong_share == 3 / 8
        assert task.rules.spoils_all == (name == "A3")
    assert "caps that function's points at 3/8, which is 30 of 80" in PAGE


def test_the_marks_that_the_page_predicts_are_those_of_the_bench():
    rows = re.findall(r"^\| .+((?: \| \d+-\d+){5}) \|$", PAGE, re.MULTILINE)
    shown = [re.findall(r"(\d+)-(\d+)", row) for row in rows]
    kept = {row.student: (f"{row.least:g}", f"{row.most:g}") for row in honest.HONEST}
    names = (
        ("a1_ours", "a2_ours", "a3_ours", "a4_ours", "a5_ours"),
        ("a1_two_slots", "a2_larger", "a3_exact", "a4_largest", "a5_rules"),
        ("a1_plain", "a2_plain", "a3_as_given", "a4_first_fit", "a5_plain"),
        ("a1_no_eps", "a2_floats", "a3_swaps", "a4_starts", "a5_half"),
    )
    assert shown == [[kept[name] for name in row] for row in names]
    assert len(kept) >= 30


def test_the_table_of_assignments_is_theirs():
    rows = re.findall(r"^\| (A\d) \| (.+?) \| (.+?) \| (\d) \| (.+?) \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == ["A1", "A2", "A3", "A4", "A5"]
    for name, title, chapters, hours, functions in rows:
        task = load(name, COURSE)
        assert (task.title.lower(), task.hours) == (title, int(hours))
        ends = [int(number) for number in re.findall(r"\d+", chapters)]
        assert (task.chapters[0], task.chapters[-1]) == (ends[0], ends[-1])
        assert tuple(re.findall(r"\w+", functions)) == task.functions


def test_the_graph_of_chapters_is_whole_and_the_syllabus_follows_it():
    svg = ET.parse(ROOT / "book/_static/prerequisites.svg").getroot()
    edges = [one.attrib["data-edge"].split("-") for one in svg.iter() if "data-edge" in one.attrib]
    chapters = [re.sub("^0", "", path.name.partition("_")[0]) for path in NOTEBOOKS]
    assert {name for edge in edges for name in edge} == set(chapters)
    words = next(one.text for one in svg.iter() if one.tag.endswith("desc"))
    assert all(re.search(rf"\b{b} needs [^;]*\b{a}\b", words or "") for a, b in edges)
    order = {name: place for place, name in enumerate(chapters)}
    assert all(order[a] < order[b] for a, b in edges)
    weeks = re.findall(r"^\| \d+ \| ([^|]+) \|", PAGE, re.MULTILINE)
    taught = [name for week in weeks for name in re.findall(r"\d+[ab]?", week)]
    assert sorted(taught) == sorted(chapters)


def test_ten_questions_have_answers():
    page = (ROOT / "book/diagnostic.md").read_text("utf-8")
    assert re.findall(r"^\*\*(\d+)\.\*\*", page, re.MULTILINE) == [str(n) for n in range(1, 11)]
    assert page.count("```{admonition} Answer\n:class: dropdown") == 10


@pytest.fixture
def slides():
    """book/slides.py, which imports its neighbour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "book")
        yield import_module("slides")


def test_a_deck_has_the_listed_figures_and_needs_nothing_else(slides, tmp_path):
    path, *others = slides.write_decks(tmp_path)
    assert len(others) == 7
    deck = path.read_text("utf-8")
    listed = slides.listed(PAGE)
    first = [s for n in slides.parts()["Part I: The machine"] for s in slides.slides_of(n)]
    wanted = [slide for slide in first if slide.name in listed]
    assert deck.count("<img ") == len(wanted) == 4
    assert deck.count('src="data:image/svg+xml;base64,') == 4
    for slide in wanted:
        assert slides.escape(slide.alt) in deck
        assert slides.escape(slide.caption) in deck
    assert not re.findall(r'(?:src|href)="(?!data:|#)', deck)


def test_a_figure_that_is_missing_is_an_error(slides, tmp_path, monkeypatch):
    monkeypatch.setattr(slides, "listed", lambda text: ["fig-streams", "fig-of-nothing"])
    with pytest.raises(slides.SlideError, match="none: fig-of-nothing;"):
        slides.write_decks(tmp_path)
    assert list(tmp_path.iterdir()) == []


# -- notebooks without solutions -------------------------------------------------------------------
@pytest.fixture(scope="module")
def script():
    names = {"__name__": "page"}
    (text,) = fenced(PAGE, "python")
    exec(compile(text, "<instructor.md>", "exec"), names)
    return names


def source_of(notebook, kind):
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_a_solution_is_handed_out(path, script):
    whole = nbformat.read(path, as_version=4)
    page = "\n\n".join(source_of(whole, "markdown"))
    rest = script["without_solutions"](nbformat.read(path, as_version=4))
    prose = "\n\n".join(source_of(rest, "markdown"))
    assert "{solution" not in prose
    # What goes and what stays, found by other means: line by line.
    open_fence = ""
    gone = []
    stays = []
    inside = False
    for line in page.splitlines():
        start = re.match(r"(`{3,}|:{3,})\{solution(-start|-end)?\}", line)
        if start and not open_fence:
            open_fence = start[1]
            kind = start[2]
        (gone if inside or open_fence else stays).append(line)
        if open_fence and line.rstrip() == open_fence:
            open_fence = ""
            inside = kind == "-start"
    assert [line for line in prose.splitlines() if line] == [line for line in stays if line]
    assert any(gone)
    solved = {c.source for c in whole.cells if "exercise-solution" in c.metadata.get("tags", [])}
    assert not solved & set(source_of(rest, "code"))
    exercises = {f"check_{name}" for name in exercises_of(read_code_cells(path))}
    assert all(any(name in code for code in source_of(rest, "code")) for name in exercises)


def read_and_bound(table, top=True):
    """Return the names that a cell reads from the notebook, and those that it binds in it."""
    read = {
        s.get_name() for s in table.get_symbols() if s.is_referenced() and (top or s.is_global())
    }
    bound = {
        s.get_name() for s in table.get_symbols() if top and (s.is_assigned() or s.is_imported())
    }
    for child in table.get_children():
        read |= read_and_bound(child, top=False)[0]
    return read, bound


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_handed_out_needs_no_name_of_a_solution(path, tmp_path, script):
    rest = script["without_solutions"](nbformat.read(path, as_version=4))
    nbformat.write(rest, tmp_path / path.name)
    cells = read_code_cells(tmp_path / path.name)
    names = [read_and_bound(symtable.symtable(cell.source, "cell", "exec")) for cell in cells]
    read, bound = (set().union(*side) for side in zip(*names, strict=True))
    assert read <= bound | set(dir(builtins)) | {"get_ipython"}
