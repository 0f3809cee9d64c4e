"""How an exchange is timed, the same for every contestant; the standard library alone."""

from time import perf_counter

from contestants.case import Timed

_WARM_UP, _LEAST = 0.25, 2


def timed(case, exchange, barrier):
    """Warm up, wait for all, and exchange for the case's seconds; the last exchange is finished and counts.

    One more follows untimed, so that the slower workers' last exchange meets the same competition as all before it.
    """
    _repeat(exchange, _WARM_UP * case.seconds)
    barrier()
    result = _repeat(exchange, case.seconds)
    exchange()
    return result


def _repeat(exchange, seconds):
    began = now = perf_counter()
    exchanges = 0
    while now < began + seconds or exchanges < _LEAST:
        exchange()
        exchanges += 1
        now = perf_counter()
    return Timed(exchanges=exchanges, seconds=now - began)
