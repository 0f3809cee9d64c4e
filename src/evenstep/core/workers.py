"""Workers in messages: finds the minority, and names workers."""


def minority(values: list[str]) -> list[int]:
    """The ranks whose value is not the most common one; of several such values, the lowest rank's counts.

    >>> minority(["a", "b", "a"]), minority(["a", "b"]), minority(["a", "a"])
    ([1], [1], [])
    """
    if len(set(values)) == 1:
        return []
    usual = max(values, key=lambda value: (values.count(value), -values.index(value)))
    return [rank for rank, value in enumerate(values) if value != usual]


def name_workers(ranks: list[int]) -> str:
    """`worker 3`, or `workers 3, 5 and 7`.

    >>> name_workers([3]), name_workers([3, 5, 7])
    ('worker 3', 'workers 3, 5 and 7')
    """
    if len(ranks) == 1:
        return f"worker {ranks[0]}"
    return f"workers {', '.join(str(rank) for rank in ranks[:-1])} and {ranks[-1]}"
