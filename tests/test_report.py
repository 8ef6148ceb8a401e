"""The hardware page: every fact of every chip with value, source and trust; HTML is escaped."""

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from ascend_lab.chip import PRESETS, Fact, load_chip, presets
from ascend_lab.lab.chip_report import (
    SECTIONS,
    TRUST_LEVELS,
    chip_facts_html,
    format_size,
    format_value,
    overview_html,
    shared_keys,
    sources_html,
    table_html,
    trust_counts,
    trust_html,
)

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


def test_sections_can_be_chosen_and_an_empty_one_says_so() -> None:
    toy = load_chip("Toy")
    keys = {key for key, _ in Cells(chip_facts_html(toy, ["path", "link"])).cells if key}
    assert keys == {key for key in toy.facts if key.startswith("path.")}
    assert "Toy: no link in the chip file." in chip_facts_html(toy, ["link"])
    assert "GM->L1|MTE2" in Cells(chip_facts_html(toy, ["path"])).texts()
    split = Cells(chip_facts_html(load_chip("Ascend910B2"), ["path"])).texts()
    assert "UB->GM|MTE3, vector core" in split


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


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("clock.hz", 1.06e9, "1,060 MHz"),
        ("buffer.UB.size_bytes", 253952, "248 KiB"),
        ("alignment.UB.size_bytes", 32, "32 B"),
        ("memory.size_bytes", 24e9, "24 GB"),
        ("memory.rate_bytes_per_s", 1.2e12, "1,200 GB/s"),
        ("path.GM->L1.rate_bytes_per_cycle", 80.5, "80.5 B/cycle"),
        ("path.GM->L1.energy_pj_per_byte", 12.5, "12.5 pJ/B"),
        ("link.hccs.latency_s", 5e-7, "0.5 µs"),
        ("vector_op.vadd.slope_cycles", 2, "2 cycles"),
        ("cube.int8_energy_pj", 0.23, "0.23 pJ"),
        ("power.typical_w", 310, "310 W"),
        ("core.count", 32, "32"),
    ],
)
def test_values_carry_the_unit_of_their_key(key: str, value: float, text: str) -> None:
    assert format_value(key, value) == text


def test_sizes_are_exact() -> None:
    assert [format_size(n) for n in (64 * 2**30, 192 * 2**20, 1000, 1025)] == [
        "64 GiB",
        "192 MiB",
        "1,000 B",
        "1,025 B",
    ]


def test_the_overview_computes_peaks_and_names_the_weakest_trust() -> None:
    chips = presets()
    texts = Cells(overview_html(chips.values())).texts()
    assert "262.1 TFLOPS|published" in texts  # 910A: 2 * 32 * 4096 * 1 GHz
    assert "8.2 TFLOPS|derived" in texts  # 310: its clock is derived
    assert "24 cube + 48 vector|published" in texts
    assert "–|no entry" in texts  # nobody prints the power of some chips
    for name, chip in chips.items():
        assert name in texts
        assert f"{chip.peak_ops_per_s('int8') / 1e12:,.1f} TOPS" in str(texts)


def test_counts_by_trust_add_up() -> None:
    chips = list(presets().values())
    shared = shared_keys(chips)
    assert "vector_op.vadd.head_cycles" in shared
    assert "clock.hz" not in shared
    rows = Cells(trust_html(chips)).texts()
    for chip in chips:
        assert sum(trust_counts(chip).values()) == len(chip.facts)
        own = trust_counts(chip, chip.facts.keys() - shared)
        at = rows.index(f"{chip.name}, its own")
        numbers = [*own.values(), len(chip.facts) - len(shared)]
        assert rows[at + 1 : at + 5] == [str(number) for number in numbers]
    assert tuple(trust_counts(chips[0])) == TRUST_LEVELS


def test_every_source_in_use_is_spelled_out() -> None:
    chips = presets().values()
    texts = Cells(sources_html(chips)).texts()
    for chip in chips:
        for fact in chip.facts.values():
            assert chip.sources[fact.source] in texts
    total = sum(int(number) for number in texts[4 + 2 :: 3])
    assert total == sum(len(chip.facts) for chip in chips)


def test_every_section_has_a_caption() -> None:
    texts = Cells(chip_facts_html(load_chip("Ascend910A"))).texts()
    assert [f"Ascend910A. {caption}" in texts for caption in SECTIONS.values()] == [True] * 7
