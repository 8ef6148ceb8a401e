"""Decisions: those that need the clock, and those that a user takes in a file of switches.

Groups of one kernel and rows in fractals are decided before the network is lowered, so candidates
are lowered and timed here, with what starts them in a network: a launch from the device's queue, or
a barrier inside a super kernel. Kernels are remembered, so that what is taken is not written again.

Which passes and fusion rules are on is said in the two forms of `fusion_switch.cfg`:

    SoftmaxFusionPass:off

    {"Switch": {"GraphFusion": {"ALL": "off", "SoftmaxFusionPass": "on"}, "UBFusion": {...}}}

`ALL` sets what is not named. Source: CANN documentation, --fusion_switch_file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from ascend_lab import limits
from ascend_lab.compiler import aliases, ir, lower, tasks
from ascend_lab.compiler.draft import Draft
from ascend_lab.compiler.layout import scale_of
from ascend_lab.compiler.lower.vector import ROW_WISE
from ascend_lab.compiler.rules import special_form
from ascend_lab.errors import AscendLabError, InputError
from ascend_lab.machine.chip import DTYPE_BYTES, Chip
from ascend_lab.machine.sim.timeline import Start, start_cycles
from ascend_lab.operators.ops.casts import QUANTISED

SCOPES = ("GraphFusion", "UBFusion")
FORM = '{"Switch": {"GraphFusion": {...}, "UBFusion": {...}}}'


@dataclass(frozen=True, slots=True)
class Switches:
    """On or off by scope and name; what no file names is on."""

    named: Mapping[tuple[str, str], bool] = field(default_factory=dict)

    def is_on(self, name: str, scope: str = "UBFusion") -> bool:
        """Tell whether a rule runs."""
        return self.named.get((scope, name), self.named.get((scope, "ALL"), True))


def read_switches(path: str | Path) -> Switches:
    """Return the switches of a file; raise `InputError` naming what cannot be read."""
    data = limits.read_file(path, "a fusion switch file", limits.TOML_BYTES)
    with limits.naming(path):
        try:
            return parse_switches(data.decode("utf-8"))
        except UnicodeDecodeError as error:
            remedy = "check the path; it is UTF-8"
            raise InputError("a fusion switch file", str(error), remedy) from error


def parse_switches(text: str) -> Switches:
    """Return the switches of a text in either form."""
    found: dict[tuple[str, str], bool] = {}
    if text.lstrip().startswith(("{", "[")):
        whole = limits.json_of(text, FORM, "mend the JSON")
        scopes = whole.get("Switch") if isinstance(whole, dict) else None
        if not isinstance(scopes, dict) or not all(isinstance(v, dict) for v in scopes.values()):
            raise InputError(FORM, text.strip()[:60], "mend the JSON")
        wrong = next((s for s, names in scopes.items() if names and s not in SCOPES), None)
        if wrong is not None:
            raise InputError(f"a scope {' or '.join(SCOPES)}", wrong, "rename it")
        for scope, names in scopes.items():
            found.update({(scope, name): _state(str(v), name) for name, v in names.items()})
        return Switches(found)
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, _, state = line.partition(":")
            on = _state(state, f"line {number}")
            found.update({(scope, name.strip()): on for scope in SCOPES})
    return Switches(found)


def _state(text: str, where: str) -> bool:
    if text.strip().lower() not in ("on", "off"):
        raise InputError(f"{where}: on or off", repr(text.strip()), "write Name:on or Name:off")
    return text.strip().lower() == "on"


# -- what needs the clock --------------------------------------------------------------------------
NEVER = float("inf")


def pays(graph: ir.Graph, group: Sequence[ir.Node], chip: Chip, start: Start = "queued") -> bool:
    """Tell whether a group becomes one kernel no slower than its nodes apart, starts counted.

    One on cube and vector cores starts later and saves little but trips to L2, and a convolution
    alone may run on either: for both, what other kernels wrote is taken to be in L2.
    """
    if not aliases.moves_between(graph).isdisjoint(n.name for n in group):
        return False  # nothing moves there
    piece = lower.piece_of(graph, group)
    after = ir.only_reader(graph, group[-1])
    special = special_form(graph, group)
    smaller = special[0].smaller(special[1]) if special else ()
    two_products = sum(node.has("convolution", "product") for node in group) > 1
    more = after and after.has("lanes") and not scale_of(graph, after)
    if (len(piece.graph.outputs) > 1 and not smaller) or (more and two_products):
        return False  # what follows two products needs a kernel of its own
    if smaller and not pays(graph, smaller, chip, start):
        return False
    try:
        if lower.mixes(piece, chip) and not _may_mix(graph, group, chip, start):
            return False
        kernel = tasks.lowered_once(piece, chip, start=start).kernel
        if lower.conv.follows_free(piece, lower.piece_of(graph, group[:1]), chip):
            return True
    except AscendLabError:
        return False
    mixed = any(phase.mix for phase in kernel.phases) and not lower.attention_in(group)
    warm = mixed or any(node.has("convolution") for node in group)
    together = _cycles(piece, chip, start, warm=warm)
    least = _apart(graph, group, chip, start, cuts=mixed, warm=warm, enough=together)
    # one by one some cannot leave their blocks
    return together <= least if least < NEVER else any(n.op in QUANTISED for n in group)


def _may_mix(graph: ir.Graph, group: Sequence[ir.Node], chip: Chip, start: Start) -> bool:
    """Tell whether what follows a convolution takes longer, apart, than a mix kernel's later start.

    It is asked before that kernel is written, which is hardly quicker than the convolution alone.
    """
    head = _cycles(lower.piece_of(graph, group[:1]), chip, start, warm=True)
    later = start_cycles(chip, start, round(chip.mix_start_s * chip.clock_hz))
    rest = _apart(graph, group, chip, start, cuts=False, warm=True) - head
    return head == NEVER or rest > later - start_cycles(chip, start)


def _apart(
    graph: ir.Graph,
    group: Sequence[ir.Node],
    chip: Chip,
    start: Start,
    *,
    cuts: bool,
    warm: bool,
    enough: float = NEVER,
) -> float:
    """Return the cycles of the first way apart there is, or with `cuts` of one below `enough`."""
    least = NEVER
    special = special_form(graph, group)
    every = cuts or bool(special and special[0].compares_all)
    for way in chain(_ways_apart(graph, group), _cuts(group) if cuts else ()):
        least = min(least, _summed(graph, way, chip, start, warm=warm, enough=enough))
        if least < (enough if every else NEVER):
            break
    return least


def _summed(
    graph: ir.Graph,
    way: Sequence[Sequence[ir.Node]],
    chip: Chip,
    start: Start,
    *,
    warm: bool,
    enough: float,
) -> float:
    """Return the cycles of kernels one after another, or some number from `enough` on.

    Kernels that bring a way to `enough` cycles by what each takes at least are not written.
    """
    cycles: float = sum(known := [_least(graph, part, chip, start) for part in way])
    for part, at_least in zip(way, known, strict=True):
        if cycles >= enough:
            break
        cycles += _cycles(lower.piece_of(graph, part), chip, start, warm=warm) - at_least
    return cycles


def _least(graph: ir.Graph, part: Sequence[ir.Node], chip: Chip, start: Start) -> int:
    """Return the cycles of starting a kernel and writing its last result, all cores at once."""
    kind = graph.types[part[-1].output]
    rate = max(path.rate_bytes_per_cycle for (_, to), path in chip.paths.items() if to == "GM")
    written = kind.elements * DTYPE_BYTES[kind.dtype] / (rate * chip.cores_of("vector"))
    return start_cycles(chip, start) + int(written)


def _ways_apart(graph: ir.Graph, group: Sequence[ir.Node]) -> Iterator[Sequence[Sequence[ir.Node]]]:
    """Yield what would be kernels without a group, the first that the chip has counts."""
    views = aliases.view_nodes(graph)
    if special := special_form(graph, group):
        fusion, parts = special
        yield from fusion.apart(parts)
        return
    if heads := _added(graph, group):  # the one in front would be one kernel with what follows
        other = heads[0] if group[0] in heads[1] else heads[1]
        yield [other, [n for n in group if n not in other]]
        yield [*heads, [n for n in group if n not in (*heads[0], *heads[1])]]
    if node := lower.attention_in(group):
        found = (chain for _, chain, _ in lower.around_attention(graph, node))
        yield [(node,), *(chain for chain in found if chain[0] in group)]
    yield [(n,) for n in group if n.name not in views]


def _cuts(group: Sequence[ir.Node]) -> Iterator[Sequence[Sequence[ir.Node]]]:
    """Yield a chain in two: vector cores that follow a cube save less where it is two kernels."""
    for cut in range(1, len(group)):
        yield group[:cut], group[cut:]


def _added(graph: ir.Graph, group: Sequence[ir.Node]) -> list[tuple[ir.Node, ...]]:
    """Return the two convolutions of a group that are added, if it has such."""
    for node in group:
        heads = lower.added_convolutions(graph, node)
        if heads and all(head[0] in group for head in heads):
            return heads
    return []


def _cycles(piece: lower.Piece, chip: Chip, start: Start, *, warm: bool = False) -> float:
    """Return the cycles of a piece's kernel, its start included; infinite if there is none."""
    try:
        return tasks.cycles_started(piece, chip, start, warm=warm)
    except AscendLabError:
        return NEVER


def stay_in_fractals(graph: ir.Graph, chip: Chip, start: Start = "queued") -> ir.Graph:
    """Return the graph with row-wise operators on fractals where the programs say so.

    A layer norm between two matrix products may be quickest row-major, but going there and back
    takes two conversions, each started; one in front of products may be quicker behind a conversion
    than before it: both ways are timed.
    """
    for name in [node.name for node in graph.nodes if node.op in ROW_WISE]:
        found = _moved(graph, graph.node(name))
        if found is None:
            continue
        cycles = near_cycles(*found, chip, start, NEVER)
        if cycles < near_cycles(graph, name, chip, start, cycles + 1):
            graph = found[0]
    return graph


def _moved(graph: ir.Graph, node: ir.Node) -> tuple[ir.Graph, str] | None:
    """Return the graph with one operator on fractals, and its name there.

    None if its operand does not come from fractals, nor its result go there, or a row has padding.
    """
    x = node.inputs[0]
    kind = graph.types[node.output]
    draft = Draft(graph)
    rank = len(kind.shape)
    source = graph.producers.get(x)
    constants = all(n in graph.constants for n in node.inputs[1:])
    if kind.shape[-1] % 16 or not constants or node.attr("axis", -1) % rank != rank - 1:
        return None
    goes = {n.attr("layout") for n in graph.readers[node.output] if n.op == "trans_data"}
    if source and source.op == "trans_data":
        fractal = source.inputs[0]
    elif "FRACTAL_NZ" in goes:
        fractal = draft.insert("trans_data", (x,), {"layout": "FRACTAL_NZ"}, f"{x}.rows")
    else:
        return None
    if draft.type(fractal).layout != "FRACTAL_NZ":
        return None
    y = draft.new_name(f"{node.output}.rows")
    moved = replace(node, name=y, inputs=(fractal, *node.inputs[1:]), outputs=(y,))
    draft.put(moved, replace(kind, layout="FRACTAL_NZ"))
    for reader in graph.readers[node.output]:
        if reader.op == "trans_data" and reader.attr("layout") == "FRACTAL_NZ":
            draft.replace(reader.output, y)
    draft.replace(node.output, draft.insert("trans_data", (y,), {"layout": "ND"}, f"{y}.ND"))
    return draft.finish(), y


def near_cycles(graph: ir.Graph, name: str, chip: Chip, start: Start, enough: float) -> float:
    """Return the cycles of an operator and of the conversions it alone needs, with their starts.

    Bytes are made, and sums of bytes scaled, in the same kernels. Conversions are written first.
    """
    node = graph.node(name)
    before = graph.producers.get(node.inputs[0])
    after = ir.only_reader(graph, node)
    scaled = after is not None and after.op in ("dequantise", "requantise")
    readers = graph.readers[node.output]
    groups: list[tuple[ir.Node, ...]] = [(n,) for n in readers if n.op == "trans_data"]
    if before is not None and before.op == "trans_data" and len(graph.readers[before.output]) == 1:
        maker = graph.producers.get(before.inputs[0])
        bytes_made = maker is not None and maker.op == "quantise" and ir.only_reader(graph, maker)
        groups.append((maker, before) if maker and bytes_made else (before,))
    groups.append((node, after) if after and scaled else (node,))
    return _summed(graph, groups, chip, start, warm=False, enough=enough)
