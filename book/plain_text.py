"""The book's Markdown as plain Markdown that any notebook viewer renders; `copies.py` calls it.

Only roles and directives that a chapter uses are known; any other one is an error, never a leak.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from myst_nb.core.variables import format_plain_text
from pybtex.database import Entry, parse_file
from pybtex.plugin import find_plugin

FENCE = re.compile(r"(`{3,}|~{3,}|:{3,}(?=\{))(?:\{([^}]*)\})?\s*(.*)")
OPTION = re.compile(r":([\w-]+):\s*(.*)")
URL = re.compile(r"\\url\{(.+)\}")
# What may hold a backtick or a bracket comes first, so that it is passed over as a whole.
INLINE = re.compile(
    r"""\{(?P<role>[A-Za-z][\w:.+-]*)\}`(?P<content>[^`]+)`
    |(?P<ticks>(?<!`)`+(?!`)).+?(?<!`)(?P=ticks)(?!`)
    |<!--.*?-->
    |\$\$(?P<math>.+?)\$\$(?:[ ]*\((?P<label>[\w-]+)\))?
    |\\\$|\$[^$]+\$
    |(?<!!)\[(?P<text>[^][]*)\]\((?P<target>[^()\s]+)\)
    |^\((?P<anchor>[\w:-]+)\)=$
    |^(?P<block>\%|\+\+\+).*$""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


class CopyError(Exception):
    """Something an author or a reader has to put right; the message says what."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of text (name ""), a fence of code (name "code") or a directive."""

    name: str
    body: str
    argument: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Book:
    """What a text refers to: labels and documents {name: (file, words)}, sources {key: words}."""

    labels: dict[str, tuple[str, str]]
    sources: dict[str, tuple[str, str]]


def anchor(label: str) -> str:
    """Return what a link to `label` finds; every viewer names headings in its own way."""
    return f'<a id="{label}"></a>'


def blocks(text: str) -> Iterator[Block]:
    """Split Markdown into text, fences of code, and directives with their options."""
    lines, plain = text.split("\n"), []
    while lines:
        line = lines.pop(0)
        opening = FENCE.fullmatch(line)
        if not opening:
            plain.append(line)
            continue
        if plain:
            yield Block("", "\n".join(plain))
            plain = []
        fence, name, argument = opening[1], opening[2], opening[3]
        if "`" in fence and "`" in argument:
            raise CopyError(f"{line!r}: no backtick stands behind a fence of backticks; use colons")
        closing = re.compile(rf"{fence[0]}{{{len(fence)},}}\s*")
        end = next((i for i, row in enumerate(lines) if closing.fullmatch(row)), None)
        if end is None:
            raise CopyError(f"the fence {line!r} is never closed")
        body, lines = lines[:end], lines[end + 1 :]
        if name is None:
            yield Block("code", "\n".join([line, *body, fence]))
            continue
        options = {}
        while body and (option := OPTION.fullmatch(body[0])):
            options[option[1]] = option[2]
            body = body[1:]
        yield Block(name, "\n".join(body).strip("\n"), argument.strip(), options)
    if plain:
        yield Block("", "\n".join(plain))


def joined(parts: Iterable[str]) -> str:
    """Join pieces of Markdown, a blank line between them."""
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())


@dataclass(frozen=True, slots=True)
class Page:
    """One notebook: its file name, its glued values as text, and the book around it."""

    file: str
    glued: Mapping[str, str]
    book: Book

    def render(self, text: str) -> str:
        """Return Markdown without roles and directives; solutions are not its part."""
        return joined(self.block(block) for block in blocks(text))

    def block(self, block: Block) -> str:
        """Return one block as plain Markdown."""
        match block.name:
            case "":
                return re.sub(r"\n{3,}", "\n\n", INLINE.sub(self.inline, block.body))
            case "code":
                return block.body
            case "math":
                return self.equation(block.body, block.options.get("label"))
            case "exercise":
                label = block.options["label"]
                title = f"### {self.words(label)}: {INLINE.sub(self.inline, block.argument)}"
                return f"{anchor(label)}\n\n{title}\n\n{self.render(block.body)}"
            case "admonition":
                return self.box(block)
        raise self.problem(f"no plain form of the directive {{{block.name}}}")

    def box(self, block: Block) -> str:
        """Return a box as a quotation with a title, or as a fold if it is a dropdown."""
        title, text = INLINE.sub(self.inline, block.argument), self.render(block.body)
        if "dropdown" in block.options.get("class", "").split():
            title = re.sub(r"`([^`]+)`", r"<code>\1</code>", title)  # no Markdown in a summary
            return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"
        rows = [f"**{title}**", "", *text.split("\n")]
        return "\n".join(f"> {row}".rstrip() for row in rows)

    def inline(self, found: re.Match[str]) -> str:
        """Return a role, labelled formula, link, target or comment as plain Markdown."""
        if found["role"]:
            return self.role(found["role"], found["content"])
        if found["math"] and found["label"]:
            return self.equation(found["math"], found["label"])
        if found["target"]:
            return self.link(found["text"], found["target"])
        if found["anchor"]:
            return anchor(found["anchor"]) + "\n"
        if found["block"]:
            raise self.problem(f"no plain form of the line {found[0]!r}")
        return "" if found[0].startswith("<!--") else found[0]

    def role(self, name: str, content: str) -> str:
        """Return what a role stands for."""
        match name:
            case "glue:text":
                key, _, form = content.rpartition(":") if ":" in content else (content, "", "s")
                if key not in self.glued:
                    raise self.problem(f"nothing is glued as {key!r}")
                return format_plain_text(self.glued[key], form)
            case "cite":
                return f"({'; '.join(self.citation(key, '{}, {}') for key in keys(content))})"
            case "cite:t":
                return ", ".join(self.citation(key, "{} ({})") for key in keys(content))
            case "eq" | "numref" | "ref" | "doc":
                return self.link("", Path(content).name if name == "doc" else content)
            case "term":
                return re.sub(r"\s*<[^<>]*>$", "", content)
        raise self.problem(f"no plain form of the role {{{name}}}")

    def citation(self, key: str, form: str) -> str:
        """Return author and year with a link to the source."""
        if key not in self.book.sources:
            raise self.problem(f"no source {key!r} in the bibliography")
        return f"[{form.format(*self.book.sources[key])}](references.ipynb#{key})"

    def equation(self, formula: str, label: str | None) -> str:
        """Return a formula on lines of its own, with its number if it has one."""
        if not label:
            return f"$$\n{formula.strip()}\n$$"
        number = self.words(label).removeprefix("Eq. ").strip("()")
        return f"\n{anchor(label)}\n\n$$\n{formula.strip()} \\tag{{{number}}}\n$$\n"

    def link(self, text: str, target: str) -> str:
        """Return a link to a label, a document or an address of the web."""
        if target.startswith(("http://", "https://")):
            return f"[{INLINE.sub(self.inline, text)}]({target})"
        name = target.removesuffix(".ipynb")
        words = INLINE.sub(self.inline, text) or self.words(name)
        file = self.book.labels[name][0] if self.words(name) else ""
        fragment = "" if f"{name}.ipynb" == file else f"#{name}"
        return f"[{words}]({'' if file == self.file else file}{fragment})"

    def words(self, label: str) -> str:
        """Return what a reader reads in place of a label."""
        if label not in self.book.labels:
            raise self.problem(f"nothing in the notebooks has the label {label!r}")
        return self.book.labels[label][1]

    def problem(self, message: str) -> CopyError:
        """Return an error that names the notebook."""
        return CopyError(f"{self.file}: {message}")


def keys(content: str) -> list[str]:
    """Return the keys of a citation."""
    return [key.strip() for key in content.split(",")]


# --- the bibliography -----------------------------------------------------------------------------


def authors(entry: Entry) -> str:
    """Return the last names of a source's authors as a citation gives them."""
    people = entry.persons.get("author") or entry.persons["editor"]
    names = [" ".join(map(str, who.rich_prelast_names + who.rich_last_names)) for who in people]
    if len(names) > 2:
        return f"{names[0]} et al."
    return " and ".join(names)


def bibliography(file: Path) -> tuple[dict[str, tuple[str, str]], str]:
    """Return {key: (authors, year)}, letters telling equal ones apart, and the list as Markdown."""
    entries = parse_file(str(file)).entries
    equal = defaultdict(list)
    for key, entry in sorted(entries.items()):
        equal[authors(entry), entry.fields["year"]].append(key)
        if address := URL.fullmatch(entry.fields.get("howpublished", "")):
            entry.fields["url"] = address[1]
            del entry.fields["howpublished"]
    sources = {
        key: (who, year + ("abcdefghijklmnopqrstuvwxyz"[index] if len(group) > 1 else ""))
        for (who, year), group in equal.items()
        for index, key in enumerate(group)
    }
    style = find_plugin("pybtex.style.formatting", "unsrt")()
    markdown = find_plugin("pybtex.backends", "markdown")()
    rows = {}
    for entry in style.format_entries(entries.values()):
        words, text = ", ".join(sources[entry.key]), " ".join(entry.text.render(markdown).split())
        rows[words] = f"{anchor(entry.key)}**{words}.** {text}"
    listed = [rows[words] for words in sorted(rows, key=str.casefold)]
    return sources, "\n\n".join(["# References", *listed])
