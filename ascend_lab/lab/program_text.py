"""Programs as text that fits the width of a page."""

import re

from ascend_lab.machine import isa


def listing(program: isa.Program, *starts: str) -> str:
    """Return a program's lines without flags, cut where an operand or an attribute begins.

    With `starts`, only lines that begin with one of them, without their indentation.

    >>> from ascend_lab.machine import load_chip
    >>> kernel = isa.KernelBuilder("copy", load_chip("Toy"))
    >>> tile = kernel.buffer("b", "UB", "fp16", 16).region(0, 16)
    >>> kernel.copy(tile, kernel.tensor("x", "fp16", 16).region(0, 16))
    >>> print(listing(kernel.finish(), "MTE2"))
    MTE2 data_copy b[0 | 16:1]
        <- x[0 | 16:1]
    """
    lines = [line for line in str(program).splitlines() if "_flag" not in line]
    if starts:
        lines = [line.strip() for line in lines if line.strip().startswith(starts)]
    return "\n".join(map(_cut, lines))


def _cut(line: str) -> str:
    """Return a long line in several, its operands below each other."""
    indent = " " * (len(line) - len(line.lstrip()))
    line = line.replace(" <- ", f"\n{indent}    <- ")
    line = line.replace("], ", f"],\n{indent}       ")  # a second operand, under the first
    return re.sub(r"\] (?=\w+=)", f"]\n{indent}    ", line, count=1)
