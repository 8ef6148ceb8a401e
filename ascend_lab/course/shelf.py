"""What a hand-in can import and open: a folder of links to what is not closed to it.

Beside the standard library a hand-in's path has one folder. It links to every installed package
but this one, and of this one to the modules that the assignment leaves open. So what is closed is
not on the path; where the system has Landlock (see `confine`) it cannot be opened by its name in
the file system either.
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
"""Where shared libraries of the system lie; Pythons and their packages beside them stay closed."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """What the far side is told of its files."""

    path: tuple[str, ...]
    """Where it imports from."""
    moved: tuple[str, str]
    """Where the standard library lies, and by which path the account reaches it."""
    handles: tuple[str, ...]
    """Folders that only root reaches, to be opened before it becomes another account."""
    readable: tuple[str, ...]
    listed: tuple[str, ...]


def laid(folder: Path, denied: Sequence[str]) -> Shelf:
    """Fill a folder with links to what is open, and return what the far side must know.

    Where the system has no links (Windows without the right), the path names what is installed, and
    only `denied` stands before it.
    """
    handles = tuple(str(place) for place in _places() if not reached_by_others(place))
    links = [*_installed(), *_open_parts(denied)]
    library = _library()
    own_library = _seen_from_inside(library, handles)
    try:
        for name, target in links:
            link = folder / name
            link.parent.mkdir(parents=True, exist_ok=True)
            if target.is_relative_to(PACKAGE) and not readable_by_others(target):
                _copy(target, link)
            else:
                link.symlink_to(_seen_from_inside(target, handles))
        for place in (folder, *(path for path in folder.rglob("*") if _is_own_folder(path))):
            place.chmod(0o755)  # whatever the grader's umask is
        found: tuple[str, ...] = (str(folder),)
    except OSError:
        own = () if PACKAGE.name in denied else (PACKAGE.parent,)
        found = tuple(map(str, (*own, *_sites())))
    return Shelf(
        (own_library, f"{own_library}/lib-dynload", *found),
        (str(library), own_library),
        handles,
        (str(folder), *(str(target) for _, target in links), *_shared()),
        (str(library),),
    )


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@cache
def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"]).resolve()


@cache
def _sites() -> tuple[Path, ...]:
    """Return the folders of installed packages that this process looks into."""
    named = [Path(entry) for entry in sys.path if Path(entry).name in SITES]
    numpy_home = Path(np.__file__).parents[1]
    return tuple(dict.fromkeys(place.resolve() for place in (*named, numpy_home)))


def _places() -> tuple[Path, ...]:
    return tuple(dict.fromkeys((_library(), *_sites(), PACKAGE)))


@cache
def _installed() -> tuple[tuple[str, Path], ...]:
    """Return (name, place) of what is installed but this package; the first of a name counts."""
    found: dict[str, Path] = {}
    for site in _sites():
        for place in sorted(site.iterdir()):
            name = place.name
            ours = name.startswith(("ascend_lab", "__editable__")) or place == PACKAGE
            if not ours and name != "__pycache__" and not name.endswith(".pth"):
                found.setdefault(name, place)
    return tuple(found.items())


@cache
def _shared() -> tuple[str, ...]:
    """Return the standard library without what is installed below it, and shared libraries."""
    homes = [*map(Path, LIBRARIES), Path(sys.prefix, "lib"), Path(sys.base_prefix, "lib")]
    found = [place for place in _library().iterdir() if place.name not in SITES]
    for home in dict.fromkeys(homes):
        if home.is_dir():
            found += [place for place in home.iterdir() if not place.name.startswith("python")]
    return tuple(map(str, found))


def _open_parts(denied: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Yield (path below the folder, place) of what is open of this package, whole where it can."""
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
    """Return the path by which the account of a hand-in reaches a place."""
    for number, home in enumerate(handles):
        if place.is_relative_to(home):
            below = place.relative_to(home).as_posix()
            return confine.handle_path(number) + ("" if below == "." else f"/{below}")
    return str(place)


def _copy(place: Path, to: Path) -> None:
    """Lay a copy where a link would not do: the package itself is closed to other accounts."""
    if place.is_dir():
        shutil.copytree(place, to, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copyfile(place, to)
    for path in (to, *to.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


@cache
def readable_by_others(place: Path) -> bool:
    """Whether an account that owns nothing can read a file or folder once it is there."""
    if os.name != "posix" or os.getuid() != 0:
        return True
    folders = [folder for folder in place.parents if folder.is_relative_to(PACKAGE)]
    open_folder = stat.S_IROTH | stat.S_IXOTH
    need = open_folder if place.is_dir() else stat.S_IROTH
    return place.stat().st_mode & need == need and all(
        folder.stat().st_mode & open_folder == open_folder for folder in folders
    )


@cache
def reached_by_others(place: Path) -> bool:
    """Whether an account that owns nothing comes to a folder; asked only where this is root."""
    if os.name != "posix" or os.getuid() != 0:
        return True
    return all(folder.stat().st_mode & stat.S_IXOTH for folder in (place, *place.parents))
