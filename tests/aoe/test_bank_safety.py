"""Banks under attack: two writers, kill -9, no permission, a full disk, a file held by another."""

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from bank_cases import ENTRY, KEY, entry

from ascend_lab.aoe.bank import BankError, Knowledge, Store
from ascend_lab.aoe.drive import Trial

COUNT = 80
Trouble = Callable[[Store], None]
Action = Callable[[Path], Any]


def write_many(file: Path, name: str) -> None:
    """Write COUNT entries of one's own, and COUNT that the other process writes too."""
    with Store(file) as store:
        for i in range(COUNT):
            store.put(entry(f"{name} {i}"))
            store.put(entry(f"common {i}", after_cycles=100 + (i + len(name)) % 7, search=name))
            store.save_trials(name, [Trial(i, (i,), float(i))])


def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
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
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
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


def fill_disk(store: Store) -> None:
    """Let the file grow no further, as on a full disk."""
    pages = store._con.execute("PRAGMA page_count").fetchone()[0]
    store._con.execute(f"PRAGMA max_page_count={pages}")


def forbid(store: Store) -> None:
    """Let SQLite refuse writes as for a file without permission."""
    store._con.execute("PRAGMA query_only=ON")


BIG = entry("big", schedule=["x" * 50_000])


@pytest.mark.parametrize(("trouble", "reason"), [(fill_disk, "full"), (forbid, "unwritable")])
def test_a_bank_that_cannot_be_written_keeps_what_it_has(
    tmp_path: Path, trouble: Trouble, reason: str
) -> None:
    with Store(tmp_path / "knowledge.db") as store, Store(tmp_path / "other.db") as other:
        store.put(ENTRY)
        other.put(BIG)
        trouble(store)
        for write in (
            lambda: store.put(BIG),
            lambda: store.merge(other),
            lambda: store.save_trials("run", [Trial(0, ("x" * 50_000,), 1.0)]),
        ):
            with pytest.raises(BankError, match=r"knowledge\.db") as caught:
                write()
            assert caught.value.reason == reason
            assert caught.value.remedy
        assert store.entries() == (ENTRY,)
        assert store.check() == ()
    with Store(tmp_path / "knowledge.db") as again:
        assert again.put(BIG) == "add"


@pytest.mark.parametrize("trouble", [fill_disk, forbid])
def test_tuning_goes_on_when_the_bank_cannot_be_written(tmp_path: Path, trouble: Trouble) -> None:
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


def unprivileged(action: Action, folder: Path, answer: Connection) -> None:
    """Send what `action` returns where permissions count: as nobody if the tests run as root."""
    with TemporaryDirectory() as warm, Knowledge(Path(warm) / "knowledge.db", builtin=None) as all_:
        all_.find(KEY)  # nobody may not be able to read the modules this imports
    if os.geteuid() == 0:
        os.setuid(65534)
    answer.send(action(folder))


def asked_of_nobody(action: Action, folder: Path) -> Any:
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


def use_locked(folder: Path) -> Any:
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
def test_a_read_only_bank_is_read_and_never_stops_a_run(locked: str) -> None:
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


def open_killed(folder: Path) -> Any:
    """Read a bank whose writer was killed, in a folder that may not be written."""
    return [Store(folder / "knowledge.db", write).get(KEY) for write in (True, False)]


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="permissions are a Unix matter")
def test_a_half_written_state_is_never_shown() -> None:
    """What a killed writer left in the write-ahead file must not be passed over."""
    with TemporaryDirectory() as name:
        live, folder = Path(name) / "live", Path(name) / "copy"
        live.mkdir()
        folder.mkdir()
        with Store(live / "knowledge.db") as store:
            store.put(ENTRY)
            for suffix in ("", "-wal"):
                file = folder / f"knowledge.db{suffix}"
                file.write_bytes((live / file.name).read_bytes())
                file.chmod(0o444)
        Path(name).chmod(0o755)
        folder.chmod(0o555)
        assert asked_of_nobody(open_killed, folder) == [ENTRY, ENTRY]
        folder.chmod(0o777)
        for file in folder.iterdir():
            file.chmod(0o666)
        with Store(folder / "knowledge.db") as store:
            assert store.get(KEY) == ENTRY


def test_a_bank_held_by_another_process_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ascend_lab.aoe.bank.connect.BUSY_TIMEOUT_S", 0.05)
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


def test_an_interrupt_in_the_middle_of_a_write_leaves_the_bank_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    with Store(tmp_path / "knowledge.db") as store:
        with monkeypatch.context() as patch:
            patch.setattr("ascend_lab.aoe.bank.store.to_line", interrupted)
            with pytest.raises(KeyboardInterrupt):
                store.put(ENTRY)
        assert store.entries() == ()
        assert store.put(ENTRY) == "add"
