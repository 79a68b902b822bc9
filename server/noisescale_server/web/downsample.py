"""Fewer points, and still every peak and trough."""

from collections.abc import Iterable, Sequence

Column = Sequence[float | None]


def keep_extremes(columns: Sequence[Column], *, max_points: int, always: Iterable[int] = ()) -> list[int]:
    """Indices to draw: of each of many equal stretches, where each column is least and greatest.

    So every column's own minimum and maximum are kept, and so are its narrow spikes, which evenly
    chosen points would miss. The first and the last point are kept as well.

    Args:
        columns: Of one length; None where there is no value.
        max_points: At most so many, besides those of `always`.
        always: Indices that are kept whatever their values, such as jumps.

    Returns:
        In ascending order, each once; all of them where there are no more than `max_points`.
    """
    count = len(columns[0]) if columns else 0
    if count <= max_points:
        return list(range(count))
    kept = {0, count - 1, *always}
    stretches = max(1, (max_points - 2) // (2 * len(columns)))
    for stretch in range(stretches):
        indices = range(count * stretch // stretches, count * (stretch + 1) // stretches)
        for column in columns:
            known = [(value, index) for index in indices if (value := column[index]) is not None]
            if known:
                kept.add(min(known)[1])
                kept.add(max(known)[1])
    return sorted(kept)
