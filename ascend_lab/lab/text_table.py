"""The tables that the chapters print."""

import math
import re
from collections.abc import Iterable, Sequence
from numbers import Integral, Real

GAP = "  "
"""What stands between two columns."""
_NUMBER = re.compile(r"[-+±<>≤≥~]?[\d.,]+(?:e[-+]?\d+)?\s?[%x×]?|-|")
"""Text that is set like a number: `1,024`, `-3.5 %`, `2.1x`, a dash for a missing value."""


def table(header: Sequence[str], rows: Iterable[Sequence[object]], digits: int = 3) -> None:
    """Print rows under a header, one column a name: numbers to the right, words to the left.

    Whole numbers are printed whole (`16,384`), other numbers to `digits` significant digits
    (`0.0123`, `4.57`, `123`), true and false as yes and no, None as a dash.

    >>> rows = [("16 x 16", 4096, 0.5), ("8 x 8", 16384, 0.125)]
    >>> table(["tile", "cycles", "share of peak"], rows)
    tile     cycles  share of peak
    16 x 16   4,096          0.500
    8 x 8    16,384          0.125
    """
    lines = [list(header), *([cell_text(value, digits) for value in row] for row in rows)]
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"a row of {len(header)} values under {header}; got {line}")
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    # A column is a column of numbers if everything below its name is one.
    to_the_right = [all(_NUMBER.fullmatch(text) for text in column[1:]) for column in columns]
    for line in lines:
        cells = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, to_the_right, strict=True)
        ]
        print(GAP.join(cells).rstrip())


def cell_text(value: object, digits: int) -> str:
    """Return a value as a table shows it.

    >>> [cell_text(value, 3) for value in (16384, 0.012345, 123.4, 1234.6, True, None, "V")]
    ['16,384', '0.0123', '123', '1,235', 'yes', '-', 'V']
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return f"{int(value):,}"
    if isinstance(value, Real):
        return number_text(float(value), digits)
    return str(value)


def number_text(value: float, digits: int) -> str:
    """Return a number to so many significant digits, all digits before the point kept.

    >>> number_text(0.05, 3), number_text(1234.56, 3), number_text(99.96, 3)
    ('0.0500', '1,235', '100')
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    # Rounded first: 99.96 has two digits before the point, but to three digits it is 100.
    rounded = float(f"{value:.{digits - 1}e}")
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{value:,.{max(0, places)}f}"
