"""What a record says about a request beyond its numbers."""

from typing import Any

from rankwise.compression.parts import PartResult
from rankwise.compression.record import Compression, Latency


def unchanged(part: str, result: PartResult) -> list[str]:
    """A note where a part took nothing away.

    Args:
        part: its name.
        result: what it did.
    """
    heads = bool(result.heads) and all(head.width == head.before for head in result.heads)
    latents = bool(result.latents) and all(latent.rank == latent.full for latent in result.latents)
    if not heads and not latents:
        return []
    what = {"heads": "no head was removed", "kv": "every latent has its full rank"}
    return [f"{part}: {what.get(part, 'nothing was narrowed')}. The request allows no less: ask for more."]


def grown(prices: dict[str, Any]) -> list[str]:
    """A note where a compressed model has more parameters than before.

    Args:
        prices: fields of a record.
    """
    then, now = prices["parameters_before"], prices["parameters_after"]
    if now <= then:
        return []
    cache = f"{prices['cache_bytes_before']:,} to {prices['cache_bytes_after']:,}"
    return [
        f"The model has more parameters than before: {now:,} after {then:,}. Factors of a latent can hold "
        f"more numbers than the projections in whose place they are. Bytes of the cache a token: {cache}."
    ]


def slower(timing: Latency, record: Compression) -> str:
    """That a model became slower, and what was won for it.

    Args:
        timing: before and after.
        record: of the compression.
    """
    won = [
        what
        for what, now, then in (
            ("parameters", record.parameters_after, record.parameters_before),
            ("bytes of the cache", record.cache_bytes_after, record.cache_bytes_before),
        )
        if now < then
    ]
    gain = f"There are fewer {' and '.join(won)}, but no time is won" if won else "No memory is won either"
    return (
        f"{timing.phase} of {timing.tokens} tokens became slower on this machine: {timing.before:.2f} to "
        f"{timing.after:.2f} ms. {gain}; reload the original to go back"
    )
