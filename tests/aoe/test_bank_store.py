"""The bank file used by one process: put, get, nearest, merge, JSON Lines, trials of a search."""

import math
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from bank_cases import ENTRY, KEY, banks, entry
from hypothesis import given, settings

from ascend_lab.aoe.bank import MODEL_VERSION, BankEntry, BankError, Store
from ascend_lab.aoe.bank.connect import APPLICATION_ID, SCHEMA_VERSION
from ascend_lab.aoe.bank.records import better, to_line
from ascend_lab.aoe.drive import Trial
from ascend_lab.errors import InputError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "knowledge.db") as opened:
        yield opened


# -- entries ---------------------------------------------------------------------------------------


def test_put_writes_only_what_is_better(store: Store) -> None:
    assert store.get(KEY) is None
    assert store.put(ENTRY) == "add"
    assert store.put(ENTRY) == "reserved"
    assert store.put(entry(after_cycles=121, seed=1)) == "reserved"
    assert store.put(entry(seed=1)) == "reserved"
    assert store.get(KEY) == ENTRY
    assert store.put(entry(proven=True)) == "update"
    assert store.put(entry(after_cycles=110)) == "update"
    assert store.put(entry(after_cycles=150, model_version=MODEL_VERSION + 1)) == "update"
    assert store.put(entry(after_cycles=100)) == "reserved"
    assert [e.after_cycles for e in store.entries()] == [150]


def test_a_key_is_found_by_all_its_parts(store: Store) -> None:
    others = [entry(core_count=1), entry(kind="graph"), entry(chip_digest="1"), entry("text\n2")]
    assert [store.put(e) for e in (ENTRY, *others)] == ["add"] * 5
    assert [store.get(e.key) for e in others] == others
    assert store.get(entry(chip="Toy").key) is None
    assert len(store.entries()) == 5


def test_the_bank_is_one_file_that_can_be_opened_again(tmp_path: Path) -> None:
    file = tmp_path / "a bank? 100%.db"
    with Store(file) as first:
        first.put(ENTRY)
    assert [p.name for p in tmp_path.iterdir()] == [file.name]
    with Store(file, write=False) as again:
        assert again.entries() == (ENTRY,)
        assert again.check() == ()


def test_nearest_looks_at_like_problems_only(store: Store) -> None:
    near, far = entry("near", features=(6, 6, 7)), entry("far", features=(9, 9, 9))
    other_cores = entry("near", features=(6, 6, 7), core_count=1)
    other_chip = entry("near", features=(6, 6, 7), chip_digest="edited")
    no_use = [
        entry("a", features=(6, 6)),
        entry("b", op="vadd"),
        entry("c", chip="Toy"),
        entry("d", kind="graph"),
    ]
    for one in (far, other_chip, other_cores, near, ENTRY, *no_use):
        store.put(one)
    assert store.nearest(KEY, (6, 6, 6), 10) == [near, other_cores, other_chip, far]
    assert store.nearest(KEY, (8, 9, 9), 1) == [far]
    assert store.nearest(KEY, (), 10) == []


# -- merge -----------------------------------------------------------------------------------------


def filled(folder: str, name: str, entries: list[BankEntry]) -> Store:
    """Return a new bank with `entries`; the better one of each key is in it."""
    store = Store(Path(folder) / name)
    store.take(entries)
    return store


@given(banks, banks)
@settings(max_examples=15)
def test_merge_keeps_the_better_one_and_commutes(a: list[BankEntry], b: list[BankEntry]) -> None:
    with (
        TemporaryDirectory() as folder,
        filled(folder, "a", a) as one,
        filled(folder, "b", b) as two,
    ):
        before, others = one.entries(), two.entries()
        counts = one.merge(two)
        assert sum(counts.values()) == len(others)
        assert len(one.entries()) == len(before) + counts["add"]
        with filled(folder, "c", a) as again:
            two.merge(again)
        assert one.entries() == two.entries()
        assert one.merge(two) == {"add": 0, "update": 0, "reserved": len(one.entries())}
        best: dict[object, BankEntry] = {}
        for e in [*a, *b]:
            best[e.key] = better(best.get(e.key, e), e)
        assert set(map(to_line, one.entries())) == set(map(to_line, best.values()))


def test_merge_takes_everything_or_nothing(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path / "other.db") as other:
        other.take([entry(str(i)) for i in range(3)])
        texts = iter(["one", "two"])
        monkeypatch.setattr("ascend_lab.aoe.bank.store.to_line", lambda _: next(texts))
        with pytest.raises(StopIteration):
            store.merge(other)
    assert store._read("SELECT * FROM entries") == []


# -- JSON Lines ------------------------------------------------------------------------------------


@given(banks)
@settings(max_examples=15)
def test_an_export_gives_the_bank_back(entries: list[BankEntry]) -> None:
    with TemporaryDirectory() as folder, filled(folder, "a", entries) as one:
        lines, again = Path(folder) / "bank.jsonl", Path(folder) / "again.jsonl"
        assert one.export_jsonl(lines) == len(one.entries())
        with Store(Path(folder) / "b") as two:
            assert two.import_jsonl(lines)["add"] == len(one.entries())
            assert two.entries() == one.entries()
            two.export_jsonl(again)
        assert again.read_bytes() == lines.read_bytes()


def test_a_wrong_line_is_named_and_nothing_is_imported(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "bank.jsonl"
    good = [to_line(entry(str(i))) for i in range(4)]
    file.write_text("\n".join([good[0], "", good[1], good[2][:-9], good[3]]))
    with pytest.raises(BankError, match=r"bank\.jsonl line 4: one JSON object") as caught:
        store.import_jsonl(file)
    assert caught.value.reason == "line"
    assert store.entries() == ()
    file.write_text("\n".join([good[0], "", good[1]]) + "\r\n")
    assert store.import_jsonl(file) == {"add": 2, "update": 0, "reserved": 0}


def test_a_failed_export_leaves_the_old_file(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bank.jsonl"
    file.write_text("old")
    store.put(ENTRY)

    def no_space(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", no_space)
        with pytest.raises(InputError, match=r"No space left"):
            store.export_jsonl(file)
    assert file.read_text() == "old"
    assert {p.name for p in tmp_path.glob("*jsonl*")} == {"bank.jsonl"}
    assert store.export_jsonl(file) == 1
    assert file.read_text() == to_line(ENTRY) + "\n"


def test_files_that_are_not_there_are_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BankError, match=r"nowhere\.jsonl") as caught:
        store.import_jsonl(tmp_path / "nowhere.jsonl")
    assert caught.value.reason == "missing"
    with pytest.raises(InputError, match=r"no_folder.*make its folder"):
        store.export_jsonl(tmp_path / "no_folder" / "bank.jsonl")
    with pytest.raises(BankError, match=r"no regular file") as caught:
        store.import_jsonl(tmp_path)
    assert caught.value.reason == "unwritable"


# -- trials ----------------------------------------------------------------------------------------


def test_trials_come_back_as_they_were(store: Store) -> None:
    points = [(1, "mnk", (2, 3)), (True, None, ()), (0.1, "é", ((1,), 2**60))]
    store.save_trials("run", [Trial(2, points[2], math.inf, "cannot be built")])
    store.save_trials("run", [Trial(i, points[i], 0.1 + i) for i in range(2)])
    store.save_trials("other", [Trial(0, (9,), 1.0)])
    assert store.trials("run") == (
        Trial(0, points[0], 0.1),
        Trial(1, points[1], 1.1),
        Trial(2, points[2], math.inf, "cannot be built"),
    )
    assert isinstance(store.trials("run")[1].point[0], bool)
    store.save_trials("run", [Trial(2, (5,), 3.0)])
    assert store.trials("run")[2] == Trial(2, (5,), 3.0)
    store.forget_trials("run")
    assert store.trials("run") == ()
    assert len(store.trials("other")) == 1


def test_trials_that_cannot_be_stored_are_refused_and_none_is_kept(store: Store) -> None:
    for bad in (Trial(1, (1,), math.nan), Trial(1, (object(),), 1.0)):
        with pytest.raises(BankError) as caught:
            store.save_trials("run", [Trial(0, (1,), 1.0), bad])
        assert caught.value.reason == "record"
    assert store.trials("run") == ()


# -- files that are no bank ------------------------------------------------------------------------


def test_a_missing_file_or_folder_is_named(tmp_path: Path) -> None:
    for file, word in ((tmp_path / "no.db", "file"), (tmp_path / "no" / "k.db", "folder")):
        with pytest.raises(BankError, match=f"no such {word}") as caught:
            Store(file, write=file.parent != tmp_path)
        assert caught.value.reason == "missing"
        assert not file.exists()


def test_what_is_no_bank_is_refused_and_left_alone(tmp_path: Path) -> None:
    text, other, empty = tmp_path / "text.db", tmp_path / "other.db", tmp_path / "empty.db"
    text.write_text("I am a letter, not a database. " * 50)
    with sqlite3.connect(other) as con:
        con.execute("CREATE TABLE songs (name TEXT)")
    con.close()
    empty.touch()
    for file in (text, other, empty):
        before = file.read_bytes()
        with pytest.raises(BankError, match=str(file.name)) as caught:
            Store(file, write=file is not empty)
        assert caught.value.reason == "not-a-bank"
        assert caught.value.remedy
        assert file.read_bytes() == before
    with pytest.raises(BankError, match="folder") as caught:
        Store(tmp_path)
    assert caught.value.reason == "unwritable"


def test_a_bank_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "knowledge.db"
    with Store(file) as store:
        assert store._con.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        store._con.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    with pytest.raises(BankError, match=f"got version {SCHEMA_VERSION + 1}; update") as caught:
        Store(file)
    assert caught.value.reason == "newer"


def test_a_damaged_page_costs_only_its_own_rows(tmp_path: Path) -> None:
    file = tmp_path / "knowledge.db"
    with Store(file) as store:
        store.take([entry(str(i), schedule=["x" * 300]) for i in range(200)])
    data = bytearray(file.read_bytes())
    assert len(data) > 20_000
    data[-4096 * 3 : -4096 * 3 + 200] = b"\xff" * 200
    file.write_bytes(data)
    with pytest.raises(BankError, match=r"a sound knowledge bank.*aoe bank export") as caught:
        Store(file)
    assert caught.value.reason == "damaged" and "\n" not in str(caught.value)
    with Store(file, write=False) as store:
        assert 180 < len(store.entries()) == 200 - store.skipped < 200
    assert file.read_bytes() == data and [p.name for p in tmp_path.iterdir()] == [file.name]


def test_a_closed_bank_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path / "knowledge.db")
    store.close()
    store.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        store.entries()
