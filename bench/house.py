"""What a reader of the package must hold in mind, folder by folder: `python -m bench.house`.

A report and no limit: statements, functions of more than six parameters, records of more than
twelve fields, assignments that pack unrelated names into a tuple, comments, words that say little.
"""

import ast
import io
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "ascend_lab"
MAX_PARAMETERS = 6
MAX_FIELDS = 12
VAGUE_WORDS = """
found own one part whole wanted most before rest held after each near other others given made said
told known more less left here there both least enough full some first last next every all new old
same such way ways what how
"""
VAGUE = frozenset(VAGUE_WORDS.split())
"""Words that, alone as a name, do not say what a value is."""


@dataclass
class Report:
    """Counts of some modules."""

    files: int = 0
    lines: int = 0
    comments: int = 0
    statements: int = 0
    assignments: int = 0
    packed: int = 0
    names: int = 0
    vague: int = 0
    long_signatures: list[str] = field(default_factory=list)
    long_records: list[str] = field(default_factory=list)

    def add(self, module: Path) -> None:
        """Count one module, too."""
        text = module.read_text("utf-8")
        self.files += 1
        self.lines += text.count("\n")
        self.comments += comments_in(text)
        for node in ast.walk(ast.parse(text)):
            self._add_node(node, module)

    def _add_node(self, node: ast.AST, module: Path) -> None:
        if isinstance(node, ast.stmt) and not is_signature_or_text(node):
            self.statements += 1
        if isinstance(node, ast.Assign):
            self.assignments += 1
            self.packed += is_packed(node)
        if isinstance(node, ast.FunctionDef) and parameters_of(node) > MAX_PARAMETERS:
            self.long_signatures.append(f"{module.name}:{node.name}")
        if isinstance(node, ast.ClassDef) and fields_of(node) > MAX_FIELDS:
            self.long_records.append(f"{module.name}:{node.name}")
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.names += 1
            self.vague += node.id.strip("_") in VAGUE


def comments_in(text: str) -> int:
    """Return the lines of a module that hold a comment which is no order to a tool."""
    orders = ("# noqa", "# fmt", "# isort", "# type", "# --")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type == tokenize.COMMENT and not t.string.startswith(orders) for t in tokens)


def is_signature_or_text(node: ast.stmt) -> bool:
    """Tell whether a statement only declares, imports or documents."""
    declares = isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom)
    return declares or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def is_packed(node: ast.Assign) -> bool:
    """Tell whether an assignment packs values into several names: `a, b = f(x), 3`.

    What one expression yields (`rows, columns = shape`) is a pair by nature.
    """
    target = node.targets[0]
    return isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)


def parameters_of(node: ast.FunctionDef) -> int:
    """Return how many parameters a function has, without `self`."""
    args = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(args) - (args[:1] == ["self"])


def fields_of(node: ast.ClassDef) -> int:
    """Return how many annotated fields a class declares."""
    return sum(isinstance(statement, ast.AnnAssign) for statement in node.body)


def folders() -> dict[str, list[Path]]:
    """Return the modules of each folder of the package; those beside the folders are one."""
    found: dict[str, list[Path]] = {}
    for module in sorted(PACKAGE.rglob("*.py")):
        parts = module.relative_to(PACKAGE).parts
        found.setdefault(parts[0] if len(parts) > 1 else "(top)", []).append(module)
    return found


def share(part: int, whole: int) -> str:
    """Return a share in per cent."""
    return f"{100 * part / max(1, whole):.1f} %"


def main() -> None:
    """Print a line a folder, and one for all but the book's own and the course."""
    print(
        f"{'folder':<11}{'files':>6}{'lines':>8}{'statements':>11}{'packed':>8}{'comments':>9}"
        f"{'vague':>7}{'>6 parameters':>14}{'>12 fields':>11}"
    )
    core = Report()
    for folder, modules in folders().items():
        report = Report()
        for module in modules:
            report.add(module)
            if folder not in ("lab", "course"):
                core.add(module)
        print(line(folder, report))
    print(line("core", core))
    print("\nlong signatures:", ", ".join(core.long_signatures) or "none")
    print("long records:", ", ".join(core.long_records) or "none")
    skips = Counter(
        module.read_text("utf-8").count("# fmt: " + "skip") for module in PACKAGE.rglob("*.py")
    )
    print("fmt: skip:", sum(count * modules for count, modules in skips.items()))


def line(folder: str, report: Report) -> str:
    """Return a row of the table."""
    return (
        f"{folder:<11}{report.files:>6}{report.lines:>8,}{report.statements:>11,}"
        f"{share(report.packed, report.assignments):>8}{share(report.comments, report.lines):>9}"
        f"{share(report.vague, report.names):>7}{len(report.long_signatures):>14}"
        f"{len(report.long_records):>11}"
    )


if __name__ == "__main__":
    main()
