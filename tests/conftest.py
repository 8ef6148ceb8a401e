"""Shared by all tests: repeatable Hypothesis runs, a Ctrl-C that counts, our scripts as modules."""

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

# No deadlines: a slow machine is no bug. `HYPOTHESIS_PROFILE=explore pytest` tries new examples.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


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
