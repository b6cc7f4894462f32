"""Tables of latents: ranks by layer, and other ways to factor at the same bytes."""

from rankwise._internals.records import format_number
from rankwise.compression.records import Compression

Words = tuple[str, list[str], list[list[str]], str]
"""Title, columns, rows and a note."""


def latent_words(record: Compression) -> str:
    """What was done to keys and values, for a sentence; empty where nothing was."""
    if not record.latents:
        return ""
    count = len(record.latents)
    before, rank = (
        sum(values) / count
        for values in zip(*((latent.before, latent.rank) for latent in record.latents), strict=True)
    )
    return f"keys and values out of latents of {rank:.1f} for {before:.0f} channels on average"


def latent_tables(record: Compression) -> list[Words]:
    """What the record says of latents; empty where there are none."""
    tables: list[Words] = []
    if record.latent_curves:
        shares = [point.keep for point in record.latent_curves[0].points]
        tables.append(
            (
                "KL of the outputs against bytes of the cache",
                ["way", *(f"{share:g}" for share in shares)],
                [
                    [curve.method, *(format_number(point.output_kl, 5) for point in curve.points)]
                    for curve in record.latent_curves
                ],
                f"Nats a token, KL(p‖p′) of what the model gives, on up to 16 sequences of {record.figures}. "
                "Columns: share of the bytes of full keys and values, positions counted.",
            )
        )
    if record.latents:
        rows = [
            [
                str(latent.layer),
                str(latent.before),
                str(latent.full),
                str(latent.rank),
                format_number(latent.nats, 6),
            ]
            for latent in record.latents
        ]
        tables.append(
            (
                "Latents",
                ["layer", "channels of keys and values", "rank that loses nothing", "rank", "predicted nats"],
                rows,
                "Predicted: of the KL of the outputs, a token, to second order, on the calibration data; "
                "layers add up.",
            )
        )
    return tables
