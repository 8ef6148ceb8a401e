"""A3: graphs, what a group may hold, what it moves, and the least that any grouping moves."""

from functools import cache

import numpy as np

from ascend_lab.course.assignment import Case, Judged
from ascend_lab.course.sandbox import Call

UNARY = {"relu": lambda x: np.maximum(x, 0), "neg": np.negative, "copy": lambda x: x}
BINARY = {"add": np.add, "mul": np.multiply, "sub": np.subtract}
ELEMENTWISE = {**UNARY, **BINARY}
ELEMENT_BYTES = 2
NAMES = ("form", "legal", "values", "quicker")


def instance(rng, twist):
    """Return what a group may hold and what a launch costs, in bytes."""
    return {
        "slots": int(twist.get("slots", 8)),
        "launch_bytes": int(rng.choice([4096, 8192, 16384])),
        "side": int(rng.choice([32, 48, 64])),
    }


# -- graphs ----------------------------------------------------------------------------------------


def graph(rng, n, side, prefix="", matmuls=True):
    """Return a random graph: inputs {name: shape}, nodes [name, op, arguments], outputs."""
    inputs = {f"{prefix}x{i}": [side, side] for i in range(int(rng.integers(1, 4)))}
    values, nodes = list(inputs), []
    for i in range(n):
        name, pick = f"{prefix}n{i}", rng.random()
        recent = values[-4:]
        if pick < 0.12 and matmuls:
            op, count = "matmul", 2
        elif pick < 0.22:
            op, count = "transpose", 1
        elif pick < 0.32:
            op, count = "sum", 1
        elif pick < 0.62:
            op, count = str(rng.choice(sorted(UNARY))), 1
        else:
            op, count = str(rng.choice(sorted(BINARY))), 2
        nodes.append([name, op, [str(rng.choice(recent)) for _ in range(count)]])
        values.append(name)
    read = {a for _, _, args in nodes for a in args}
    ends = [name for name, _, _ in nodes if name not in read]
    more = [name for name, *_ in nodes if rng.random() < 0.08]
    return {"inputs": inputs, "nodes": nodes, "outputs": sorted({*ends, *more})}


def joined(parts):
    """Return several graphs side by side as one."""
    return {
        "inputs": {k: v for part in parts for k, v in part["inputs"].items()},
        "nodes": [node for part in parts for node in part["nodes"]],
        "outputs": [name for part in parts for name in part["outputs"]],
    }


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
    reached, todo = set(), [group[0]]
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
        seen, todo = set(), [frozenset([n]) for n in names if n not in done and needs[n] <= done]
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


def cluttered(rng, graph, share=0.5):
    """Return the same graph with pairs that undo each other, copies, twins and dead nodes."""
    nodes, renamed, extra = [], {}, 0
    for name, op, args in graph["nodes"]:
        args = [renamed.get(a, a) for a in args]
        nodes.append([name, op, args])
        if rng.random() < share:
            kind = str(rng.choice(["copy", "neg", "transpose", "twin", "dead"]))
            first, second = f"c{extra}", f"c{extra}b"
            extra += 1
            if kind == "copy":
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


def group_case(drawn, rng, sizes, name, timed=True, made=None):
    """Return a graph to group; several sizes make several graphs side by side."""
    parts = made or [graph(rng, n, drawn["side"], f"g{i}_") for i, n in enumerate(sizes)]
    whole = joined(parts)
    arguments = {"graph": whole, "slots": drawn["slots"], "launch_bytes": drawn["launch_bytes"]}
    rules = drawn["slots"], drawn["launch_bytes"]
    known = {"least": sum(least_bytes(part, *rules) for part in parts)}
    return Case(name, Call("groups", arguments), known, timed)


def rewrite_case(drawn, rng, n, name, timed=True):
    """Return a cluttered graph to clean."""
    plain = graph(rng, n, drawn["side"])
    known = {"least": len(tidy(plain)["nodes"])}
    return Case(name, Call("rewrite", {"graph": cluttered(rng, plain)}), known, timed)


def tidy(graph):
    """Return the graph without nodes that no output needs: what the clutter was added to."""
    needed = set(graph["outputs"])
    kept = []
    for node in reversed(graph["nodes"]):
        if node[0] in needed:
            kept.append(node)
            needed |= set(node[2])
    return {**graph, "nodes": kept[::-1]}


def cases(drawn, rng):
    """Return the public cases."""
    return [
        group_case(drawn, rng, [1], "one node", timed=False),
        group_case(drawn, rng, [8], "8 nodes", timed=False),
        group_case(drawn, rng, [9] * 8, "72 nodes"),
        rewrite_case(drawn, rng, 12, "rewrite 12 nodes"),
    ]


def judge(case, answer):
    """Judge groups or a rewritten graph."""
    ask = {"groups": judge_groups, "rewrite": judge_rewrite}
    return ask[case.call.function](case, answer)


def judge_groups(case, answer):
    """Judge a list of groups of names."""
    given = case.call.arguments
    graph, slots, launch = given["graph"], given["slots"], given["launch_bytes"]
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
    return Judged(found, cost, max(base, 1.05 * least), 1.02 * least, least)


def judge_rewrite(case, answer):
    """Judge a graph that should compute the same with fewer nodes."""
    given = case.call.arguments["graph"]
    found = dict.fromkeys(NAMES, "")
    rng = np.random.default_rng(len(given["nodes"]))
    arrays = {name: rng.integers(-3, 4, shape).astype(np.int64)
              for name, shape in given["inputs"].items()}  # fmt: skip
    try:
        if answer["inputs"] != given["inputs"] or answer["outputs"] != given["outputs"]:
            return Judged(dict.fromkeys(NAMES, "the same inputs and outputs, by name"))
        got, right = evaluate(answer, arrays), evaluate(given, arrays)
        lacking = [name for name in given["outputs"] if name not in got]
    except (ValueError, TypeError, KeyError) as error:
        return Judged(dict.fromkeys(NAMES, f"no graph: {error}"[:200]))
    if lacking:
        found["legal"] = f"output {lacking[0]} is gone"
    else:
        wrong = [n for n in given["outputs"] if not np.array_equal(got[n], right[n])]
        found["values"] = f"output {wrong[0]} has other values" if wrong else ""
    cost, base, least = len(answer["nodes"]), len(given["nodes"]), case.known["least"]
    if cost >= base > least:
        found["quicker"] = f"{cost} nodes, given {base}"
    return Judged(found, cost, max(base, 1.05 * least), 1.02 * least, least)


def chart(case, answer):
    """Draw the groups as columns of names, in the order they can run."""
    if case.call.function != "groups":
        return ""
    wide, high = 110, max(len(group) for group in answer) * 16 + 24
    columns = []
    for i, group in enumerate(answer):
        names = "".join(f'<text x="{i * wide + 8}" y="{34 + 16 * k}" font-size="11">{name}</text>'
                        for k, name in enumerate(group))  # fmt: skip
        columns.append(f'<rect x="{i * wide + 2}" y="16" width="{wide - 6}" height="{high - 18}" '
                       f'fill="none" stroke="#4878a8"/>{names}')  # fmt: skip
    width = len(answer) * wide
    return f'<svg viewBox="0 0 {width} {high}" width="{min(width, 900)}">{"".join(columns)}</svg>'
