"""A digest of what decides marks: an assignment's folder, and this package.

A hand-in cannot write to either where the wall closes files. Where it does not, a digest before and
after each hand-in tells whether one did.
"""

import hashlib
from pathlib import Path

import ascend_lab

DECIDES = (".py", ".toml")


def seal_of(folder: Path) -> str:
    """Return the digest of the Python and TOML files of an assignment and of the package."""
    package = Path(ascend_lab.__file__).parent
    found = hashlib.sha256()
    for path in (*_of(folder, "*"), *_of(package, "**/*")):
        content = path.read_bytes()
        found.update(f"{path}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
        found.update(content)
    return found.hexdigest()


def _of(folder: Path, pattern: str) -> list[Path]:
    return sorted(
        path for path in folder.glob(pattern) if path.suffix in DECIDES and path.is_file()
    )
