"""The hardware page: every fact of every chip with value, source and trust; HTML is escaped."""

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ascend_lab.lab.chip_report import (
    chip_facts_html,
    format_size,
    format_value,
    overview_html,
    sources_html,
    table_html,
    trust_html,
)
from ascend_lab.machine.chip import PRESETS, Fact, load_chip

VOID = {"br"}


class Cells(HTMLParser):
    """Collects the text of every cell, by its title, and checks that all elements are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th", "caption"):
            self.cells.append((dict(attrs).get("title") or "", ""))
        elif tag == "br":
            self.handle_data("|")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.cells and set(self.open) & {"td", "th", "caption"}:
            title, text = self.cells.pop()
            self.cells.append((title, text + data))

    def texts(self) -> list[str]:
        return [text for _, text in self.cells]


@pytest.mark.parametrize("name", PRESETS)
def test_every_fact_stands_once_with_value_source_and_trust(name: str) -> None:
    chip = load_chip(name)
    cells = [cell for cell in Cells(chip_facts_html(chip)).cells if cell[0]]
    assert Counter(key for key, _ in cells) == Counter(chip.facts.keys())
    for key, text in cells:
        fact = chip.facts[key]
        assert text == f"{format_value(key, fact.value)}|{fact.source}, {fact.trust}"


def test_html_is_escaped() -> None:
    nasty = "<script>&\"'"
    toy = load_chip("Toy")
    facts = {key: replace(fact, source=nasty) for key, fact in toy.facts.items()}
    facts[f"cube.{nasty}"] = Fact(1.0, nasty, "assumed")
    chip = replace(toy, name=nasty, facts=facts, sources={nasty: nasty})
    pages = [chip_facts_html(chip), overview_html([chip]), trust_html([chip])]
    pages += [sources_html([chip]), table_html(nasty, [nasty], [])]
    for page in pages:
        assert "<script>" not in page
        assert any(nasty in text for text in Cells(page).texts())
    assert f"cube.{nasty}" in dict(Cells(chip_facts_html(chip)).cells)


def test_sizes_are_exact() -> None:
    assert [format_size(n) for n in (64 * 2**30, 192 * 2**20, 1000, 1025)] == [
        "64 GiB",
        "192 MiB",
        "1,000 B",
        "1,025 B",
    ]
