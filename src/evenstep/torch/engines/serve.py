"""Puts the server engine of one worker together."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel

from evenstep.core.errors import ConfigError
from evenstep.protocol.optimizer import OptimizerSpec, options_to_record
from evenstep.protocol.run_spec import RunSpec
from evenstep.torch.engines.describe import describe, layout_of, options_of
from evenstep.torch.engines.served import ServedEngine
from evenstep.torch.engines.served_optimizer import ServedOptimizer
from evenstep.torch.processes.workers import Workers
from evenstep.torch.request import Agreement, Request
from evenstep.transport.codec import DEFAULT_LIMITS, Limits, encode_header
from evenstep.worker.balancer import Balancer
from evenstep.worker.servers.link import Link

ROOM_BYTES: Final = 2**13
"""What a header holds beside the optimizer's options, at most."""


def served_engine(
    request: Request,
    agreement: Agreement,
    workers: Workers,
    balancer: Balancer,
    link: Link,
    clock: Callable[[], float],
) -> ServedEngine:
    """Describe the run to the servers, and take this worker's place there; where that fails, the link is closed.

    Raises:
        ConfigError: The servers cannot run it.
        DisagreementError: The workers described different runs.
    """
    try:
        return _served_engine(request, agreement, workers, balancer, link, clock)
    except BaseException:
        link.close()
        raise


def _served_engine(
    request: Request,
    agreement: Agreement,
    workers: Workers,
    balancer: Balancer,
    link: Link,
    clock: Callable[[], float],
) -> ServedEngine:
    scheme = agreement.scheme
    assert scheme.served is not None
    model = request.models[0]
    module = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = request.optimizers[0]
    layout = layout_of(module.named_parameters(), request.optimizers)
    spec = describe(optimizer)
    _require_small_options(spec, optimizer)
    run = RunSpec(
        scheme=scheme,
        problem=agreement.problem,
        length=agreement.order.length,
        drop_last=bool(request.loader.drop_last),
        layout=layout,
        optimizers=(spec,),
    )
    layouts = layout.shards(scheme.served.servers)
    link.start(run.encode(), [each.nbytes for each in layouts])
    engine = ServedEngine(
        workers=workers,
        balancer=balancer,
        link=link,
        served=scheme.served,
        layouts=layouts,
        parameters=dict(module.named_parameters()),
        optimizer=optimizer,
        spec=spec,
        clock=clock,
        ahead=1 if scheme.served.exchange == "overlapped" or request.loader.num_workers else 0,
    )
    engine.watch_gradients()
    return engine


def served_optimizer(engine: ServedEngine, optimizer: torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...]) -> Any:
    """What the script steps from now on, in a tuple where it gave one."""
    given = optimizer[0] if isinstance(optimizer, tuple) else optimizer

    served = ServedOptimizer(
        given,
        push=engine.step,
        forget=engine.forget_gradients,
        fetch=engine.fetch_state,
        restore=engine.restore_state,
    )
    return (served,) if isinstance(optimizer, tuple) else served


def _require_small_options(spec: OptimizerSpec, optimizer: torch.optim.Optimizer) -> None:
    """Options travel in a header.

    Raises:
        ConfigError: They do not fit there.
    """
    record = options_to_record(options_of(spec, optimizer))
    needed, room = len(encode_header({"options": record}, Limits(header_bytes=2**40))), DEFAULT_LIMITS.header_bytes
    if needed > room - ROOM_BYTES:
        raise ConfigError(
            f"the options of {len(record)} param groups take {needed} bytes, and at most {room - ROOM_BYTES} can travel"
            " with a push to parameter servers: put parameters with the same options into one group"
        )
