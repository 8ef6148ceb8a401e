"""Banks that are damaged: rows and pages cost themselves, reading changes nothing."""

import os
import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from bank_cases import ENTRY, KEY, entry
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ascend_lab.aoe.bank import BankEntry, BankError, Knowledge, Store
from ascend_lab.aoe.bank.records import to_line
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.saved import bank_at
from ascend_lab.errors import InputError

GOOD = [entry(str(i), schedule=["x" * 100 * (i % 5)]) for i in range(60)]


def made(file: Path, entries: list[BankEntry] = GOOD) -> bytes:
    """Write a bank and return its bytes."""
    with Store(file) as store:
        store.take(entries)
        store.save_trials("run", [Trial(0, (1,), 2.0)])
    return file.read_bytes()


with TemporaryDirectory() as _folder:
    WHOLE = made(Path(_folder, "bank.db"))


@given(st.lists(st.integers(0, len(WHOLE) * 8 - 1), min_size=1, max_size=3))
@example([100 * 8]).via("the root of the schema")
@example([4096 * 8]).via("the root of the entries")
@settings(max_examples=25, deadline=None)
def test_flipped_bits_never_lose_a_bank_or_show_what_was_not_there(bits: list[int]) -> None:
    data, said = bytearray(WHOLE), []
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    with TemporaryDirectory() as folder:
        file = Path(folder, "bank.db")
        file.write_bytes(data)
        try:
            with Store(file, write=False) as store:
                found = store.entries()
                keys = {e.key for e in found}
                assert keys <= {e.key for e in GOOD}
                assert len(keys) == len(GOOD) or store.skipped
        except BankError as error:
            said.append(str(error))
        assert [p.name for p in Path(folder).iterdir()] == ["bank.db"] and file.read_bytes() == data
        try:
            with Store(file) as store:
                store.put(ENTRY)
                assert store.get(KEY) == ENTRY
                assert {e.key for e in store.entries()} <= {*(e.key for e in GOOD), KEY}
                store.trials("run")
        except BankError as error:
            said.append(str(error))
    assert all("\n" not in text and str(file) in text for text in said)


BAD = {
    "text": "x",
    "cut": to_line(GOOD[1])[:-9],
    "another key": to_line(GOOD[2]),
    "a newer field": to_line(GOOD[1])[:-1] + ',"new":1}',
    "negative": to_line(GOOD[1]).replace('"before_cycles":200', '"before_cycles":-200'),
    "not a number": to_line(GOOD[1]).replace('"before_cycles":200', '"before_cycles":NaN'),
    "infinite": to_line(GOOD[1]).replace('"features":[6.0', '"features":[1e999'),
    "huge": to_line(GOOD[1]).replace('"before_cycles":200', f'"before_cycles":{10**400}'),
    "a huge size": to_line(GOOD[1]).replace('"features":[6.0', f'"features":[{10**400}'),
    "a type": to_line(GOOD[1]).replace('"proven":false', '"proven":"no"'),
    "deep": "[" * 100_000,
    "bytes": b"\xff\xfe",
    "number": 7,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_a_bad_row_costs_itself_only_and_can_be_deleted(tmp_path: Path, bad: object) -> None:
    file = tmp_path / "bank.db"
    made(file, GOOD[:4])
    with sqlite3.connect(file) as con:
        con.execute("UPDATE entries SET line = ? WHERE digest = ?", (bad, GOOD[1].key.digest))
    con.close()
    others = {e.key: e for e in (GOOD[0], *GOOD[2:4])}
    for write in (False, True):
        with Knowledge(file, None, write=write) as knowledge:
            assert {e.key: e for e in knowledge.entries()} == others
            assert knowledge.find(GOOD[1].key) is None and knowledge.find(GOOD[3].key)
            assert len(knowledge.nearest(KEY, (6, 6, 6), 9)) == 3
            (warning,) = knowledge.warnings
            assert warning.startswith("1 unreadable rows of") and str(file) in warning
    with Store(file) as store:
        assert store.forget_unreadable() == 1
    with Store(file, write=False) as store:
        assert store.skipped == 0 and {e.key: e for e in store.entries()} == others
    with Store(file) as store:
        assert store.put(GOOD[1]) == "add"


def test_bad_trials_are_passed_over(tmp_path: Path) -> None:
    with Store(tmp_path / "bank.db") as store:
        store.save_trials("run", [Trial(i, (i,), 1.0) for i in range(7)])
        wrong = ["point = 'x'", "point = '5'", "cost = -1.0", "cost = 'x'", "note = x'ff'"]
        for number, change in enumerate(wrong):
            store._con.execute(f"UPDATE trials SET {change} WHERE number = ?", (number,))
        assert [t.number for t in store.trials("run")] == [5, 6]


def test_reading_makes_and_changes_nothing(tmp_path: Path) -> None:
    bank, empty, link = tmp_path / "bank.db", tmp_path / "empty.db", tmp_path / "link.db"
    made(bank)
    empty.touch()
    link.symlink_to("bank.db")
    os.mkfifo(tmp_path / "pipe.db")
    (tmp_path / "loop.db").symlink_to("loop.db")
    (tmp_path / "notes.db").write_text("notes, not a database, and long enough to be one. " * 99)
    before = {p.name: p.lstat().st_mtime_ns for p in tmp_path.iterdir()}
    for good in (bank, link):
        with bank_at(good) as knowledge:
            assert len(knowledge.entries()) >= len(GOOD)
    bad = ["empty.db", "pipe.db", "loop.db", "notes.db", ".", "", "nothing.db", "n" * 300 + ".db"]
    bad += ["pipe.jsonl", "no/such.jsonl", "\0", "/dev/zero", "no/such/folder.db"]
    (tmp_path / "pipe.jsonl").symlink_to("/dev/zero")
    before["pipe.jsonl"] = (tmp_path / "pipe.jsonl").lstat().st_mtime_ns
    for name in bad:
        with pytest.raises(InputError) as caught:
            bank_at(tmp_path / name)
        assert "\n" not in str(caught.value) and str(tmp_path / name) in str(caught.value)
    assert {p.name: p.lstat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_what_a_killed_writer_left_is_read_and_stays(tmp_path: Path) -> None:
    live, copy = tmp_path / "bank.db", tmp_path / "copy"
    copy.mkdir()
    with Store(live) as store:
        store.put(ENTRY)
        with Store(live, write=False) as reading:  # beside a writer
            assert reading.get(KEY) == ENTRY
        for suffix in ("", "-wal"):
            (copy / f"bank.db{suffix}").write_bytes(Path(f"{live}{suffix}").read_bytes())
    before = {p.name: p.read_bytes() for p in copy.iterdir()}
    with Store(copy / "bank.db", write=False) as reading:
        assert reading.get(KEY) == ENTRY
    assert {p.name: p.read_bytes() for p in copy.iterdir()} == before


def test_lines_that_are_no_entries_are_passed_over_when_read_only(tmp_path: Path) -> None:
    file = tmp_path / "bank.jsonl"
    file.write_text(f"{to_line(GOOD[0])}\nx\n{to_line(GOOD[1])}\n")
    with bank_at(file) as knowledge:
        assert knowledge.find(GOOD[0].key) and knowledge.find(GOOD[1].key)
        assert knowledge.warnings == [f"1 lines of {file} are no entries and are passed over"]
    file.write_text("x\n")
    with pytest.raises(BankError, match="line 1"):
        bank_at(file)


def test_trials_that_nobody_goes_on_with_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "bank.db"
    with Store(file) as store:
        for run in ("old 1", "young 1", "young 2", "done 1", "done 2"):
            store.save_trials(run, [Trial(0, (1,), 2.0)])
        store._con.execute("UPDATE runs SET touched = touched - 31 WHERE run_id = 'old 1'")
        store._con.execute("DELETE FROM runs WHERE run_id = 'young 2'")  # of an earlier version
        store.forget_trials("done 1")
    with Store(file) as store:
        left = store._read("SELECT run_id FROM trials ORDER BY run_id")
    assert left == [("young 1",), ("young 2",)]
