"""The loader of a replica: its batch of each slice, which is the same slice again if a step did not count."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch.utils.data import DataLoader

from evenstep.core.samples import Drawn, Ledger, Lookahead, Share
from evenstep.torch.data.batch_maker import BatchMaker
from evenstep.torch.data.fetch import ProcessFetcher, Requests, inner_loader, pinned, pins
from evenstep.torch.data.order import order_of
from evenstep.torch.data.randomness import mixed
from evenstep.torch.processes.workers import Workers

if TYPE_CHECKING:
    from evenstep.torch.agree import Terms
    from evenstep.torch.elastic.session import ElasticSession, Position

_ALONE = Workers(rank=0, count=1, host="", timeout_seconds=0.0)


@final
class ElasticLoader:
    """Hands out this replica's batches.

    A loop over it is one epoch, counted from 0. On a replica that has joined in a later epoch, the loops of the earlier
    ones are empty; `for epoch in range(loader.epoch, epochs)` leaves them out.
    """

    def __init__(self, source: DataLoader[Any], session: "ElasticSession") -> None:
        self.session = session
        self._source = source
        self._next = 0
        self._terms: Terms | None = None
        self._drawn: Drawn | None = None
        self._drawn_for = -1
        self._ledger: Ledger | None = None
        self._shares: Lookahead | None = None
        self._maker: BatchMaker | None = None
        self._requests = Requests()
        self._fetcher: ProcessFetcher | None = None
        self.current: Share | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)

    @property
    def length(self) -> int:
        """The samples of an epoch."""
        return order_of(self._source, _ALONE, 0).length if self._terms is None else self._terms.order.length

    @property
    def epoch(self) -> int:
        """The epoch of the next batch of all replicas, and of the next loop here; joins them if need be."""
        self.session.join()
        self._next = max(self._next, self.session.at.epoch)
        return self.session.at.epoch

    @property
    def batch_sizes(self) -> list[int]:
        """The batch sizes of the members, by rank in the quorum, in the current step."""
        return [] if self.current is None else self.current.sizes.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Make the next loop this epoch; without this call they count up."""
        self._next = epoch

    def __len__(self) -> int:
        """Steps in an epoch."""
        return self._ledger_at(0).iterations

    def __iter__(self) -> Iterator[Any]:
        epoch, self._next = self._next, self._next + 1
        while (share := self.session.share_of(epoch)) is not None:
            self.current = share
            yield self._batch(share)
            self.session.next_begins()
            if self.session.counted and self._shares is not None:
                self._shares.replan()

    def state_dict(self) -> dict[str, Any]:
        """See `ElasticSession.state_dict`."""
        return self.session.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `ElasticSession.load_state_dict`."""
        self.session.load_state_dict(state)
        self._next = self.session.at.epoch

    # For the session.

    def follow(self, terms: "Terms") -> None:
        """Use these terms from now on, on which the members have agreed."""
        self._terms = terms

    def planned(self, at: "Position") -> Share | None:
        """This replica's share of the slice at this position."""
        if self.session.fresh or self._shares is None or self._drawn_for != at.epoch:
            self._plan(at)
        assert self._shares is not None
        return self._shares.share()

    def advance(self, at: "Position") -> None:
        """The slice counts: move on."""
        assert self._shares is not None
        assert self._ledger is not None
        if self._fetcher is not None:
            self._fetcher.drop(at.done)
        self._shares.advance()
        at.done = self._ledger.iteration
        if at.done == self._ledger.iterations:
            at.epoch, at.done = at.epoch + 1, 0

    def _ledger_at(self, iteration: int) -> Ledger:
        size, terms = self.session.global_batch_size, self._terms
        order = order_of(self._source, _ALONE, 0) if terms is None else terms.order
        ends = None if self._drawn is None else self._drawn.ends
        return Ledger(
            length=order.length if ends is None else int(ends[-1]),
            global_batch_size=size,
            drop_last=order.sampling.drop_last,
            iteration=iteration,
            ends=ends,
        )

    def _plan(self, at: "Position") -> None:
        """Plan the slices from here on; what was fetched for them already is used where it is still needed."""
        assert self._terms is not None
        tracker, order = self.session.tracker, self._terms.order
        again = self._drawn_for == at.epoch
        if not again:
            self._drawn, self._drawn_for = order.draw(at.epoch, _ALONE, lambda record: [dict(record)]), at.epoch
        assert self._drawn is not None
        asked = self._shares.asked if again and self._shares is not None else {}
        self._ledger = self._ledger_at(at.done)
        self._shares = tracker.shares(self._ledger, epoch=at.epoch, depth=self._terms.depth, asked=asked)
        self.session.fresh = False
        maker = self._maker = self._maker or BatchMaker(self._source.dataset, self._source.collate_fn)
        if self._source.num_workers:
            self._fetch(maker, order.seed, at.epoch, again=again)

    def _fetch(self, maker: BatchMaker, seed: int, epoch: int, *, again: bool) -> None:
        assert self._shares is not None
        assert self._drawn is not None
        if again and self._fetcher is not None:
            self._requests.follow(self._shares)
            return
        randomness = torch.Generator().manual_seed(mixed(seed, 0, epoch, self.session.tracker.workers.rank))
        inner = inner_loader(self._source, maker, self._requests, randomness)
        self._requests.begin(self._shares, self._drawn.indices, limit=None, by_rows=maker.by_rows)
        self._fetcher = ProcessFetcher(inner, self._requests, maker, pin=pins(self._source))

    def _batch(self, share: Share) -> Any:
        if self._fetcher is not None:
            return self._fetcher.fetch(share.iteration, share.positions, last=False)
        assert self._drawn is not None
        assert self._maker is not None
        return pinned(self._maker.batch(self._drawn.indices[np.array(share.positions)].tolist()), pins(self._source))
