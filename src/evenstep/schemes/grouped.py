"""The recipe of groups: barriers inside them, and any policy of parameter servers between them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Unpack

from evenstep.core.errors import ConfigError
from evenstep.core.groups import ByHost, ByRank, BySpeed, GivenGroups, Grouping, Groups, Progressive
from evenstep.core.load.equal import Equal
from evenstep.core.shown import shown
from evenstep.core.sync import Grouped
from evenstep.schemes.given_sizes import is_number
from evenstep.schemes.recipe import recipe, scheme_within, sizes_of
from evenstep.schemes.scheme import Clip, Nonfinite, OptimizerName, PushTo, Rate, Scheme, Served, ServerCount
from evenstep.schemes.served import PeriodOptions, on_servers


@recipe
def grouped(
    *,
    groups: Annotated[
        int | str,
        "`progressive`: one group while no worker is slow, more while each is worth it. A number of groups. `hosts`:"
        " the workers of each host. Or the ranks of each group, such as `0-3/4+6/5+7`.",
    ] = "progressive",
    by: Annotated[
        Literal["rank", "speed"],
        "Who is in a number of groups: neighbours by `rank`, or workers of like `speed`, regrouped as speeds change.",
    ] = "rank",
    behind: Annotated[
        float | None,
        "Of `progressive`: no group may miss more global batches than this in one of its iterations (10).",
    ] = None,
    inside: Annotated[
        Scheme | str, "The scheme by whose sizes a group shares out its part of the global batch, as `load` of `asp`."
    ] = "bsp",
    across: Annotated[
        Scheme | str,
        "The scheme by which groups wait for each other: `asp`, `ssp`, `dssp` or `bsp`. In a scheme string, its own"
        " parameters follow a colon and are separated by semicolons: `grouped:groups=4,across=dssp:lower=2;upper=8`.",
    ] = "asp",
    rate: Rate = "share",
    clip: Clip = None,
    nonfinite: Nonfinite = "skip",
    servers: ServerCount = 1,
    optimizer: OptimizerName = None,
    push_to: PushTo = "group",
    **local: Unpack[PeriodOptions],
) -> Scheme:
    """Grouped parameter servers: a barrier inside each group, while groups may run ahead of each other.

    Source: Basu, Saxena, Panja and Verma, "Balancing Stragglers Against Staleness in Distributed Deep Learning", HiPC
    2018. Parts: the sizes of `inside`, the bound of `across`, and groups. One group is synchronous training, and one
    per worker is `across` itself; in between, staleness is the price of less waiting. The paper says neither who is in
    which group nor when their number changes (`evenstep.core.groups` decides), nor at which rate a group's gradient is
    applied: here by its share of the global batch, like any push (see `asp`). With a `period` a group pushes the sum of
    its workers' changes over their local steps.

    When to use it: a few workers are much slower than the others, or hosts are far apart. When not: differences of
    speed last, and sizes can even them out (`lb_bsp`).
    """
    scheme = scheme_within(inside)
    try:
        sizes_of("grouped", scheme)
    except ConfigError as error:
        raise ConfigError(
            f"inside a group is a barrier, and {str(scheme)!r} says more than its sizes: use bsp, lb-bsp or dbs"
        ) from error
    sync = Grouped(grouping=_grouping(str(groups), by, behind), across=_across(across).sync)
    options: dict[str, Any] = {"rate": rate, "clip": clip, "nonfinite": nonfinite, "servers": servers}
    return on_servers("grouped", sync, inside, push_to=push_to, optimizer=optimizer, **options, **local)


def _across(across: Scheme | str) -> Scheme:
    scheme = scheme_within(across)
    plain = scheme.served in (None, Served()) and scheme.load == Equal() and scheme.period is None
    if not plain or isinstance(scheme.sync, Grouped):
        raise ConfigError(
            f"groups wait for each other as under bsp, asp, ssp or dssp, and {scheme.name!r} says more than that: leave"
            " out its load and its servers' options, which stand next to across"
        )
    return scheme


def _grouping(groups: str, by: str, behind: float | None = None) -> Grouping:
    if behind is not None and groups != "progressive":
        raise ConfigError("behind limits progressive groups, and others stay as many: leave it out, or bound across")
    if is_number(groups):
        return BySpeed(int(groups)) if by == "speed" else ByRank(int(groups))
    if by != "rank":
        raise ConfigError(f"by={by} says who is in a number of groups, and there is none: give groups=4, say")
    if groups == "progressive":
        return Progressive() if behind is None else Progressive(behind=behind)
    return ByHost() if groups == "hosts" else GivenGroups(_given(groups))


def _given(text: str) -> Groups:
    groups = []
    for part in text.split("/"):
        group: list[int] = []
        for ranks in part.split("+"):
            first, dash, last = (each.strip() for each in ranks.partition("-"))
            if not is_number(first) or (dash and not is_number(last)):
                raise ConfigError(
                    f"groups cannot be {shown(text)}: use progressive, hosts, a number, or ranks such as 0-3/4+6/5+7"
                )
            low, high = int(first), int(last if dash else first)
            if not 0 <= high - low < 2**16:  # More than any run has.
                raise ConfigError(f"groups cannot name the ranks {ranks!r}: write the first and the last, such as 0-3")
            group += range(low, high + 1)
        groups.append(tuple(sorted(group)))
    return tuple(groups)


def group_servers(scheme: Scheme, hosts: Sequence[str], *, root: str | None) -> Groups:
    """The groups with a server of their own, given the workers' `hosts` by rank and the root server's host, `root`.

    A group on the root's host reaches the root without the network, and a group of one worker has nothing to combine.

    >>> group_servers(grouped(groups=3), ["a", "a", "b", "b", "c", "a"], root="a")
    ((2, 3),)
    """
    sync, served = scheme.sync, scheme.served
    if served is None or served.push_to == "root" or served.servers > 1:
        return ()
    if not (isinstance(sync, Grouped) and isinstance(sync.grouping, ByRank | GivenGroups)):
        return ()
    groups = sync.grouping.form(len(hosts))
    return tuple(
        group
        for group in groups
        if len(group) > 1 and len({hosts[worker] for worker in group}) == 1 and hosts[group[0]] != root
    )
