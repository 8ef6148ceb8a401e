"""Shared by all tests: repeatable Hypothesis runs, a Ctrl-C that counts, our scripts as modules."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings
from scripts import load_script

ROOT = Path(__file__).resolve().parent.parent

# A shell's background jobs, and what they start, ignore Ctrl-C, which some tests press.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What is collected is no garbage: looking for some takes a fifth of the time.
gc.disable()

# No deadlines: a slow machine is no bug. `HYPOTHESIS_PROFILE=explore pytest` tries new examples,
# a hundred; a test that says how many takes so many in both, a cheap one as many.
settings.register_profile(
    "repeatable", max_examples=20, deadline=None, derandomize=True, print_blob=True
)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

LONGEST = (
    "test_exercises.py", "21_subgraph_tuner.ipynb", "test_ops_matrix.py", "test_course.py",
    "25_tuning_networks.ipynb", "test_course_exercises.py", "19_vector_tuner_mcts.ipynb",
    "test_cube.py", "test_graph_lower.py", "validation.ipynb", "test_dsl_values.py",
    "17_smaller_models.ipynb", "20_cube_tuner_ga.ipynb", "test_network.py", "test_vector.py",
    "test_engine.py", "test_zoo.py", "test_command.py", "test_dsl_rows.py", "test_dsl_schedules.py",
    "23_parallel_training.ipynb", "15_memory_planning.ipynb", "validation_networks.ipynb",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files, so that no core waits for another at the end."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20)  # syntax trees of the whole package are half the work so


@pytest.fixture
def lab() -> ModuleType:
    return load_script(ROOT / "lab.py")


@pytest.fixture
def build() -> Iterator[ModuleType]:
    """book/build.py, which imports its neighbour."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "book")
        yield load_script(ROOT / "book" / "build.py")


@pytest.fixture(scope="session")
def copies() -> Iterator[ModuleType]:
    """book/copies.py, which imports its neighbours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "book")
        yield load_script(ROOT / "book" / "copies.py")
