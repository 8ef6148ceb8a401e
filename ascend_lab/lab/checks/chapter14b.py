"""Checks of chapter 14b: what fits one kernel, what that saves, parts of a proposal, groups."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ascend_lab.compiler import Graph, GraphBuilder, fusion
from ascend_lab.lab.checks import core as ex

Readers = Mapping[str, Sequence[str]]
"""Node -> the nodes that read its result, each once."""


# -- 14b.1 and 14b.2: what may be one kernel, and what it saves ------------------------------------
FORK: Readers = {"c": ["s", "y"], "s": ["t"], "t": ["y"], "y": ["z"], "z": []}
UNREAD: Readers = {"a": ["c"], "b": [], "c": ["d"], "d": []}
"""Nobody reads the result of b, and it is no output of the network."""


def fits(group: Sequence[str], readers: Readers, outputs: Sequence[str]) -> bool:
    """Return whether only the result of the group's last node is read outside or is an output."""
    return all(
        name not in outputs and all(reader in group for reader in readers[name])
        for name in group[:-1]
    )


def _drawn_graph(rng: ex.Rng, count: int) -> tuple[list[str], dict[str, list[str]]]:
    """Return nodes in order, and for each the nodes that read it: up to three of the next four."""
    names = [f"n{i}" for i in range(count)]
    readers = {name: list[str]() for name in names}
    for place, name in enumerate(names[:-1]):
        later = names[place + 1 : place + 5]
        chosen = rng.choice(
            len(later), size=min(len(later), int(rng.integers(1, 4))), replace=False
        )
        readers[name] = [later[i] for i in sorted(chosen)]
    return names, readers


@ex.against(
    fits,
    edges=[
        (["c", "s", "t", "y"], FORK, ["z"]),
        (["c", "s", "t"], FORK, ["z"]),
        (["s", "t"], FORK, ["z"]),
        (["s", "t"], FORK, ["s", "z"]),
        (["s", "t"], FORK, ["t", "z"]),
        (["c"], FORK, ["z"]),
        (["a", "b", "c"], UNREAD, ["d"]),
        (["a", "b"], UNREAD, ["d"]),
    ],
)
def check_ex_14b_1(rng: ex.Rng) -> ex.Case:
    """Check `fn(group, readers, outputs)`: whether nothing inside is wanted outside."""
    names, readers = _drawn_graph(rng, int(rng.integers(3, 10)))
    start = int(rng.integers(len(names)))
    group = names[start : start + int(rng.integers(1, 6))]
    inner = [str(rng.choice(names))] if rng.random() < 0.3 else []
    return {"group": group, "readers": readers, "outputs": [*inner, names[-1]]}


def saved_s(
    group: Sequence[str],
    readers: Readers,
    sizes: Mapping[str, int],
    launch_s: float,
    bytes_per_s: float,
) -> float:
    """Return the seconds that a group saves: launches, and trips of the tensors inside."""
    trips = sum(sizes[name] * (1 + len(readers[name])) for name in group[:-1])
    return (len(group) - 1) * launch_s + trips / bytes_per_s


SIZES = {"c": 4096, "s": 4096, "t": 2048, "y": 1024, "z": 1024}


@ex.against(
    saved_s,
    edges=[
        (["c", "s", "t", "y"], FORK, SIZES, 2e-6, 1e12),
        (["y", "z"], FORK, SIZES, 2e-6, 1e9),
        (["z"], FORK, SIZES, 2e-6, 1e9),
    ],
    rel_tol=1e-9,
)
def check_ex_14b_2(rng: ex.Rng) -> ex.Case:
    """Check `fn(group, readers, sizes, launch_s, bytes_per_s)`: seconds that one kernel saves."""
    names, readers = _drawn_graph(rng, int(rng.integers(2, 8)))
    sizes = {name: int(rng.integers(1, 1000)) * 1024 for name in names}
    start = int(rng.integers(len(names) - 1))
    return {
        "group": names[start:],
        "readers": readers,
        "sizes": sizes,
        "launch_s": float(rng.uniform(1e-6, 5e-6)),
        "bytes_per_s": float(rng.uniform(1e11, 2e12)),
    }


# -- 14b.3: parts of a proposal --------------------------------------------------------------------
def parts(count: int, pays: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the kernels, as (first, end), of a proposal of `count` nodes: longest parts first."""
    kernels = list[tuple[int, int]]()
    start = 0
    while start < count:
        ends = [end for first, end in pays if first == start]
        end = max([start + 1, *ends])
        kernels.append((start, end))
        start = end
    return kernels


@ex.judged(
    lambda got, case: ex.equal_to(parts(*case.values()))([tuple(pair) for pair in got]),
    edges=[
        (4, [(0, 4), (0, 2), (2, 4)]),
        (4, [(0, 2), (0, 3), (1, 4), (2, 4)]),
        (3, [(1, 3)]),
        (3, []),
        (5, [(0, 2), (2, 4), (3, 5), (2, 5)]),
    ],
)
def check_ex_14b_3(rng: ex.Rng) -> ex.Case:
    """Check `fn(count, pays)`: what the compiler makes of a proposal."""
    count = int(rng.integers(2, 10))
    pairs = [(a, b) for a in range(count) for b in range(a + 2, count + 1)]
    chosen = [pair for pair in pairs if rng.random() < 0.35]
    return {"count": count, "pays": [chosen[i] for i in rng.permutation(len(chosen))]}


# -- 14b.4: the grouping ---------------------------------------------------------------------------
NODE = re.compile(r"(\w+)=(\w+)\(([\w,]+)\)")


def network(text: str) -> Graph:
    """Return the graph of a line such as "c=conv(x) s=exp(c) y=mul(c,s) -> y"."""
    net = GraphBuilder("exercise", "fp16")
    live = {"x": net.input("x", (1, 16, 4, 4))}
    body, _, outputs = text.partition("->")
    for name, op, reads in NODE.findall(body):
        operands = [live[r] for r in reads.split(",")]
        if op == "conv":
            live[name] = net.conv2d(*operands, net.weight((16, 16, 1, 1)), name=name)
        else:
            live[name] = net.add_node(op, *operands, name=name)
    net.output(*(live[name] for name in outputs.split()))
    return net.build()


ELEMENTWISE = ("relu", "tanh", "exp", "sigmoid")
JOINS = ("add", "mul", "sub")


def misgrouped(graph: Graph, groups: Sequence[Sequence[str]]) -> str | None:
    """Return what is wrong with groups of nodes that are to be one kernel each, or None."""
    grouped: set[str] = set()
    for group in map(set, groups):
        nodes = [n for n in graph.nodes if n.name in group]
        if len(nodes) != len(group) or group & grouped:
            return "expected names of nodes, each once"
        grouped |= group
        for node in nodes:
            inside = group.intersection(node.inputs)
            others = [n.op for n in nodes if n != node]
            if node.op == "conv2d" and (inside or "conv2d" in others):
                return f"expected one convolution a group, before all others, see {node.name}"
            outside = [r.name for r in graph.readers[node.output] if r.name not in group]
            if node != nodes[-1] and (outside or node.output in graph.outputs):
                return f"but {node.name}, inside of a group, is wanted outside"
    return None


def _judge_groups(got: Any, case: ex.Case) -> str | None:
    """Judge groups of nodes: each may be one kernel, and there are as few kernels as ours.

    The text returned ends the sentence "your function returned ..., ".
    """
    graph = network(case["network"])
    if wrong := misgrouped(graph, got):
        return wrong
    ours = fusion.automatic_groups(graph, ())
    kernels = _kernel_count(graph, got)
    our_kernels = _kernel_count(graph, ours)
    if kernels > our_kernels:
        return f"{kernels} kernels; {our_kernels} are possible"
    return None


def _kernel_count(graph: Graph, groups: Sequence[Sequence[object]]) -> int:
    """Return the kernels of a graph: one for each group, one for each node in no group."""
    return len(graph.nodes) - sum(len(group) - 1 for group in groups if group)


DIAMONDS = (
    "c=conv(x) s=exp(c) t=tanh(s) y=mul(c,t) -> y",
    "c=conv(x) r=relu(c) -> c r",
    "a=relu(x) c=conv(a) r=relu(x) y=add(c,r) -> y",
    "c=conv(x) d=conv(x) y=add(c,d) z=relu(y) -> z",
    "c=conv(x) r=relu(c) d=conv(r) e=add(d,c) y=relu(e) -> y",
    "a=relu(x) b=exp(a) c=tanh(a) d=mul(b,c) e=add(d,a) -> e",
)


@ex.judged(
    _judge_groups,
    edges=[(line,) for line in DIAMONDS],
    wrap=lambda fn: lambda line: fn(network(line)),
)
def check_ex_14b_4(rng: ex.Rng) -> ex.Case:
    """Check `fn(graph)`: groups of names of nodes, one kernel each, as few kernels as ours."""
    names = ["x"]
    node_texts = []
    for i in range(int(rng.integers(3, 11))):
        first, second = (names[-4:][int(k)] for k in rng.integers(0, len(names[-4:]), 2))
        share = rng.random()
        ops = ("conv",) if share < 0.25 else ELEMENTWISE if share < 0.65 else JOINS
        op = ops[rng.integers(len(ops))]
        operands = f"{first},{second}" if ops is JOINS else first
        node_texts.append(f"n{i}={op}({operands})")
        names.append(f"n{i}")
    body = " ".join(node_texts)
    ends = [n for n in names[1:] if not re.search(rf"[(,]{n}[,)]", body)]
    if rng.random() < 0.3:
        ends.append(names[int(rng.integers(1, len(names)))])
    return {"network": f"{body} -> {' '.join(dict.fromkeys(ends))}"}
