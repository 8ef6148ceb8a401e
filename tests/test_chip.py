"""Chip files: presets agree with the published facts, bad files are refused by file and key."""

import math
import tomllib
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

import ascend_lab.machine.chip
from ascend_lab.errors import AscendLabError, ChipError, PathError
from ascend_lab.machine.chip import BLOCK_BYTES, PRESETS, chip_from_dict, load_chip, presets
from ascend_lab.machine.chip.model import Trust, chip_dict, chip_lines, chip_table
from ascend_lab.machine.sim import simulate
from ascend_lab.operators.kernels import GemmShape, elementwise_launch, gemm_launch

FOLDER = Path(ascend_lab.machine.chip.__file__).parent / "presets"
TOY = (FOLDER / "Toy.toml").read_text("utf-8")


# -- presets ---------------------------------------------------------------------------------------

PEAKS = {
    "Ascend310": 8.192e12,
    "Ascend310DK": 11.14e12,
    "Ascend310P3": 69.47e12,
    "Ascend910A": 262.144e12,
    "Ascend910B1": 363.7e12,
    "Ascend910B2": 353.9e12,
    "Ascend910B3": 294.9e12,
    "Ascend910B4": 245.8e12,
    "Ascend910C": 363.7e12,
    "Ascend950PR": 432.5e12,
    "Toy": 16.384e12,
}


@pytest.mark.parametrize("name", PRESETS)
def test_peaks_agree_with_the_published_ones(name):
    """ops/s = 2 * cores * 16 * 16 * 16 * clock; INT8 doubles it (hardware facts, 1.1)."""
    chip = load_chip(name)
    assert chip.peak_ops_per_s("fp16") == pytest.approx(PEAKS[name], rel=1e-3)
    assert chip.peak_ops_per_s("int8") == 2 * chip.peak_ops_per_s("fp16")
    assert chip.macs_per_cycle("fp16") == 4096
    assert chip.cube_shape("int8") == (16, 32, 16)


KIB = 1024
BINS = ("Ascend910B1", "Ascend910B3", "Ascend910B4", "Ascend910C")
"""Presets that state where they differ from the 910B2."""
SIZES = {
    "Ascend310": (64, 64, 256, 1024, 248),
    "Ascend310DK": (64, 64, 256, 1024, 248),
    "Ascend310P3": (64, 64, 256, 1024, 256),
    "Ascend910A": (64, 64, 256, 1024, 256),
    **dict.fromkeys((*BINS, "Ascend910B2"), (64, 64, 128, 512, 192)),
    "Ascend950PR": (64, 64, 256, 512, 248),
    "Toy": (8, 8, 16, 64, 32),
}


@pytest.mark.parametrize("name", PRESETS)
def test_buffers_agree_with_the_published_ones(name):
    chip = load_chip(name)
    order = ("L0A", "L0B", "L0C", "L1", "UB")
    assert tuple(chip.buffers[space] // KIB for space in order) == SIZES[name]
    assert all(chip.buffers[space] % chip.alignment[space] == 0 for space in order)
    assert chip.vector_bytes_per_repeat % BLOCK_BYTES == 0


@pytest.mark.parametrize(
    ("name", "cores", "clock_hz", "l2_mib"),
    [
        ("Ascend310", 2, 5e8, 8),
        ("Ascend310P3", 8, 1.06e9, 16),
        ("Ascend910A", 32, 1e9, 32),
        ("Ascend910B1", 24, 1.85e9, 192),
        ("Ascend910B2", 24, 1.8e9, 192),
        ("Ascend910B3", 20, 1.8e9, 192),
        ("Ascend910B4", 20, 1.5e9, 96),
        ("Ascend910C", 24, 1.85e9, 192),
        ("Ascend950PR", 32, 1.65e9, 128),
    ],
)
def test_cores_clock_and_l2_agree_with_the_published_ones(name, cores, clock_hz, l2_mib):
    chip = load_chip(name)
    assert (chip.core_count, chip.clock_hz) == (cores, clock_hz)
    assert chip.l2.size_bytes == l2_mib * KIB * KIB
    assert chip.combined == (name[:9] not in ("Ascend910", "Ascend950") or name == "Ascend910A")
    assert chip.cores_of("vector") == cores * (1 if chip.combined else 2)
    assert chip.cores_of("cube") == chip.cores_of("core") == cores


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

# Each row: text of the Toy file, what it becomes, and what the message must say.
BAD = {
    "unknown section": ("[clock]", "[speed]\nx = 1\n\n[clock]", "speed needs a known section"),
    "unknown key": (CLOCK, f"{CLOCK}\nmhz = {value('1')}", "clock.mhz needs a known key"),
    "unknown path key": ('pipe = "MTE2"', 'pipe = "MTE2"\ncolour = 1', "colour needs a known key"),
    "unknown buffer": (L0A, f"{L0A}\nL9.size_bytes = {value('64')}", "buffer.L9 needs a known key"),
    "unknown buffer key": (L0A, f"{L0A}\nL0A.rows = {value('64')}", "buffer.L0A.rows needs"),
    "unknown cube key": ("[launch]", f"[cube.fp16]\nq = {value('1')}\n[launch]", "cube.fp16.q"),
    "unknown vector op": (
        "[launch]",
        f"[vector_op.vfoo]\nhead_cycles = {value('1')}\n[launch]",
        "vector_op.vfoo needs a known key",
    ),
    "unknown space": ('[path."GM->L1"]', '[path."GM->L3"]', "path.GM->L3 needs SRC->DST"),
    "path without arrow": ('[path."GM->L1"]', '[path."GML1"]', "path.GML1 needs SRC->DST"),
    "missing path": ('[path."GM->L1"]', '[path."L1->GM"]', "path.GM->L1 needs an entry"),
    "missing drain": ('[path."L0C->UB"]', '[path."L0C->L1"]', "path.L0C->UB needs an entry"),
    "ragged vector": (
        "[launch]",
        f"[vector]\nrepeat_bytes = {value('100')}\n[launch]",
        "vector.repeat_bytes needs a multiple of 32; got 100",
    ),
    "missing clock": (f"[clock]\n{CLOCK}", "", "clock needs a table"),
    "missing number": (CLOCK, "", "clock.hz needs"),
    "missing buffer": (L0A, "", "buffer.L0A needs an entry"),
    "missing name": ('name = "Toy"', "", "name needs a text"),
    "missing combined": ("combined = true", "", "combined needs true or false"),
    "combined as text": ("combined = true", 'combined = "yes"', "combined needs true or false"),
    "name as number": ('name = "Toy"', "name = 7", "name needs a text"),
    "negative": (COUNT, f"count = {value('-2')}", "core.count needs a positive number; got -2"),
    "zero": (COUNT, f"count = {value('0')}", "core.count needs a positive number; got 0"),
    "zero rate": (FIRST_RATE, f"rate_bytes_per_cycle = {value('0.0')}", "a positive number; got 0"),
    "negative latency": (LATENCY, f"latency_cycles = {value('-1')}", "a positive number; got -1"),
    "fraction": (COUNT, f"count = {value('2.5')}", "core.count needs a whole number; got 2.5"),
    "absurd count": (COUNT, f"count = {value('99999')}", "core.count needs at most 4096"),
    "absurd clock": (CLOCK, f"hz = {value('1e18')}", "clock.hz needs at most 1e+10"),
    "clock in GHz": (CLOCK, f"hz = {value('1.0')}", "clock.hz needs at least 1000"),
    "absurd buffer": (L0A, f"L0A.size_bytes = {value('8e12')}", "L0A.size_bytes needs at most"),
    "absurd cube": ("[launch]", f"[cube.fp16]\nm = {value('4096')}\n[launch]", "cube.fp16.m needs"),
    "other cube": ("[launch]", f"[cube.int8]\nk = {value('16')}\n[launch]", "k needs 32, the side"),
    "two vectors": (
        "core = { value = 1,",
        "core = { value = 2,",
        "1 where combined = true",
    ),
    "tiny rate": (FIRST_RATE, f"rate_bytes_per_cycle = {value('1e-9')}", "needs at least 0.001"),
    "huge integer": (COUNT, f"count = {value('9' * 400)}", "core.count needs at most 4096"),
    "integer beyond reading": (COUNT, f"count = {value('9' * 5000)}", "valid TOML"),
    "not a number": (CLOCK, f"hz = {value('nan')}", "clock.hz needs a number; got nan"),
    "infinite": (CLOCK, f"hz = {value('inf')}", "clock.hz needs at most 1e+10; got inf"),
    "text": (CLOCK, f"hz = {value(chr(34) + 'fast' + chr(34))}", "clock.hz needs a number"),
    "boolean": (COUNT, f"count = {value('true')}", "core.count needs a number; got True"),
    "list": (COUNT, f"count = {value('[2]')}", "core.count needs a number; got [2]"),
    "bare number": (COUNT, "count = 2", "core.count needs {value"),
    "without source": (CLOCK, 'hz = { value = 1e9, trust = "assumed" }', "give all three"),
    "without trust": (CLOCK, 'hz = { value = 1e9, source = "TEAM" }', "give all three"),
    "extra word": (CLOCK, f'{CLOCK[:-2]}, note = "x" }}', "give all three"),
    "unknown source": (CLOCK, f"hz = {value('1e9', 'RUMOUR')}", "a source listed in [sources]"),
    "source as list": (
        CLOCK,
        'hz = { value = 1e9, source = ["TEAM"], trust = "assumed" }',
        "a source listed in [sources]",
    ),
    "unknown trust": (CLOCK, f"hz = {value('1e9', 'TEAM', 'certain')}", "trust published, derived"),
    "sources as number": (
        'base = "common"',
        'base = "common"\nsources = 3',
        "sources needs a table",
    ),
    "source text as number": (
        "[launch]",
        "[sources]\nNEW = 1\n[launch]",
        "sources.NEW needs a text",
    ),
    "wrong pipe": ('pipe = "MTE2"', 'pipe = "DMA"', "pipe needs one of S, V"),
    "pipe as list": ('pipe = "MTE2"', 'pipe = ["MTE2"]', "pipe needs one of S, V"),
    "wrong unit": ('unit = "core"', 'unit = "tensor"', "unit needs core, cube or vector"),
    "unknown base": ('base = "common"', 'base = "H100"', "base names a preset"),
    "base as list": ('base = "common"', "base = [1]", "base names a preset"),
    "bad TOML": ("[clock]", "[clock", "valid TOML"),
    "twice": (CLOCK, f"{CLOCK}\n{CLOCK}", "valid TOML"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_name_file_key_and_remedy(tmp_path, case):
    old, new, message = BAD[case]
    assert old in TOY
    with pytest.raises(ChipError) as caught:
        load(tmp_path, TOY.replace(old, new, 1))
    assert message in str(caught.value)
    assert "mine.toml" in str(caught.value)
    assert caught.value.remedy


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(ChipError, match="readable chip file"):
        load(tmp_path, b'name = "\xff\xfe"')
    with pytest.raises(ChipError, match="readable chip file"):
        load_chip(tmp_path / "absent.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(ChipError, match="readable chip file"):
        load_chip(tmp_path / "folder.toml")
    with pytest.raises(ChipError, match="readable chip file"):
        load_chip("nul\0.toml")


@pytest.mark.parametrize("name", ["Ascend999", "", "toy", "../presets/Toy", "common"])
def test_unknown_names_list_the_presets(name):
    with pytest.raises(ChipError, match="presets: Ascend310, "):
        load_chip(name)


def test_empty_and_deep_files_are_refused(tmp_path):
    with pytest.raises(ChipError, match=r"mine\.toml: sources needs a table"):
        load(tmp_path, "")
    with pytest.raises(ChipError, match="valid TOML"):
        load(tmp_path, "x = " + "[" * 100_000)


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
