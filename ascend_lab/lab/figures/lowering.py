"""What lowering decides, and layouts: addresses of tiles, flags between pipes, conversions."""

from collections.abc import Sequence
from typing import Any

from ascend_lab import dsl as te
from ascend_lab.chip import Chip, load_chip
from ascend_lab.dsl import Schedule
from ascend_lab.errors import InputError
from ascend_lab.graph.compile import DEFAULT_ROAD
from ascend_lab.graph.layout import assign_layouts
from ascend_lab.isa import Instruction, Loop, Program, parse_program, pipe_stream
from ascend_lab.lab import layout_choices as choices
from ascend_lab.lab.figures import style as st

KIB = 1024
LOOKS: Sequence[dict[str, Any]] = (
    {"facecolor": st.SKY, "hatch": ""},
    {"facecolor": st.ORANGE, "hatch": "//"},
    {"facecolor": st.GREEN, "hatch": "\\\\"},
    {"facecolor": st.YELLOW, "hatch": ".."},
    {"facecolor": st.PURPLE, "hatch": "xx"},
)


# -- programs -------------------------------------------------------------------------------------
def residual_sum(n: int, tile: int, slots: int, chip: str, inputs: int = 2) -> Program:
    """Return relu of a sum of vectors as the program of one core: one loop over tiles."""
    names = "abcd"[:inputs]
    x = [te.placeholder((n,), name=name) for name in names]
    total = x[0]
    for other in x[1:]:
        total = te.vadd(total, other)
    s = te.create_schedule(te.renamed(te.vrelu(total), "y"), load_chip(chip))
    for stage in s.state.stages[:-1]:
        s = te.inline(s, stage.name)
    return _only(te.double_buffer(te.split(s, "y", "i", tile), "y", slots))


def _only(s: Schedule) -> Program:
    return te.lower(s).phases[-1].parts[0].program


def five_programs() -> dict[str, tuple[Program, Chip]]:
    """Return a sum, a sum with a table held in UB, a block's last step, a softmax, a product."""
    chip, toy = load_chip("Ascend910B2"), load_chip("Toy")
    a, b = (te.placeholder((65536,), name=name) for name in "ab")
    plain = te.split(te.create_schedule(te.renamed(te.vadd(a, b), "y"), chip), "y", "i", 8192)
    x, p = te.placeholder((32, 65536), name="x"), te.placeholder((65536,), name="p")
    z = te.compute(x.shape, lambda i, j: x[i, j] + p[j], name="z")
    s = te.vectorise(te.split(te.create_schedule(z, chip), "z", "j", 8192), "z", "j_i")
    s = te.cache_read(te.reorder(s, "z", "j_o", "i"), "p", "UB")
    held = te.double_buffer(te.compute_at(s, "p_ub", "z", "j_o"), "z")
    r = te.placeholder((2048, 512), name="r")
    e = te.vexp(te.vsub(r, te.broadcast(te.reduce_max(r, -1, True), r.shape)))
    soft = te.vdiv(e, te.broadcast(te.reduce_sum(e, -1, True), r.shape))
    c = te.matmul(te.placeholder((64, 256), name="c"), te.placeholder((256, 64), name="d"))
    return {
        "sum": (_only(te.double_buffer(plain, "y")), chip),
        "table": (_only(held), chip),
        "block": (residual_sum(64 * 56 * 56, 2 * 56 * 56, 2, chip.name), chip),
        "softmax": (_only(te.auto_schedule(soft, chip)), chip),
        "product": (_only(te.auto_schedule(c, toy)), toy),
    }


# -- programs as text -----------------------------------------------------------------------------
def rewritten(program: Program, *edits: tuple[str, str]) -> Program:
    """Return the program with (old, new) replaced in its text form, in this order."""
    text = str(program)
    for old, new in edits:
        if old not in text:
            raise InputError("text of the program", repr(old), "print the program")
        text = text.replace(old, new)
    return parse_program(text)


def without(program: Program, event: str) -> Program:
    """Return the program without the sets and waits of one kind of flag, such as V>MTE2:0x2."""
    kept = (line for line in str(program).splitlines() if f"_flag {event}" not in line)
    return parse_program("\n".join(kept))


def same_order(one: Program, two: Program) -> bool:
    """Tell whether every pipe runs the same instructions in the same order in both."""
    start = {name: 0 for name, _ in one.params}
    return one.pipes == two.pipes and all(
        list(pipe_stream(one, pipe, start)) == list(pipe_stream(two, pipe, start))
        for pipe in one.pipes
    )


# -- addresses ------------------------------------------------------------------------------------


@st.styled
def fig_addresses(
    tile: int = 6272, slots: int = 2, inputs: int = 2, chip: str = "Ascend910B2"
) -> st.LabFigure:
    """Draw where the tiles of relu(a + b + ...) lie in UB, slot by slot.

    Raises `CapacityError` for tiles that do not fit.
    """
    if not 1 <= inputs <= 4:
        raise InputError("1 to 4 inputs", str(inputs))
    program = residual_sum(4 * tile, tile, slots, chip, inputs)
    size = load_chip(chip).buffers["UB"]
    fig, ax = st.new_figure(height_in=1.5)
    told, used = [], 0
    for number, buffer in enumerate(b for b in program.buffers if b.space == "UB"):
        for slot in range(buffer.slots):
            low = buffer.address + slot * buffer.slot_bytes
            look = LOOKS[number % len(LOOKS)] | {"edgecolor": st.INK}
            st.box(ax, low / KIB, 0, buffer.slot_bytes / KIB, 1, **look)
            paper = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 1.0}
            middle = (low + buffer.slot_bytes / 2) / KIB
            st.put(ax, middle, 0.5, f"{buffer.name}\nslot {slot}", bbox=paper)
            used = max(used, low + buffer.slot_bytes)
        told.append(f"{buffer.name} at {buffer.address:,}, {buffer.slots} x {buffer.slot_bytes:,}")
    ax.set(xlim=(0, size / KIB), ylim=(0, 1), yticks=[], xlabel=f"address in UB of {chip} (KiB)")
    ax.set(title=f"tiles of {tile:,}: {used:,} of {size:,} bytes, {used / size:.0%}")
    return st.finish(fig, alt=f"UB of {chip}, {size:,} bytes: {'; '.join(told)}; {used:,} in use.")


# -- flags ----------------------------------------------------------------------------------------
def turn_of(program: Program) -> list[Instruction]:
    """Return the instructions of one turn of the first loop; of the whole if there is none."""
    loop = next((node for node in program.body if isinstance(node, Loop)), None)
    nodes = program.body if loop is None else loop.body
    return [node for node in nodes if isinstance(node, Instruction)]


@st.styled
def fig_flags(program: Program) -> st.LabFigure:
    """Draw one turn of a program's loop: pipes side by side, an arrow from every set to its wait.

    A dashed arrow leaves at the bottom and comes in at the top: the wait is in a later turn.
    """
    turn = turn_of(program)
    pipes: list[str] = [
        p for p in ("MTE2", "MTE1", "M", "V", "FIX", "MTE3") if p in {i.pipe for i in turn}
    ]
    fig, ax = st.new_figure(height_in=0.7 + 0.27 * len(turn))
    places: dict[tuple[str, Any], tuple[float, float]] = {}
    for row, i in enumerate(turn):
        x, y = float(pipes.index(i.pipe)), float(row)
        if i.event is not None:
            places[i.op, i.event] = x, y
            st.put(ax, x, y, f"{i.op.removesuffix('_flag')} {i.event}", fontsize=8)
            continue
        look = st.PIPE_STYLE[i.pipe]
        st.box(ax, x - 0.33, y - 0.4, 0.66, 0.8, **look.patch_args())
        name = "" if i.dst is None else i.dst.buffer.name
        st.put(ax, x, y, f"{i.op.removeprefix('data_')} {name}", **look.text_args())
    told, bottom = [], len(turn) - 0.3
    for (op, event), (x, y) in places.items():
        if op != "set_flag" or ("wait_flag", event) not in places:
            continue
        to_x, to_y = places["wait_flag", event]
        side = 0.34 if to_x > x else -0.34
        if to_y > y:
            _arrow(ax, (x + side, y), (to_x - side, to_y), "-", st.BLUE)
        else:
            _arrow(ax, (x + side, y), (x + side * 1.3, bottom), "--", st.VERMILLION)
            _arrow(ax, (to_x - side * 1.3, -0.7), (to_x - side, to_y), "--", st.VERMILLION)
        told.append(f"{event} {'in the same turn' if to_y > y else 'in a later turn'}")
    ax.set(xlim=(-0.6, len(pipes) - 0.4), ylim=(bottom, -0.8), yticks=[])
    ax.set_xticks(range(len(pipes)), pipes)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)
    alt = f"One turn of {program.name} on {', '.join(pipes)}. From set to wait: {'; '.join(told)}."
    return st.finish(fig, alt=alt)


def _arrow(
    ax: Any, start: tuple[float, float], end: tuple[float, float], style: str, colour: str
) -> None:
    look = {"arrowstyle": "-|>", "linestyle": style, "color": colour, "linewidth": 1.1}
    ax.annotate("", end, start, arrowprops=look)


# -- layouts --------------------------------------------------------------------------------------
COLOURS: dict[str, dict[str, Any]] = {
    "ND": {"facecolor": st.LIGHT, "hatch": ""},
    "NC1HWC0": {"facecolor": st.SKY, "hatch": "//"},
    "FRACTAL_NZ": {"facecolor": st.ORANGE, "hatch": "\\\\"},
    "trans_data": {"facecolor": st.VERMILLION, "hatch": "xx"},
}


@st.styled
def fig_layouts(name: str = "heads", count: int = 3, channels: int = 64) -> st.LabFigure:
    """Draw the operators of a small graph by layout: as the package assigns them, and at best.

    `count` and `channels` are those of the graph heads, and mean nothing to the others.
    """
    if name not in choices.OWN:
        raise InputError(f"a graph: {', '.join(choices.OWN)}", repr(name))
    own = choices.heads(channels, count=count) if name == "heads" else choices.OWN[name]()
    graph = DEFAULT_ROAD.prepare(DEFAULT_ROAD.rewrite(own)[0], load_chip(choices.CHIP))
    sides = {"the rule": assign_layouts(graph), "the fewest bytes": choices.cheapest(graph)}
    rows = max(len(side.nodes) for side in sides.values())
    fig, axes = st.new_figure(ncols=2, height_in=0.9 + 0.26 * rows)
    told = []
    for ax, (title, side) in zip(st.panels(axes), sides.items(), strict=True):
        for y, node in enumerate(side.nodes):
            kind = side.types[node.output]
            look = COLOURS["trans_data" if node.op == "trans_data" else kind.layout]
            st.box(ax, 0, y - 0.4, 1, 0.8, edgecolor=st.INK, **look)
            words = f"{node.op}  {kind.size_bytes / KIB:,.0f} KiB"
            st.put(ax, 0.5, y, words, bbox={"facecolor": st.PAPER, "edgecolor": "none", "pad": 1})
        moved = choices.converted_bytes(side)
        count = sum(node.op == "trans_data" for node in side.nodes)
        ax.set(xlim=(0, 1), ylim=(rows - 0.4, -0.6), xticks=[], yticks=[])
        ax.set_title(f"{title}: {moved / KIB:,.0f} KiB converted")
        told.append(f"{title}: {count} conversions that move {moved:,} bytes")
    used = {n.layout for side in sides.values() for n in side.types.values()} | {"trans_data"}
    st.key(
        fig, {k: v for k, v in COLOURS.items() if k in used}, loc="outside lower center", ncols=4
    )
    return st.finish(fig, alt=f"Operators of {name} from first to last. {'; '.join(told)}.")
