"""What the loader, the model and the optimizer need of an engine: the part that communicates."""

from typing import Protocol

import torch

from evenstep.core.errors import EvenstepError
from evenstep.core.samples import Ledger, MicroBatch, Share, Shares
from evenstep.torch.processes.workers import Workers
from evenstep.worker.balancer import Balancer


class Engine(Protocol):
    """Keeps one worker in step with the others.

    The loader calls `enter_loader` and `begin` around each hand-out, the model's wrapper calls `forward_begins` and
    `forward_ends`, and the optimizer calls `before_step`. Errors of collectives that nothing typed can carry are kept
    until the next of `before_step` and `enter_loader`; no weight changes after one.
    """

    workers: Workers
    balancer: Balancer

    def enter_loader(self) -> None:
        """The script asks for the next batch: the one before is done with.

        Raises:
            WorkerLostError: A worker died or stopped.
            DisagreementError: Workers disagree on what they did.
        """

    def shares(self, ledger: Ledger, *, epoch: int, depth: int) -> Shares:
        """What this worker computes on in an epoch that begins now, or goes on where the ledger stands.

        Raises:
            WorkerLostError, DisagreementError: As `enter_loader`.
        """

    def leave_loop(self) -> None:
        """The script has left the epoch, at its end or before."""

    def begin(self, share: Share, piece: MicroBatch, epoch: int) -> None:
        """This piece of a share is handed out."""

    def weigh_by(self, count: int) -> None:
        """Weigh this worker's present batch by `count` over everybody's, instead of by samples.

        Raises:
            ConfigError: The count is negative or not whole, no batch is in hand, or the scheme cannot heed it.
        """

    @property
    def synchronises(self) -> bool:
        """Whether the batch in hand is the last before the optimizer steps."""

    @property
    def unsettled(self) -> str | None:
        """Why a checkpoint of one worker would not serve them all now; None where it does."""

    def settle(self) -> None:
        """Make all workers alike, where they are not.

        Raises:
            WorkerLostError, DisagreementError: As `enter_loader`.
        """

    def forward_begins(self, model: int, *, synchronises: bool) -> None:
        """A forward pass of the model of that index, whose backward will, or will not, synchronise."""

    def forward_ends(self, outputs: object) -> None:
        """It has come to these outputs, whatever the model returns."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Before any weight changes, by a step of this optimizer of the script's.

        Raises:
            WorkerLostError, DisagreementError: As `enter_loader`.
            ConfigError: The optimizer must not step now, or not on these gradients.
        """

    def explained(self, cause: Exception) -> EvenstepError:
        """The error to raise after a collective of this worker's failed with `cause`: it names who is missing."""

    def close(self) -> None:
        """End the pulse and the recording, and leave this engine's process groups."""
