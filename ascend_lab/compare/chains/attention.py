"""Measured attention in the words of our operators: causal rows, latent heads, selected keys."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ascend_lab.compare.rows import Shape, Work
from ascend_lab.compiler import Graph, GraphBuilder
from ascend_lab.errors import InputError

FLASH = "flash_attention"


# -- one kernel ------------------------------------------------------------------------------------
def is_causal(work: Work) -> bool:
    """Tell whether a row's queries see the keys before them only."""
    return work.attributes.get("causal") in (True, 1)


def as_called(work: Work) -> Work:
    """Return a row of flash attention as the library is called.

    A causal one has no mask to read: the measured kernel skips what a mask would drop. Heads that
    share keys, stacked as rows of q in the table, stand apart: a query knows its place then.
    """
    if not is_causal(work) or len(work.shapes) not in (3, 4):
        return work
    q, k, v = work.shapes[:3]
    queries = work.attributes.get("queries", q[-2])
    if len(q) == 4 and q[-2] != queries:
        if type(queries) is not int or queries < 1 or q[-2] % queries:
            needed = f"{work.operator}: queries that divide the {q[-2]} rows of q"
            raise InputError(needed, f"queries={queries}", "mend that row")
        q = (q[0], q[1] * (q[2] // queries), queries, q[3])
    dtypes = work.dtypes if len(work.dtypes) == 1 else work.dtypes[:3]
    return replace(work, shapes=(q, k, v), dtypes=dtypes)


def latent(work: Work) -> Work:
    """Return multi-head latent attention as one call: q and k are a latent part and a turned one.

    Inputs are q latent, q turned, k latent, k turned, v latent. All heads share one key, which is
    as wide as both parts, (512 + 64), and its value, 512.
    Source: DeepSeek-AI 2024, "DeepSeek-V2" (multi-head latent attention, weights absorbed).
    """
    _check_count(work, 5)
    q, q_turned, k, k_turned, v = (_heads_first(work, shape) for shape in work.shapes)
    shapes = ((*q[:3], q[3] + q_turned[3]), (*k[:3], k[3] + k_turned[3]), v)
    return replace(work, operator=FLASH, shapes=shapes, dtypes=work.dtypes[:1])


def _check_count(work: Work, count: int) -> None:
    """Raise `InputError` unless a row has so many inputs, each with batch, tokens, heads, size."""
    if len(work.shapes) != count or any(len(shape) != 4 for shape in work.shapes):
        needed = f"{work.operator}: {count} inputs of four axes"
        raise InputError(needed, str(work.shapes), "mend that row")


def _heads_first(work: Work, shape: Shape) -> Shape:
    """Return (batch, heads, tokens, size) of a shape in the row's layout."""
    layout = work.attributes.get("layout", "BNSD")
    if layout not in ("BNSD", "BSND"):
        needed = f"{work.operator}: layout BNSD or BSND"
        raise InputError(needed, str(layout), "mend that row")
    batch, one, two, size = shape
    return (batch, two, one, size) if layout == "BSND" else (batch, one, two, size)


# -- a chain ---------------------------------------------------------------------------------------
def selected(work: Work) -> Graph:
    """Return attention to selected keys: rows of k and v are gathered, every query has its own.

    Inputs are q, k, v and the numbers of the keys: (b, s, h, d), (b, t, 1, d), (b, t, 1, e) and
    (b, s, 1, n). The h heads of a query are the rows of its matrix.
    """
    _check_count(work, 4)
    q, k, v, chosen = (_heads_first(work, shape) for shape in work.shapes)
    batch, heads, queries, size = q
    tokens = batch * queries
    count = chosen[3]
    dtype = {"float16": "fp16", "bfloat16": "bf16"}.get(work.dtypes[0], work.dtypes[0])
    net = GraphBuilder(work.operator, dtype)
    asked = net.input("q", (tokens, heads, size))
    places = net.input("chosen", (tokens * count,), "int32")
    parts = []
    for name, shape in (("k", k), ("v", v)):
        rows = net.input(name, (batch * shape[1] * shape[2], shape[3]))
        found = net.gather(rows, places, axis=0)
        parts.append(net.reshape(found, shape=(tokens, count, shape[3])))
    net.output(net.flash_attention(asked, *parts))
    return net.build()


BUILDERS: Mapping[str, Callable[[Work], Graph | Work]] = {
    "mla": latent,
    "sparse_flash_attention": selected,
}
"""The table's name for a kernel -> the call of an operator, or the chain, that computes it."""
