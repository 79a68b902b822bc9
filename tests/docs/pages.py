"""The pages a reader sees, README included, and the blocks of code in them."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("*/*.md")))

_BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BEGINS_PROGRAM = re.compile(r"(import|from) ")


@dataclass(frozen=True, slots=True)
class Block:
    """One block of code.

    Attributes:
        language: As its fence says.
        line: Of the page, where its fence is.
    """

    page: Path
    language: str
    text: str
    line: int

    @property
    def name(self) -> str:
        """For a test's name."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def text_of(page: Path) -> str:
    """A page as it is built: with the reference that the program writes."""
    extensions = str(DOCS / "extensions")
    if extensions not in sys.path:
        sys.path.insert(0, extensions)
    from reference import fill_in

    return fill_in(page.read_text(encoding="utf-8"))


def blocks(*languages: str) -> Iterator[Block]:
    """Every block in these languages."""
    for page in PAGES:
        text = text_of(page)
        for found in _BLOCK.finditer(text):
            if found[1] in languages:
                yield Block(page, found[1], found[2], text.count("\n", 0, found.start()) + 1)


def programs() -> Iterator[Block]:
    """The Python programs: a block that begins with an import begins one, others go on with it."""
    begun: Block | None = None
    for block in blocks("python"):
        if begun is not None and (begun.page != block.page or _BEGINS_PROGRAM.match(block.text)):
            yield begun
            begun = None
        begun = block if begun is None else Block(begun.page, "python", begun.text + block.text, begun.line)
    if begun is not None:
        yield begun
