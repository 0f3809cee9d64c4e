"""DSSP's controller: after how many extra iterations a fast worker waits least for the slowest. A pure function."""


def extra_iterations(
    *, interval_seconds: float, slowest_interval_seconds: float, slowest_due_seconds: float, most: int, allowed: int
) -> int:
    """How many more iterations the fastest worker should do before it waits: r* of DSSP's Algorithm 2.

    Zhao et al., "Dynamic Stale Synchronous Parallel Distributed Training for Deep Learning", ICDCS 2019, Algorithm 2,
    with the present as the origin of time, p the fastest worker and s the slowest:

        Sim_p[r] = r * I_p            when p would push after r extra iterations
        Sim_s[k] = due + k * I_s      when s is expected to push next, and k pushes later
        r* = the r of the pair (k, r) in [0, most]^2 with the least |Sim_s[k] - Sim_p[r]|

    At r* a push of p and one of s are expected closest together, so that p waits least. The difference counts alike
    whichever is the later.

    Deviations: the paper leaves ties open; the smallest r wins. It takes intervals between pushes, and s's next push
    one such interval after the last; waiting inflates both, so here an interval is from release to push and s is due
    one interval after its release. Of the r only those up to `allowed` are considered, of the k all. Only the k on
    either side of Sim_p[r] are tried, which changes nothing.

    Args:
        interval_seconds: I_p, from the last release of p to its push, which is now; 0 or more.
        slowest_interval_seconds: I_s, the same of s, as last measured; 0 or more.
        slowest_due_seconds: from now until s's next push; negative where it is overdue.
        most: the paper's r_max, the largest k and r; 0 or more.
        allowed: the largest r that may be granted now; 0 or more.

    >>> extra_iterations(
    ...     interval_seconds=1.0, slowest_interval_seconds=4.0, slowest_due_seconds=3.0, most=4, allowed=4
    ... )
    3
    """

    def apart(extra: int) -> float:
        after_due = extra * interval_seconds - slowest_due_seconds
        if not slowest_interval_seconds:
            return abs(after_due)
        earlier = int(min(max(after_due / slowest_interval_seconds, 0.0), float(most)))
        later = min(earlier + 1, most)
        return min(
            abs(after_due - earlier * slowest_interval_seconds), abs(after_due - later * slowest_interval_seconds)
        )

    return min(range(min(most, allowed) + 1), key=apart)
