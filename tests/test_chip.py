"""Chip files: presets agree with the published facts, bad files are refused by file and key."""

import math
import tomllib
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import get_args

import pytest
from message_lists import assert_messages

import ascend_lab.machine.chip
from ascend_lab import llm
from ascend_lab.errors import AscendLabError, ChipError, PathError
from ascend_lab.machine.chip import BLOCK_BYTES, PRESETS, chip_from_dict, load_chip, presets
from ascend_lab.machine.chip.model import Trust, chip_dict, chip_lines, chip_table
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import GemmShape, elementwise_launch, gemm_launch

FOLDER = Path(ascend_lab.machine.chip.__file__).parent / "presets"
TOY = (FOLDER / "Toy.toml").read_text("utf-8")


# -- presets ---------------------------------------------------------------------------------------

# cores, clock in Hz, MiB of L2, ops/s in fp16, KiB of L0A, L0B, L0C, L1 and UB
SPLIT_KIB = (64, 64, 128, 512, 192)
PUBLISHED = {
    "Ascend310": (2, 5e8, 8, 8.192e12, (64, 64, 256, 1024, 248)),
    "Ascend310DK": (2, 6.8e8, 8, 11.14e12, (64, 64, 256, 1024, 248)),
    "Ascend310P3": (8, 1.06e9, 16, 69.47e12, (64, 64, 256, 1024, 256)),
    "Ascend910A": (32, 1e9, 32, 262.144e12, (64, 64, 256, 1024, 256)),
    "Ascend910B1": (24, 1.85e9, 192, 363.7e12, SPLIT_KIB),
    "Ascend910B2": (24, 1.8e9, 192, 353.9e12, SPLIT_KIB),
    "Ascend910B3": (20, 1.8e9, 192, 294.9e12, SPLIT_KIB),
    "Ascend910B4": (20, 1.5e9, 96, 245.8e12, SPLIT_KIB),
    "Ascend910C": (24, 1.85e9, 192, 363.7e12, SPLIT_KIB),
    "Ascend950PR": (32, 1.65e9, 128, 432.5e12, (64, 64, 256, 512, 248)),
    "Toy": (2, 1e9, 1, 16.384e12, (8, 8, 16, 64, 32)),
}


@pytest.mark.parametrize("name", PRESETS)
def test_numbers_agree_with_the_published_ones(name):
    """ops/s = 2 * cores * 16 * 16 * 16 * clock; INT8 doubles it (hardware facts, 1.1)."""
    chip = load_chip(name)
    cores, clock_hz, l2_mib, peak, sizes = PUBLISHED[name]
    assert (chip.core_count, chip.clock_hz) == (cores, clock_hz)
    assert chip.l2.size_bytes == l2_mib << 20
    assert chip.peak_ops_per_s("fp16") == pytest.approx(peak, rel=1e-3)
    assert chip.peak_ops_per_s("int8") == 2 * chip.peak_ops_per_s("fp16")
    assert chip.macs_per_cycle("fp16") == 4096
    assert chip.cube_shape("int8") == (16, 32, 16)
    spaces = ("L0A", "L0B", "L0C", "L1", "UB")
    assert tuple(chip.buffers[space] // 1024 for space in spaces) == sizes
    assert all(chip.buffers[space] % chip.alignment[space] == 0 for space in spaces)
    assert chip.vector_bytes_per_repeat % BLOCK_BYTES == 0
    assert chip.combined == (name[:9] not in ("Ascend910", "Ascend950") or name == "Ascend910A")
    assert chip.cores_of("vector") == cores * (1 if chip.combined else 2)
    assert chip.cores_of("cube") == chip.cores_of("core") == cores


BINS = ("Ascend910B1", "Ascend910B3", "Ascend910B4", "Ascend910C")
"""Presets that state where they differ from the 910B2."""


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_has_a_source_and_a_trust(name):
    chip = load_chip(name)
    assert len(chip.facts) > 100
    for key, fact in chip.facts.items():
        assert fact.source in chip.sources, key
        assert fact.trust in get_args(Trust), key
        assert math.isfinite(fact.value), key
    assert chip.facts["clock.hz"].value == chip.clock_hz
    rate = chip.facts["path.GM->L1.rate_bytes_per_cycle"].value
    assert rate == chip.path("GM", "L1").rate_bytes_per_cycle


@pytest.mark.parametrize("name", PRESETS)
def test_paths_drain_the_cube_by_fix_pipe_or_by_vector(name):
    chip = load_chip(name)
    if chip.combined:
        assert chip.path("L0C", "UB").pipe == "V"
        with pytest.raises(PathError, match=f"L0C->GM on {name}"):
            chip.path("L0C", "GM")
    else:
        assert chip.path("L0C", "GM").pipe == "FIX"
        assert {p.unit for p in chip.paths.values()} == {"cube", "vector"}
    with pytest.raises(PathError, match="fp64"):
        chip.cube_shape("fp64")


def test_presets_are_loaded_once_and_print_short():
    assert load_chip("Toy") is load_chip("Toy")
    assert tuple(presets()) == PRESETS
    assert repr(load_chip("Toy")) == "Chip('Toy')"


def test_reports_hold_every_number():
    for name, chip in presets().items():
        data = chip_dict(chip)
        assert data["name"] == name
        assert data["facts"].keys() == chip.facts.keys()
        assert set(data["facts"]["clock.hz"]) == {"value", "source", "trust"}
        lines = "\n".join(chip_lines(chip))
        assert all(key in lines for key in chip.facts)
        assert name in chip_table([chip])[1]


@pytest.mark.parametrize("name", [*BINS, "Ascend950PR"])
def test_what_a_bin_does_not_state_is_the_910b2s_and_borrowed(name):
    own = tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
    lender = tomllib.loads((FOLDER / "Ascend910B2.toml").read_text("utf-8"))
    chip = load_chip(name)
    for key in facts_of(lender):
        if key in facts_of(own) or (key.startswith("link.") and not chip.links):
            continue
        assert chip.facts[key].value == load_chip("Ascend910B2").facts[key].value, key
        assert chip.facts[key].trust in ("borrowed", "assumed"), key
    stated = facts_of(own) - {"memory.rate_bytes_per_s"}  # a share of their own peak
    assert all(chip.facts[key].trust in ("published", "derived") for key in stated)


def facts_of(table, before=""):
    """Return the dotted keys of the facts in a table of a chip file."""
    found = set()
    for key, value in table.items():
        if isinstance(value, dict):
            here = f"{before}{key}"
            found |= {here} if "value" in value else facts_of(value, f"{here}.")
    return found


def test_a_file_that_borrows_says_so_of_what_its_base_states(tmp_path):
    mine = 'base = "Ascend910A"\nname = "Mine"\nsummary = "a chip"\ncombined = true\n'
    key = "buffer.L1.size_bytes"
    assert load(tmp_path, mine + '[about]\nINI = ["Mine"]\n').facts[key].trust == "published"
    lent = load(tmp_path, f'borrows = true\n{mine}[about]\nINI = ["Mine"]\n')
    assert lent.facts[key].trust == "borrowed"
    for wrong in (f"borrows = 1\n{mine}", "borrows = true\n" + TOY.replace("base", "# base", 1)):
        with pytest.raises(ChipError, match="borrows as true or false"):
            load(tmp_path, wrong)


def test_an_empty_table_takes_away_what_the_base_has():
    assert "hccs" in load_chip("Ascend910B3").links
    assert not load_chip("Ascend950PR").links


# -- files of one's own ----------------------------------------------------------------------------
def load(tmp_path: Path, text: str | bytes):
    file = tmp_path / "mine.toml"
    if isinstance(text, bytes):
        file.write_bytes(text)
    else:
        file.write_text(text, "utf-8")
    return load_chip(file)


def test_a_file_may_change_a_preset_by_a_few_lines(tmp_path):
    text = (
        'base = "Ascend910A"\nname = "Faster"\nsummary = "910A at 2 GHz"\ncombined = true\n'
        '[clock]\nhz = { value = 2e9, source = "TEAM", trust = "assumed" }\n'
    )
    chip = load(tmp_path, text)
    assert chip.peak_ops_per_s("fp16") == 2 * load_chip("Ascend910A").peak_ops_per_s("fp16")
    assert chip.facts["clock.hz"].trust == "assumed"
    assert chip.buffers == load_chip("Ascend910A").buffers


def test_what_a_kernel_costs_to_start():
    chips = {name: load_chip(name) for name in PRESETS}
    for chip in chips.values():
        assert 0 < chip.barrier_s < chip.queued_launch_s < chip.launch_overhead_s
        assert chip.facts["launch.queued_s"].source in chip.sources
        assert (chip.l2.kind == "buffer") == (chip.name in ("Ascend310", "Ascend310DK"))
    assert round(chips["Ascend910B2"].barrier_s * 1.8e9) in range(55, 251)  # cycles, published
    word = 2 * 32 / 128  # store a word; poll twice
    assert round(chips["Ascend310"].barrier_s * 5e8, 6) == (10 + 50) + 2 * (10 + word + 50)


def test_a_file_that_does_not_say_what_a_queued_kernel_costs(tmp_path):
    data = deepcopy(toy_sections())
    del data["launch"]["queued_s"], data["launch"]["barrier_s"]
    chip = chip_from_dict(data)
    assert chip.queued_launch_s == chip.launch_overhead_s > chip.barrier_s > 0
    assert chip.facts["launch.queued_s"].trust == "assumed"
    assert "same file" in chip.sources[chip.facts["launch.queued_s"].source]
    cheap = load(tmp_path, TOY.replace("value = 1e-06", "value = 1e-08", 1))
    assert cheap.queued_launch_s == cheap.barrier_s == cheap.launch_overhead_s == 1e-8
    with pytest.raises(ChipError, match=r"l2\.kind needs cache or buffer"):
        load(tmp_path, TOY.replace("[l2]", '[l2]\nkind = "drum"'))
    with pytest.raises(ChipError, match=r"memory\.kind needs memory"):
        load(tmp_path, TOY.replace("[memory]", '[memory]\nkind = "cache"'))


def value(number: str, source: str = "TEAM", trust: str = "assumed") -> str:
    return f'{{ value = {number}, source = "{source}", trust = "{trust}" }}'


CLOCK = 'hz = { value = 1000000000.0, source = "TEAM", trust = "assumed" }'
COUNT = 'count = { value = 2, source = "TEAM", trust = "assumed" }'
L0A = 'L0A.size_bytes = { value = 8192, source = "TEAM", trust = "assumed" }'
LATENCY = 'latency_cycles = { value = 50, source = "PTO", trust = "derived" }'
FIRST_RATE = 'rate_bytes_per_cycle = { value = 32, source = "TEAM", trust = "assumed" }'

# Each row: text of the Toy file, and what it becomes.
BAD = {
    "unknown section": ("[clock]", "[speed]\nx = 1\n\n[clock]"),
    "unknown key": (CLOCK, f"{CLOCK}\nmhz = {value('1')}"),
    "unknown path key": ('pipe = "MTE2"', 'pipe = "MTE2"\ncolour = 1'),
    "unknown buffer": (L0A, f"{L0A}\nL9.size_bytes = {value('64')}"),
    "unknown buffer key": (L0A, f"{L0A}\nL0A.rows = {value('64')}"),
    "unknown cube key": ("[launch]", f"[cube.fp16]\nq = {value('1')}\n[launch]"),
    "unknown vector op": ("[launch]", f"[vector_op.vfoo]\nhead_cycles = {value('1')}\n[launch]"),
    "unknown space": ('[path."GM->L1"]', '[path."GM->L3"]'),
    "path without arrow": ('[path."GM->L1"]', '[path."GML1"]'),
    "missing path": ('[path."GM->L1"]', '[path."L1->GM"]'),
    "missing drain": ('[path."L0C->UB"]', '[path."L0C->L1"]'),
    "ragged vector": ("[launch]", f"[vector]\nrepeat_bytes = {value('100')}\n[launch]"),
    "missing clock": (f"[clock]\n{CLOCK}", ""),
    "missing number": (CLOCK, ""),
    "missing buffer": (L0A, ""),
    "missing name": ('name = "Toy"', ""),
    "missing combined": ("combined = true", ""),
    "combined as text": ("combined = true", 'combined = "yes"'),
    "name as number": ('name = "Toy"', "name = 7"),
    "negative": (COUNT, f"count = {value('-2')}"),
    "zero": (COUNT, f"count = {value('0')}"),
    "zero rate": (FIRST_RATE, f"rate_bytes_per_cycle = {value('0.0')}"),
    "negative latency": (LATENCY, f"latency_cycles = {value('-1')}"),
    "fraction": (COUNT, f"count = {value('2.5')}"),
    "absurd count": (COUNT, f"count = {value('99999')}"),
    "absurd clock": (CLOCK, f"hz = {value('1e18')}"),
    "clock in GHz": (CLOCK, f"hz = {value('1.0')}"),
    "absurd buffer": (L0A, f"L0A.size_bytes = {value('8e12')}"),
    "absurd cube": ("[launch]", f"[cube.fp16]\nm = {value('4096')}\n[launch]"),
    "other cube": ("[launch]", f"[cube.int8]\nk = {value('16')}\n[launch]"),
    "two vectors": ("core = { value = 1,", "core = { value = 2,"),
    "tiny rate": (FIRST_RATE, f"rate_bytes_per_cycle = {value('1e-9')}"),
    "huge integer": (COUNT, f"count = {value('9' * 400)}"),
    "integer beyond reading": (COUNT, f"count = {value('9' * 5000)}"),
    "not a number": (CLOCK, f"hz = {value('nan')}"),
    "infinite": (CLOCK, f"hz = {value('inf')}"),
    "text": (CLOCK, f"hz = {value(chr(34) + 'fast' + chr(34))}"),
    "boolean": (COUNT, f"count = {value('true')}"),
    "list": (COUNT, f"count = {value('[2]')}"),
    "bare number": (COUNT, "count = 2"),
    "without source": (CLOCK, 'hz = { value = 1e9, trust = "assumed" }'),
    "without trust": (CLOCK, 'hz = { value = 1e9, source = "TEAM" }'),
    "extra word": (CLOCK, f'{CLOCK[:-2]}, note = "x" }}'),
    "unknown source": (CLOCK, f"hz = {value('1e9', 'RUMOUR')}"),
    "source as list": (CLOCK, 'hz = { value = 1e9, source = ["TEAM"], trust = "assumed" }'),
    "unknown trust": (CLOCK, f"hz = {value('1e9', 'TEAM', 'certain')}"),
    "sources as number": ('base = "common"', 'base = "common"\nsources = 3'),
    "source text as number": ("[launch]", "[sources]\nNEW = 1\n[launch]"),
    "wrong pipe": ('pipe = "MTE2"', 'pipe = "DMA"'),
    "pipe as list": ('pipe = "MTE2"', 'pipe = ["MTE2"]'),
    "wrong unit": ('unit = "core"', 'unit = "tensor"'),
    "unknown base": ('base = "common"', 'base = "H100"'),
    "base as list": ('base = "common"', "base = [1]"),
    "bad TOML": ("[clock]", "[clock"),
    "twice": (CLOCK, f"{CLOCK}\n{CLOCK}"),
}


def test_what_is_refused_says_what_is_needed(tmp_path, monkeypatch):
    """A message names the file as the caller did."""
    monkeypatch.chdir(tmp_path)
    here = Path()
    assert all(TOY.count(old) for old, _ in BAD.values())
    calls = {
        case: partial(load, here, TOY.replace(old, new, 1)) for case, (old, new) in BAD.items()
    }
    (tmp_path / "folder.toml").mkdir()
    for name in ("Ascend999", "", "toy", "../presets/Toy", "common"):
        calls[f"no preset {name!r}"] = partial(load_chip, name)
    calls |= {
        "other bytes": partial(load, here, b'name = "\xff\xfe"'),
        "an absent file": lambda: load_chip(Path("absent.toml")),
        "a folder": lambda: load_chip(Path("folder.toml")),
        "no name of a file": lambda: load_chip("nul\0.toml"),
        "an empty file": partial(load, here, ""),
        "a deep file": partial(load, here, "x = " + "[" * 100_000),
        "data from elsewhere": lambda: chip_from_dict(tomllib.loads(TOY)),
        "the name of its base": partial(load, here, 'base = "Ascend910A"\nsummary = "a chip"\n'),
    }
    assert_messages("chip", "test_chip", calls)


@pytest.mark.parametrize("number", [1, 33, 4096, 1e6])
def test_any_accepted_chip_can_be_simulated(number):
    """Whatever single number a student changes: a time, or an error of the family."""
    facts = load_chip("Toy").facts
    shape = GemmShape(70, 50, 90)
    finished = 0
    for key in facts:
        whole = deepcopy(toy_sections())
        entry = whole
        for part in key.split("."):
            entry = entry[part]
        entry["value"] = number
        try:
            chip = chip_from_dict(whole)
            for launch in (gemm_launch(shape, chip), elementwise_launch(chip, 4096 * 33)):
                assert simulate(launch, chip).time_s > 0
            finished += 1
        except AscendLabError:
            continue
    assert finished > 10


@cache
def toy_sections() -> dict:
    common = tomllib.loads((FOLDER / "common.toml").read_text("utf-8"))
    own = tomllib.loads(TOY)
    own.pop("base")
    for name, section in common.items():
        own[name] = {**section, **own.get(name, {})}
    return own


# -- figures of other chips ------------------------------------------------------------------------
def test_a_figure_of_another_chip_is_borrowed(tmp_path):
    chips = presets()
    vector = "vector_op.vadd.slope_cycles"
    levels = {name: chip.facts[vector].trust for name, chip in chips.items()}
    assert levels.pop("Ascend910B2") == "published" and set(levels.values()) == {"borrowed"}
    assert chips["Ascend910A"].facts["cube.fp16.m"].trust == "published"
    assert chips["Ascend310"].facts["cube.fp16.m"].trust == "borrowed"
    assert chips["Ascend310"].facts["clock.hz"].trust == "derived"
    mine = 'base = "Ascend910A"\nname = "Mine"\nsummary = "a chip"\ncombined = true\n'
    assert load(tmp_path, mine).facts[vector].trust == "borrowed"
    own = load(tmp_path, mine + '[about]\nPTO = ["Mine"]\n')
    assert own.facts[vector].trust == "published"
    assert own.facts["memory.energy_pj_per_byte"].trust == "assumed"
    for wrong, says in (('PTO = "Mine"', "a list of chips"), ("XYZ = []", "a known key")):
        with pytest.raises(ChipError, match=says):
            load(tmp_path, f"{mine}[about]\n{wrong}\n")


def test_kernels_reach_no_more_than_the_peak(tmp_path):
    chip = load_chip("Ascend910B2")
    assert chip.device_memory.rate_bytes_per_s < chip.memory_peak_bytes_per_s
    older = load_chip("Ascend910A")
    assert older.device_memory.rate_bytes_per_s == older.memory_peak_bytes_per_s
    path = tmp_path / "mine.toml"
    head = 'base = "Ascend910A"\nname = "Mine"\nsummary = "a chip"\ncombined = true\n'
    peak = '{ value = 1e9, source = "TEAM", trust = "assumed" }'
    path.write_text(f"{head}[memory]\npeak_bytes_per_s = {peak}\n", "utf-8")
    with pytest.raises(ChipError, match="peak_bytes_per_s"):
        load_chip(path)


def test_a_chip_of_ones_own_follows_its_base_where_no_number_speaks(tmp_path):
    """Kernels of the vendor's library belong to a family, not to a name."""
    file = tmp_path / "mine.toml"
    file.write_text('base = "Ascend910B2"\nname = "Mine"\n')
    mine = load_chip(file)
    assert (mine.family, mine.summary) == ("Ascend910B2", "based on Ascend910B2")
    decoder = llm.load_decoder("zoo:qwen3_0_6b")
    times = [
        llm.Model(decoder, llm.machine_of(str(chip), "", llm.Plan())).step(llm.decode(4, 512))
        for chip in ("Ascend910B2", file)
    ]
    assert times[0].time_s == times[1].time_s and times[0].ledger == times[1].ledger
    # numbers of another chip are borrowed: what no number says is not known of this one
    file.write_text('base = "Ascend910B2"\nname = "Mine"\nborrows = true\n')
    assert load_chip(file).family == "Mine"
