"""Computes a digest of all files that decide marks: those of the assignment and of this package.

Confined hand-ins cannot write to these files. If hand-ins are not confined, comparing the digests
before and after grading shows whether one of them changed a file.
"""

import hashlib
from pathlib import Path

import ascend_lab

SUFFIXES = (".py", ".toml")


def seal_of(folder: Path) -> str:
    """Return the digest of the Python and TOML files of an assignment and of the package."""
    package = Path(ascend_lab.__file__).parent
    digest = hashlib.sha256()
    for path in (*_files(folder, "*"), *_files(package, "**/*")):
        content = path.read_bytes()
        digest.update(f"{path}\0{len(content)}\0".encode("utf-8", "surrogateescape"))
        digest.update(content)
    return digest.hexdigest()


def _files(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that count for the seal."""
    return sorted(
        path for path in folder.glob(pattern) if path.suffix in SUFFIXES and path.is_file()
    )
