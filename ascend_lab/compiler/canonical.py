"""The last rewrites before layouts: operators without a kernel of their own become those that have.

gemm(a, b, c)          matmul, add
batch_norm             mul and add by constants per channel
attention              one kernel that keeps the scores on the core, or products and a softmax
(.., k) @ (k, n)       one product of flat matrices, reshapes around it
products of one x      one product (`merged_products`)
elementwise(reshape)   reshape(elementwise), so that what follows a product stays beside it
moves of channels      products with zeros and ones where that is quicker (`channels`)

The products are queries, keys and values of an attention, for example:

    x @ A, x @ B, x @ C  ->  x @ [A B C], and slices of its columns

One launch, x is read once, and wide results keep more cores busy. Columns of fractals are outermost
in memory, so that slices are views. What else all do alike, lane by lane, comes along. Convolutions
of one image with windows alike are such products; what a concat takes is a view, and stays apart.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ascend_lab.compiler.channels import channels_by_cube
from ascend_lab.compiler.draft import Draft, pruned
from ascend_lab.compiler.ir import Attrs, Constant, Graph, Node, TensorType, Values, only_reader
from ascend_lab.compiler.passes import images
from ascend_lab.machine.chip import Chip
from ascend_lab.operators.ops.attention import grouped_heads, seen_keys
from ascend_lab.operators.ops.formats import is_float
from ascend_lab.operators.ops.operator import get

BLOCK = 16
FLASH = "flash_attention"


def canonical(graph: Graph, chip: Chip, *, joint: bool = True) -> Graph:
    """Return the graph in the operators that lowering knows; values are those of the parts.

    `joint`: two convolutions that are added may become one kernel.
    """
    graph = _sink(_flatten(_expand(_attention_apart(pruned(graph), chip))))
    return merged_products(channels_by_cube(graph, chip, joint=joint), chip)


# -- attention ------------------------------------------------------------------------------------
def _attention_apart(graph: Graph, chip: Chip) -> Graph:
    draft = Draft(graph)
    for node in draft:
        if node.op in ("attention", FLASH):
            draft.replace(node.output, _attention(draft, node, chip))
        elif node.op == "attention_context":
            draft.replace(node.output, draft.insert("batch_matmul", node.inputs, {}, node.name))
        elif node.op == "attention_scores":
            draft.replace(node.output, _scores(draft, node.name, node))
    return draft.finish()


def _attention(draft: Draft, node: Node, chip: Chip) -> str:
    """Insert what computes a node of attention on a chip; return the tensor of its result."""
    q, k, v, *mask = node.inputs
    k, v = (_head_each(draft, name, node) for name in (k, v))
    shape = draft.type(node.output).shape
    if grouped_heads(*(draft.type(name).shape for name in (q, k, v))) > 1:
        # one matrix for all heads: joined, they are no groups whose rows the kernel stacks
        mask = [_whole(draft, name, node) for name in mask]
        q, k, v, *mask = (_one_batch(draft, name) for name in (q, k, v, *mask))
    if node.attr("causal", False) and not _has_kernel(draft, (q, k, v, *mask), node.attrs, chip):
        mask = [_causal_mask(draft, node, mask)]
        node = replace(node, attrs={**node.attrs, "causal": False})
    node = replace(node, inputs=(q, k, v, *mask))
    result = _attention_kernel(draft, node, chip)
    if draft.type(result).shape == shape:
        return result
    return draft.insert("reshape", (result,), {"shape": shape}, f"{node.name}_heads")


def _attention_kernel(draft: Draft, node: Node, chip: Chip) -> str:
    """Insert the kernel of attention, or products and a softmax."""
    q, k, v, *mask = node.inputs
    if _has_kernel(draft, node.inputs, node.attrs, chip):
        whole = [_whole(draft, name, node) for name in mask]
        attrs = {"scale": _scale(draft, node)}
        if node.attr("causal", False):
            attrs["causal"] = True
        return draft.insert(FLASH, (q, k, v, *whole), attrs, node.name)
    scores = _scores(draft, f"{node.name}_scores", node)
    for name in mask:
        scores = draft.insert("add", (scores, name), {}, f"{node.name}_masked")
    shares = draft.insert("softmax", (scores,), {"axis": -1}, f"{node.name}_softmax")
    return draft.insert("batch_matmul", (shares, v), {}, node.name)


def _one_batch(draft: Draft, name: str) -> str:
    """Return matrices with their batch axes as one."""
    shape = draft.type(name).shape
    joined = (math.prod(shape[:-2]), *shape[-2:])
    return draft.insert("reshape", (name,), {"shape": joined}, f"{name}_joined")


def _has_kernel(draft: Draft, inputs: Sequence[str], attrs: Attrs, chip: Chip) -> bool:
    """Tell whether the kernel of attention applies, and reads the mask."""
    operator = get(FLASH)
    types = [draft.type(n) for n in inputs]
    call = operator.call([t.shape for t in types], [t.dtype for t in types], attrs)
    masked = len(inputs) > 3
    ragged = masked and types[3].shape[-1] % 16 and inputs[3] not in draft.constants
    assert operator.template is not None
    return not ragged and operator.template.applies(call, chip)


def _head_each(draft: Draft, name: str, node: Node) -> str:
    """Return keys or values with a matrix for each head of the queries, or one matrix for all."""
    shape = draft.type(name).shape
    batch = draft.type(node.output).shape[:-2]
    if math.prod(shape[:-2]) in (1, math.prod(batch)):
        return name
    if len(shape) < len(batch) + 2 or shape[-3] in (1, batch[-1]):
        return draft.stretched(name, (*batch, *shape[-2:]))
    # grouped heads: (b, g, t, d) -> (b, g, h / g, t, d) -> (b, h, t, d)
    heads = batch[-1] // shape[-3]
    apart = (*shape[:-2], 1, *shape[-2:])
    name = draft.insert("reshape", (name,), {"shape": apart}, f"{node.name}_groups")
    name = draft.stretched(name, (*batch[:-1], shape[-3], heads, *shape[-2:]))
    return draft.insert("reshape", (name,), {"shape": (*batch, *shape[-2:])}, f"{name}_heads")


def _causal_mask(draft: Draft, node: Node, mask: Sequence[str]) -> str:
    """Return a mask that drops the keys behind each query, and what the node's own one drops."""
    kind = draft.type(node.output)
    queries = draft.type(node.inputs[0]).shape[-2]
    keys = draft.type(node.inputs[1]).shape[-2]
    least = -65504.0  # the least number of fp16
    data = np.where(seen_keys(queries, keys), 0.0, least)
    own = draft.add(Constant(TensorType((queries, keys), kind.dtype), data), f"{node.name}_causal")
    for name in mask:
        own = draft.insert("add", (name, own), {}, f"{node.name}_mask")
    return own


def _scale(draft: Draft, node: Node) -> float:
    scale = node.attr("scale")
    width = draft.type(node.inputs[0]).shape[-1]
    return 1.0 / math.sqrt(width) if scale is None else float(scale)


def _scores(draft: Draft, name: str, node: Node) -> str:
    scores = draft.insert("batch_matmul", node.inputs[:2], {"trans_b": True}, name)
    return draft.insert("muls", (scores,), {"number": _scale(draft, node)}, f"{node.name}_scaled")


def _whole(draft: Draft, mask: str, node: Node) -> str:
    """Return a mask with a matrix for every pair of batch and head, unless one serves all."""
    shape = draft.type(mask).shape
    batch = draft.type(node.output).shape[:-2]
    if math.prod(shape[:-2]) in (1, math.prod(batch)):
        return mask
    return draft.stretched(mask, (*batch, *shape[-2:]))


# -- operators as their parts ---------------------------------------------------------------------
def _expand(graph: Graph) -> Graph:
    draft = Draft(graph)
    for node in draft:
        made = ""
        if node.op == "gemm":
            made = _gemm(draft, node)
        elif node.op == "batch_matmul" and (shapes := _batches(draft, node)):
            sides = [draft.stretched(n, s) for n, s in zip(node.inputs, shapes, strict=True)]
            made = draft.insert(node.op, sides, node.attrs, node.name)
        elif len(node.inputs) > 2 and (
            node.op == "conv_transpose2d"
            or (node.has("convolution") and node.inputs[2] not in draft.constants)
        ):
            made = _bias_apart(draft, node)
        elif node.op == "batch_norm" and (found := images.affine_of(draft, node)):
            made = _batch_norm(draft, node, found[1])
        if made:
            draft.replace(node.output, made)
    return draft.finish()


def _gemm(draft: Draft, node: Node) -> str:
    a, b, *bias = node.inputs
    sides = {key: node.attr(key, False) for key in ("trans_a", "trans_b")}
    y = draft.insert("matmul", (a, b), sides, node.name)
    if node.attr("alpha", 1.0) != 1.0:
        y = draft.insert("muls", (y,), {"number": node.attr("alpha")}, f"{node.name}_alpha")
    if not bias:
        return y
    added = bias[0]
    if node.attr("beta", 1.0) != 1.0:
        added = draft.insert("muls", bias, {"number": node.attr("beta")}, f"{node.name}_beta")
    return draft.insert("add", (y, added), {}, f"{node.name}_bias")


def _batches(draft: Draft, node: Node) -> tuple[tuple[int, ...], ...]:
    """Return the operands' shapes with all batch axes written out; () if they are."""
    batch = draft.type(node.output).shape[:-2]
    shapes = [draft.type(n).shape for n in node.inputs]
    flat = len(shapes[1]) == 2 and node.inputs[1] in draft.constants
    if all(s[:-2] == batch for s in shapes) or (flat and not node.attr("trans_a", False)):
        return ()
    return tuple((*batch, *s[-2:]) for s in shapes)


def _bias_apart(draft: Draft, node: Node) -> str:
    """Return the convolution of x and w, plus bias, one number per channel."""
    x, weight, bias = node.inputs
    kind = draft.type(bias)
    constant = draft.constant(bias)
    y = draft.insert(node.op, (x, weight), node.attrs, node.name)
    shape = (*kind.shape, 1, 1)
    column = draft.insert("reshape", (bias,), {"shape": shape})
    if constant is not None:
        kind = TensorType(shape, kind.dtype)
        column = draft.add(Constant(kind, lambda: constant.array().reshape(shape)), bias)
    return draft.insert("add", (y, column), {}, f"{node.name}_bias")


def _batch_norm(draft: Draft, node: Node, affine: images.Affine) -> str:
    """Return a x + c, per channel."""
    kind = draft.type(node.inputs[0])
    shape = (kind.shape[1], *(1,) * (len(kind.shape) - 2))
    column = TensorType(shape, kind.dtype)

    def part(place: int) -> Values:
        found = affine.wide(tuple(constant.array() for constant in affine.sources))
        return np.asarray(found[place]).reshape(shape)

    factor = draft.add(Constant(column, lambda: part(0)), f"{node.name}_scale")
    shift = draft.add(Constant(column, lambda: part(1)), f"{node.name}_shift")
    y = draft.insert("mul", (node.inputs[0], factor), {}, node.name)
    return draft.insert("add", (y, shift), {}, f"{node.name}_add")


# -- products on flat matrices --------------------------------------------------------------------
def _flatten(graph: Graph) -> Graph:
    """Make one product of flat matrices of every (.., k) @ constant (k, n)."""
    draft = Draft(graph)
    for node in draft:
        if node.op not in ("matmul", "batch_matmul") or node.attr("trans_a", False):
            continue
        a, b = (draft.type(n).shape for n in node.inputs)
        if len(a) <= 2 or len(b) != 2 or node.inputs[1] not in draft.constants:
            continue
        rows = {"shape": (math.prod(a[:-1]), a[-1])}
        flat = draft.insert("reshape", node.inputs[:1], rows, f"{node.name}_flat")
        y = draft.insert("matmul", (flat, node.inputs[1]), node.attrs, node.name)
        shape = {"shape": draft.type(node.output).shape}
        draft.replace(node.output, draft.insert("reshape", (y,), shape, f"{node.name}_nd"))
    return draft.finish()


def _sink(graph: Graph) -> Graph:
    """Move reshapes that only split rows behind the elementwise nodes that read nothing else."""
    draft = Draft(graph)
    flat = dict[str, str]()
    for node in graph.nodes:  # a matrix (m, n) read as (.., n)
        if node.op == "reshape":
            source = graph.types[node.inputs[0]].shape
            shape = graph.types[node.output].shape
            if len(source) == 2 and len(shape) > 2 and source[-1] == shape[-1]:
                flat[node.output] = node.inputs[0]
    for node in draft:
        if not node.has("lanes") or not any(n in flat for n in node.inputs):
            continue
        same = {n for n in node.inputs if n in draft.constants and len(draft.type(n).shape) <= 1}
        rows = [flat.get(n) or (n if n in same else "") for n in node.inputs]
        if all(rows):
            y = draft.insert(node.op, rows, node.attrs, node.name)
            sizes = {"shape": draft.type(node.output).shape}
            made = draft.insert("reshape", (y,), sizes, f"{node.name}_nd")
            draft.replace(node.output, made)
            flat[made] = y
    return draft.finish()


# -- products of one tensor ----------------------------------------------------------------------
def merged_products(graph: Graph, chip: Chip) -> Graph:
    """Return the graph with one product for all flat matrices, or windows, that read one tensor."""
    families: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.op in ("matmul", "conv2d") and _joins(graph, node):
            key = (node.inputs[0], len(node.inputs), *graph.types[node.inputs[1]].shape[2:])
            families.setdefault((*key, *sorted(node.attrs.items())), []).append(node)
    draft = Draft(graph)
    for nodes in families.values():
        ragged = [node for node in nodes if graph.types[node.output].shape[1] % BLOCK]
        family = [node for node in nodes if node not in ragged] + ragged[:1]
        chains = _alike(graph, family)
        later = [only_reader(graph, chain[-1]) for chain in chains]
        alone = any(n is not None and n.has("lanes", "largest") for n in later)
        alone &= chip.combined or family[0].has("convolution")
        if len(family) > 1 and not alone:  # what follows one of them alone stays in its kernel
            _merge(draft, chains)
    return draft.finish()


def _joins(graph: Graph, node: Node) -> bool:
    """Tell whether the columns of a product with constants are outermost, and go nowhere else."""
    out = graph.types[node.output]
    if node.op == "matmul":
        plain = len(out.shape) == len(node.inputs) == 2 and not node.attr("trans_a", False)
    else:
        readers = {reader.op for reader in graph.readers[_alike(graph, [node])[0][-1].output]}
        plain = out.shape[0] == node.attr("groups", 1) == 1 and "concat" not in readers
    return plain and is_float(out.dtype) and all(n in graph.constants for n in node.inputs[1:])


def _alike(graph: Graph, family: list[Node]) -> list[list[Node]]:
    """Return each product with the additions and other lane-wise work that all have in common."""
    chains = [[node] for node in family]
    while True:
        found = [only_reader(graph, chain[-1]) for chain in chains]
        pairs = [(n, c[-1]) for n, c in zip(found, chains, strict=True) if n is not None]
        kinds = {(n.op, *sorted(n.attrs.items())) for n, _ in pairs}
        same = len(pairs) == len(chains) and len(kinds) == 1
        if not same or not all(_along(graph, n, before) for n, before in pairs):
            return chains
        for chain, (node, _) in zip(chains, pairs, strict=True):
            chain.append(node)


def _along(graph: Graph, node: Node, before: Node) -> bool:
    """Tell whether a node reads its chain first, then at most a number per column."""
    rest = node.inputs[1:]
    plain = node.has("lanes") and node.inputs[0] == before.output and len(rest) < 2
    kind = graph.types[node.output]
    width = graph.types[before.output].shape[1:]
    same = kind == graph.types[before.output]
    fixed = all(n in graph.constants and graph.types[n].shape == width for n in rest)
    return plain and same and fixed


def _merge(draft: Draft, chains: list[list[Node]]) -> None:
    """Insert one chain for all, and a slice of its result for each."""
    first = chains[0][0]
    axis = 0 if first.op == "conv2d" or first.attr("trans_b", False) else 1
    y = first.inputs[0]
    for nodes in zip(*chains, strict=True):
        rest = [
            _joined(draft, list(names), axis if nodes[0] is first and not i else 0)
            for i, names in enumerate(zip(*(n.inputs[1:] for n in nodes), strict=True))
        ]
        y = draft.insert(nodes[0].op, (y, *rest), nodes[0].attrs, nodes[0].name)
    shape = draft.type(y).shape
    at = 0
    for chain in chains:
        end = at + draft.type(chain[-1].output).shape[1]
        begin = tuple(at if i == 1 else 0 for i in range(len(shape)))
        attrs = {"begin": begin, "end": (shape[0], end, *shape[2:])}
        part = draft.insert("slice", (y,), attrs, f"{chain[-1].name}_part")
        draft.replace(chain[-1].output, part)
        at = end


def _joined(draft: Draft, names: list[str], axis: int) -> str:
    """Add constants side by side as one, made when somebody asks for it."""
    parts = [draft.constants[name] for name in names]
    shape = list(parts[0].type.shape)
    shape[axis] = sum(p.type.shape[axis] for p in parts)
    kind = TensorType(tuple(shape), parts[0].type.dtype)
    data = Constant(kind, lambda: np.concatenate([part.array() for part in parts], axis))
    return draft.add(data, f"{names[0]}_all")
