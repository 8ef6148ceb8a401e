"""A3: two readers, a diamond, outputs inside, larger graphs; a generator, no answers."""

from course_A3_public import group_case, rewrite_case

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
        group_case(drawn, rng, [], "two readers", timed=False, made=[readers]),
        group_case(drawn, rng, [], "a diamond", timed=False, made=[diamond]),
        group_case(drawn, rng, [], "an output inside", timed=False, made=[inside]),
        group_case(drawn, rng, [11], "11 nodes", timed=False),
        group_case(drawn, rng, [10, 9] * 5, "95 nodes"),
        rewrite_case(drawn, rng, 25, "rewrite 25 nodes"),
        Case("no twins", Call("rewrite", {"graph": twins}), {"least": 4}),
    ]
