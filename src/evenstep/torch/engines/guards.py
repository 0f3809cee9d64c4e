"""What a script does that has no effect on the parameter servers."""

import warnings
from typing import final

import torch

from evenstep.torch.engines.served_parameters import ServedParameters
from evenstep.worker.servers.link import Link


@final
class ChangeGuard:
    """Warns once of gradients that the script changes after backward, and once of weights that it writes.

    `clips`: the servers clip, so changed gradients need no warning. Autograd keeps the hook alive, so this object does
    not refer to the link.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], *, clips: bool) -> None:
        self._watched = next(each for each in parameters if each.requires_grad)
        self._complete: int | None = None
        self._gradients_warned = clips
        self._weights_warned = False
        self._handle = self._watched.register_post_accumulate_grad_hook(self._completed)  # type: ignore[no-untyped-call]

    def _completed(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self._complete = parameter.grad._version

    def begin(self) -> None:
        """A batch is handed out."""
        self._complete = None

    def check_gradients(self) -> None:
        """The optimizer steps: warn if the gradient changed since backward."""
        gradient = self._watched.grad
        if self._gradients_warned or gradient is None or self._complete in (None, gradient._version):
            return
        self._gradients_warned = True
        warnings.warn(
            "the gradients were changed between backward and step: under parameter servers clip_grad_norm_ sees"
            " only this worker's part of the batch; have the servers clip with clip=... in the scheme",
            stacklevel=2,
        )

    def check_weights(self, parameters: ServedParameters, link: Link) -> None:
        """Have weights that the script wrote replaced by the servers', with a warning."""
        if not parameters.changed():
            return
        link.has = -1  # The servers then send weights even if theirs have not changed.
        if self._weights_warned:
            return
        self._weights_warned = True
        warnings.warn(
            "the model's weights were changed between steps, but under parameter servers they are replaced by the"
            " servers' at the next step: load weights before prepare, or go on from snapshots with evenstep run"
            " --resume",
            stacklevel=2,
        )

    def close(self) -> None:
        """Remove the hook, which autograd keeps alive together with the weights in shared memory."""
        self._handle.remove()
