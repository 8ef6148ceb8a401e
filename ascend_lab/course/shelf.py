"""Fills the folder from which a hand-in imports with links to the modules that it may use.

Besides the standard library, the import path of a hand-in has one folder. It links to all installed
packages, and to those modules of this package that the assignment does not close, that is, forbid.
So closed modules are not on the path. Where the system has Landlock (see `confine`), their files
cannot be opened by path either.
"""

import os
import shutil
import stat
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

import ascend_lab
from ascend_lab.course import confine

PACKAGE = Path(ascend_lab.__file__).resolve().parent
SITES = ("site-packages", "dist-packages")
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
"""Folders of the system's shared libraries; other Python installations in them stay closed."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """The files that the process of a hand-in can reach, as `inside.py` needs to know them."""

    path: tuple[str, ...]
    """The folders from which it imports."""
    moved: tuple[str, str]
    """The path of the standard library here, and the path by which the account reaches it."""
    handles: tuple[str, ...]
    """Folders that only root reaches, to be opened before the process becomes another account."""
    readable: tuple[str, ...]
    """Files and folders that it may read."""
    listed: tuple[str, ...]
    """Folders of which it may read only the list of names."""


def fill(folder: Path, denied: Sequence[str]) -> Shelf:
    """Fill a folder with links to all modules not in `denied`; return what `inside.py` must know.

    On a system without links (Windows without the right to make them) the import path holds the
    folders of installed packages, and only an import finder refuses the modules in `denied`.
    """
    handles = tuple(str(place) for place in _places() if not reached_by_others(place))
    links = [*_installed(), *_open_parts(denied)]
    library = _library()
    library_inside = _seen_from_inside(library, handles)
    try:
        for name, target in links:
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if target.is_relative_to(PACKAGE) and not readable_by_others(target):
                _copy(target, link)
            else:
                link.symlink_to(_seen_from_inside(target, handles))
        for place in (folder, *(path for path in folder.rglob("*") if _is_real_folder(path))):
            place.chmod(0o755)  # whatever the grader's umask is
        import_path: tuple[str, ...] = (str(folder),)
    except OSError:
        package_folder = () if PACKAGE.name in denied else (PACKAGE.parent,)
        import_path = tuple(map(str, (*package_folder, *_sites())))
    return Shelf(
        (library_inside, f"{library_inside}/lib-dynload", *import_path),
        (str(library), library_inside),
        handles,
        (str(folder), *(str(target) for _, target in links), *_shared()),
        (str(library),),
    )


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@cache
def _library() -> Path:
    """Return the folder of the standard library."""
    return Path(sysconfig.get_paths()["stdlib"]).resolve()


@cache
def _sites() -> tuple[Path, ...]:
    """Return the folders of installed packages on the import path of this process."""
    named = [Path(entry) for entry in sys.path if Path(entry).name in SITES]
    numpy_home = Path(np.__file__).parents[1]
    return tuple(dict.fromkeys(place.resolve() for place in (*named, numpy_home)))


def _places() -> tuple[Path, ...]:
    """Return all folders with modules: the standard library, installed packages, this package."""
    return tuple(dict.fromkeys((_library(), *_sites(), PACKAGE)))


@cache
def _installed() -> tuple[tuple[str, Path], ...]:
    """Return (name, path) of all installed packages except this one; the first of a name counts."""
    packages: dict[str, Path] = {}
    for site in _sites():
        for place in sorted(site.iterdir()):
            name = place.name
            ours = name.startswith(("ascend_lab", "__editable__")) or place == PACKAGE
            if not ours and name != "__pycache__" and not name.endswith(".pth"):
                packages.setdefault(name, place)
    return tuple(packages.items())


@cache
def _shared() -> tuple[str, ...]:
    """Return the files of the standard library, without packages installed in it, and libraries."""
    homes = [*map(Path, LIBRARIES), Path(sys.prefix, "lib"), Path(sys.base_prefix, "lib")]
    shared = [place for place in _library().iterdir() if place.name not in SITES]
    for home in dict.fromkeys(homes):
        if home.is_dir():
            shared += [place for place in home.iterdir() if not place.name.startswith("python")]
    return tuple(map(str, shared))


def _open_parts(denied: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield (path in the folder, path here) of the open modules of this package.

    A folder without closed modules is yielded as one.
    """
    todo = [PACKAGE]
    while todo:
        place = todo.pop()
        inner = place.relative_to(PACKAGE.parent)
        module = ".".join(inner.with_suffix("").parts) if place.is_file() else ".".join(inner.parts)
        if module in denied or place.name == "__pycache__":
            continue
        if place.is_dir() and any(name.startswith(f"{module}.") for name in denied):
            todo += place.iterdir()
        else:
            yield str(inner), place


def _seen_from_inside(place: Path, handles: Sequence[str]) -> str:
    """Return the path by which the account of a hand-in reaches a file or folder."""
    for number, home in enumerate(handles):
        if place.is_relative_to(home):
            inner = place.relative_to(home).as_posix()
            return confine.handle_path(number) + ("" if inner == "." else f"/{inner}")
    return str(place)


def _copy(place: Path, to: Path) -> None:
    """Copy a part of the package that other accounts cannot read, as a link would not help."""
    if place.is_dir():
        shutil.copytree(place, to, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(place, to)
    for path in (to, *to.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@cache
def readable_by_others(place: Path) -> bool:
    """Tell whether an account that owns nothing can read a file or folder of the package."""
    if os.name != "posix" or os.getuid() != 0:
        return True
    folders = [folder for folder in place.parents if folder.is_relative_to(PACKAGE)]
    open_folder = stat.S_IROTH | stat.S_IXOTH
    needed = open_folder if place.is_dir() else stat.S_IROTH
    return place.stat().st_mode & needed == needed and all(
        folder.stat().st_mode & open_folder == open_folder for folder in folders
    )


@cache
def reached_by_others(place: Path) -> bool:
    """Tell whether an account that owns nothing can enter a folder; True unless this is root."""
    if os.name != "posix" or os.getuid() != 0:
        return True
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (place, *place.parents))
