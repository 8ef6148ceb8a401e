"""Write the figures that the syllabus names as slides, one page of HTML a part: `lab.py slides`.

The figures are those of the saved outputs. A deck needs no network: arrow keys, Home and End turn
its pages, print puts one figure on a sheet.
"""

import base64
import json
import re
import sys
from collections import namedtuple
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import yaml
from chapter_numbers import number_of

ROOT = Path(__file__).resolve().parent.parent
STYLE = """
:root { color-scheme: light dark; font: 20px/1.4 system-ui, sans-serif; }
body, figure { margin: 0; } section { box-sizing: border-box; min-height: 100vh; padding: 3vh 4vw; }
.deck section { display: none; } .deck section.here { display: block; } h2 { margin: 0 0 2vh; }
h2 { font-size: 1.1rem; } details { font-size: .8rem; margin-top: 1vh; }
img { display: block; width: 92vw; max-height: 74vh; object-fit: contain; background: white; }
@media print { .deck section { display: block; break-after: page; } details { display: none; } }
"""
SCRIPT = """
const slides = [...document.querySelectorAll("section")];
const at = () => Math.max(0, slides.findIndex(one => "#" + one.id === location.hash));
const show = () => slides.forEach((one, i) => one.classList.toggle("here", i === at()));
const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -slides.length, End: slides.length };
addEventListener("hashchange", show);
addEventListener("keydown", e => { if (e.key in steps)
  location.hash = slides[Math.min(slides.length - 1, Math.max(0, at() + steps[e.key]))].id; });
document.body.className = "deck"; show();
"""


class SlideError(Exception):
    """Something an author has to put right; the message says what."""


Slide = namedtuple("Slide", "name chapter caption alt image")  # the image: an address `data:...`


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
            for kind in sorted({"image/svg+xml", "image/png"} & set(output.get("data", {})))[-1:]:
                data = "".join(output["data"][kind]).strip()
                if kind != "image/png":
                    data = base64.b64encode(data.encode()).decode()
                caption, alt = told["figure"]["caption"], told["image"]["alt"]
                yield Slide(name, chapter, caption, alt, f"data:{kind};base64,{data}")


def parts() -> dict[str, list[Path]]:
    """Return the notebooks of each part, by its caption in the table of contents."""
    found, caption = {}, ""
    for part in yaml.safe_load((ROOT / "_toc.yml").read_text("utf-8"))["parts"]:
        caption = part.get("caption", caption)
        names = [chapter["file"] for chapter in part["chapters"] if number_of(chapter["file"])]
        found[caption] = found.get(caption, []) + [ROOT / f"{name}.ipynb" for name in names]
    return {caption: files for caption, files in found.items() if files}


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
    head = f'<meta charset="utf-8"><title>{escape(part)}</title><style>{STYLE}</style>'
    body = f"<body>{''.join(pages)}<script>{SCRIPT}</script></body>"
    return f'<!doctype html><html lang="en">{head}{body}</html>\n'


def write_decks(folder: Path) -> list[Path]:
    """Write a deck for each part that has figures in the syllabus; return their paths."""
    names, decks = listed((ROOT / "book" / "instructor.md").read_text("utf-8")), []
    found = {part: [s for p in paths for s in slides_of(p)] for part, paths in parts().items()}
    there = {slide.name for slides in found.values() for slide in slides}
    if missing := ", ".join(name for name in names if name not in there):
        remedy = "correct book/instructor.md, or refresh the notebook"
        raise SlideError(f"figures of the syllabus in the notebooks; none: {missing}; {remedy}")
    folder.mkdir(parents=True, exist_ok=True)
    for number, (part, slides) in enumerate(found.items(), 1):
        if chosen := [slide for slide in slides if slide.name in names]:
            decks.append(folder / f"part{number}.html")
            decks[-1].write_text(deck(part, chosen), "utf-8")
    return decks


if __name__ == "__main__":
    try:
        for path in write_decks(Path(sys.argv[1])):
            print(path)
    except SlideError as error:
        sys.exit(f"lab: {error}")
