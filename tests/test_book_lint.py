"""The book's rules: no orphan page, measured cells, captions and alt texts, no bare numbers.

Every rule (book_rules.py) runs on the book, and on a bad example that it has to complain about.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml
from book_rules import (
    GLUED,
    Cell,
    bitmap_complaints,
    box_complaints,
    cells_of,
    cited_keys,
    code_of,
    elsewhere_complaints,
    exercise_complaints,
    fence_complaints,
    figure_complaints,
    gives_away,
    home_complaints,
    image_complaints,
    import_complaints,
    keep_complaints,
    link_terms,
    listing_complaints,
    measure_complaints,
    minute_complaints,
    number_complaints,
    plain_sentences,
    prediction_complaints,
    printed_in,
    prose_of,
    repeat_complaints,
    rhythm_complaints,
    table_complaints,
    term_complaints,
    terms_of,
    toc_files,
    wide_complaints,
    word_complaints,
)
from scripts import load_script

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
reading_time = load_script(ROOT / "book" / "reading_time.py")
CHAPTERS = [path for path in NOTEBOOKS if path.name[:2].isdigit()]
PAGES = sorted((ROOT / "book").rglob("*.md"))

# --- the book obeys -------------------------------------------------------------------------------

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
each_chapter = pytest.mark.parametrize("notebook", CHAPTERS, ids=lambda path: path.stem)
each_text = pytest.mark.parametrize("path", [*NOTEBOOKS, *PAGES], ids=lambda path: path.name)


def text_of(path: Path) -> str:
    """Return a page, or the Markdown of a notebook."""
    return prose_of(cells_of(path)) if path.suffix == ".ipynb" else path.read_text("utf-8")


def test_the_table_of_contents_names_every_page_once() -> None:
    listed = toc_files(yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8")))
    there = [path.relative_to(ROOT).with_suffix("").as_posix() for path in [*NOTEBOOKS, *PAGES]]
    assert sorted(listed) == sorted(there)


@cache
def everywhere() -> Counter[str]:
    return Counter(s for path in CHAPTERS for s in plain_sentences(cells_of(path)))


@cache
def glossary() -> list[str]:
    return terms_of((ROOT / "book/glossary.md").read_text("utf-8"))


RULES: dict[str, Callable[[list[Cell]], list[str]]] = {
    "measure": measure_complaints,
    "imports": import_complaints,
    "rhythm": rhythm_complaints,
    "boxes": box_complaints,
    "homes": lambda cells: home_complaints(prose_of(cells), ROOT),
    "predictions": prediction_complaints,
    "width": wide_complaints,
    "exercises": exercise_complaints,
    "minutes": minute_complaints,
    "elsewhere": elsewhere_complaints,
    "keep": keep_complaints,
    "bitmaps": bitmap_complaints,
    "terms": lambda cells: term_complaints(cells, glossary()),
    "times": reading_time.complaints,
    "repeats": lambda cells: repeat_complaints(cells, everywhere()),
}
PENDING: dict[str, str] = {}
"""Chapters that a new rule still waits for; it must be exact, and in the end empty."""


@each_chapter
@pytest.mark.parametrize("rule", RULES)
def test_a_chapter_keeps_the_rules(notebook: Path, rule: str) -> None:
    complaints = RULES[rule](cells_of(notebook))
    if notebook.name.partition("_")[0] in PENDING.get(rule, "").split():
        assert complaints, f"take {notebook.name} out of PENDING[{rule!r}]"
    else:
        assert complaints == []


@each_notebook
def test_figures_have_name_caption_and_alt_text(notebook: Path) -> None:
    cells = code_of(cells_of(notebook))
    assert [complaint for cell in cells for complaint in figure_complaints(cell)] == []


@each_notebook
def test_notebooks_are_saved_executed_and_clean(notebook: Path) -> None:
    document = json.loads(notebook.read_text(encoding="utf-8"))
    kept = {"kernelspec", "language_info"}
    assert set(document["metadata"]) == kept, "python3 lab.py refresh drops the rest"
    code = code_of(document["cells"])
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
    assert not any("execution" in cell["metadata"] for cell in code)
    assert word_complaints(printed_in(code)) == []
    assert table_complaints(code) == []


@pytest.fixture
def drawings() -> Iterator[ModuleType]:
    """book/drawings.py, which imports its neighbour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "book")
        yield import_module("drawings")


def test_every_chapter_is_a_station_of_the_map_once(drawings: ModuleType) -> None:
    on_map = drawings.chapters_of()
    assert len(on_map) == len(set(on_map))
    assert {path.stem for path in CHAPTERS} <= set(on_map)
    parts = [chapter for part in drawings.PARTS for chapter in part.split()]
    assert sorted(chapter.partition("_")[0] for chapter in on_map) == sorted(parts)


def test_drawings_are_sound_and_link_to_what_is_there(drawings: ModuleType) -> None:
    there = {path.stem for path in CHAPTERS}
    drawn = [draw(there.__contains__) for draw in (drawings.road_map, drawings.narrow_map)]
    drawn += [drawings.strip(part, there.__contains__) for part in range(1, 9)]
    for drawing in drawn:
        svg = ET.fromstring(drawing.replace("&#8194;", " ")).find("svg")
        assert len(svg.attrib["aria-label"]) > 60
        links = [link.attrib["href"] for link in svg.iter("a")]
        assert links
        assert {Path(link).stem for link in links} <= there
        sizes = [int(size) for size in re.findall(r"font-size: (\d+)px", drawing)]
        assert min(sizes) * 700 / 724 >= 9
    assert [len(re.findall("<a href", drawing)) for drawing in drawn[:2]] == [len(there)] * 2
    assert "13_graph_ir" not in drawings.road_map(lambda chapter: chapter != "13_graph_ir")
    strips = [drawings.strip(part, lambda _: True) for part in range(1, 9)]
    marked = [strip.count('class="lab-here"') for strip in strips]
    assert marked == [1, 3, 1, 4, 2, 1, 1, 1]


def test_the_opening_page_and_every_part_have_their_drawing() -> None:
    assert "```{road}\n" in (ROOT / "book/index.md").read_text("utf-8")
    for part in range(1, 9):
        assert f"```{{road}} {part}\n" in (ROOT / f"book/part{part}.md").read_text("utf-8")


@each_text
def test_prose_is_clean(path: Path) -> None:
    text = text_of(path)
    rules = (number_complaints, word_complaints, image_complaints)
    rules = (*rules, fence_complaints, listing_complaints)
    assert [complaint for rule in rules for complaint in rule(text)] == []


def test_every_citation_has_an_entry() -> None:
    entries = re.findall(
        r"^@\w+\{\s*([^,\s]+)\s*,", (ROOT / "book/references.bib").read_text("utf-8"), re.MULTILINE
    )
    assert len(entries) == len(set(entries)), "a key stands twice"
    cited = {key for path in [*NOTEBOOKS, *PAGES] for key in cited_keys(text_of(path))}
    assert cited
    assert cited <= set(entries)


# --- the rules bite -------------------------------------------------------------------------------
def code_cell(source: str, **metadata: Any) -> Cell:
    return {"cell_type": "code", "source": source, "metadata": metadata, "outputs": []}


def prose(source: str) -> Cell:
    return {"cell_type": "markdown", "source": source, "metadata": {}}


def printing(source: str, text: str, **metadata: Any) -> Cell:
    return {**code_cell(source, **metadata), "outputs": [{"text": [text]}]}


def gluing(name: str, value: str) -> Cell:
    output = {"data": {f"{GLUED}text/plain": value}, "metadata": {"scrapbook": {"name": name}}}
    return {**code_cell(f"glue('{name}', 1)", tags=["remove-input"]), "outputs": [output]}


ASK = printing('guess = predict("How many times?", unit="x")', "How many times?")
TELL = printing("compare(guess, 2.712)", "The model says 2.712x.\n", tags=["hide-output"])


@pytest.mark.parametrize(
    ("above", "count"),
    [
        ([prose("A block of 64 takes 3 ms, and one of 32 takes 2 ms.")], 0),
        ([prose("It is 2.71 times as fast.")], 1),
        ([prose("It is 2.7x as fast.")], 1),
        ([prose("It takes {glue:text}`a:,d` cycles, then {glue:text}`b:,d`.")], 1),
        ([prose("It takes 27.1 ms here.\n\nAnd 10.0 ms there.")], 0),
        ([prose("It takes 5.42 ms and then 2.00 ms; see {ref}`2.71` and [it](2.71).")], 1),
        ([printing("run()", "27,120 cycles\n10,000 cycles")], 1),
        ([code_cell("x = 1  # 2.71 in all")], 1),
        ([code_cell("fig", mystnb={"figure": {"caption": "It is 2.71 times."}})], 1),
    ],
)
def test_prediction_rule_bites(above: list[Cell], count: int) -> None:
    later = [gluing("a", "2712"), gluing("b", "1000"), TELL]
    assert len(prediction_complaints([*above, ASK, *later])) == count


@pytest.mark.parametrize(
    ("value", "unit", "text", "given"),
    [
        (21.0, "cores", "With 21 of 31 cores", True),
        (21.0, "cores", "With chapter-21, Ascend21 and 2.1", False),
        (25.7, "%", "23.5 ms, then 18.7", True),
        (25.7, "%", "23.5 ms, then 18.7 s", False),
        (26.0, "%", "51 MB and 25 MB", False),
        (26.0, "%", "51 % and 25 %", True),
        (906.0, "cycles", "1556 cycles less 650 cycles", True),
        (4.0, "x", "4 x 4 x 4 of 16", False),
        (845.7, "x", "3,961,415 and 4,684 cycles", True),
    ],
)
def test_an_answer_is_given_away_by_digits_ratio_or_difference(
    value: float, unit: str, text: str, given: bool
) -> None:
    assert bool(gives_away(text, value, unit)) == given


def test_a_prediction_is_the_readers_and_its_answer_folded() -> None:
    filled = code_cell('guess = predict("How many times?", unit="x", guess=3)')
    assert len(prediction_complaints([filled, TELL])) == 1
    assert len(prediction_complaints([code_cell('guess = predict("How?", 3)'), TELL])) == 1
    assert len(prediction_complaints([ASK, {**TELL, "metadata": {}}])) == 1
    assert len(prediction_complaints([ASK, {**TELL, "outputs": []}])) == 1
    assert prediction_complaints([ASK, prose("It is 2.71 times as fast."), TELL]) == []
    second = [prose("## Now\n\nA second one."), ASK, TELL]
    assert prediction_complaints([ASK, TELL, prose("5.42 and 2.00."), *second]) == []
    assert prediction_complaints([ASK, TELL, prose("## Now\n\n5.42 and 2.00."), ASK, TELL])


def test_rules_of_width_and_parts_bite() -> None:
    assert wide_complaints([code_cell("x" * 88)]) == []
    assert wide_complaints([code_cell("x" * 89)])
    assert table_complaints([printing("t", f"  {'one  two  ' + 'x' * 77}\n")])
    assert table_complaints([printing("t", f"  {'a  sentence ' + 'x' * 99}\n")]) == []
    assert table_complaints([printing("t", f"{'one  two  ' + 'x' * 78}\n")]) == []
    assert len(listing_complaints(f"```python\n{'x' * 89}\n```\n{'y' * 99}\n")) == 1
    titles = ["One", "Two", "Three", "Four (an evening)"]
    exercises = [prose(f"```{{exercise}} {title}\n:label: e\n```") for title in titles]
    assert exercise_complaints(exercises) == []
    assert len(exercise_complaints(exercises[:3])) == 2
    assert exercise_complaints([*exercises, exercises[-1]])
    minute = "```{admonition} One minute: why?\n:class: dropdown tip\nSo.\n```"
    assert minute_complaints([prose(minute)] * 2) == []
    assert minute_complaints([prose(minute)])
    assert minute_complaints([prose(minute)] * 4)
    assert minute_complaints([prose(minute)] * 2 + [prose(minute.replace("dropdown ", ""))])
    elsewhere = prose("```{admonition} Elsewhere this is called\n:class: note\n- a\n```")
    assert elsewhere_complaints([elsewhere]) == []
    assert elsewhere_complaints([elsewhere] * 2)
    assert elsewhere_complaints([prose("Elsewhere this is called")])
    assert keep_complaints([prose("**Keep:** bytes decide.")]) == []
    assert keep_complaints([prose("Keep: bytes decide.")])
    assert bitmap_complaints([pictured("A sentence.", "Bars of four pipes.")])
    assert bitmap_complaints([printing("x", "y")]) == []


def test_repeat_rule_bites() -> None:
    cells = [prose("Write down your guess, 3 of {glue:text}`n`, now. Short one. `x = 1` is code.")]
    assert plain_sentences(cells) == {"write down your guess of now"}
    assert repeat_complaints(cells, Counter({"write down your guess of now": 10}))
    assert repeat_complaints(cells, Counter({"write down your guess of now": 9})) == []


TERMS = ["kernel", "mix kernel", "scale", "ZeRO", "memory hierarchy", "bus"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("A kernel, two kernels.", "A {term}`kernel`, two kernels."),
        ("Kernels run.", "{term}`Kernels <kernel>` run."),
        ("A mix kernel, then kernels.", "A {term}`mix kernel`, then {term}`kernels <kernel>`."),
        ("# A kernel\n`kernel`, $kernel$, [kernel](x)", ""),
        ("```python\nkernel\n```\n~~~\nkernel\n~~~\n<a kernel>, {ref}`kernel`", ""),
        ("```{math}\nkernel\n```\n\nA kernel.", "```{math}\nkernel\n```\n\nA {term}`kernel`."),
        ("```{note} A kernel\n:class: kernel\nA\nkernel.\n```", ("```{note} A kernel\n"
         ":class: kernel\nA\n{term}`kernel`.\n```")),
        ("At this scale, **scale** and *scale*.", "At this scale, **{term}`scale`** and *scale*."),
        ("A memory\nhierarchy and memory hierarchies",
         "A {term}`memory\nhierarchy <memory hierarchy>` and memory hierarchies"),
        ("zero, subkernel, kernel-like", ""),
        ("ZeRO on buses", "{term}`ZeRO` on {term}`buses <bus>`"),
        ("A kernel, a {term}`kernel`.", "A {term}`kernel`, a kernel."),
        ("It {term}`runs <kernel>`, a kernel.", ""),
        ("In $a$ a kernel of $b$", "In $a$ a {term}`kernel` of $b$"),
        ("Costs `a` kernel `b`.", "Costs `a` {term}`kernel` `b`."),
    ],
)  # fmt: skip
def test_terms_are_linked_where_they_come_first(before: str, after: str) -> None:
    after = after or before
    assert link_terms([before], TERMS) == [after]
    assert link_terms([after, "A kernel."], ["kernel"])[0] == link_terms([after], ["kernel"])[0]
    assert link_terms([after], TERMS) == [after]
    assert term_complaints([prose(after)], TERMS) == []
    assert bool(term_complaints([prose(before)], TERMS)) == (before != after)


def test_a_term_is_linked_once_in_a_chapter() -> None:
    assert link_terms(["A kernel.", "A kernel."], TERMS) == ["A {term}`kernel`.", "A kernel."]
    assert term_complaints([prose("A kernel."), prose("A {term}`kernel`.")], TERMS)
    assert len(glossary()) > 300
    assert {"kernel", "L0A, L0B, L0C", "zigzag order"} <= set(glossary())


def chapter_of(words: int, minutes: int) -> list[Cell]:
    """A chapter of so many words, twelve lines of code, a figure and an exercise."""
    opening = prose(f"# A\n\n(about {minutes} minutes)\n\n" + "word " * (words - 5))
    figure = code_cell("fig", mystnb={"figure": {"name": "fig-a"}})
    exercise = prose("end.\n\n## Exercises\n\n" + "word " * 999)
    code = code_cell("# why\n\n" + "x = 1\n" * 11)
    return [opening, code, figure, gluing("a", "1"), exercise, code_cell("y\n" * 99)]


def test_reading_time_counts_words_lines_and_figures() -> None:
    cells = chapter_of(1380, 12)
    assert reading_time.minutes_of(cells) == pytest.approx(10 + 1 + 1, abs=0.05)
    assert reading_time.complaints(cells) == []
    assert reading_time.complaints(chapter_of(1380, 14))
    assert reading_time.complaints(chapter_of(1380, 10))
    assert reading_time.complaints(cells[1:])
    wrong = chapter_of(5000, 12)
    reading_time.state(wrong)
    assert "(about 40 minutes)" in wrong[0]["source"]
    assert reading_time.complaints(wrong) == []
    exact = (11.6, 12.4, 13, 18, 21.9, 37.4)
    assert [reading_time.rounded(minutes) for minutes in exact] == [12, 12, 13, 18, 20, 35]


def test_box_rule_bites() -> None:
    closed = prose("```{exercise}\n:label: e\n```\n\n```{solution} e\nThe cell counts.\n```")
    opened = prose("````{solution-start} e\n````\n\nThe cell counts.")
    assert box_complaints([closed, code_cell("1 + 1")]) == [
        "e: a cell of the answer stands outside its box"
    ]
    assert box_complaints([opened, code_cell("1 + 1"), closed]) == []


def pictured(caption: str, alt: str, name: str = "fig-a") -> Cell:
    options = {"figure": {"name": name, "caption": caption}, "image": {"alt": alt}}
    cell = code_cell("fig", mystnb=options)
    return {**cell, "outputs": [{"data": {"image/png": "", "text/plain": "Figure"}}]}


def test_measure_rule_bites() -> None:
    assert len(measure_complaints([code_cell("x = 1\n" * 26)] * 3)) == 5
    told = [code_cell("# why\n\nx = 1")] * 15
    assert measure_complaints(told) == []
    start = prose("````{solution-start} e\n````")
    end = prose("````{solution-end}\n````")
    aside = [code_cell("y", exercise="ex_01_1"), code_cell("check_ex_01_1(f)"), gluing("a", "1")]
    assert measure_complaints([*told, start, code_cell("x"), end, *aside * 9]) == []
    assert measure_complaints([*told[1:], start, code_cell("x"), end, *aside])
    assert measure_complaints([*told, start, end, *told, *told])
    assert import_complaints([code_cell("import os"), code_cell("from os import path")])
    assert import_complaints([code_cell("x = 1"), code_cell("import os")])
    assert import_complaints([code_cell("%pylab\nimport os"), code_cell("x = 1")]) == []
    assert import_complaints([code_cell("import os\n" * 13)])
    assert import_complaints([code_cell("from os import (" + "\n    path," * 11 + "\n)")])
    assert import_complaints([code_cell("from os import (" + "\n    path," * 10 + "\n)")]) == []
    assert home_complaints("\n## Where this lives\n\n- `lab.py`: it\n- `no.py`: it\n", ROOT)
    assert home_complaints("\n## Where this lives\n\n- `lab.py`: it\n", ROOT)
    assert home_complaints("\n## Where this lives\n\n- `lab.py`: a\n- `lab.py`: b\n", ROOT) == []


def test_rhythm_rule_bites() -> None:
    assert len(rhythm_complaints([code_cell("import os"), code_cell("x = 1")])) == 3


@pytest.mark.parametrize(
    "cell",
    [
        pictured("No full stop", "Bars of four pipes."),
        pictured("A sentence.", "A sentence."),
        pictured("A sentence.", "Bars of four pipes.", name="sine"),
        pictured("A sentence.", "Bars of four pipes: 12.5 and 0.25."),
        pictured("A sentence.", "Bars of four pipes, 12,346 high."),
        {**pictured("A sentence.", "Bars of four pipes."), "outputs": []},
        {**pictured("A sentence.", "Bars of four pipes."), "metadata": {}},
    ],
)
def test_figure_rule_bites(cell: Cell) -> None:
    assert figure_complaints(cell)
    assert figure_complaints(pictured("A sentence.", "Bars of four pipes.")) == []
    cell = pictured("A sentence.", "Bars of the 310: 12,300 high, 0.2 wide, 99 long, 4 x 640x15.")
    cell["outputs"][0]["data"]["text/plain"] = ["Figure: 12,345 high,\n", "0.249 wide"]
    assert figure_complaints(cell) == []
    cell["outputs"][0]["data"]["text/plain"] = ["Figure: 12,385 high, 0.251 wide"]
    assert len(figure_complaints(cell)) == 2


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("L1 holds 512 KiB and HBM gives 1.6 TB/s.", 1),
        ("The clock is 1.8 GHz {cite}`liao2021`.", 0),
        ("L1 holds {glue:text}`l1` KiB; `64 KiB` is code.", 0),
        ("```python\nsize = '64 KiB'\n```\n32 KiB in prose", 1),
        ("```{note}\n32 KiB in a note\n```\n64 KiB\n```\n1 KiB\n```", 2),
        ("<!-- number-ok: a definition -->\n1 KiB is 1024 bytes.\n\nL0A has 64 KiB.", 1),
        ("L1 has 1 MiB,\nas printed {cite}`liao2021`. L0A has\n64 KiB.", 1),
        ("| L1 | 1 MiB |\n| UB | 256 KiB {cite}`liao2021` |", 1),
        ("<!-- number-ok-page: generated -->\n64 KiB\n", 0),
    ],
)
def test_number_rule_bites(text: str, count: int) -> None:
    assert len(number_complaints(text)) == count


def test_word_image_and_citation_rules_bite() -> None:
    assert word_complaints("see /home/me/x and C:\\Users, TODO") == ["/home/m", "C:\\U", "TODO"]
    assert word_complaints("GET https://x.org/home/me or ../opt/x") == []
    assert len(image_complaints("![](a.png)\n![b](b.png)\n```{figure} c.png\n:name: c\n```")) == 2
    assert fence_complaints("```{tip} Of `f`\nSo.\n```\n:::{tip} Of `f`\n:::\n``x``") != []
    assert fence_complaints("```{tip} Of f\nSo.\n```\n:::{tip} Of `f`\n:::\n``x``") == []
    assert cited_keys("{cite}`a, b` and {cite:t}`c`") == {"a", "b", "c"}
