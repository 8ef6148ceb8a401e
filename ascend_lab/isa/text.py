"""Programs read from their text form: `parse_program(str(program)) == program`."""

import re

from ascend_lab.errors import ProgramError
from ascend_lab.isa.memory import Affine, Buffer, Region
from ascend_lab.isa.program import AttrValue, Event, Instruction, Loop, Node, Program

_EVENT = re.compile(r"(\w+)>(\w+):(\d+)(?:x(\d+))?$")
_REGION = re.compile(r"([\w.]+)\[(?:([^|\]]+) \| )?([^|\]]+) \| ([-\d:,]+)\]")
_ATTR = re.compile(r"(\w+)=(\([^)]*\)|\S+)")
_TERM = re.compile(r"([+-]?)(?:(\d+)\*)?([A-Za-z_]\w*)|([+-]?\d+)")
_WORD_ATTRS = ("op", "round", "atomic")
_AFFINE_ATTRS = ("accumulate", "m_start", "k_start")


def parse_program(text: str) -> Program:
    """Read the text form back; raise `ProgramError` with the line that cannot be read."""
    name, params, buffers = "", [], dict[str, Buffer]()
    stack: list[tuple[int, str, int, list[Node]]] = [(-1, "", 1, [])]

    def close(indent: int) -> None:
        while stack[-1][0] >= indent:
            _, loop_var, count, body = stack.pop()
            stack[-1][3].append(Loop(loop_var, count, tuple(body)))

    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words:
            continue
        indent = len(line) - len(line.lstrip())
        try:
            close(indent)
            if words[0] == "program":
                name = line.split(maxsplit=1)[1].strip()
            elif words[0] == "param":
                params.append((words[1], int(words[2])))
            elif words[0] == "buffer":
                buffers[words[1]] = _buffer(words)
            elif words[0] == "loop":
                loop = Loop(words[1], int(words[2].rstrip(":")), ())
                stack.append((indent, loop.var, loop.count, []))
            else:
                stack[-1][3].append(_instruction(line.strip(), buffers))
        except (ValueError, KeyError, IndexError, AttributeError, ProgramError) as error:
            raise ProgramError(
                f"line {number} in program text form", line.strip(), f"mend it ({error})"
            ) from error
    close(0)
    return Program(name, tuple(buffers.values()), tuple(stack[0][3]), tuple(params))


def _buffer(words: list[str]) -> Buffer:
    extra = {k: int(v) for k, v in (w.split("=") for w in words[5:])}
    name, space, dtype, elements = words[1:5]
    places = extra.get("slots", 1), extra.get("at", 0), extra.get("pitch", 0)
    return Buffer(name, space, dtype, int(elements), *places)


def _event(text: str) -> Event:
    match = _EVENT.match(text)
    if match is None:
        raise ValueError(f"event {text}")
    return Event(match[1], match[2], int(match[3]), int(match[4] or 1))


def _affine(text: str) -> Affine:
    total = Affine()
    position = 0
    for match in _TERM.finditer(text):
        if match.start() != position:
            raise ValueError(f"affine expression {text}")
        position = match.end()
        sign, coefficient, name, const = match.groups()
        if name:
            factor = int(coefficient or 1) * (-1 if sign == "-" else 1)
            total = total + Affine(0, ((name, factor),))
        else:
            total = total + int(const)
        if position < len(text) and text[position] == "+":
            position += 1 if text[position + 1] == "-" else 0
    if position != len(text):
        raise ValueError(f"affine expression {text}")
    return total


def _region(match: re.Match[str], buffers: dict[str, Buffer]) -> Region:
    pairs = [dim.split(":") for dim in match[4].split(",")]
    sizes, strides = tuple(int(p[0]) for p in pairs), tuple(int(p[1]) for p in pairs)
    slot = _affine(match[2]) if match[2] else Affine()
    return Region(buffers[match[1]], _affine(match[3]), sizes, strides, slot)


def _instruction(line: str, buffers: dict[str, Buffer]) -> Instruction:
    words = line.split()
    if words[0] in ("set_flag", "wait_flag"):
        event = _event(words[1])
        pipe = event.src if words[0] == "set_flag" else event.dst
        return Instruction(words[0], pipe, event=event)
    pipe, op = words[0], words[1]
    rest = line[line.index(op, len(pipe)) + len(op) :]
    left, arrow, _ = rest.partition(" <- ")
    regions = [_region(m, buffers) for m in _REGION.finditer(rest)]
    has_dst = bool(arrow) or (bool(_REGION.match(left.strip())) and bool(regions))
    dst = regions.pop(0) if has_dst else None
    tail = _REGION.sub("", rest)
    attrs = tuple((m[1], _attr(m[1], m[2])) for m in _ATTR.finditer(tail))
    return Instruction(op, pipe, dst, tuple(regions), attrs)


def _attr(key: str, text: str) -> AttrValue:
    if key in _AFFINE_ATTRS:
        return _affine(text)
    if key in _WORD_ATTRS:
        return text
    if text.startswith("("):
        return tuple(int(v) for v in text[1:-1].split(",") if v)
    try:
        return int(text)
    except ValueError:
        return float(text)
