"""Print how the product code is sized: totals, and the tails a reader feels (long files, functions,
classes)."""

import argparse
import ast
import statistics
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Piece:
    """A file, function or class, with its length in lines."""

    kind: str
    name: str
    lines: int


def pieces_of(path: Path) -> list[Piece]:
    """The file itself, then each function and class in it."""
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    found = [Piece("file", name, text.count("\n"))]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            found.append(
                Piece(kind, f"{name}:{node.lineno} {node.name}", (node.end_lineno or 0) - node.lineno + 1)
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="dicp")
    args = parser.parse_args()
    pieces = [p for path in sorted((ROOT / args.folder).rglob("*.py")) for p in pieces_of(path)]
    for kind, limit in (("file", 500), ("function", 60), ("class", 250)):
        sizes = sorted((p.lines for p in pieces if p.kind == kind), reverse=True)
        if not sizes:
            continue
        long = sorted((p for p in pieces if p.kind == kind and p.lines > limit), key=lambda p: -p.lines)
        print(
            f"{len(sizes)} x {kind}: {sum(sizes)} lines, median "
            f"{statistics.median(sizes):.0f}, longest {sizes[0]}; over {limit}: {len(long)}"
        )
        for piece in long:
            print(f"  {piece.lines:5d}  {piece.name}")


if __name__ == "__main__":
    main()
