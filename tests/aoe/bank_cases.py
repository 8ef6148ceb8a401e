"""Entries of knowledge banks, made by hand and by Hypothesis."""

from dataclasses import replace

from hypothesis import strategies as st

from ascend_lab.aoe.bank import MODEL_VERSION, BankEntry, BankKey

KEY = BankKey("Ascend310", "00c0ffee00c0ffee", 2, "op", "matmul", "matmul fp16 64x64x64")
ENTRY = BankEntry(
    key=KEY,
    schedule={"tile": [4, 4, 2], "order": "mnk"},
    before_cycles=200,
    after_cycles=120,
    bound_cycles=100,
    proven=False,
    search="ga",
    seed=7,
    trials=500,
    tool_version="0.3.0",
    created="2026-01-01T00:00:00+00:00",
    features=(6.0, 6.0, 6.0),
)


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
keys = st.builds(
    BankKey,
    chip=st.sampled_from(["Ascend310", "Ascend910A"]),
    chip_digest=st.sampled_from(["aa", "bb"]),
    core_count=st.sampled_from([1, 2]),
    kind=st.sampled_from(["op", "graph"]),
    op=st.sampled_from(["matmul", "算子"]),
    problem=st.sampled_from(["", "x\ny", "é\u2028\x00"]),
)


@st.composite
def entries(draw):
    """Draw any legal entry; few keys and few numbers, so that keys and ranks often agree."""
    bound, after, before = sorted(draw(st.lists(st.integers(1, 4), min_size=3, max_size=3)))
    return BankEntry(
        key=draw(keys),
        schedule=draw(plain),
        before_cycles=before,
        after_cycles=after,
        bound_cycles=draw(st.sampled_from([None, bound])),
        proven=draw(st.booleans()),
        search=draw(st.sampled_from(["ga", "mcts"])),
        seed=draw(st.integers(-3, 2**64)),
        trials=draw(st.integers(0, 3)),
        tool_version="0.3.0",
        created=draw(st.text(max_size=5)),
        model_version=draw(st.sampled_from([MODEL_VERSION, MODEL_VERSION + 1])),
        features=tuple(draw(st.lists(st.floats(-4, 40), max_size=3))),
    )


banks = st.lists(entries(), max_size=6)
