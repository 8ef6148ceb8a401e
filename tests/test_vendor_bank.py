"""The vendor's runtime bank: read, translated, held against ours, kept and written back.

Every entry here is made up. With `ASCEND_LAB_AOE_BANK` naming a folder of tables, those are held
against ours, too.
"""

import json
import os
from pathlib import Path

import pytest

from ascend_lab.aoe.bank import Store
from ascend_lab.aoe.vendor_bank import (
    KNOWLEDGE,
    bank_entry,
    held_against,
    lines,
    read_decisions,
    summary,
    translated,
    write_decisions,
    written_lines,
)
from ascend_lab.cli import aoe
from ascend_lab.errors import InputError, UnsupportedError
from ascend_lab.machine.chip import load_chip

B2 = load_chip("Ascend910B2")
NAME = "Ascend910B2_24_AiCore_MatMulV3_runtime_kb.json"
PLAIN = {
    "usedCoreNum": 24,
    "singleCoreM": 128,
    "singleCoreN": 256,
    "singleCoreK": 640,
    "baseM": 128,
    "baseN": 256,
    "baseK": 64,
    "depthA1": 8,
    "depthB1": 8,
    "stepM": 1,
    "stepN": 1,
    "iterateOrder": 0,
    "stepKa": 4,
    "stepKb": 4,
    "dbL0A": 2,
    "dbL0B": 2,
    "dbL0C": 1,
    "l2MTileCnt": 1,
    "l2NTileCnt": 1,
    "l2MTileBlock": 0,
    "l2NTileBlock": 0,
    "l2IterateOrder": 0,
    "tilingEnable": 0,
}


def line(sizes: tuple[int, int, int] = (1536, 640, 1024), **changed: int) -> str:
    """Return an entry as a line of JSON; what is not said is that of the plain one."""
    m, k, n = sizes
    problem = {"m": m, "k": k, "n": n, "a_dtype": 1, "b_dtype": 1, "out_dtype": 1}
    problem |= {"trans_a_flag": 0, "trans_b_flag": 0}
    own = PLAIN | {"singleCoreK": k} | changed
    entry = {"id": 7, "op": "MatMulV3", "version": 0, "info_dict": problem, "knowledge": own}
    return json.dumps(entry)


def bank(folder: Path, *entries: str) -> Path:
    """Write a runtime bank."""
    path = folder / NAME
    path.write_text("".join(f"{entry}\n" for entry in entries), "utf-8")
    return path


def one(folder: Path, sizes: tuple[int, int, int] = (1536, 640, 1024), **changed: int):
    """Return the only decision of a bank."""
    return read_decisions(bank(folder, line(sizes, **changed)))[0]


# -- files -----------------------------------------------------------------------------------------
def test_what_is_read_is_written_back(tmp_path):
    path = bank(tmp_path, line(), line((64, 512, 4096), baseM=64))
    found = read_decisions(path)
    assert [d.sizes for d in found] == [(1536, 640, 1024), (64, 512, 4096)]
    assert {d.chip for d in found} == {"Ascend910B2"} and found[0].core_count == 24
    again = tmp_path / f"again_{NAME}"
    assert write_decisions(found, again) == 2
    assert again.read_bytes() == path.read_bytes()


def test_a_table_says_the_same(tmp_path):
    words = PLAIN | {"singleCoreK": 640}
    row = {"chip": "Ascend910B2", "bin_cores": "24", "operator": "MatMulV3"}
    row |= {"m": "1536", "k": "640", "n": "1024", "a_dtype": "fp16", "out_dtype": "fp16"}
    row |= {column: str(words[word]) for word, column in KNOWLEDGE.items()}
    path = tmp_path / "table.csv"
    path.write_text(",".join(row) + "\n" + ",".join(row.values()) + "\n", "utf-8")
    (from_table,) = read_decisions(path)
    from_bank = one(tmp_path)
    assert from_table.shape == from_bank.shape
    assert translated(from_table, B2) == translated(from_bank, B2)


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("{", "line 1"),
        ("[]", "an object"),
        ('{"op": "MatMulV3"}', "info_dict"),
        (line().replace('"m": 1536', '"m": "much"'), "m as a whole number"),
        (line().replace("MatMulV3", "Conv2DV2"), "an entry of MatMulV3"),
    ],
)
def test_what_is_no_entry_names_its_line(tmp_path, text, needed):
    with pytest.raises((InputError, UnsupportedError), match=needed) as caught:
        read_decisions(bank(tmp_path, text))
    assert "line 1" in str(caught.value)


def test_a_bank_says_chip_and_cores_in_its_name(tmp_path):
    path = tmp_path / "mine_runtime_kb.json"
    path.write_text(line(), "utf-8")
    with pytest.raises(InputError, match="CORES"):
        read_decisions(path)


# -- in our terms ----------------------------------------------------------------------------------
def test_a_plain_tiling_is_ours(tmp_path):
    found = translated(one(tmp_path), B2)
    own = found.schedule
    assert (own.base_m, own.base_k, own.base_n, own.step_k) == (128, 64, 256, 4)
    assert own.grid_rows * own.grid_cols == 24  # 12 x 4 blocks in two rounds
    assert (own.order, own.keep, own.split_k, found.lost) == ("nm", "", 1, ())
    assert (own.a_l1_slots, own.b_l1_slots, own.c_l0_slots) == (2, 2, 1)


def test_what_stays_in_l1_has_no_steps(tmp_path):
    long = one(tmp_path, (64, 512, 4096), baseM=64, singleCoreM=64, stepKa=8, depthA1=8, stepKb=2,
               depthB1=4)  # fmt: skip
    found = translated(long, B2)
    assert found.schedule.keep == "a" and found.schedule.step_k == 2 and not found.lost
    told = translated(one(tmp_path, (1536, 512, 1024), tilingEnable=20, baseN=64), B2)
    assert told.schedule.keep == "b" and told.schedule.order == "nm"


def test_what_ours_cannot_say_is_told(tmp_path):
    uneven = translated(one(tmp_path, stepKa=4, stepKb=2, depthB1=4), B2)
    assert uneven.schedule.step_k == 2 and uneven.lost == ("two steps along K",)
    with pytest.raises(UnsupportedError, match="splits K"):
        translated(one(tmp_path, tilingEnable=2), B2)
    shared = translated(one(tmp_path, (128, 8192, 256), tilingEnable=3, singleCoreK=2048), B2)
    assert shared.schedule.split_k == 4


# -- held against ours -----------------------------------------------------------------------------
def test_a_poor_tiling_is_slower_than_ours_and_in_the_space(tmp_path):
    poor = one(tmp_path, baseM=32, baseN=32, singleCoreM=32, singleCoreN=32, usedCoreNum=4)
    (held,) = held_against([poor])
    assert held.factor > 1.5 and held.in_space and held.share > 0.05
    (good,) = held_against([one(tmp_path)])
    assert 1.0 <= good.factor < 1.5 and good.share < held.share


def test_the_summary_counts_what_was_timed_and_what_was_not(tmp_path):
    path = bank(tmp_path, line(), line(tilingEnable=2), line(stepKb=2, depthB1=4))
    found = summary([*held_against(read_decisions(path))])
    assert (found["entries"], found["timed"]) == (3, 2)
    assert found["in_space"] == 0.5 and found["lost"] == {"two steps along K": 1}
    assert sum(found["refused"].values()) == 1
    told = "\n".join(lines(found))
    assert "2 of 3" in told and "splits K" in told
    assert lines(summary([])) == ["0 of 0 decisions timed, L2 cold"]


def test_a_chip_that_there_is_no_preset_of_is_refused(tmp_path):
    path = bank(tmp_path, line()).rename(tmp_path / NAME.replace("910B2", "910X"))
    (held,) = held_against(read_decisions(path))
    assert "Ascend910X" in held.refused and held.factor is None


# -- in our bank -----------------------------------------------------------------------------------
def better() -> str:
    """Return an entry that our default is a little slower than: all of A's rows stay in L1."""
    return line(
        (2000, 512, 912), baseM=176, baseN=80, singleCoreM=176, singleCoreN=464, stepKa=3,
        stepKb=3, depthA1=6, depthB1=6, dbL0C=2, tilingEnable=10,
    )  # fmt: skip


def test_the_bank_takes_what_is_better_and_gives_the_line_back(tmp_path):
    decision = read_decisions(bank(tmp_path, better()))[0]
    assert bank_entry(one(tmp_path, baseM=16, singleCoreM=16, usedCoreNum=1)) is None
    entry = bank_entry(decision)
    assert entry is not None and entry.improved
    with Store(tmp_path / "bank.db") as store:
        store.put_all([entry])
        assert written_lines(store.entries()) == [decision.line]


def test_the_verbs_take_a_bank_of_the_vendor(tmp_path, capsys):
    path = bank(tmp_path, better(), line(tilingEnable=2))
    own = tmp_path / "bank.db"
    out = tmp_path / f"out_{NAME}"
    code, told, _ = run_aoe(capsys, "bank", "import", path, "--bank", own)
    assert code == 0 and told.startswith("1 added") and "1 have no kernel here" in told
    code, told, _ = run_aoe(capsys, "bank", "export", out, "--bank", own)
    assert code == 0 and "of CANN's bank written" in told
    assert out.read_text().splitlines() == [better()]
    code, told, _ = run_aoe(capsys, "bank", "compare", path)
    assert code == 0 and "1 of 2 decisions timed" in told
    code, told, _ = run_aoe(capsys, "bank", "compare", path, "--soc_version", "Ascend310P3")
    assert "0 of 0" in told


def run_aoe(capsys, *words):
    """Run `aoe` with these words."""
    code = aoe([str(word) for word in words])
    out, err = capsys.readouterr()
    return code, out, err


FOLDER = os.environ.get("ASCEND_LAB_AOE_BANK", "")


@pytest.mark.skipif(not FOLDER, reason="no folder of tables is named")
@pytest.mark.parametrize("name", ["910b2.csv", "310p.csv"])
def test_no_decision_beats_our_best(name):
    found = summary([*held_against(read_decisions(Path(FOLDER) / name))])
    assert found["timed"] and found["ours_no_slower"] >= 0.98


@pytest.mark.parametrize(
    "changed", [{"usedCoreNum": 0}, {"usedCoreNum": 99}, {"stepKa": 0}, {"baseM": True}]
)
def test_tilings_that_mean_nothing_are_refused(tmp_path: Path, changed: dict[str, int]) -> None:
    path = tmp_path / NAME
    path.write_text(line(**changed) + "\n", "utf-8")
    with pytest.raises(InputError, match=next(iter(changed))):
        read_decisions(path)


def test_factors_of_two_types_are_refused(tmp_path: Path) -> None:
    entry = json.loads(line())
    entry["info_dict"]["b_dtype"] = 2
    path = tmp_path / NAME
    path.write_text(json.dumps(entry) + "\n", "utf-8")
    with pytest.raises(UnsupportedError, match="one type"):
        read_decisions(path)
