"""Keys and entries: what is equal, what is better, what is refused, how they are written."""

import json
from dataclasses import replace

import pytest
from bank_cases import ENTRY, KEY, entries, entry
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_lab.aoe.bank import MODEL_VERSION, BankEntry, BankError, chip_digest
from ascend_lab.aoe.bank.records import better, from_line, to_line
from ascend_lab.chip import load_chip, presets
from ascend_lab.kernels import GemmShape, elementwise_launch, gemm_launch
from ascend_lab.sim import simulate


def test_the_digest_of_a_chip_follows_its_numbers_only() -> None:
    chip = load_chip("Ascend310")
    assert chip_digest(chip) == chip_digest(replace(chip, name="Mine", summary="edited words"))
    path = chip.paths["GM", "L1"]
    slower = replace(path, rate_bytes_per_cycle=path.rate_bytes_per_cycle / 2)
    edited = [
        replace(chip, core_count=chip.core_count + 1),
        replace(chip, paths={**chip.paths, ("GM", "L1"): slower}),
        replace(chip, l2=replace(chip.l2, size_bytes=1)),
        replace(chip, power_w=None),
    ]
    digests = {chip_digest(c) for c in [*presets().values(), *edited]}
    assert len(digests) == len(presets()) + len(edited)


def test_the_digest_of_a_chip_does_not_see_the_order_or_the_kind_of_numbers() -> None:
    chip = load_chip("Ascend310")
    turned = replace(chip, buffers=dict(reversed(chip.buffers.items())))
    assert chip_digest(replace(turned, clock_hz=int(chip.clock_hz))) == chip_digest(chip)


@pytest.mark.parametrize("name", ["chip", "chip_digest", "core_count", "kind", "op", "problem"])
def test_every_part_of_a_key_counts(name: str) -> None:
    other = replace(KEY, **{name: {"core_count": 3, "kind": "graph"}.get(name, "other")})
    assert other != KEY
    assert other.digest != KEY.digest
    assert replace(KEY).digest == KEY.digest


def test_the_gap_is_what_is_left_above_the_bound() -> None:
    assert ENTRY.gap == pytest.approx(0.2)
    assert entry(bound_cycles=120).gap == 0
    assert entry(bound_cycles=None).gap is None
    assert entry(bound_cycles=0).gap is None
    assert ENTRY.improved
    assert not entry(after_cycles=200).improved


def test_an_entry_owns_its_schedule() -> None:
    tile = [1, 2]
    mine = entry(schedule={"tile": tile, "pair": (3, 4)})
    tile.append(3)
    assert mine.schedule == {"tile": [1, 2], "pair": [3, 4]}
    assert len({mine, replace(mine)}) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("after_cycles", 201),
        ("after_cycles", 1.5),
        ("after_cycles", True),
        ("before_cycles", -1),
        ("bound_cycles", 121),
        ("schedule", {"x": float("nan")}),
        ("schedule", {"x": object()}),
        ("features", (float("inf"),)),
        ("features", "abc"),
        ("proven", 1),
        ("seed", "0"),
        ("search", None),
        ("trials", -1),
    ],
)
def test_an_entry_that_cannot_be_true_is_refused(field: str, value: object) -> None:
    with pytest.raises(BankError, match=rf"BankEntry\.{field} must be") as caught:
        entry(**{field: value})
    assert caught.value.reason == "record"


@pytest.mark.parametrize(
    ("field", "value"),
    [("core_count", 0), ("kind", "net"), ("op", "a\nb"), ("chip", 3), ("op", "\ud800")],
)
def test_a_key_that_cannot_be_stored_is_refused(field: str, value: object) -> None:
    with pytest.raises(BankError, match=rf"BankKey\.{field} must be"):
        replace(KEY, **{field: value})


def test_better_means_newer_model_then_cycles_then_proof_then_bound() -> None:
    from_best = [
        entry(model_version=MODEL_VERSION + 1, after_cycles=200),
        entry(after_cycles=119),
        entry(proven=True),
        entry(bound_cycles=110),
        ENTRY,
        entry(bound_cycles=None),
    ]
    for i, one in enumerate(from_best):
        assert one.better_than(None)
        assert [one.better_than(other) for other in from_best] == [i < j for j in range(6)]
    assert not entry(seed=1).better_than(entry(seed=2))


@given(st.tuples(entries(), entries(), entries()))
@settings(max_examples=25)
def test_the_better_of_several_is_the_same_in_any_order(three: tuple[BankEntry, ...]) -> None:
    a, b, c = (replace(e, key=KEY) for e in three)
    assert better(a, b) == better(b, a)
    assert better(a, better(b, c)) == better(better(a, b), c)
    assert better(a, a) == a
    assert not b.better_than(better(a, b))


@given(entries())
@settings(max_examples=25)
def test_a_line_gives_the_entry_back(one: BankEntry) -> None:
    line = to_line(one)
    assert "\n" not in line
    assert line.isascii()
    assert from_line(line) == one
    assert to_line(from_line(line)) == line


LINE = json.loads(to_line(ENTRY))
WRONG_LINES = {
    "half a line": (to_line(ENTRY)[:40], "one JSON object"),
    "not a number": (to_line(ENTRY).replace("120", "NaN"), "no JSON number"),
    "no object": ("[]", "a BankEntry as a JSON object"),
    "no key": (json.dumps({k: v for k, v in LINE.items() if k != "key"}), "no 'key'"),
    "a field too many": (json.dumps({**LINE, "note": 1}), "unknown 'note'"),
    "key as text": (json.dumps({**LINE, "key": "k"}), "a BankKey as a JSON object"),
    "key without op": (json.dumps({**LINE, "key": {"chip": "x"}}), "no 'op'"),
    "text as cycles": (json.dumps({**LINE, "after_cycles": "1"}), "must be an integer"),
    "too deep": ("[" * 100_000, "one JSON object"),
}


@pytest.mark.parametrize("case", WRONG_LINES)
def test_a_wrong_line_says_what_is_wrong(case: str) -> None:
    line, message = WRONG_LINES[case]
    with pytest.raises(BankError, match=message):
        from_line(line)


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(BankError, match="one JSON object"):
        from_line(b'{"a": "\xff"}')


def test_the_model_version_stands_for_these_cycles() -> None:
    """If this fails the model or a default has changed: raise MODEL_VERSION and correct this."""
    chip = load_chip("Ascend310")
    launches = (gemm_launch(GemmShape(256, 256, 256), chip), elementwise_launch(chip, 65536))
    cycles = [simulate(launch, chip).cycles for launch in launches]
    assert {MODEL_VERSION: cycles} == {2: [6041, 3858]}
