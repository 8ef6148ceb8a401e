"""The framework of passes: rules that rewrite nodes, repeated in rounds until none matches.

A rule finds its nodes with `match` and a pattern. A pattern is a nested tuple, matched from the
last node backwards:

    ("mul", "x", ("sigmoid", "x"))              x * sigmoid(x), both the same tensor
    ("adds", "x", {"number": 1.0})              an attribute with a value (numbers within 0.1 %)
    ("adds", "x", {"number": "$eps"})           an attribute to remember
    ("pow", "x", 3.0)                           a constant that holds one number
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ascend_lab.compiler.draft import SMALL_ELEMENTS, Draft
from ascend_lab.compiler.ir import Constant, Graph, Node, TensorType, Values, operator_of
from ascend_lab.errors import GraphError, InputError
from ascend_lab.operators.ops.formats import round_to
from ascend_lab.plugins import listed

Rule = Callable[[Draft, Node], bool]
Apply = Callable[[Graph], tuple[Graph, int]]
Effect = Literal["exact", "rounded", "steps", "changed"]
Pattern = Any
Bindings = dict[str, Any]
INNER_READERS = ""
"""Key of the bindings under which the search stores which nodes of a match read each inner tensor.

No name of a pattern is empty.
"""
RELATIVE_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Pass:
    """A named rewrite of graphs; `apply` returns the graph and how often it matched.

    stage     when the pass runs: "prepare" (removes nodes without effect) and "fuse" (merges nodes
              that one kernel computes) by default, "opt-in" and "precision" only if named
    values    what happens to results: "exact" keeps every bit; "rounded" rounds at other places;
              "steps" changes a quantised number by one step at most; "changed" computes something
              else, and never runs by default
    """

    name: str
    stage: str
    apply: Apply
    summary: str
    values: Effect = "exact"

    @property
    def changes_values(self) -> bool:
        """Tell whether the new graph computes something else, beyond rounding."""
        return self.values == "changed"

    def run(self, graph: Graph) -> Graph:
        """Return the rewritten graph; the same object if nothing matched."""
        return self.apply(graph)[0]


def sweep(rule: Rule, *ops: str) -> Apply:
    """Return the rewrite that calls a rule once for each node (of `ops`, if given)."""

    def apply(graph: Graph) -> tuple[Graph, int]:
        names = [node.name for node in graph.nodes if not ops or node.op in ops]
        if not names:
            return graph, 0
        draft = Draft(graph)
        count = 0
        for name in names:
            # an earlier match of this sweep may have removed the node, or changed its operator
            if name in draft.nodes:
                node = draft.current(name)
                if (not ops or node.op in ops) and rule(draft, node):
                    count += 1
        # the same graph object, not an equal copy, tells `run_passes` that nothing changed
        return (draft.finish(), count) if count else (graph, 0)

    return apply


def having(apply: Apply, *ops: str) -> Apply:
    """Return a rewrite that skips graphs without any of these operators."""

    def apply_if_present(graph: Graph) -> tuple[Graph, int]:
        has_operator = any(node.op in ops for node in graph.nodes)
        return apply(graph) if has_operator else (graph, 0)

    return apply_if_present


def plugged(name: str) -> Apply:
    """Return the rewrite that modules of `ascend_lab.fused` list under the name of a pass.

    Their lists GRAPH_REWRITES hold pairs of such a name and a rewrite. If no list has the name, the
    graph does not change.
    """

    def apply(graph: Graph) -> tuple[Graph, int]:
        total = 0
        rewritten = graph
        for pass_name, rewrite in listed("GRAPH_REWRITES"):
            if pass_name == name:
                rewritten, count = rewrite(rewritten)
                total += count
        return rewritten, total

    return apply


def rewrites(
    name: str, *ops: str, needs: str = "", stage: str = "fuse", values: Effect = "exact"
) -> Callable[[Rule], Pass]:
    """Return a decorator that makes a rule the pass `name` over nodes of `ops`.

    The first line of the rule's docstring becomes the summary. The pass skips graphs without the
    operator `needs`, if one is named.
    """

    def pass_of(rule: Rule) -> Pass:
        apply = having(sweep(rule, *ops), needs) if needs else sweep(rule, *ops)
        return Pass(name, stage, apply, (rule.__doc__ or "").splitlines()[0], values)

    return pass_of


def settings(node: Node) -> dict[str, Any]:
    """Return all attributes of a node, including those with default values."""
    return operator_of(node.op).settings(node.attrs)


def derived(
    kind: TensorType,
    compute: Callable[..., Values],
    *sources: Constant,
    small: int = SMALL_ELEMENTS,
) -> Constant:
    """Return the constant `compute(*arrays)`, computed now if no array is large.

    If a source or the result has more than `small` elements, it is computed when it is read.
    """

    def data() -> Values:
        arrays = [source.array() for source in sources]
        with np.errstate(all="ignore"):
            return round_to(np.asarray(compute(*arrays)), kind.dtype)

    constant = Constant(kind, data)
    # the weights of a large layer take seconds to fold, and to time a network no values are needed
    if max([kind.elements, *(s.type.elements for s in sources)]) > small:
        return constant
    return Constant(kind, constant.array())


def match(draft: Draft, node: Node, *patterns: Pattern) -> Bindings | None:
    """Return tensors and attributes by the names in the first pattern that fits, else None.

    Nodes inside the match must not be read from outside it.
    """
    for pattern in patterns:
        for bindings in _match_node(draft, node, pattern, {}):
            readers: Mapping[str, set[str]] = bindings.pop(INNER_READERS, {})
            # an inner tensor with more uses than readers in the match is read from outside
            if all(draft.uses[name] == len(reader_names) for name, reader_names in readers.items()):
                return bindings
    return None


def _match_node(
    draft: Draft, node: Node, pattern: Pattern, bindings: Bindings
) -> Iterator[Bindings]:
    """Yield the ways in which a node fits a pattern: `bindings`, extended by those of the node."""
    # ("sum", ("mul", "x", 0.5), {"axis": "$a"}): operator, a pattern for each input, attributes
    op, *parts = pattern
    attributes = parts.pop() if parts and isinstance(parts[-1], dict) else {}
    if node.op != op or len(node.inputs) != len(parts):
        return
    with_attributes = _match_attributes(settings(node), attributes, bindings)
    if with_attributes is None:
        return
    # a product a * b matches in both orders
    for inputs in (node.inputs, node.inputs[::-1]) if node.has("commutes") else (node.inputs,):
        yield from _match_inputs(
            draft, node, list(zip(inputs, parts, strict=True)), with_attributes
        )


def _match_inputs(
    draft: Draft, node: Node, pairs: list[tuple[str, Pattern]], bindings: Bindings
) -> Iterator[Bindings]:
    """Yield the bindings with which all (input, pattern) pairs fit, the first pair first."""
    if not pairs:
        yield bindings
        return
    # each way to fit the first input is tried with all ways to fit the others: backtracking
    (name, pattern), *other_pairs = pairs
    for extended in _match_tensor(draft, node, name, pattern, bindings):
        yield from _match_inputs(draft, node, other_pairs, extended)


def _match_tensor(
    draft: Draft, reader: Node, name: str, pattern: Pattern, bindings: Bindings
) -> Iterator[Bindings]:
    """Yield the bindings with which one input fits: a name, a number, or a pattern of its maker."""
    name = draft.resolve(name)
    if isinstance(pattern, str):
        # the same name in a pattern means the same tensor
        if bindings.get(pattern, name) == name:
            yield {**bindings, pattern: name}
    elif isinstance(pattern, float):
        number = draft.number(name)
        # fp16 rounds 0.044715 to 0.04471: numbers within 0.1 % count as equal
        is_close = number is not None and math.isclose(number, pattern, rel_tol=RELATIVE_TOLERANCE)
        if is_close and not _widens(draft, reader, name):
            yield bindings
    else:
        maker = draft.maker(name)
        if maker is not None and len(maker.outputs) == 1:
            readers = dict(bindings.get(INNER_READERS, {}))
            readers[name] = readers.get(name, set()) | {reader.name}
            extended = {**bindings, INNER_READERS: readers}
            yield from _match_node(draft, maker, pattern, extended)


def _widens(draft: Draft, reader: Node, constant: str) -> bool:
    """Tell whether a constant operand gives a node's result a shape that no other operand has.

    x of shape (3,) times [[2.0]] has the shape (1, 3): an operator on x alone would give (3,).
    """
    shape = draft.type(reader.output).shape
    operands = [name for name in map(draft.resolve, reader.inputs) if name != constant]
    return all(draft.type(name).shape != shape for name in operands)


def _match_attributes(
    options: Mapping[str, Any], pattern: Bindings, bindings: Bindings
) -> Bindings | None:
    """Return the bindings with the attributes that a pattern names; None if one does not fit."""
    # a copy: the caller tries further matches with the same bindings
    bound = dict(bindings)
    for key, value in pattern.items():
        actual = options.get(key)
        # two "$axis" of a pattern must be equal, such as those of the two means of a layer norm
        if isinstance(value, str) and value.startswith("$"):
            if bound.setdefault(value[1:], actual) != actual:
                return None
        elif isinstance(value, float):
            if not isinstance(actual, (int, float)) or not math.isclose(
                actual, value, rel_tol=RELATIVE_TOLERANCE
            ):
                return None
        elif actual != value:
            return None
    return bound


# -- rounds ---------------------------------------------------------------------------------------
PASSES: dict[str, Pass] = {}
"""All passes by name, in the order in which they run; `register_pass` adds one."""
USUAL: list[str] = []
"""Names of the passes that run by default; the package `passes` fills both."""
MAX_ROUNDS = 100
"""If passes still match after this many rounds, they undo each other; networks need about five."""


def get_pass(name: str) -> Pass:
    """Return a pass by name; raise `InputError` with the most similar name for an unknown one."""
    if name not in PASSES:
        close_names = difflib.get_close_matches(name, PASSES, 1, 0.3)
        remedy = f"did you mean {close_names[0]}?" if close_names else "see PASSES"
        raise InputError("the name of a pass", repr(name), remedy)
    return PASSES[name]


def register_pass(new_pass: Pass) -> Pass:
    """Add a pass of your own under its name; raise `InputError` if the name is taken."""
    if new_pass.name in PASSES:
        raise InputError("a new name for a pass", new_pass.name, "choose another")
    PASSES[new_pass.name] = new_pass
    return new_pass


@dataclass(frozen=True, slots=True)
class Step:
    """One pass that matched: how often, and the graph before and after."""

    name: str
    matches: int
    before: Graph
    after: Graph


@dataclass(frozen=True, slots=True)
class Report:
    """The steps of a run of passes, in order, without passes that matched nothing.

    `settled` is true if no pass matches the last graph, false if a limit of rounds ended the run.
    """

    start: Graph
    steps: tuple[Step, ...] = ()
    rounds: int = 0
    settled: bool = True

    @property
    def matches(self) -> dict[str, int]:
        """Matches of each pass over all rounds."""
        counts: dict[str, int] = {}
        for step in self.steps:
            counts[step.name] = counts.get(step.name, 0) + step.matches
        return counts

    def __str__(self) -> str:
        """Return a table: pass, matches, nodes before and after."""
        lines = [f"{'pass':36} matches  nodes"]
        for step in self.steps:
            sizes = f"{len(step.before.nodes)} -> {len(step.after.nodes)}"
            lines.append(f"{step.name:36} {step.matches:7}  {sizes}")
        end = self.steps[-1].after if self.steps else self.start
        nodes = f"{len(self.start.nodes)} -> {len(end.nodes)} nodes"
        lines.append(f"{self.rounds} rounds: {nodes}{'' if self.settled else ', not settled'}")
        return "\n".join(lines)


def run_passes(
    graph: Graph, names: Sequence[str] | None = None, *, rounds: int | None = None
) -> tuple[Graph, Report]:
    """Return the graph after the passes, repeated until none matches, and the report.

    `names` lists the passes, by default those of `USUAL`. `rounds` limits the number of rounds.
    Passes verify the graphs they return. Raises `InputError` for an unknown name, `GraphError` for
    passes that never settle.
    """
    passes = [get_pass(name) for name in (USUAL if names is None else names)]
    if rounds is not None and rounds < 1:
        raise InputError("at least 1 round", str(rounds), "leave it out: until none matches")
    steps: list[Step] = []
    current = graph
    round_count = 0
    unchanged = 0
    while passes and round_count < (rounds or MAX_ROUNDS):
        round_count += 1
        for next_pass in passes:
            rewritten, matches = next_pass.apply(current)
            # a whole round in which no pass changes the graph: settled
            unchanged = unchanged + 1 if rewritten is current else 0
            if rewritten is not current:
                steps.append(Step(next_pass.name, matches, current, rewritten))
                current = rewritten
            # 3 passes, the last change by pass 2: passes 3, 1 and 2 find nothing, and the run ends
            if unchanged == len(passes):
                return current, Report(graph, tuple(steps), round_count)
    if passes and rounds is None:
        needed = f"{graph.name}: passes that settle"
        got = f"{steps[-1].name} still matches after {MAX_ROUNDS} rounds"
        raise GraphError(needed, got, "leave out one of those that undo each other")
    return current, Report(graph, tuple(steps), round_count, settled=not passes)
