"""When workers that train alone come together."""

from evenstep.core.samples.lookahead import Share


def ends_period(share: Share, period: int) -> bool:
    """Whether an average follows this iteration: every `period`-th one of an epoch, and the epoch's last.

    Counted within the epoch, so that a run resumed in mid-epoch averages where the first one would have.

    >>> import numpy as np
    >>> [ends_period(Share(iteration=k, positions=(), samples=0, sizes=np.array([])), 3) for k in range(4)]
    [False, False, True, False]
    """
    return (share.iteration + 1) % period == 0 or share.ends_epoch
