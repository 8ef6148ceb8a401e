"""A3: graphs, what a group may hold, what it moves, and the least that any grouping moves.

The optimum of a large graph is known because it was woven from small ones: only transposes lead
from one to the next, and a transpose stands alone. The optimum of a cluttered graph is known
because each value that it had before is an output, and all of them differ: none can be spared.
"""

import zlib
from functools import cache

import numpy as np

from ascend_lab.course.assignment import Case, Judged, draw
from ascend_lab.course.sandbox import Call

UNARY = {"relu": lambda x: np.maximum(x, 0), "neg": np.negative, "copy": lambda x: x}
BINARY = {"add": np.add, "mul": np.multiply, "sub": np.subtract}
ELEMENTWISE = {**UNARY, **BINARY}
ELEMENT_BYTES = 2
FULL = 1.05
"""Bytes over the optimum that earn all points of groups: below is the luck of a graph."""
NAMES = ("form", "legal", "values", "quicker")
TWISTS = {
    "noise": {
        "says": "an operator of one argument to the graphs that `rewrite` gets, `noise`: its "
        "argument plus random numbers that the node draws for itself, as dropout does. No two "
        "nodes draw the same, and every node that counts has to draw under its own name."
    }
}
"""What a term may add to the task: no argument says it, the hand-out does."""


def instance(rng, twist):
    """Return what a group may hold and what a launch costs, in bytes."""
    return {
        "slots": int(twist.get("slots", 8)),
        "launch_bytes": int(rng.choice([4096, 8192, 16384])),
        "side": int(rng.choice([32, 48, 64])),
        "adds": twist.get("adds", ""),
    }


# -- graphs ----------------------------------------------------------------------------------------


def graph(rng, n, side, prefix=""):
    """Return a random graph: inputs {name: shape}, nodes [name, op, arguments], outputs."""
    inputs = {f"{prefix}x{i}": [side, side] for i in range(int(rng.integers(1, 4)))}
    values = list(inputs)
    nodes = []
    for i in range(n):
        name = f"{prefix}n{i}"
        nodes.append([name, *operation(rng, values[-4:])])
        values.append(name)
    read = {a for _, _, args in nodes for a in args}
    ends = [name for name, _, _ in nodes if name not in read]
    more = [name for name, *_ in nodes if rng.random() < 0.08]
    return {"inputs": inputs, "nodes": nodes, "outputs": sorted({*ends, *more})}


def operation(rng, recent):
    """Return (op, arguments) of a random node that reads some of the recent values."""
    pick = rng.random()
    if pick < 0.12:
        op = "matmul"
        count = 2
    elif pick < 0.22:
        op = "transpose"
        count = 1
    elif pick < 0.32:
        op = "sum"
        count = 1
    elif pick < 0.62:
        op = str(rng.choice(sorted(UNARY)))
        count = 1
    else:
        op = str(rng.choice(sorted(BINARY)))
        count = 2
    return op, [str(rng.choice(recent)) for _ in range(count)]


def woven(rng, parts):
    """Return small graphs as one that hangs together, and the parts as they stand in it.

    From the second on, one input of a part is the transpose of a value of an earlier part. Two
    parts share no group, for a transpose stands alone, and no two groups of different parts can
    wait for each other, so what is best for each part is best for the whole.
    """
    whole = {"inputs": {}, "nodes": [], "outputs": []}
    placed = []
    for number, part in enumerate(parts):
        inputs = dict(part["inputs"])
        nodes = part["nodes"]
        if placed:
            earlier = placed[int(rng.integers(len(placed)))]
            source = str(rng.choice([name for name, *_ in earlier["nodes"]]))
            earlier["outputs"] = sorted({*earlier["outputs"], source})
            read = {a for _, _, args in nodes for a in args}
            bridge = f"t{number}"
            replaced = str(rng.choice(sorted(read & set(inputs))))
            whole["nodes"].append([bridge, "transpose", [source]])
            shape = inputs.pop(replaced)
            nodes = [[name, op, [bridge if a == replaced else a for a in args]]
                     for name, op, args in nodes]  # fmt: skip
            part = {"inputs": {**inputs, bridge: shape}, "nodes": nodes, "outputs": part["outputs"]}
        whole["inputs"] |= inputs
        whole["nodes"] += nodes
        whole["outputs"] += part["outputs"]
        placed.append(dict(part))
    return whole, placed


def noise(name, shape):
    """Return the numbers that a node of this name draws."""
    return np.random.default_rng(zlib.crc32(name.encode())).integers(1, 1000, shape)


def evaluate(graph, arrays):
    """Return every value of a graph; raises `ValueError` for what is no graph."""
    values = dict(arrays)
    for name, op, args in graph["nodes"]:
        if name in values or not all(a in values for a in args):
            raise ValueError(f"{name}: a new name, and arguments that stand above it")
        given = [values[a] for a in args]
        if op in ELEMENTWISE and len(given) == (1 if op in UNARY else 2):
            values[name] = ELEMENTWISE[op](*given)
        elif op == "matmul" and len(given) == 2:
            values[name] = given[0] @ given[1]
        elif op == "transpose" and len(given) == 1:
            values[name] = given[0].T
        elif op == "sum" and len(given) == 1:
            values[name] = np.broadcast_to(given[0].sum(-1, keepdims=True), given[0].shape)
        elif op == "noise" and len(given) == 1:
            values[name] = given[0] + noise(name, given[0].shape)
        else:
            raise ValueError(f"{name}: {op} with {len(given)} arguments is no operator")
    return values


def size_bytes(graph):
    """Return the bytes of one value; all have the same shape."""
    rows, columns = next(iter(graph["inputs"].values()))
    return rows * columns * ELEMENT_BYTES


# -- groups ----------------------------------------------------------------------------------------


def why_not(graph, group, slots):
    """Return "" if the nodes named may be one kernel, else why not."""
    inside = set(group)
    nodes = {name: (op, args) for name, op, args in graph["nodes"]}
    ops = [nodes[name][0] for name in group]
    if len(group) > 1 and "transpose" in ops:
        return "a transpose stands alone"
    if ops.count("matmul") > 1:
        return "one matmul a group"
    for name in group:
        op, args = nodes[name]
        own = [a for a in args if a in inside]
        if op == "matmul" and own:
            return f"{name}: a matmul reads from outside its group"
        if any(nodes[a][0] == "sum" for a in own):
            return f"{name} reads a sum of its own group"
    if "matmul" in ops and "sum" in ops:
        return "a sum does not follow a matmul in one group"
    read = {a for name in group for a in nodes[name][1]} - inside
    if len(read) + len(group) > slots:
        return f"{len(read)} inputs and {len(group)} values, {slots} slots"
    reached = set()
    todo = [group[0]]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += [a for a in nodes[name][1] if a in inside]
            todo += [other for other in group if name in nodes[other][1]]
    return "" if reached == inside else "its nodes do not hang together"


def moved_bytes(graph, group, launch_bytes):
    """Return what a group moves: inputs read once, values that others need, and a launch."""
    inside = set(group)
    read = {a for name, _, args in graph["nodes"] if name in inside for a in args} - inside
    needed = {a for name, _, args in graph["nodes"] if name not in inside for a in args}
    written = inside & (needed | set(graph["outputs"]))
    return (len(read) + len(written)) * size_bytes(graph) + launch_bytes


def has_circle(graph, groups):
    """Tell whether some groups wait for each other."""
    of = {name: i for i, group in enumerate(groups) for name in group}
    waits = {i: set() for i in range(len(groups))}
    for name, _, args in graph["nodes"]:
        waits[of[name]] |= {of[a] for a in args if a in of} - {of[name]}
    done = set()
    while len(done) < len(groups):
        ready = {i for i in waits if i not in done and waits[i] <= done}
        if not ready:
            return True
        done |= ready
    return False


def least_bytes(graph, slots, launch_bytes):
    """Return what the best grouping moves, by trying every legal group behind every done set.

    Only for few nodes. A set is done when its nodes and all they need are; the next group must need
    nothing else.
    """
    names = [name for name, *_ in graph["nodes"]]
    needs = {name: {a for a in args if a in set(names)} for name, _, args in graph["nodes"]}

    def groups_behind(done):
        """Yield every connected group that can run once `done` has."""
        seen = set()
        todo = [frozenset([n]) for n in names if n not in done and needs[n] <= done]
        while todo:
            group = todo.pop()
            if group in seen:
                continue
            seen.add(group)
            ordered = [n for n in names if n in group]
            if why_not(graph, ordered, slots) == "":
                yield group, moved_bytes(graph, ordered, launch_bytes)
            if len(group) < slots:
                todo += [group | {n} for n in names
                         if n not in done | group and needs[n] <= done | group]  # fmt: skip

    @cache
    def least(done):
        if len(done) == len(names):
            return 0
        return min(cost + least(done | group) for group, cost in groups_behind(done))

    return least(frozenset())


# -- a cluttered graph -----------------------------------------------------------------------------


def bare(rng, n, side):
    """Return a random graph of n nodes whose values all differ, every one an output."""
    graph = {"inputs": {f"x{i}": [side, side] for i in range(3)}, "nodes": [], "outputs": []}
    values = sample(graph, rng)
    known = {value.tobytes() for value in values.values()}
    while len(graph["nodes"]) < n:
        node = [f"n{len(graph['nodes'])}", *operation(rng, list(values)[-6:])]
        more = evaluate({"nodes": [node]}, values)
        made = np.ascontiguousarray(more[node[0]]).tobytes()
        if made not in known:
            known.add(made)
            values = more
            graph["nodes"].append(node)
            graph["outputs"].append(node[0])
    return graph


def sample(graph, rng):
    """Return small whole numbers for each input."""
    return {name: rng.integers(-3, 4, shape).astype(np.int64)
            for name, shape in graph["inputs"].items()}  # fmt: skip


def noisy(rng, graph):
    """Return the graph with two nodes that draw numbers for one value, and what sets them apart.

    Only a node of a name draws its numbers, so neither can be spared.
    """
    source = str(rng.choice(sorted(graph["inputs"])))
    nodes = [["z0", "noise", [source]], ["z1", "noise", [source]], ["z2", "sub", ["z0", "z1"]]]
    return {**graph, "nodes": graph["nodes"] + nodes, "outputs": sorted([*graph["outputs"], "z2"])}


def cluttered(rng, graph, share=0.5):
    """Return the same graph with pairs that undo each other, copies, twins and dead nodes."""
    nodes = []
    renamed = {}
    extra = 0
    for name, op, args in graph["nodes"]:
        args = [renamed.get(a, a) for a in args]
        nodes.append([name, op, args])
        if rng.random() < share:
            kind = str(rng.choice(["copy", "neg", "transpose", "twin", "dead"]))
            first = f"c{extra}"
            second = f"c{extra}b"
            extra += 1
            if kind == "copy" or (kind == "twin" and op == "noise"):
                nodes.append([first, "copy", [name]])
                renamed[name] = first
            elif kind in ("neg", "transpose"):
                nodes += [[first, kind, [name]], [second, kind, [first]]]
                renamed[name] = second
            elif kind == "twin":
                nodes.append([first, op, list(args)])
                renamed[name] = first if rng.random() < 0.5 else name
            else:
                nodes.append([first, "relu", [name]])
    return {"inputs": graph["inputs"], "nodes": nodes, "outputs": list(graph["outputs"])}


# -- cases and the judge ---------------------------------------------------------------------------


def group_case(drawn, whole, least, name, timed=True):
    """Return a graph to group, and the least that its groups move."""
    arguments = {"graph": whole, "slots": drawn["slots"], "launch_bytes": drawn["launch_bytes"]}
    return Case(name, Call("groups", arguments), {"least": least}, timed)


def small_case(drawn, made, name):
    """Return a graph that is small enough to try everything, for the properties."""
    least = least_bytes(made, drawn["slots"], drawn["launch_bytes"])
    return group_case(drawn, made, least, name, timed=False)


def woven_case(drawn, rng, sizes, least_of=least_bytes):
    """Return a graph that hangs together, woven from graphs of some sizes, with its optimum."""
    parts = [graph(rng, n, drawn["side"], f"g{i}_") for i, n in enumerate(sizes)]
    whole, placed = woven(rng, parts)
    bridge = 2 * size_bytes(whole) + drawn["launch_bytes"]
    least = sum(least_of(part, drawn["slots"], drawn["launch_bytes"]) for part in placed)
    name = f"{len(whole['nodes'])} nodes"
    return group_case(drawn, whole, least + (len(parts) - 1) * bridge, name)


def rewrite_case(drawn, rng, n, timed=True):
    """Return a cluttered graph to clean, with the number of nodes that none is below."""
    made = bare(rng, n, drawn["side"])
    if drawn["adds"] == "noise":
        made = noisy(rng, made)
    call = Call("rewrite", {"graph": cluttered(rng, made)})
    return Case(f"rewrite {n} nodes", call, {"least": len(made["nodes"])}, timed)


def cases(drawn, rng):
    """Return the public cases."""
    return [
        small_case(drawn, graph(rng, 1, drawn["side"]), "one node"),
        small_case(drawn, graph(rng, 8, drawn["side"]), "8 nodes"),
        woven_case(drawn, rng, [9] * 8),
        rewrite_case(drawn, rng, 12),
    ]


def judge(case, answer):
    """Judge groups or a rewritten graph."""
    ask = {"groups": judge_groups, "rewrite": judge_rewrite}
    return ask[case.call.function](case, answer)


def judge_groups(case, answer):
    """Judge a list of groups of names."""
    given = case.call.arguments
    graph = given["graph"]
    slots = given["slots"]
    launch = given["launch_bytes"]
    names = [name for name, *_ in graph["nodes"]]
    found = dict.fromkeys(NAMES, "")
    try:
        flat = sorted(name for group in answer for name in group)
    except TypeError:
        flat = None
    if flat != sorted(names) or not all(isinstance(g, list) and g for g in answer):
        return Judged(dict.fromkeys(NAMES, "a list of groups, every node in exactly one"))
    order = {name: i for i, name in enumerate(names)}
    groups = [sorted(group, key=order.__getitem__) for group in answer]
    bad = [why for group in groups if (why := why_not(graph, group, slots))]
    found["legal"] = bad[0] if bad else ""
    if has_circle(graph, groups):
        found["values"] = "two groups wait for each other"
    cost = sum(moved_bytes(graph, group, launch) for group in groups)
    base = sum(moved_bytes(graph, [name], launch) for name in names)
    if cost >= base and len(names) > 1 and case.known["least"] < base:
        found["quicker"] = f"{cost} bytes, unfused {base}"
    least = case.known["least"]
    return Judged(found, cost, base, FULL * least, least)


def judge_rewrite(case, answer):
    """Judge a graph that should compute the same with fewer nodes."""
    given = case.call.arguments["graph"]
    found = dict.fromkeys(NAMES, "")
    arrays = sample(given, draw(case, answer))
    try:
        if answer["inputs"] != given["inputs"] or answer["outputs"] != given["outputs"]:
            return Judged(dict.fromkeys(NAMES, "the same inputs and outputs, by name"))
        got = evaluate(answer, arrays)
        right = evaluate(given, arrays)
        lacking = [name for name in given["outputs"] if name not in got]
    except (ValueError, TypeError, KeyError) as error:
        return Judged(dict.fromkeys(NAMES, f"no graph: {error}"[:200]))
    if lacking:
        found["legal"] = found["values"] = f"output {lacking[0]} is gone"
    else:
        wrong = [n for n in given["outputs"] if not np.array_equal(got[n], right[n])]
        found["values"] = f"output {wrong[0]} has other values" if wrong else ""
    cost = len(answer["nodes"])
    base = len(given["nodes"])
    least = case.known["least"]
    if cost >= base > least:
        found["quicker"] = f"{cost} nodes, given {base}"
    return Judged(found, cost, base, 1.02 * least, least)


def chart(case, answer):
    """Draw the groups as columns of names, in the order they can run."""
    if case.call.function != "groups":
        return ""
    wide = 110
    high = max(len(group) for group in answer) * 16 + 24
    columns = []
    for i, group in enumerate(answer):
        names = "".join(f'<text x="{i * wide + 8}" y="{34 + 16 * k}" font-size="11">{name}</text>'
                        for k, name in enumerate(group))  # fmt: skip
        columns.append(f'<rect x="{i * wide + 2}" y="16" width="{wide - 6}" height="{high - 18}" '
                       f'fill="none" stroke="#4878a8"/>{names}')  # fmt: skip
    width = len(answer) * wide
    return f'<svg viewBox="0 0 {width} {high}" width="{min(width, 900)}">{"".join(columns)}</svg>'
