"""Both banks together: the built-in file, hit and miss and repeat, and where the bank lies."""

import gzip
import os
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from bank_cases import ENTRY, KEY, banks, entry
from hypothesis import given, settings

from ascend_lab.aoe import bank
from ascend_lab.aoe.bank import (
    FILE_NAME,
    MODEL_VERSION,
    BankEntry,
    BankError,
    Knowledge,
    Store,
    find_builtin,
    settle,
    write_builtin,
)
from ascend_lab.aoe.bank.records import better, to_line
from ascend_lab.aoe.drive import Trial
from ascend_lab.aoe.entries import key_of
from ascend_lab.aoe.operators import operators_of
from ascend_lab.compiler import compile_graph, zoo
from ascend_lab.errors import InputError
from ascend_lab.machine.chip import load_chip

OLD = MODEL_VERSION - 1


# -- the built-in bank -----------------------------------------------------------------------------
@given(banks)
@settings(max_examples=15)
def test_the_built_in_bank_finds_what_was_written(entries):
    with TemporaryDirectory() as folder:
        file = Path(folder) / "bank.gz"
        again = Path(folder) / "again.gz"
        best: dict[object, BankEntry] = {}
        for e in entries:
            best[e.key] = better(best.get(e.key, e), e)
        assert write_builtin(entries, file) == len(best)
        for e in best.values():
            found = find_builtin(e.key, file)
            assert found is not None
            assert to_line(found) == to_line(e)
        assert find_builtin(replace(KEY, problem="never written"), file) is None
        write_builtin(reversed(entries), again)
        assert again.read_bytes() == file.read_bytes()


def test_the_package_works_without_the_file_and_with_the_one_it_has(tmp_path):
    assert dict(bank.builtin_entries(tmp_path / "none.gz")) == {}
    for e in bank.builtin_entries(bank.BUILTIN_FILE).values():
        assert e.model_version == MODEL_VERSION, "generate the built-in bank again"


@pytest.mark.parametrize("damage", ["no gzip", "cut", "header", "line"])
def test_a_damaged_built_in_bank_is_named(tmp_path, damage):
    file = tmp_path / "bank.gz"
    write_builtin([ENTRY], file)
    whole = file.read_bytes()
    text = gzip.decompress(whole)
    damaged = {"header": gzip.compress(text.split(b"\n")[1]), "line": gzip.compress(text[:-9])}
    file.write_bytes({"no gzip": b"hello", "cut": whole[:-12], **damaged}[damage])
    bank.builtin_entries.cache_clear()
    with pytest.raises(BankError, match=r"bank\.gz") as caught, Knowledge(None, file) as knowledge:
        knowledge.find(KEY)
    assert caught.value.reason == "damaged"
    assert "install ascend_lab again" in caught.value.remedy


# -- both banks ------------------------------------------------------------------------------------
@pytest.fixture
def builtin(tmp_path):
    file = tmp_path / "builtin.gz"
    write_builtin([entry(after_cycles=130), entry("near", features=(6, 6, 7))], file)
    return file


@pytest.fixture
def custom(tmp_path):
    return tmp_path / FILE_NAME


def test_custom_comes_first_even_if_it_is_worse(custom, builtin):
    with Knowledge(custom, builtin) as knowledge:
        assert knowledge.find(KEY) == (entry(after_cycles=130), "builtin")
        assert knowledge.keep(entry(after_cycles=140)) == "add"
        assert knowledge.find(KEY) == (entry(after_cycles=140), "custom")
        assert knowledge.find(entry(chip_digest="edited").key) is None
        assert knowledge.warnings == []
        assert knowledge.unsaved == {}
    with Store(custom, write=False) as store:
        assert store.entries() == (entry(after_cycles=140),)


def test_entries_of_another_model_are_no_hits(custom, builtin):
    with Knowledge(custom, builtin) as knowledge:
        knowledge.keep(entry(after_cycles=1, bound_cycles=1, model_version=OLD))
        assert knowledge.find(KEY) == (entry(after_cycles=130), "builtin")
        assert knowledge.keep(ENTRY) == "update"
        assert knowledge.find(KEY) == (ENTRY, "custom")
    write_builtin([entry(model_version=OLD)], builtin)
    with Knowledge(None, builtin) as knowledge:
        assert knowledge.find(KEY) is None


def test_suggestions_come_from_both_banks_once(custom, builtin):
    with Knowledge(custom, builtin) as knowledge:
        far = entry("far", features=(9, 9, 9))
        knowledge.keep(far)
        first, second = knowledge.nearest(KEY, (6, 6, 6), 9)
        assert (first.features, second) == ((6, 6, 7), far)
        mine = entry("near", features=(6, 6, 7), after_cycles=101)
        knowledge.keep(mine)
        assert knowledge.nearest(KEY, (6, 6, 6), 9) == [mine, far]
        assert knowledge.nearest(mine.key, (6, 6, 7), 1)[0].after_cycles == 130


def test_without_a_custom_bank_results_stay_in_memory(builtin):
    with Knowledge(None, builtin) as knowledge:
        assert knowledge.keep(ENTRY) == "add"
        assert knowledge.keep(ENTRY) == "reserved"
        assert knowledge.find(KEY) == (ENTRY, "custom")
        near = knowledge.nearest(entry("x").key, (6, 6, 6), 1)
        assert near == [ENTRY]
        knowledge.save_trials("run", [Trial(0, (1,), 1.0)])
        knowledge.forget_trials("run")
        assert knowledge.trials("run") == ()
        assert knowledge.warnings == []


def test_trials_are_kept_for_a_resumed_run(custom):
    trials = (Trial(0, (1, "a"), 2.0), Trial(1, (2, "a"), float("inf"), "does not fit"))
    with Knowledge(custom, resume=False) as knowledge:
        knowledge.save_trials("run", iter(trials))
        assert knowledge.trials("run") == ()
    with Knowledge(custom) as knowledge:
        assert knowledge.trials("run") == trials
        knowledge.forget_trials("run")
        assert knowledge.trials("run") == ()


# -- hit, miss, repeat -----------------------------------------------------------------------------

DEFAULT = entry(after_cycles=200, proven=True)
FLOW = {
    "known, better": (ENTRY, entry(after_cycles=110), "update", 110),
    "known, proof of the same": (ENTRY, entry(proven=True), "update", 120),
    "known, equal": (ENTRY, entry(seed=9), "reserved", ENTRY),
    "known, worse": (ENTRY, entry(after_cycles=121), "reserved", ENTRY),
    "new, better than the default": (None, ENTRY, "add", ENTRY),
    "new, nothing better": (None, DEFAULT, "unsatisfied", DEFAULT),
}


@pytest.mark.parametrize("bank", ["custom", "builtin"])
@pytest.mark.parametrize("case", FLOW)
def test_the_published_flow(custom, builtin, case, bank):
    known, tuned, outcome, left = FLOW[case]
    write_builtin([known] if known and bank == "builtin" else [], builtin)
    with Knowledge(custom, builtin) as knowledge:
        if known is not None and bank == "custom":
            knowledge.keep(known)
        assert knowledge.find(KEY) == ((known, bank) if known else None)
        assert settle(knowledge, tuned) == outcome
        after, origin = knowledge.find(KEY)  # type: ignore[misc]
        assert left in (after, after.after_cycles)
        assert bank == "custom" or origin == ("builtin" if outcome == "reserved" else "custom")


# -- where the bank lies ---------------------------------------------------------------------------
@pytest.fixture
def places(tmp_path, monkeypatch):
    """A home folder, and no word of the environment about banks."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("TUNE_BANK_PATH", "ASCEND_CACHE_PATH", "REPEAT_TUNE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_the_places_in_their_order(tmp_path, places):
    home = tmp_path / "home"
    root = tmp_path / "root"
    cache = tmp_path / "cache"
    root.mkdir()
    places.setenv("TUNE_BANK_PATH", str(root))
    places.setenv("ASCEND_CACHE_PATH", str(cache))
    assert bank.bank_file() == root / FILE_NAME and not cache.exists()
    with bank.open_knowledge() as knowledge:
        knowledge.keep(ENTRY)
    assert (root / FILE_NAME).is_file()
    places.setenv("TUNE_BANK_PATH", "")
    assert bank.bank_file() == cache / "aoe_data" / FILE_NAME and not home.exists()
    places.delenv("ASCEND_CACHE_PATH")
    assert bank.bank_file(make=False) == home / ".ascend_lab" / "aoe" / FILE_NAME
    assert not home.exists() and bank.bank_file().parent.is_dir()


@pytest.mark.parametrize("wrong", ["nothing there", "a file", "no permission"])
def test_a_wrong_tune_bank_path_is_an_error_that_names_it(tmp_path, wrong, places):
    place = tmp_path / "bank"
    if wrong == "a file":
        place.touch()
    elif wrong == "no permission":
        place.mkdir()
        places.setattr("os.access", lambda path, mode: False)
    places.setenv("TUNE_BANK_PATH", str(place))
    for opening in (bank.bank_file, bank.open_knowledge):
        with pytest.raises(InputError, match=f"TUNE_BANK_PATH.*{wrong}.*unset TUNE_BANK_PATH"):
            opening()


@pytest.mark.parametrize("variable", ["ASCEND_CACHE_PATH", "the home folder"])
def test_any_other_place_that_cannot_be_made_leaves_a_warning(tmp_path, variable, places):
    (tmp_path / "blocked").touch()
    name = "HOME" if variable == "the home folder" else variable
    places.setenv(name, str(tmp_path / "blocked"))
    with bank.open_knowledge() as knowledge:
        assert knowledge.keep(ENTRY) == "add"
        (warning,) = knowledge.warnings
        assert variable in warning and "tuning goes on" in warning


def test_repeat_tune_is_true_or_false(places):
    for word, wanted in (("", False), ("False", False), ("True", True), ("TRUE", True)):
        places.setenv("REPEAT_TUNE", word)
        assert bank.repeat_tune(os.environ) is wanted
    with pytest.raises(InputError, match="REPEAT_TUNE as True or False; got '1'"):
        bank.repeat_tune({"REPEAT_TUNE": "1"})


def test_the_built_in_bank_knows_every_operator_of_bert_on_the_910a():
    """Its keys are digests of problems as they are today, and of the chip's numbers."""
    compiled = compile_graph(zoo.build("bert_base", batch=1), load_chip("Ascend910A"))
    tunable = [operator for operator in operators_of(compiled) if operator.unit]
    assert len(tunable) >= 8
    assert all(find_builtin(key_of(operator)) is not None for operator in tunable)
