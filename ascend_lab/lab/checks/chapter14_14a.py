"""Checks of chapters 14 and 14a.

14: dead code, transposes of transposes, scales folded into a convolution, a pass manager.
14a: results of a convolution, transposes, chains of conversions and of operators, a choice of
layouts for a whole network.

A judge returns None for a right answer, else the end of the sentence
"your function returned ..., ", for example "with 3 transposes, expected 1".
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ascend_lab.compiler import Graph, GraphBuilder, evaluate, passes, random_inputs
from ascend_lab.compiler.ir import to_text
from ascend_lab.compiler.layout import assign_layouts, cancel_trans_data
from ascend_lab.lab import graph_examples
from ascend_lab.lab.checks import core as ex

Values = np.ndarray


# -- 14.1: dead code with effects ------------------------------------------------------------------
def needed(
    nodes: Sequence[tuple[str, str, tuple[str, ...]]], outputs: Sequence[str], effects: set[str]
) -> list[str]:
    """Return the nodes that an output or a node with an effect depends on, in order."""
    needed_tensors = set(outputs)
    reversed_names = []
    for name, op, inputs in reversed(nodes):
        if name in needed_tensors or op in effects:
            reversed_names.append(name)
            needed_tensors.update(inputs)
    return reversed_names[::-1]


CHAIN_OF_FIVE = [
    ("n0", "relu", ("x",)),
    ("n1", "relu", ("n0",)),
    ("n2", "relu", ("n1",)),
    ("n3", "relu", ("n2",)),
    ("n4", "relu", ("n3",)),
]


@ex.against(
    needed,
    edges=[
        (CHAIN_OF_FIVE, ["n2"], set()),
        (CHAIN_OF_FIVE, ["x"], set()),
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


# -- 14.2: two transposes are one ------------------------------------------------------------------
TRANSPOSES = 6
"""Number of permutations of three axes."""
ELEMENTWISE = ("exp", "relu", "neg")


def merge_transposes(rw: passes.Draft, node: Any) -> bool:
    """Let a transpose of a transpose read what the first one reads; drop it if no axis moves."""
    first = rw.maker(node.inputs[0])
    if first is None or first.op != "transpose":
        return False
    perm = tuple(first.attr("perm")[axis] for axis in node.attr("perm"))
    if perm == tuple(range(len(perm))):
        return rw.forward(node, first.inputs[0])
    return rw.become(node, "transpose", first.inputs, {"perm": perm})


def chain_graph(operators: Sequence[int], reads: Sequence[int], rank: int = 3) -> Graph:
    """Return a chain of operators, each given by a number; the results at `reads` are outputs, too.

    0 to 5 are the permutations of three axes, 6 to 8 the functions of `ELEMENTWISE`.
    """
    net = GraphBuilder("chain")
    value = net.input("x", (2, 3, 4, 5)[:rank])
    perms = list(itertools.permutations(range(rank)))
    for place, number in enumerate(operators):
        if number < TRANSPOSES:  # of four axes every fourth permutation
            perm = perms[number * len(perms) // TRANSPOSES]
            value = net.transpose(value, perm=perm, name=f"t{place}")
        else:
            function = getattr(net, ELEMENTWISE[number - TRANSPOSES])
            value = function(value, name=f"e{place}")
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


@ex.judged(
    edges=[
        ([2, 5], [], 3),
        ([3, 4], [], 3),  # inverse to each other
        ([3, 6, 4], [], 3),  # with exp between them: nothing to merge
        ([3, 3, 3], [1], 3),  # nothing moves in the end, but the second result is read
    ],
    cases=20,
    wrap=lambda fn: lambda steps, reads, rank: rewritten(fn, chain_graph(steps, reads, rank)),
    steps=lambda rng: rng.integers(0, 7, rng.integers(1, 8)).tolist(),
    reads=lambda rng: rng.integers(0, 8, rng.integers(0, 3)).tolist(),
    rank=range(3, 5),
)
def check_ex_14_2(got: Graph, case: ex.Case) -> str | None:
    """Check `fn(rw, node)`, a rule that merges transposes of transposes."""
    chain = chain_graph(case["steps"], case["reads"], case["rank"])
    merged = rewritten(merge_transposes, chain)
    inputs = random_inputs(chain, 14)
    outputs = evaluate(got, inputs)
    for name, values in evaluate(chain, inputs).items():
        if not np.array_equal(outputs[name], values):
            return f"which computes another {name}; every bit should stay"
    if merged is chain and to_text(got) != to_text(chain):
        return "expected the same graph: no transpose reads another"
    count = _transposes(got)
    least = _transposes(merged)
    return f"with {count} transposes, expected {least}" if count != least else None


def _transposes(graph: Graph) -> int:
    return sum(node.op == "transpose" for node in graph.nodes)


# -- 14.4: a chain of scales and shifts ------------------------------------------------------------
Step = tuple[Any, ...]
"""("mul", factor), ("add", summand) or ("bn", scale, bias, mean, variance, epsilon)."""


def fold(weight: Values, bias: Values, steps: Sequence[Step]) -> tuple[Values, Values]:
    """Return weights and bias of one convolution that computes the convolution and the steps."""
    w = weight.astype(np.float64)
    b = bias.astype(np.float64)
    for kind, *constants in steps:
        if kind == "mul":
            scale = constants[0]
            shift = 0.0
        elif kind == "add":
            scale = 1.0
            shift = constants[0]
        else:  # gamma (y - mean) / sqrt(variance + epsilon) + beta
            gamma, beta, mean, variance, epsilon = constants
            scale = gamma / np.sqrt(variance + epsilon)
            shift = beta - mean * scale
        # scale (w x + b) + shift = (scale w) x + (scale b + shift)
        w = w * np.reshape(scale, (-1, 1, 1, 1))
        b = scale * b + shift
    return w, b


def _read_only(fn: Any) -> Any:
    """Return an answer to exercise 14.4 whose arrays cannot be written."""

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
            gamma, beta, mean = (rng.standard_normal(k) for _ in range(3))
            variance = rng.uniform(0.1, 2.0, k)
            steps.append(("bn", gamma, beta, mean, variance, 1e-5))
        else:
            steps.append((str(kind), rng.standard_normal(k)))
    weight = rng.standard_normal((k, c, 3, 3))
    bias = rng.standard_normal(k)
    return {"weight": weight, "bias": bias, "steps": steps}


# -- 14.5: the pass manager ------------------------------------------------------------------------
MAX_MATCHES = 500
"""Matches after which rules count as endless."""


def _drop_second(rw: passes.Draft, node: Any) -> bool:
    """Replace relu(relu(x)) by relu(x), and neg(neg(x)) by x."""
    first = rw.maker(node.inputs[0]) if node.op in ("relu", "neg") else None
    if first is None or first.op != node.op:
        return False
    return rw.forward(node, node.inputs[0] if node.op == "relu" else first.inputs[0])


def _transpose_first(rw: passes.Draft, node: Any) -> bool:
    """Rewrite transpose(relu(x)) as relu(transpose(x)), and the same for neg."""
    first = rw.maker(node.inputs[0]) if node.op == "transpose" else None
    if first is None or first.op not in ("relu", "neg"):
        return False
    inner = rw.insert("transpose", first.inputs, node.attrs)
    return rw.become(node, first.op, [inner])


def _merge_if_transpose(rw: passes.Draft, node: Any) -> bool:
    """Apply `merge_transposes`, which is made for transposes only."""
    return node.op == "transpose" and merge_transposes(rw, node)


def _endless(rw: passes.Draft, node: Any) -> bool:
    """Replace exp(x) by exp(x), which matches again for ever."""
    return node.op == "exp" and rw.become(node, "exp", node.inputs)


RULES = (_drop_second, _merge_if_transpose, _transpose_first)


class _CountedRule:
    """A rule that counts how often it is offered a node, and how often it matches."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule
        self.offers = 0
        self.matches = 0

    def __call__(self, rw: passes.Draft, node: Any) -> bool:
        is_match = bool(self.rule(rw, node))
        self.offers += 1
        self.matches += is_match
        return is_match


def _with_counted_rules(fn: Any) -> Any:
    """Return a function that runs a pass manager `fn` on a chain.

    It returns the manager's answer, the offers, the matches, and the graph at the end.
    """

    def run(steps: Sequence[int], reads: Sequence[int], endless: bool) -> Any:
        rw = passes.Draft(chain_graph(steps, reads))
        rules = [_CountedRule(rule) for rule in RULES]
        if endless:
            rules.append(_CountedRule(_endless))
        # The manager gets a copy of the list, which it may change.
        is_done = fn(rw, list(rules), MAX_MATCHES)
        offers = sum(rule.offers for rule in rules)
        matches = sum(rule.matches for rule in rules)
        return is_done, offers, matches, rw.finish()

    return run


@ex.judged(
    edges=[
        ([7, 7, 7], [], False),  # relu thrice
        ([8, 3, 8, 4], [], False),  # the transposes, and then the negs, meet after moves
        ([8, 7] * 12 + [3], [], False),  # a transpose moves past 24 functions
        ([7, 6, 7], [], True),  # with the rule that matches for ever, on exp
        ([3, 8, 8, 4] * 8, [], False),  # everything cancels
        ([8, 0, 0, 8], [1, 3], False),  # the readers of a forwarded tensor must be visited again
    ],
    cases=20,
    wrap=_with_counted_rules,
    steps=lambda rng: rng.integers(0, 9, rng.integers(6, 30)).tolist(),
    reads=lambda rng: rng.integers(0, 9, 2).tolist(),
    endless=[False],
)
def check_ex_14_5(got: Any, case: ex.Case) -> str | None:
    """Check `fn(rw, rules, most)`, a pass manager: the graph at the end, and how many offers."""
    is_done, offers, matches, graph = got
    if case["endless"]:
        if is_done is False and matches == MAX_MATCHES:
            return None
        return f"after {matches} matches of rules that never end; stop at {MAX_MATCHES}"
    chain = chain_graph(case["steps"], case["reads"])
    inputs = random_inputs(chain, 14)
    outputs = evaluate(graph, inputs)
    expected = evaluate(chain, inputs)
    if any(not np.array_equal(outputs[name], values) for name, values in expected.items()):
        return "and the graph computes something else"
    if is_done is not True:
        return "expected True: nothing fits any more"
    if any(passes.sweep(rule)(graph)[1] for rule in RULES):
        return "and a rule still fits"
    # Every rule may look once at every node, and at four nodes more for each match.
    most_offers = len(RULES) * (len(chain.nodes) + 4 * matches)
    if offers > most_offers:
        return f"after {offers} offers for {matches} matches, not {most_offers}"
    return None


# -- 14a.1: results of a convolution that leave the network ----------------------------------------
def converted_after(count: int, channels: int, pixels: int) -> tuple[int, int]:
    """Return the bytes converted for `count` functions of a convolution: by the rule, and at best.

    A conversion from NC1HWC0 to rows reads whole blocks of 16 channels in fp16, and writes the
    channels alone. The rule converts each result. Converting the convolution's result once is best.
    """
    padded_channels = -(-channels // 16) * 16
    conversion_bytes = 2 * pixels * (channels + padded_channels)
    return count * conversion_bytes, min(count, 1) * conversion_bytes


@ex.against(converted_after, edges=[(0, 16, 4), (1, 16, 4), (3, 64, 1024), (2, 1, 9), (4, 17, 1)])
def check_ex_14a_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(count, channels, pixels)`: the bytes converted after a convolution.

    They are a pair: if every function's result is converted, and if the tensor is converted once.
    """
    return ex.drawn(rng, count=range(6), channels=range(1, 130), pixels=range(1, 3000))


# -- 14a.2: transposes one after another -----------------------------------------------------------
def merged_permutation(
    perms: Sequence[Sequence[int]], shape: Sequence[int]
) -> tuple[int, ...] | None:
    """Return the one permutation that does what all do, or None if no number moves in memory.

    Numbers move only if axes with more than one place change their order.
    """
    merged = tuple(range(len(shape)))
    for perm in perms:
        merged = tuple(merged[axis] for axis in perm)
    long_axes = [axis for axis in merged if shape[axis] > 1]
    return None if long_axes == sorted(long_axes) else merged


@ex.against(
    merged_permutation,
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
    """Check `fn(perms, shape)`: the transpose that does what several do, or None."""
    rank = int(rng.integers(2, 5))
    perms = [tuple(map(int, rng.permutation(rank))) for _ in range(rng.integers(1, 4))]
    return {"perms": perms, "shape": tuple(int(n) for n in rng.choice([1, 1, 2, 3], rank))}


# -- 14a.3: a chain of conversions -----------------------------------------------------------------
def left_over(layouts: Sequence[str], reads: set[int], padded: bool) -> list[tuple[str, str]]:
    """Return the conversions that a chain of them needs when each starts from the first tensor.

    A conversion from a layout to itself goes, unless the tensor's padding may hold anything.
    """
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
    """Check `fn(layouts, reads, padded)`: the conversions that are left of a chain."""
    all_layouts = ["ND", "NC1HWC0", "FRACTAL_NZ"]
    count = int(rng.integers(2, 7))
    chain = list[str]()
    while len(chain) < count:
        others = [layout for layout in all_layouts if layout not in chain[-1:]]
        chain.append(str(rng.choice(others)))
    reads = {place for place in range(count) if rng.random() < 0.6}
    return {"layouts": chain, "reads": reads, "padded": chain[0] != "ND" and rng.random() < 0.5}


# -- 14a.4: a chain of operators -------------------------------------------------------------------
LAYOUTS = ("ND", "NC1HWC0")


def fewest_bytes(kinds: Sequence[str], sizes: Sequence[tuple[int, int]]) -> int:
    """Return the fewest bytes that conversions move in a chain of operators.

    Dynamic programming: for each layout of the operator reached, the fewest bytes up to there.
    """
    fewest = {layout: 0 for layout in LAYOUTS if kinds[0] in (layout, "any")}
    for kind, (nd_bytes, blocked_bytes) in zip(kinds[1:], sizes, strict=True):
        previous = fewest
        fewest = {}
        for layout in LAYOUTS:
            if kind not in (layout, "any"):
                continue
            # A conversion reads the tensor in one layout and writes it in the other.
            converted = nd_bytes + blocked_bytes
            fewest[layout] = min(
                size if old == layout else size + converted for old, size in previous.items()
            )
    return min(fewest.values())


@ex.against(
    fewest_bytes,
    edges=[
        (["ND", "NC1HWC0"], [(6, 32)]),
        (["ND", "any", "NC1HWC0"], [(64, 64), (16, 16)]),  # convert late, where it is small
        (["ND", "any", "NC1HWC0"], [(16, 16), (64, 64)]),  # convert early
        (["ND", "any", "ND"], [(16, 16), (64, 64)]),  # nothing to convert
        (["NC1HWC0", "any", "NC1HWC0", "ND"], [(1, 1), (1, 1), (9, 9)]),  # once, at the end
        (["any", "any"], [(5, 5)]),
    ],
)
def check_ex_14a_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(kinds, sizes)`: the fewest bytes that conversions move in a chain of operators."""
    count = int(rng.integers(2, 9))
    kinds = [str(k) for k in rng.choice(["ND", "NC1HWC0", "any", "any"], count)]
    nd_bytes = [int(n) for n in rng.integers(1, 100, count - 1)]
    return {"kinds": kinds, "sizes": [(n, n * int(rng.integers(1, 4))) for n in nd_bytes]}


# -- 14a.5: a choice of layouts for a network ------------------------------------------------------
GOAL = 1.005
"""A choice may convert half a percent more bytes than the best one."""
NETWORKS = ("block", "heads", "sampler", "shufflenet_v2", "mobilevit_xxs", "efficientformer_l1")


@cache
def rule_bytes(graph: Graph) -> int:
    """Return what the package's assignment converts."""
    return graph_examples.converted_bytes(cancel_trans_data(assign_layouts(graph)))


def _judge_choice(got: Any, case: ex.Case) -> str | None:
    """Judge an option for every node by the bytes that the conversions between them move."""
    graph = case["graph"]
    allowed = case["options"]
    if not isinstance(got, dict) or set(got) != {node.name for node in graph.nodes}:
        return "expected a dict with an option for every node"
    wrong = next((name for name, option in got.items() if option not in allowed[name]), None)
    if wrong is not None:
        return f"expected one of {len(allowed[wrong])} options for {wrong}"
    moved = graph_examples.converted_bytes(graph_examples.laid_out(graph, got))
    goal = min(rule_bytes(graph), graph_examples.fewest_bytes(graph, allowed) * GOAL)
    return None if moved <= goal else f"expected at most {goal:,.0f} bytes, it converts {moved:,}"


_options_of = cache(graph_examples.options)


def _case_of(graph: Graph) -> ex.Case:
    """Return a graph with lists of options that an answer may change."""
    options = {name: list(allowed) for name, allowed in _options_of(graph).items()}
    return {"graph": graph, "options": options}


def check_ex_14a_5(fn: Any, seed: int = ex.DEFAULT_SEED) -> ex.CheckResult:
    """Judge a choice of layouts by what it converts, on networks and on random graphs."""
    return ex.check_property(
        "ex_14a_5",
        fn,
        _judge_choice,
        lambda rng: _case_of(graph_examples.random_graph(rng)),
        edge_cases=[_case_of(graph_examples.prepared(name)) for name in NETWORKS],
        cases=12,
        seed=seed,
    )
