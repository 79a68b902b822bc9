"""Tables on standard output, in Markdown."""

from collections.abc import Sequence


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one; the first column is text, the others are numbers."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    print(line(head))  # noqa: T201  its output
    print(f"|{'|'.join('-' * (w + 1 + (c == 0)) + ':' * (c > 0) for c, w in enumerate(widths))}|")  # noqa: T201  its output
    for row in rows:
        print(line(row))  # noqa: T201  its output
    print(flush=True)  # noqa: T201  its output
