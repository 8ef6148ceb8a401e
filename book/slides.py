"""Write the figures that the syllabus names as slides, one page of HTML a part: `lab.py slides`.

python book/slides.py FOLDER [PART ...]

The figures are those of the saved outputs, nothing is executed. A deck is one file that needs no
network: arrow keys, Home and End turn its pages, print puts one figure on a sheet.
"""

import base64
import json
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import yaml
from chapter_numbers import number_of

ROOT = Path(__file__).resolve().parent.parent
STYLE = """
:root { color-scheme: light dark; font: 20px/1.4 system-ui, sans-serif; }
body { margin: 0; } section { box-sizing: border-box; min-height: 100vh; padding: 3vh 4vw; }
.deck section { display: none; } .deck section.here { display: block; }
h2 { font-size: 1.1rem; margin: 0 0 2vh; } figure { margin: 0; }
img { display: block; max-width: 100%; width: 92vw; max-height: 74vh; object-fit: contain;
  background: white; }
details { font-size: .8rem; margin-top: 1vh; }
@media print { .deck section { display: block; break-after: page; } details { display: none; } }
"""
SCRIPT = """
const slides = [...document.querySelectorAll("section")];
const wanted = () => Math.max(0, slides.findIndex(one => "#" + one.id === location.hash));
const show = () => slides.forEach((one, i) => one.classList.toggle("here", i === wanted()));
const go = i => { location.hash = slides[Math.min(slides.length - 1, Math.max(0, i))].id; };
const steps = { ArrowRight: 1, PageDown: 1, " ": 1, ArrowLeft: -1, PageUp: -1,
  Home: -slides.length, End: slides.length };
addEventListener("hashchange", show);
addEventListener("keydown", e => { if (e.key in steps) { e.preventDefault();
  go(wanted() + steps[e.key]); } });
document.body.className = "deck"; show();
"""


class SlideError(Exception):
    """Something an author has to put right; the message says what."""


class Slide(NamedTuple):
    """A figure as a notebook has saved it; its image is an address `data:...`."""

    name: str
    chapter: str
    caption: str
    alt: str
    image: str


def listed(text: str) -> list[str]:
    """Return the figures that a syllabus names, in order: `fig-...` in the rows of tables."""
    rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    return list(dict.fromkeys(re.findall(r"\bfig-[\w-]+", rows)))


def slides_of(notebook: Path) -> Iterator[Slide]:
    """Yield every figure of a chapter that has a name and a saved picture."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    title = "".join(cells[0]["source"]).partition("\n")[0].lstrip("# ")
    chapter = f"{number_of(f'notebooks/{notebook.stem}')}  {title}"
    for cell in cells:
        told = cell["metadata"].get("mystnb", {})
        name = told.get("figure", {}).get("name")
        for output in cell.get("outputs", []) if name else ():
            for kind in {"image/svg+xml", "image/png"} & set(output.get("data", {})):
                data = "".join(output["data"][kind]).strip()
                if kind != "image/png":
                    data = base64.b64encode(data.encode()).decode()
                caption, alt = told["figure"]["caption"], told["image"]["alt"]
                yield Slide(name, chapter, caption, alt, f"data:{kind};base64,{data}")


def parts(root: Path = ROOT) -> dict[str, list[Path]]:
    """Return the notebooks of each part, by its caption in the table of contents."""
    found: dict[str, list[Path]] = {}
    caption = ""
    for part in yaml.safe_load((root / "_toc.yml").read_text("utf-8"))["parts"]:
        caption = part.get("caption", caption)
        files = [root / f"{c['file']}.ipynb" for c in part["chapters"] if number_of(c["file"])]
        if files:
            found.setdefault(caption, []).extend(files)
    return found


def deck(part: str, slides: Sequence[Slide]) -> str:
    """Return one page of HTML with all it needs."""
    first = "".join(f'<li><a href="#s{i}">{escape(s.chapter)}</a>' for i, s in enumerate(slides, 1))
    pages = [f'<section id="s0"><h1>{escape(part)}</h1><ol>{first}</ol></section>']
    for i, slide in enumerate(slides, 1):
        _, chapter, caption, alt, image = map(escape, slide)
        pages.append(
            f'<section id="s{i}"><h2>{chapter}</h2><figure><img src="{image}" alt="{alt}">'
            f"<figcaption>{caption}</figcaption></figure>"
            f"<details><summary>In words</summary>{alt}</details></section>"
        )
    head = f'<html lang="en"><meta charset="utf-8"><title>{escape(part)}</title>'
    head += f"<style>{STYLE}</style>"
    return f"<!doctype html>{head}<body>{''.join(pages)}<script>{SCRIPT}</script></body></html>\n"


def write_decks(folder: Path, wanted: Sequence[str] = (), root: Path = ROOT) -> list[Path]:
    """Write the decks of all parts, or of those with these numbers; return their paths."""
    names, decks = listed((root / "book" / "instructor.md").read_text("utf-8")), []
    found = {
        part: [slide for path in files for slide in slides_of(path)]
        for part, files in parts(root).items()
    }
    there = {slide.name for slides in found.values() for slide in slides}
    if missing := ", ".join(name for name in names if name not in there):
        remedy = "mend book/instructor.md, or refresh the notebook"
        raise SlideError(f"figures of the syllabus in the notebooks; none: {missing}; {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    for number, (part, slides) in enumerate(found.items(), 1):
        chosen = [slide for slide in slides if slide.name in names]
        if chosen and (not wanted or str(number) in wanted):
            decks.append(folder / f"part{number}.html")
            decks[-1].write_text(deck(part, chosen), "utf-8")
    return decks


if __name__ == "__main__":
    try:
        for path in write_decks(Path(sys.argv[1]), sys.argv[2:]):
            print(path)
    except SlideError as error:
        sys.exit(f"lab: {error}")
