"""Entries of knowledge banks, made by hand and by Hypothesis."""

from dataclasses import replace

from hypothesis import strategies as st

from ascend_lab.aoe.bank import MODEL_VERSION, BankEntry, BankKey

KEY = BankKey("Ascend310", "00c0ffee00c0ffee", 2, "op", "matmul", "matmul fp16 64x64x64")
HOW = ("ga", 7, 500, "0.3.0", "2026-01-01T00:00:00+00:00")
TILES = {"tile": [4, 4, 2], "order": "mnk"}
ENTRY = BankEntry(KEY, TILES, 200, 120, 100, False, *HOW, features=(6.0, 6.0, 6.0))


def entry(problem=KEY.problem, /, **changes):
    """Return ENTRY for another problem and with other fields; key fields are told by their name."""
    own = {name: changes.pop(name) for name in list(changes) if hasattr(KEY, name)}
    return replace(ENTRY, key=replace(KEY, problem=problem, **own), **changes)


numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
plain = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)
CHIPS = ["Ascend310", "Ascend910A"]
PROBLEMS = ["", "x\ny", "é\u2028\x00"]
PARTS = (CHIPS, ["aa", "bb"], [1, 2], ["op", "graph"], ["matmul", "算子"], PROBLEMS)
keys = st.builds(BankKey, *map(st.sampled_from, PARTS))


@st.composite
def entries(draw):
    """Draw any legal entry; few keys and few numbers, so that keys and ranks often agree."""
    bound, after, before = sorted(draw(st.lists(st.integers(1, 4), min_size=3, max_size=3)))
    what = draw(keys), draw(plain), before, after, draw(st.sampled_from([None, bound]))
    how = draw(st.booleans()), draw(st.sampled_from(["ga", "mcts"])), draw(st.integers(-3, 2**64))
    when = draw(st.integers(0, 3)), "0.3.0", draw(st.text(max_size=5))
    model = draw(st.sampled_from([MODEL_VERSION, MODEL_VERSION + 1]))
    return BankEntry(
        *what, *how, *when, model, tuple(draw(st.lists(st.floats(-4, 40), max_size=3)))
    )


banks = st.lists(entries(), max_size=6)
