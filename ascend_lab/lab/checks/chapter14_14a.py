"""Checks of chapters 14 and 14a.

14: transposes, dead code, folded channels, and its pass manager.
14a: heads, transposes, chains of conversions and operators, propagation.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, GraphBuilder, evaluate, passes, random_inputs
from ascend_lab.compiler.ir import to_text
from ascend_lab.compiler.layout import assign_layouts, cancel_trans_data
from ascend_lab.lab import graph_examples as layouts
from ascend_lab.lab.checks import core as ex

Values = np.ndarray
Step = tuple[Any, ...]
TRANSPOSES = 6
"""Orders of three axes."""
PLAIN = ("exp", "relu", "neg")


# -- two transposes are one -----------------------------------------------------------------------
def merge_transposes(rw: passes.Draft, node: Any) -> bool:
    """Let a transpose of a transpose read what the first one reads; drop it if nothing moves."""
    first = rw.maker(node.inputs[0])
    if first is None or first.op != "transpose":
        return False
    perm = tuple(first.attr("perm")[axis] for axis in node.attr("perm"))
    if perm == tuple(range(len(perm))):
        return rw.forward(node, first.inputs[0])
    return rw.become(node, "transpose", first.inputs, {"perm": perm})


def chain_graph(steps: Sequence[int], reads: Sequence[int], rank: int = 3) -> Graph:
    """Return a chain: steps 0 to 5 transpose, the others are `PLAIN`; `reads` are outputs, too."""
    net = GraphBuilder("chain")
    value = net.input("x", (2, 3, 4, 5)[:rank])
    perms = list(itertools.permutations(range(rank)))
    for place, step in enumerate(steps):
        if step < TRANSPOSES:  # of four axes every fourth permutation
            perm = perms[step * len(perms) // TRANSPOSES]
            value = net.transpose(value, perm=perm, name=f"t{place}")
        else:
            value = getattr(net, PLAIN[step - TRANSPOSES])(value, name=f"e{place}")
        if place in reads:
            net.output(net.tanh(value, name=f"out{place}"))
    net.output(net.tanh(value, name="y"))
    return net.build()


def rewritten(rule: Any, graph: Graph) -> Graph:
    """Return what a rule for transposes makes of a graph, in 12 sweeps at most."""
    for _ in range(12):
        graph, matches = passes.sweep(rule, "transpose")(graph)
        if not matches:
            break
    return graph


# -- dead code with effects -----------------------------------------------------------------------
def needed(
    nodes: Sequence[tuple[str, str, tuple[str, ...]]], outputs: Sequence[str], effects: set[str]
) -> list[str]:
    """Return the nodes that an output or a node with an effect depends on, in order."""
    wanted = set(outputs)
    kept = []
    for name, op, inputs in reversed(nodes):
        if name in wanted or op in effects:
            kept.append(name)
            wanted.update(inputs)
    return kept[::-1]


# -- a chain of scales and shifts -----------------------------------------------------------------
def fold(weight: Values, bias: Values, steps: Sequence[Step]) -> tuple[Values, Values]:
    """Return weights and bias of one convolution that computes the convolution and the steps."""
    w = weight.astype(np.float64)
    b = bias.astype(np.float64)
    for kind, first, *more in steps:
        a, c = (first, 0.0) if kind == "mul" else (1.0, first)
        if kind == "bn":
            offset, mean, variance, epsilon = more
            a = first / np.sqrt(variance + epsilon)
            c = offset - mean * a
        w = w * np.reshape(a, (-1, 1, 1, 1))
        b = a * b + c
    return w, b


CHAIN_3 = [(f"n{i}", "relu", (f"n{i - 1}" if i else "x",)) for i in range(5)]


@ex.against(
    needed,
    edges=[
        (CHAIN_3, ["n2"], set()),
        (CHAIN_3, ["x"], set()),
        ([("a", "exp", ("x",)), ("b", "print", ("a",)), ("c", "relu", ("x",))], ["c"], {"print"}),
        ([("a", "exp", ("x",)), ("b", "select", ("x", "x", "a"))], ["b"], set()),
    ],
    cases=30,
)
def check_ex_14_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(nodes, outputs, effects)`: dead code elimination that keeps effects."""
    ops = ("add", "relu", "scatter", "print", "exp")
    names = ["x"]
    nodes = []
    for i in range(int(rng.integers(1, 12))):
        inputs = tuple(names[int(k)] for k in rng.integers(0, len(names), rng.integers(1, 4)))
        nodes.append((f"n{i}", ops[int(rng.integers(len(ops)))], inputs))
        names.append(f"n{i}")
    outputs = [names[int(k)] for k in rng.integers(0, len(names), rng.integers(1, 3))]
    return {"nodes": nodes, "outputs": outputs, "effects": {"scatter", "print"}}


@ex.judged(
    edges=[([2, 5], [], 3), ([3, 4], [], 3), ([3, 6, 4], [], 3), ([3, 3, 3], [1], 3)],
    cases=20,
    wrap=lambda fn: lambda steps, reads, rank: rewritten(fn, chain_graph(steps, reads, rank)),
    steps=lambda rng: rng.integers(0, 7, rng.integers(1, 8)).tolist(),
    reads=lambda rng: rng.integers(0, 8, rng.integers(0, 3)).tolist(),
    rank=range(3, 5),
)
def check_ex_14_2(got: Graph, case: ex.Case) -> str | None:
    """Check `fn(rw, node)`, a rule that merges transposes of transposes."""
    before = chain_graph(case["steps"], case["reads"], case["rank"])
    best = rewritten(merge_transposes, before)
    wanted, found = (evaluate(graph, random_inputs(before, 14)) for graph in (before, got))
    for name, values in wanted.items():
        if not np.array_equal(found[name], values):
            return f"which computes another {name}; every bit should stay"
    if best is before and to_text(got) != to_text(before):
        return "expected the same graph: no transpose reads another"
    made, least = (sum(node.op == "transpose" for node in graph.nodes) for graph in (got, best))
    return f"with {made} transposes, expected {least}" if made != least else None


def _read_only(fn: Any) -> Any:
    def folded(weight: Values, bias: Values, steps: Any) -> Any:
        for array in (weight, bias):
            array.flags.writeable = False  # whoever writes in place is told so
        return fn(weight, bias, steps)

    return folded


RNG_14_4 = np.random.default_rng(3)
WEIGHT = RNG_14_4.standard_normal((2, 1, 1, 1))
BIAS = RNG_14_4.standard_normal(2)
ONES = np.ones(2)
ZEROS = np.zeros(2)
FACTORS = np.array([2.0, 3.0])


@ex.against(
    fold,
    edges=[
        (WEIGHT, BIAS, []),
        (WEIGHT, BIAS, [("mul", FACTORS)]),
        (WEIGHT, BIAS, [("add", ONES), ("mul", FACTORS)]),
        (WEIGHT, BIAS, [("bn", ONES, ZEROS, ONES, 4 * ONES, 0.0)]),
    ],
    cases=20,
    rel_tol=1e-9,
    wrap=_read_only,
)
def check_ex_14_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(weight, bias, steps)`: scales, shifts and batch norms folded into a convolution."""
    k, c = (int(n) for n in rng.integers(2, 6, 2))
    steps: list[Step] = []
    for kind in rng.choice(["mul", "add", "bn"], rng.integers(0, 5)):
        if kind == "bn":
            rest = [rng.standard_normal(k) for _ in range(3)]
            steps.append(("bn", *rest, rng.uniform(0.1, 2.0, k), 1e-5))
        else:
            steps.append((str(kind), rng.standard_normal(k)))
    weight = rng.standard_normal((k, c, 3, 3))
    bias = rng.standard_normal(k)
    return {"weight": weight, "bias": bias, "steps": steps}


# -- the pass manager -----------------------------------------------------------------------------
MOST = 500
"""Matches after which rules count as endless."""


def _twice(rw: passes.Draft, node: Any) -> bool:
    """Let what a second relu, or a second neg, writes be what the first one wrote, or read."""
    first = rw.maker(node.inputs[0]) if node.op in ("relu", "neg") else None
    if first is None or first.op != node.op:
        return False
    return rw.forward(node, node.inputs[0] if node.op == "relu" else first.inputs[0])


def _earlier(rw: passes.Draft, node: Any) -> bool:
    """Let a transpose of a relu or neg be the relu or neg of a new transpose."""
    first = rw.maker(node.inputs[0]) if node.op == "transpose" else None
    if first is None or first.op not in ("relu", "neg"):
        return False
    inner = rw.insert("transpose", first.inputs, node.attrs)
    return rw.become(node, first.op, [inner])


RULES = (_twice, lambda rw, n: n.op == "transpose" and merge_transposes(rw, n), _earlier)
RESTLESS = [lambda rw, node: node.op == "exp" and rw.become(node, "exp", node.inputs)]
"""A rule that fits for ever."""


def _managed(fn: Any) -> Any:
    def run(steps: Sequence[int], reads: Sequence[int], endless: bool) -> Any:
        rw = passes.Draft(chain_graph(steps, reads))
        answers = list[bool]()

        def counted(rule: Any) -> Any:
            def offer(draft: passes.Draft, node: Any) -> bool:
                answers.append(bool(rule(draft, node)))
                return answers[-1]

            return offer

        done = fn(rw, [counted(rule) for rule in (*RULES, *RESTLESS * endless)], MOST)
        return done, len(answers), sum(answers), rw.finish()

    return run


@ex.judged(
    edges=[
        ([7, 7, 7], [], False),
        ([8, 3, 8, 4], [], False),
        ([8, 7] * 12 + [3], [], False),
        ([7, 6, 7], [], True),
        ([3, 8, 8, 4] * 8, [], False),
        ([8, 0, 0, 8], [1, 3], False),  # who reads what was forwarded has to be looked at again
    ],
    cases=20,
    wrap=_managed,
    steps=lambda rng: rng.integers(0, 9, rng.integers(6, 30)).tolist(),
    reads=lambda rng: rng.integers(0, 9, 2).tolist(),
    endless=[False],
)
def check_ex_14_5(got: Any, case: ex.Case) -> str | None:
    """Check `fn(rw, rules, most)`, a pass manager: what is left, and how many offers it took."""
    done, offers, matches, graph = got
    if case["endless"]:
        right = done is False and matches == MOST
        return None if right else f"after {matches} matches of rules that never end; stop at {MOST}"
    before = chain_graph(case["steps"], case["reads"])
    wanted, found = (evaluate(one, random_inputs(before, 14)) for one in (before, graph))
    if any(not np.array_equal(found[name], values) for name, values in wanted.items()):
        return "and the graph computes something else"
    if any(passes.sweep(rule)(graph)[1] for rule in RULES) or done is not True:
        return "and a rule still fits" if done is True else "expected True: nothing fits any more"
    most = len(RULES) * (len(before.nodes) + 4 * matches)
    return None if offers <= most else f"after {offers} offers for {matches} matches, not {most}"


# -- 14a.1 to 14a.4: heads, transposes, chains of conversions, a chain of operators ----------------
def _behind(count: int, channels: int, pixels: int) -> tuple[int, int]:
    once = 2 * pixels * (channels + -(-channels // 16) * 16)
    return count * once, min(count, 1) * once


@ex.against(_behind, edges=[(0, 16, 4), (1, 16, 4), (3, 64, 1024), (2, 1, 9), (4, 17, 1)])
def check_ex_14a_1(rng: ex.Rng) -> ex.Case:
    """Compare the bytes converted behind a convolution by the rule, and at best."""
    return ex.drawn(rng, count=range(6), channels=range(1, 130), pixels=range(1, 3000))


def _combined(perms: Sequence[Sequence[int]], shape: Sequence[int]) -> tuple[int, ...] | None:
    one = tuple(range(len(shape)))
    for perm in perms:
        one = tuple(one[axis] for axis in perm)
    moved = [axis for axis in one if shape[axis] > 1]
    return None if moved == sorted(moved) else one


@ex.against(
    _combined,
    edges=[
        ([(0, 2, 3, 1), (0, 3, 1, 2)], (1, 4, 5, 6)),
        ([(0, 2, 3, 1), (0, 2, 3, 1)], (2, 8, 8, 8)),
        ([(0, 2, 3, 1)], (1, 64, 1, 1)),
        ([(1, 2, 0)], (2, 3, 4)),
        ([(1, 0), (1, 0), (1, 0)], (3, 3)),
        ([], (2, 3)),
    ],
)
def check_ex_14a_2(rng: ex.Rng) -> ex.Case:
    """Compare transposes one after another with the one that does the same, or None."""
    rank = int(rng.integers(2, 5))
    perms = [tuple(map(int, rng.permutation(rank))) for _ in range(rng.integers(1, 4))]
    return {"perms": perms, "shape": tuple(int(n) for n in rng.choice([1, 1, 2, 3], rank))}


def left_over(layouts: Sequence[str], reads: set[int], padded: bool) -> list[tuple[str, str]]:
    """Return the conversions that a chain of them needs when each starts from the first tensor."""
    pairs = dict.fromkeys((layouts[0], layouts[place]) for place in sorted(reads - {0}))
    return [pair for pair in pairs if padded or pair[0] != pair[1]]


@ex.against(
    left_over,
    edges=[
        (["ND", "NC1HWC0", "ND"], {2}, False),
        (["NC1HWC0", "ND", "NC1HWC0"], {2}, True),
        (["NC1HWC0", "ND", "NC1HWC0"], {2}, False),
        (["ND", "NC1HWC0", "ND", "NC1HWC0"], {1, 3}, False),
        (["ND", "NC1HWC0", "FRACTAL_NZ"], {0, 2}, False),
    ],
)
def check_ex_14a_3(rng: ex.Rng) -> ex.Case:
    """Compare the conversions that are left of a chain."""
    layouts = ["ND", "NC1HWC0", "FRACTAL_NZ"]
    count = int(rng.integers(2, 7))
    chain = list[str]()
    while len(chain) < count:
        chain.append(str(rng.choice([x for x in layouts if x not in chain[-1:]])))
    reads = {place for place in range(count) if rng.random() < 0.6}
    return {"layouts": chain, "reads": reads, "padded": chain[0] != "ND" and rng.random() < 0.5}


def _chain(kinds: Sequence[str], sizes: Sequence[tuple[int, int]]) -> int:
    best = {layout: 0 for layout in ("ND", "NC1HWC0") if kinds[0] in (layout, "any")}
    for kind, (plain, blocked) in zip(kinds[1:], sizes, strict=True):
        best = {
            to: min(cost + (plain + blocked) * (to != at) for at, cost in best.items())
            for to in ("ND", "NC1HWC0")
            if kind in (to, "any")
        }
    return min(best.values())


@ex.against(
    _chain,
    edges=[
        (["ND", "NC1HWC0"], [(6, 32)]),
        (["ND", "any", "NC1HWC0"], [(64, 64), (16, 16)]),
        (["ND", "any", "NC1HWC0"], [(16, 16), (64, 64)]),
        (["ND", "any", "ND"], [(16, 16), (64, 64)]),
        (["NC1HWC0", "any", "NC1HWC0", "ND"], [(1, 1), (1, 1), (9, 9)]),
        (["any", "any"], [(5, 5)]),
    ],
)
def check_ex_14a_4(rng: ex.Rng) -> ex.Case:
    """Compare the fewest bytes of a chain of operators with a walk over all choices."""
    count = int(rng.integers(2, 9))
    kinds = [str(k) for k in rng.choice(["ND", "NC1HWC0", "any", "any"], count)]
    plain = [int(n) for n in rng.integers(1, 100, count - 1)]
    return {"kinds": kinds, "sizes": [(n, n * int(rng.integers(1, 4))) for n in plain]}


# -- 14a.5: propagation ----------------------------------------------------------------------------
NETWORKS = ("block", "heads", "sampler", "shufflenet_v2", "mobilevit_xxs", "efficientformer_l1")


@cache
def rule_bytes(graph: Graph) -> int:
    """Return what the package's assignment converts."""
    return layouts.converted_bytes(cancel_trans_data(assign_layouts(graph)))


def _judge_choice(got: Any, case: ex.Case) -> str | None:
    graph = case["graph"]
    allowed = case["options"]
    if not isinstance(got, dict) or set(got) != {node.name for node in graph.nodes}:
        return "expected a dict with an option for every node"
    wrong = next((name for name, option in got.items() if option not in allowed[name]), None)
    if wrong is not None:
        return f"expected one of {len(allowed[wrong])} options for {wrong}"
    moved = layouts.converted_bytes(layouts.laid_out(graph, got))
    goal = min(rule_bytes(graph), layouts.fewest_bytes(graph, allowed) * 1.005)
    return None if moved <= goal else f"expected at most {goal:,.0f} bytes, it converts {moved:,}"


_options_of = cache(layouts.options)


def _case_of(graph: Graph) -> ex.Case:
    """Return a graph with lists of options that an answer may change."""
    return {"graph": graph, "options": {n: [*found] for n, found in _options_of(graph).items()}}


def check_ex_14a_5(fn: Any, seed: int = ex.DEFAULT_SEED) -> ex.CheckResult:
    """Judge a choice of layouts by what it converts, on networks and on random graphs."""
    return ex.check_property(
        "ex_14a_5",
        fn,
        _judge_choice,
        lambda rng: _case_of(layouts.random_graph(rng)),
        edge_cases=[_case_of(layouts.prepared(name)) for name in NETWORKS],
        cases=12,
        seed=seed,
    )
