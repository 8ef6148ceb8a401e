"""Tables of measured rows beside the model, group by group: part of `lab.py bench`.

The tables are those that come with the package, or those of a folder named with `--measured` or by
the variable `ASCEND_LAB_MEASURED`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ascend_lab.compare import Comparison, Group, compare
from ascend_lab.data import FOLDER
from ascend_lab.errors import AscendLabError, InputError
from bench.table import Figure

VARIABLE = "ASCEND_LAB_MEASURED"


def folder_of(given: str | None) -> Path:
    """Return the folder of measured tables; raises `InputError` for one that does not exist."""
    name = given or os.environ.get(VARIABLE, "")
    if not name:
        return FOLDER / "measured"
    if not Path(name).is_dir():
        raise InputError("a folder of measured tables", name, "name one that exists")
    return Path(name)


def compared_figures(given: str | None = None) -> Iterator[Figure]:
    """Yield, for each table of the folder, how far off its groups are."""
    folder = folder_of(given)
    yield Figure("model over measured tables", "bias, median, p90", "", None)
    for path in sorted(folder.glob("*.csv")):
        try:
            found = compare(path)
        except AscendLabError as error:  # a profile without its chip, or no table at all
            yield Figure(f"  {path.name}", f"not read: {error}"[:100], "", None)
            continue
        yield from _figures(found)


def _figures(found: Comparison) -> Iterator[Figure]:
    for group in found.groups():
        name = f"  {found.name.removesuffix('.csv')}, {group.group}"
        yield Figure(name, _told(group), "", None)


def _told(group: Group) -> str:
    timed = f"{group.timed} of {group.rows} rows"
    if group.bias is None or group.median is None or group.p90 is None:
        return timed
    below = f", {group.below_bound} below bound" * (group.below_bound > 0)
    return f"{timed}: {group.bias:+.0%}, {group.median:.0%}, {group.p90:.0%}{below}"
