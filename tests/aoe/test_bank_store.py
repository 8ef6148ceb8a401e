"""The bank's files: what is stored, and what survives damage and strangers."""

import json
import math
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from bank_cases import ENTRY, KEY, banks, entries, entry
from hypothesis import example, given, settings, strategies as st

from ascend_lab.aoe.bank import (
    MODEL_VERSION,
    BankEntry,
    BankError,
    Knowledge,
    Store,
    bank_at,
    chip_digest,
)
from ascend_lab.aoe.bank.records import better, from_line, to_line
from ascend_lab.aoe.bank.store import APPLICATION_ID, SCHEMA_VERSION
from ascend_lab.aoe.drive import Trial
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip, presets
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import GemmShape, elementwise_launch, gemm_launch


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "knowledge.db") as opened:
        yield opened


# -- entries ---------------------------------------------------------------------------------------
def test_put_writes_only_what_is_better(store):
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


def test_nearest_looks_at_like_problems_only(store):
    near = entry("near", features=(6, 6, 7))
    far = entry("far", features=(9, 9, 9))
    other_cores = entry("near", features=(6, 6, 7), core_count=1)
    other_chip = entry("near", features=(6, 6, 7), chip_digest="edited")
    no_use = entry("b", op="vadd"), entry("c", chip="Toy"), entry("d", kind="graph")
    for one in (far, other_chip, other_cores, near, ENTRY, entry("a", features=(6, 6)), *no_use):
        store.put(one)
    assert store.nearest(KEY, (6, 6, 6), 10) == [near, other_cores, other_chip, far]
    assert store.nearest(KEY, (8, 9, 9), 1) == [far]
    assert store.nearest(KEY, (), 10) == []


# -- merge -----------------------------------------------------------------------------------------
def filled(folder, name, entries):
    """Return a new bank with `entries`; the better one of each key is in it."""
    store = Store(Path(folder) / name)
    store.put_all(entries)
    return store


@given(banks, banks)
@settings(max_examples=15)
def test_merge_keeps_the_better_one_and_commutes(a, b):
    with TemporaryDirectory() as at, filled(at, "a", a) as one, filled(at, "b", b) as two:
        before = one.entries()
        others = two.entries()
        counts = one.put_all(two.entries())
        assert sum(counts.values()) == len(others)
        assert len(one.entries()) == len(before) + counts["add"]
        with filled(at, "c", a) as again:
            two.put_all(again.entries())
        assert one.entries() == two.entries()
        assert one.put_all(two.entries()) == {"add": 0, "update": 0, "reserved": len(one.entries())}
        best: dict[object, BankEntry] = {}
        for e in [*a, *b]:
            best[e.key] = better(best.get(e.key, e), e)
        assert set(map(to_line, one.entries())) == set(map(to_line, best.values()))


def test_merge_takes_everything_or_nothing(store, tmp_path, monkeypatch):
    with Store(tmp_path / "other.db") as other:
        other.put_all([entry(str(i)) for i in range(3)])
        texts = iter(["one", "two"])
        monkeypatch.setattr("ascend_lab.aoe.bank.records.to_line", lambda _: next(texts))
        with pytest.raises(StopIteration):
            store.put_all(other.entries())
    assert store._read("SELECT * FROM entries") == []


# -- JSON Lines ------------------------------------------------------------------------------------
@given(banks)
@settings(max_examples=15)
def test_an_export_gives_the_bank_back(entries):
    with TemporaryDirectory() as folder, filled(folder, "a", entries) as one:
        lines = Path(folder) / "bank.jsonl"
        again = Path(folder) / "again.jsonl"
        assert one.export_jsonl(lines) == len(one.entries())
        with Store(Path(folder) / "b") as two:
            assert two.import_jsonl(lines)["add"] == len(one.entries())
            assert two.entries() == one.entries()
            two.export_jsonl(again)
        assert again.read_bytes() == lines.read_bytes()


def test_a_wrong_line_is_named_and_nothing_is_imported(store, tmp_path):
    file = tmp_path / "bank.jsonl"
    good = [to_line(entry(str(i))) for i in range(4)]
    file.write_text("\n".join([good[0], "", good[1], good[2][:-9], good[3]]))
    with pytest.raises(BankError, match=r"bank\.jsonl line 4: one JSON object") as caught:
        store.import_jsonl(file)
    assert caught.value.reason == "line"
    assert store.entries() == ()
    file.write_text("\n".join([good[0], "", good[1]]) + "\r\n")
    assert store.import_jsonl(file) == {"add": 2, "update": 0, "reserved": 0}


def test_files_that_are_not_there_are_named(store, tmp_path):
    with pytest.raises(BankError, match=r"nowhere\.jsonl") as caught:
        store.import_jsonl(tmp_path / "nowhere.jsonl")
    assert caught.value.reason == "missing"
    with pytest.raises(InputError, match=r"no_folder.*make its folder"):
        store.export_jsonl(tmp_path / "no_folder" / "bank.jsonl")
    with pytest.raises(BankError, match=r"no regular file") as caught:
        store.import_jsonl(tmp_path)
    assert caught.value.reason == "unwritable"


# -- trials ----------------------------------------------------------------------------------------
def test_trials_come_back_as_they_were(store):
    points = [(1, "mnk", (2, 3)), (True, None, ()), (0.1, "é", ((1,), 2**60))]
    store.save_trials("run", [Trial(2, points[2], math.inf, "cannot be built")])
    store.save_trials("run", [Trial(i, points[i], 0.1 + i) for i in range(2)])
    store.save_trials("other", [Trial(0, (9,), 1.0)])
    last = Trial(2, points[2], math.inf, "cannot be built")
    assert store.trials("run") == (Trial(0, points[0], 0.1), Trial(1, points[1], 1.1), last)
    assert isinstance(store.trials("run")[1].point[0], bool)
    store.save_trials("run", [Trial(2, (5,), 3.0)])
    assert store.trials("run")[2] == Trial(2, (5,), 3.0)
    store.forget_trials("run")
    assert store.trials("run") == ()
    assert len(store.trials("other")) == 1


def test_trials_that_cannot_be_stored_are_refused_and_none_is_kept(store):
    for bad in (Trial(1, (1,), math.nan), Trial(1, (object(),), 1.0)):
        with pytest.raises(BankError) as caught:
            store.save_trials("run", [Trial(0, (1,), 1.0), bad])
        assert caught.value.reason == "record"
    assert store.trials("run") == ()


# -- files that are no bank ------------------------------------------------------------------------
def test_a_missing_file_or_folder_is_named(tmp_path):
    for file, word in ((tmp_path / "no.db", "file"), (tmp_path / "no" / "k.db", "folder")):
        with pytest.raises(BankError, match=f"no such {word}") as caught:
            Store(file, write=file.parent != tmp_path)
        assert caught.value.reason == "missing"
        assert not file.exists()


def test_what_is_no_bank_is_refused_and_left_alone(tmp_path):
    text = tmp_path / "text.db"
    other = tmp_path / "other.db"
    empty = tmp_path / "empty.db"
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


def test_a_bank_of_a_newer_version_is_refused(tmp_path):
    file = tmp_path / "knowledge.db"
    with Store(file) as store:
        assert store._con.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        store._con.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    with pytest.raises(BankError, match=f"got version {SCHEMA_VERSION + 1}; update") as caught:
        Store(file)
    assert caught.value.reason == "newer"


def test_a_damaged_page_costs_only_its_own_rows(tmp_path):
    file = tmp_path / "knowledge.db"
    with Store(file) as store:
        store.put_all([entry(str(i), schedule=["x" * 300]) for i in range(200)])
    data = bytearray(file.read_bytes())
    assert len(data) > 20_000
    data[-4096 * 3 : -4096 * 3 + 200] = b"\xff" * 200
    file.write_bytes(data)
    with pytest.raises(BankError, match=r"a sound knowledge bank.*aoe bank export") as caught:
        Store(file)
    assert caught.value.reason == "damaged" and "\n" not in str(caught.value)
    with Store(file, write=False) as store:
        assert 180 < len(store.entries()) == 200 - store.skipped_count < 200
    assert file.read_bytes() == data and [p.name for p in tmp_path.iterdir()] == [file.name]


def test_the_digest_of_a_chip_follows_its_numbers_only():
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
    assert chip_digest(load_chip("Ascend910B1")) == chip_digest(load_chip("Ascend910C"))
    assert len(digests) == len(presets()) - 1 + len(edited)
    turned = replace(chip, buffers=dict(reversed(chip.buffers.items())))
    assert chip_digest(replace(turned, clock_hz=int(chip.clock_hz))) == chip_digest(chip)


@pytest.mark.parametrize("name", ["chip", "chip_digest", "core_count", "kind", "op", "problem"])
def test_every_part_of_a_key_counts(name):
    other = replace(KEY, **{name: {"core_count": 3, "kind": "graph"}.get(name, "other")})
    assert other != KEY
    assert other.digest != KEY.digest
    assert replace(KEY).digest == KEY.digest


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
def test_an_entry_that_cannot_be_true_is_refused(field, value):
    with pytest.raises(BankError, match=rf"BankEntry\.{field} must be") as caught:
        entry(**{field: value})
    assert caught.value.reason == "record"


@pytest.mark.parametrize(
    ("field", "value"),
    [("core_count", 0), ("kind", "net"), ("op", "a\nb"), ("chip", 3), ("op", "\ud800")],
)
def test_a_key_that_cannot_be_stored_is_refused(field, value):
    with pytest.raises(BankError, match=rf"BankKey\.{field} must be"):
        replace(KEY, **{field: value})


def test_better_means_newer_model_then_cycles_then_proof_then_bound():
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
def test_the_better_of_several_is_the_same_in_any_order(three):
    a, b, c = (replace(e, key=KEY) for e in three)
    assert better(a, b) == better(b, a)
    assert better(a, better(b, c)) == better(better(a, b), c)
    assert better(a, a) == a
    assert not b.better_than(better(a, b))


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
    "no text": (b'{"a": "\xff"}', "one JSON object"),
}


@pytest.mark.parametrize("case", WRONG_LINES)
def test_a_wrong_line_says_what_is_wrong(case):
    line, message = WRONG_LINES[case]
    with pytest.raises(BankError, match=message):
        from_line(line)


def test_the_model_version_stands_for_these_cycles():
    """If this fails the model or a default has changed: raise MODEL_VERSION and correct this."""
    chip = load_chip("Ascend310")
    launches = (gemm_launch(GemmShape(256, 256, 256), chip), elementwise_launch(chip, 65536))
    cycles = [simulate(launch, chip).cycles for launch in launches]
    assert {MODEL_VERSION: cycles} == {3: [6041, 3858]}


GOOD = [entry(str(i), schedule=["x" * 100 * (i % 5)]) for i in range(60)]


def made(file, entries=GOOD):
    """Write a bank and return its bytes."""
    with Store(file) as store:
        store.put_all(entries)
        store.save_trials("run", [Trial(0, (1,), 2.0)])
    return file.read_bytes()


with TemporaryDirectory() as _folder:
    WHOLE = made(Path(_folder, "bank.db"))


@given(st.lists(st.integers(0, len(WHOLE) * 8 - 1), min_size=1, max_size=3))
@example([100 * 8]).via("the root of the schema")
@example([4096 * 8]).via("the root of the entries")
def test_flipped_bits_never_lose_a_bank_or_show_what_was_not_there(bits):
    data = bytearray(WHOLE)
    said = []
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
                assert len(keys) == len(GOOD) or store.skipped_count
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
def test_a_bad_row_costs_itself_only_and_can_be_deleted(tmp_path, bad):
    file = tmp_path / "bank.db"
    made(file, GOOD[:4])
    with sqlite3.connect(file) as con:
        con.execute("UPDATE entries SET line = ? WHERE digest = ?", (bad, GOOD[1].key.digest))
    con.close()
    others = {e.key: e for e in (GOOD[0], *GOOD[2:4])}
    for write in (False, True):
        with Knowledge(file, None, write=write) as knowledge:
            found = {e.key: knowledge.find(e.key) for e in GOOD[:4]}
            assert found.pop(GOOD[1].key) is None
            assert found == {key: (entry, "custom") for key, entry in others.items()}
            assert len(knowledge.nearest(KEY, (6, 6, 6), 9)) == 3
            (warning,) = knowledge.warnings
            assert warning.startswith("1 unreadable rows of") and str(file) in warning
    with Store(file) as store:
        assert store.forget_unreadable() == 1
    with Store(file, write=False) as store:
        assert store.skipped_count == 0 and {e.key: e for e in store.entries()} == others
    with Store(file) as store:
        assert store.put(GOOD[1]) == "add"


def test_bad_trials_are_passed_over(tmp_path):
    with Store(tmp_path / "bank.db") as store:
        store.save_trials("run", [Trial(i, (i,), 1.0) for i in range(7)])
        wrong = ["point = 'x'", "point = '5'", "cost = -1.0", "cost = 'x'", "note = x'ff'"]
        for number, change in enumerate(wrong):
            store._con.execute(f"UPDATE trials SET {change} WHERE number = ?", (number,))
        assert [t.number for t in store.trials("run")] == [5, 6]


def test_reading_makes_and_changes_nothing(tmp_path):
    bank = tmp_path / "bank.db"
    empty = tmp_path / "empty.db"
    link = tmp_path / "link.db"
    made(bank)
    empty.touch()
    link.symlink_to("bank.db")
    os.mkfifo(tmp_path / "pipe.db")
    (tmp_path / "loop.db").symlink_to("loop.db")
    (tmp_path / "notes.db").write_text("notes, not a database, and long enough to be one. " * 99)
    before = {p.name: p.lstat().st_mtime_ns for p in tmp_path.iterdir()}
    for good in (bank, link):
        with bank_at(good) as knowledge:
            assert all(knowledge.find(entry.key) for entry in GOOD)
    bad = ["empty.db", "pipe.db", "loop.db", "notes.db", ".", "", "nothing.db", "n" * 300 + ".db"]
    bad += ["pipe.jsonl", "no/such.jsonl", "\0", "/dev/zero", "no/such/folder.db"]
    (tmp_path / "pipe.jsonl").symlink_to("/dev/zero")
    before["pipe.jsonl"] = (tmp_path / "pipe.jsonl").lstat().st_mtime_ns
    for name in bad:
        with pytest.raises(InputError) as caught:
            bank_at(tmp_path / name)
        assert "\n" not in str(caught.value) and str(tmp_path / name) in str(caught.value)
    assert {p.name: p.lstat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_what_a_killed_writer_left_is_read_and_stays(tmp_path):
    live = tmp_path / "bank.db"
    copy = tmp_path / "copy"
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


def test_lines_that_are_no_entries_are_passed_over_when_read_only(tmp_path):
    file = tmp_path / "bank.jsonl"
    file.write_text(f"{to_line(GOOD[0])}\nx\n{to_line(GOOD[1])}\n")
    with bank_at(file) as knowledge:
        assert knowledge.find(GOOD[0].key) and knowledge.find(GOOD[1].key)
        assert knowledge.warnings == [f"1 lines of {file} are no entries and are passed over"]
    file.write_text("x\n")
    with pytest.raises(BankError, match="line 1"):
        bank_at(file)
    file.write_text("")
    with pytest.raises(InputError, match=r"entries of a bank; got none in .*aoe bank export"):
        bank_at(file)


def test_trials_that_nobody_goes_on_with_are_removed(tmp_path):
    file = tmp_path / "bank.db"
    with Store(file) as store:
        for run in ("old 1", "young 1", "young 2", "done 1", "done 2", "done2 1"):
            store.save_trials(run, [Trial(0, (1,), 2.0)])
        store._con.execute("UPDATE runs SET touched = touched - 31 WHERE run_id = 'old 1'")
        store._con.execute("DELETE FROM runs WHERE run_id = 'young 2'")  # of an earlier version
        store.forget_trials("done 1")
    with Store(file) as store:
        left = store._read("SELECT run_id FROM trials ORDER BY run_id")
    assert left == [("done2 1",), ("young 1",), ("young 2",)]


COUNT = 80


def write_many(file, name):
    """Write COUNT entries of one's own, and COUNT that the other process writes too."""
    with Store(file) as store:
        for i in range(COUNT):
            store.put(entry(f"{name} {i}"))
            store.put(entry(f"common {i}", after_cycles=100 + (i + len(name)) % 7, search=name))
            store.save_trials(name, [Trial(i, (i,), float(i))])


def test_two_processes_may_write_at_once(tmp_path):
    file = tmp_path / "knowledge.db"
    context = multiprocessing.get_context("spawn")
    names = ("one", "three")
    writers = [context.Process(target=write_many, args=(file, name)) for name in names]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    with Store(file, write=False) as store:
        assert store.check() == ()
        assert len(store.entries()) == 3 * COUNT
        for i in range(COUNT):
            common = store.get(entry(f"common {i}").key)
            assert common is not None
            assert common.after_cycles == 100 + min((i + len(name)) % 7 for name in names)
        assert [[t.cost for t in store.trials(name)] for name in names] == [list(range(COUNT))] * 2


WRITER = textwrap.dedent("""
    import itertools, sys
    sys.path.insert(0, sys.argv[2])
    from bank_cases import entry
    from ascend_lab.aoe.bank import Store
    from ascend_lab.aoe.drive import Trial
    store = Store(sys.argv[1])
    for i in itertools.count():
        store.save_trials("run", [Trial(i, (i, "x" * 50), 1.0 * i)])
        store.put(entry(str(i), schedule=["x" * 500]))
        print(i, flush=True)
""")


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9 is a Unix matter")
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
    file = tmp_path / "knowledge.db"
    done = -1
    for round_number in range(3):
        command = [sys.executable, "-c", WRITER, str(file), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(40 * round_number + 5):
                writer.stdout.readline()
            os.kill(writer.pid, signal.SIGKILL)
            rest = writer.stdout.read().splitlines()
        assert writer.returncode == -signal.SIGKILL
        last = int(rest[-1]) if rest and rest[-1].isdigit() else 40 * round_number + 4
        done = max(done, last)
        with Store(file, write=False) as store:
            assert store.check() == ()
            problems = {e.key.problem for e in store.entries()}
            assert problems >= {str(i) for i in range(done + 1)}
            assert [t.number for t in store.trials("run")][: done + 1] == list(range(done + 1))
            assert len(store.trials("run")) <= done + 3
    assert done >= 84


# -- what a bank cannot take, and what becomes of the results --------------------------------------
def fill_disk(store):
    """Let the file grow no further, as on a full disk."""
    pages = store._con.execute("PRAGMA page_count").fetchone()[0]
    store._con.execute(f"PRAGMA max_page_count={pages}")


def forbid(store):
    """Let SQLite refuse writes as for a file without permission."""
    store._con.execute("PRAGMA query_only=ON")


BIG = entry("big", schedule=["x" * 50_000])


@pytest.mark.parametrize(("trouble", "reason"), [(fill_disk, "full"), (forbid, "unwritable")])
def test_a_bank_that_cannot_be_written_keeps_what_it_has(tmp_path, trouble, reason):
    with Store(tmp_path / "knowledge.db") as store, Store(tmp_path / "other.db") as other:
        store.put(ENTRY)
        other.put(BIG)
        trouble(store)
        long = [Trial(0, ("x" * 50_000,), 1.0)]
        takes = store.put_all, other.entries()
        for write, *given in (store.put, BIG), takes, (store.save_trials, "", long):
            with pytest.raises(BankError, match=r"knowledge\.db") as caught:
                write(*given)
            assert caught.value.reason == reason and caught.value.remedy
        assert store.entries() == (ENTRY,) and store.check() == ()
    with Store(tmp_path / "knowledge.db") as again:
        assert again.put(BIG) == "add"


@pytest.mark.parametrize("trouble", [fill_disk, forbid])
def test_tuning_goes_on_when_the_bank_cannot_be_written(tmp_path, trouble):
    with Knowledge(tmp_path / "knowledge.db", builtin=None) as knowledge:
        assert knowledge._store is not None
        assert knowledge.keep(ENTRY) == "add"
        trouble(knowledge._store)
        assert knowledge.keep(BIG) == "add"
        assert knowledge.keep(BIG) == "reserved"
        knowledge.save_trials("run", [Trial(i, ("x" * 9_000,), 1.0) for i in range(9)])
        assert knowledge.find(BIG.key) == (BIG, "custom")
        assert knowledge.find(KEY) == (ENTRY, "custom")
        assert list(knowledge.unsaved.values()) == [BIG]
        (warning,) = knowledge.warnings
        assert "knowledge.db" in warning
        assert "tuning goes on, results are not stored" in warning


def unprivileged(action, folder, answer):
    """Send what `action` returns where permissions count: as nobody if the tests run as root."""
    with TemporaryDirectory() as warm, Knowledge(Path(warm) / "knowledge.db", builtin=None) as all_:
        all_.find(KEY)  # nobody may not be able to read the modules this imports
    if os.geteuid() == 0:
        os.setuid(65534)
    answer.send(action(folder))


def asked_of_nobody(action, folder):
    """Return what `action(folder)` returns in another process; EOFError if it ends badly."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=unprivileged, args=(action, folder, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        process.join()
        receiver.close()


def use_locked(folder):
    """Read a bank, write to it, and go on tuning, with the file or its folder locked."""
    with Store(folder / "knowledge.db") as store:
        found = store.get(KEY)
        with pytest.raises(BankError, match=r"knowledge\.db.*make the file and its fol") as caught:
            store.put(entry("new"))
    answers = [found, caught.value.reason]
    for name in ("knowledge.db", "absent.db"):
        with Knowledge(folder / name, builtin=None) as knowledge:
            found_and_kept = knowledge.find(KEY), knowledge.keep(entry("new"))
            answers.append((*found_and_kept, len(knowledge.warnings)))
    return answers


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="permissions are a Unix matter")
@pytest.mark.parametrize("locked", ["file", "folder", "both"])
def test_a_read_only_bank_is_read_and_never_stops_a_run(locked):
    with TemporaryDirectory() as name:
        folder = Path(name)
        with Store(folder / "knowledge.db") as store:
            store.put(ENTRY)
        (folder / "knowledge.db").chmod(0o666 if locked == "folder" else 0o444)
        folder.chmod(0o777 if locked == "file" else 0o555)
        found, reason, known, absent = asked_of_nobody(use_locked, folder)
        folder.chmod(0o777)
    assert found == ENTRY
    assert reason == "unwritable"
    assert known == ((ENTRY, "custom"), "add", 1)
    assert absent == (None, "add", 0 if locked == "file" else 1)


def test_a_bank_held_by_another_process_is_waited_for_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr("ascend_lab.aoe.bank.store.BUSY_TIMEOUT_S", 0.05)
    with Store(tmp_path / "knowledge.db") as store:
        holder = sqlite3.connect(tmp_path / "knowledge.db", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(BankError, match="another process holds it") as caught:
            store.put(ENTRY)
        assert caught.value.reason == "busy"
        assert store.get(KEY) is None
        holder.execute("COMMIT")
        holder.close()
        assert store.put(ENTRY) == "add"


def test_an_interrupt_in_the_middle_of_a_write_leaves_the_bank_usable(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    with Store(tmp_path / "knowledge.db") as store:
        with monkeypatch.context() as patch:
            patch.setattr("ascend_lab.aoe.bank.records.to_line", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.put(ENTRY)
        assert store.entries() == ()
        assert store.put(ENTRY) == "add"
