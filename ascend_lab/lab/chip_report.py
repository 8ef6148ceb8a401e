"""Chips as HTML tables for a notebook: facts with source and trust, side by side, counted."""

import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import get_args

from ascend_lab.machine.chip.model import Chip, Trust

TRUST_LEVELS: tuple[Trust, ...] = get_args(Trust)
"""From the best to the weakest."""
_NAMES = tomllib.loads(Path(__file__).with_name("chip_names.toml").read_text("utf-8"))
SECTIONS: dict[str, str] = _NAMES["sections"]
"""The tables of a chip: name -> caption. Every fact of a chip stands in exactly one of them."""


def format_value(key: str, value: float) -> str:
    """Return a fact's value with the unit that its key names: sizes in B, KiB, MiB, GiB or GB."""
    if key.endswith("size_bytes"):
        return format_size(value)
    for ending, (factor, unit) in _NAMES["units"].items():
        if key.endswith(ending):
            return f"{value * factor:,.5g} {unit}"
    return f"{value:,.5g}"


def format_size(size_bytes: float) -> str:
    """Return a size in the largest binary unit that divides it, in GB from 1e9 bytes on if none."""
    if size_bytes >= 1e9 and size_bytes % 2**30:
        return f"{size_bytes / 1e9:,.5g} GB"
    for exponent, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size_bytes >= 2**exponent and size_bytes % 2**exponent == 0:
            return f"{size_bytes / 2**exponent:,.0f} {unit}"
    return f"{size_bytes:,.0f} B"


def chip_facts_html(chip: Chip, sections: Sequence[str] = tuple(SECTIONS)) -> str:
    """Return a chip's facts as HTML tables, one a section; below a value its source and trust."""
    return "\n".join(_section_html(chip, section) for section in sections)


def _section_html(chip: Chip, section: str) -> str:
    """Return the table of one section: the names as rows, what is known about them as columns."""
    cells: dict[str, dict[str, str]] = {}
    for key, fact in chip.facts.items():
        fact_section, row, column = _place(key)
        if fact_section == section:
            text = escape(format_value(key, fact.value))
            origin = f"{escape(fact.source)}, {escape(fact.trust)}"
            cell = f'<td title="{escape(key)}">{text}<br><small>{origin}</small></td>'
            cells.setdefault(row, {})[column] = cell
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    if not cells:
        return f"<p>{escape(chip.name)}: no {escape(section)} in the chip file.</p>"
    rows = []
    for name, row_cells in cells.items():
        text = escape(name)
        if section == "path":  # its pipe and, on split chips, its kind of core
            source, _, target = name.partition("->")
            path = chip.path(source, target)
            core = "" if chip.combined else f", {escape(path.unit)} core"
            text += f"<br><small>{escape(path.pipe)}{core}</small>"
        rows.append([_head(text), *(row_cells.get(n, "<td>\u2013</td>") for n in columns)])
    return table_html(f"{chip.name}. {SECTIONS[section]}", ["", *columns], rows)


def _place(key: str) -> tuple[str, str, str]:
    """Return section, row and column of a fact."""
    section, *middle, leaf = key.split(".")
    if section in ("l2", "memory"):
        return "memory", section.replace("l2", "L2"), _words(leaf)
    if section == "alignment":
        return "buffer", middle[0], "alignment"
    if section == "cube" and leaf.endswith("_energy_pj"):
        return "cube", leaf.removesuffix("_energy_pj"), "energy of a multiply-add"
    if middle and section in SECTIONS:
        return section, middle[0], _words(leaf)
    return "core", _NAMES["names"].get(key, key), "value"


def _words(leaf: str) -> str:
    """Return a key's last part as a column head: the unit stands in the cells."""
    for ending in ("_bytes_per_cycle", "_bytes_per_s", "_pj_per_byte", "_bytes", "_cycles", "_s"):
        leaf = leaf.removesuffix(ending)
    return {"startup": "start-up"}.get(leaf, leaf)


def _head(text: str) -> str:
    """Return the cell that names a row; `text` is escaped already."""
    return f'<th scope="row">{text}</th>'


def table_html(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table that scrolls inside its place.

    `caption` and `heads` are text and are escaped; `rows` hold ready `<td>` and `<th>` elements.
    """
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return (
        '<div style="overflow-x: auto">\n<table class="dataframe table table-sm">\n'
        f'<caption style="caption-side: top">{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def overview_html(chips: Iterable[Chip]) -> str:
    """Return one table with a column per chip; peaks are computed from the facts."""
    columns = {chip.name: _overview(chip) for chip in chips}
    names = list(dict.fromkeys(name for cells in columns.values() for name in cells))
    none = "<td>\u2013<br><small>no entry</small></td>"
    rows = [
        [_head(escape(name)), *(cells.get(name, none) for cells in columns.values())]
        for name in names
    ]
    return table_html("The chips side by side", ["", *columns], rows)


def _overview(chip: Chip) -> dict[str, str]:
    """Return the cells of one chip in the overview, by row name."""
    rate_keys = ["core.count", "clock.hz"]
    vector_keys = [*rate_keys, "core.vector_per_core", "vector.repeat_bytes"]
    kind = "coupled" if chip.combined else f"cube + {chip.cores_of('vector')} vector"
    cells = {"cores": _rated(chip, f"{chip.core_count} {kind}", ["core.count"])}
    for name, key in (("clock", "clock.hz"), ("power", "power.typical_w")):
        if key in chip.facts:
            cells[name] = _rated(chip, format_value(key, chip.facts[key].value), [key])
    for dtype, unit in (("fp16", "TFLOPS"), ("int8", "TOPS")):
        value = f"{chip.peak_ops_per_s(dtype) / 1e12:,.1f} {unit}"
        sides = [f"cube.{dtype}.{side}" for side in "mkn"]
        cells[f"cube peak, {dtype}"] = _rated(chip, value, [*rate_keys, *sides])
    vector_text = f"{chip.vector_peak_ops_per_s('fp16') / 1e12:,.2f} TFLOPS"
    cells["vector peak, fp16"] = _rated(chip, vector_text, vector_keys)
    buffers = [key for key in chip.facts if key.startswith("buffer.")]
    for key in (*buffers, "l2.size_bytes", "l2.rate_bytes_per_s"):
        name = key.removeprefix("buffer.").removesuffix(".size_bytes")
        name = {"l2": "L2", "l2.rate_bytes_per_s": "L2 rate"}.get(name, name)
        cells[name] = _rated(chip, format_value(key, chip.facts[key].value), [key])
    for name, key in (("memory", "memory.size_bytes"), ("memory rate", "memory.rate_bytes_per_s")):
        cells[name] = _rated(chip, format_value(key, chip.facts[key].value), [key])
    return cells


def _rated(chip: Chip, text: str, keys: Sequence[str]) -> str:
    """Return a cell with the weakest trust of the facts in it; of several it is derived at best."""
    levels: list[Trust] = [chip.facts[key].trust for key in keys]
    if len(keys) > 1:
        levels.append("derived")
    weakest = max(levels, key=TRUST_LEVELS.index)
    return f"<td>{escape(text)}<br><small>{weakest}</small></td>"


def shared_keys(chips: Iterable[Chip]) -> set[str]:
    """Return the keys that have the same value and source in every chip."""
    entries_of_chips = [
        {(key, fact.value, fact.source) for key, fact in chip.facts.items()} for chip in chips
    ]
    return {key for key, *_ in set.intersection(*entries_of_chips)}


def trust_html(chips: Iterable[Chip]) -> str:
    """Return the table that counts the facts of each chip by trust."""
    counted = {chip.name: Counter(fact.trust for fact in chip.facts.values()) for chip in chips}
    rows = []
    for name, counts in counted.items():
        numbers = [*(counts[trust] for trust in TRUST_LEVELS), counts.total()]
        rows.append([_head(escape(name)), *(f"<td>{number}</td>" for number in numbers)])
    return table_html("How many facts can be trusted how far", ["", *TRUST_LEVELS, "all"], rows)


def sources_html(chips: Iterable[Chip]) -> str:
    """Return the source keys in use, spelled out, with the number of facts that rest on each."""
    uses = Counter[str]()
    texts: dict[str, str] = {}
    for chip in chips:
        uses.update(fact.source for fact in chip.facts.values())
        texts |= chip.sources
    rows = [
        [f"{_head(escape(key))}<td>{escape(text)}</td><td>{uses[key]}</td>"]
        for key, text in texts.items()
        if uses[key]
    ]
    return table_html("Sources", ["key", "source", "facts"], rows)
