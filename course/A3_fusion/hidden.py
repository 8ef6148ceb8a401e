"""A3: two readers, a diamond, outputs inside, larger graphs and their optima; no answers."""

from course_A3_public import moved_bytes, rewrite_case, small_case, why_not, woven_case

from ascend_lab.course.assignment import Case
from ascend_lab.course.sandbox import Call


def fixed(side, nodes, outputs):
    """Return a graph of given nodes on one input."""
    return {"inputs": {"x": [side, side]}, "nodes": nodes, "outputs": outputs}


def cases(drawn, rng):
    """Return hidden graphs."""
    side = drawn["side"]
    readers = fixed(side, [["a", "relu", ["x"]], ["b", "neg", ["a"]], ["t", "transpose", ["a"]],
                           ["c", "add", ["b", "t"]]], ["c"])  # fmt: skip
    diamond = fixed(side, [["a", "neg", ["x"]], ["s", "sum", ["a"]], ["b", "sub", ["a", "s"]],
                           ["c", "mul", ["b", "b"]], ["d", "add", ["c", "a"]]], ["d"])  # fmt: skip
    inside = fixed(side, [["m", "matmul", ["x", "x"]], ["a", "relu", ["m"]], ["b", "neg", ["a"]],
                          ["c", "add", ["a", "b"]]], ["a", "c"])  # fmt: skip
    twins = fixed(side, [["s", "sum", ["x"]], ["a", "sub", ["x", "s"]], ["b", "sub", ["s", "x"]],
                         ["c", "copy", ["a"]], ["d", "neg", ["x"]], ["e", "neg", ["d"]],
                         ["f", "mul", ["b", "e"]]], ["c", "f"])  # fmt: skip
    return [
        small_case(drawn, readers, "two readers"),
        small_case(drawn, diamond, "a diamond"),
        small_case(drawn, inside, "an output inside"),
        woven_case(drawn, rng, [10, 9] * 5),
        woven_case(drawn, rng, [26] * 6, least_of=least_of_many),
        rewrite_case(drawn, rng, 25),
        # two outputs that differ: nothing right has fewer nodes
        Case("no twins", Call("rewrite", {"graph": twins}), {"least": 2}),
    ]


def least_of_many(graph, slots, launch_bytes):
    """Return what the best grouping of some forty nodes moves: `least_bytes` over sets of bits.

    Each legal group is found and priced once. A table holds the least for each set of nodes that is
    done, smaller sets first; a group may follow if it is not done and all it needs is.
    """
    groups = legal_groups(graph, slots, launch_bytes)
    count = len(graph["nodes"])
    least = {0: 0}
    by_size = [set() for _ in range(count + 1)]
    by_size[0].add(0)
    for some in by_size[:-1]:
        for done in some:
            for group, needed, cost in groups:
                if group & done or needed & ~done:
                    continue
                after = done | group
                total = least[done] + cost
                if total < least.get(after, float("inf")):
                    least[after] = total
                    by_size[after.bit_count()].add(after)
    return least[(1 << count) - 1]


def legal_groups(graph, slots, launch_bytes):
    """Return (nodes, nodes needed, bytes moved) of each legal group; sets of nodes are bits."""
    names = [name for name, *_ in graph["nodes"]]
    bit = {name: 1 << place for place, name in enumerate(names)}
    needs = {name: sum({bit[a] for a in args if a in bit}) for name, _, args in graph["nodes"]}
    beside = dict(needs)
    for name in names:
        for other in names:
            if needs[name] & bit[other]:
                beside[other] |= bit[name]
    found = []
    seen = set()
    todo = list(bit.values())
    while todo:
        group = todo.pop()
        if group in seen:
            continue
        seen.add(group)
        inside = [name for name in names if group & bit[name]]
        if not why_not(graph, inside, slots):
            needed = union(needs[name] for name in inside) & ~group
            found.append((group, needed, moved_bytes(graph, inside, launch_bytes)))
        if len(inside) < slots:
            border = union(beside[name] for name in inside) & ~group
            todo += [group | bit[name] for name in names if border & bit[name]]
    return found


def union(sets):
    """Return the union of sets of bits."""
    whole = 0
    for one in sets:
        whole |= one
    return whole
