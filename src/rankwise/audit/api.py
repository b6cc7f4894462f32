"""`audit`: run a model over batches and measure every head and every layer, keeping only numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from torch import nn

from rankwise.audit.batches import check_batches
from rankwise.audit.fresh_copies import BaselineWanted, FreshCopies, check_baseline
from rankwise.audit.heads import HeadTable
from rankwise.audit.numbers import Method, check_method
from rankwise.audit.pictures import Matrices, PictureTaker, chosen_heads
from rankwise.audit.records import Provenance
from rankwise.audit.result import Audit
from rankwise.audit.run import Progress, Run
from rankwise.audit.token_names import TokenNames
from rankwise.audit.worth_numbers import WorthWanted, check_worth
from rankwise.capture import SiteAdapter
from rankwise.errors import InputError, did_you_mean
from rankwise.measures import DELTA, check_delta
from rankwise.running import Batch


def audit(
    model: nn.Module,
    batches: Iterable[Batch] | None = None,
    delta: float = DELTA,
    *,
    texts: str | Sequence[str] | None = None,
    tokenizer: Callable[..., Any] | None = None,
    tokens: int = 256,
    batch_size: int = 4,
    method: Method = "auto",
    sites: Mapping[str, SiteAdapter] | None = None,
    blocks: str | None = None,
    matrices: Matrices | None = None,
    worth: WorthWanted = False,
    baseline: BaselineWanted = False,
    provenance: Mapping[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Audit:
    """Measure the rank of every head and the collapse of tokens through depth, as the model runs.

    Each batch runs once, without gradients, on the model's device; nothing of the model is written to, and
    `rankwise.advise` is what runs it again. With ``worth`` batches are kept in a list and run again: the
    first once, then each once with gradients and nine times backward, and some five to thirty times without
    sets of heads (log2 of the heads, and at most 16 more); with ``worth="exact"`` as often as there are heads
    and blocks besides. Every operator is measured as soon as its block has run and then let go: memory does
    not grow with batches or layers. The model stays in the mode it is in (call ``model.eval()`` first), its
    attention backend is not switched.

    Cost: one forward pass; for each head and sequence the eigenvalues of a Gram matrix (T S min(T, S) time,
    8 T S bytes), or where ranks are estimated 67 walks over the rows (O(T S K) time, O(T + S) memory).

    Args:
        model: any `torch.nn.Module`.
        batches: dicts (``model(**batch)``), tuples (``model(*batch)``) or tensors (``model(batch)``), such as
            a DataLoader. Labels that the model has no place for are left out, and a note says so.
        delta: singular values below it count as zero in the numerical rank.
        texts: instead of batches, strings: one sequence each, in batches padded on the right.
        tokenizer: of ``texts``; one of transformers, or anything alike. With batches too it names tokens in
            findings and pictures, if it has a method ``decode``; without one they are ids.
        tokens: of ``texts``, the most tokens of a sequence; fewer where the model takes no more.
        batch_size: of ``texts``, sequences in a batch.
        method: "exact"; "estimate" (`estimate_spectrum`: with standard errors, and an interval where δ cannot
            be resolved); or "auto", exact while a float64 matrix takes at most 512 MiB (T = S = 8,192).
        sites: operators named by hand, as in `capture`.
        blocks: names of the residual blocks, as in `capture`.
        matrices: heads that keep a picture of their matrix on the first two sequences (`MatrixPicture`, at
            most 128×128, longer sequences averaged block by block): "flagged" (those with a finding), "all",
            "3:7,5:0" (layer:head), or pairs. A product with 128 columns each; 256 MiB at most in all.
        worth: whether to measure what the model loses without each head and block, and which heads can go
            together: True estimates it from gradients, "exact" removes heads one by one as well;
            `rankwise.worth.WorthSettings` say more, such as the loss.
        baseline: whether the same architecture is audited at fresh weights too, on the same batches, one
            copy after another: True for three seeds, their number, or a function of a seed that builds the
            model where it cannot be built anew (`fresh_weights`). Each costs an audit and, while it runs, the
            memory of a copy; batches are kept in a list.
        provenance: what to write into the record besides what is known here: model, revision, data, command.
        on_progress: called after each measured site.

    Returns:
        The audit. Interrupted from the keyboard while batches run, it holds the whole ones until then (of a
        first one, its finished layers), and ``complete`` is False.

    Raises:
        AuditError: if the model or the batches raise, or worth or the baseline cannot be measured; its
            ``audit`` holds what was measured before.
        CaptureError: if no mixing operator is found.
        InputError: if there are no batches, or both batches and texts, no tokenizer for texts, or no such
            method.
        FreshWeightsError: before anything is measured, if a baseline is wanted and the model cannot be built
            at fresh weights.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> result = rw.audit(layer, [torch.randn(1, 5, 8)])
        >>> [(head.layer, head.head) for head in result.heads]
        [(0, 0), (0, 1)]
    """
    _check_provenance(provenance or {})
    check_delta(delta)
    notes: list[str] = []
    if texts is not None and isinstance(model, nn.Module):
        batches, notes = _from_texts(model, batches, texts, tokenizer, tokens, batch_size)
    check_batches(batches if texts is None else ())
    settings = check_worth(worth, tokenizer)
    copies = None if (fresh := check_baseline(baseline)) is None else FreshCopies(model, fresh)
    given = batches or ()
    given = given if settings is None and copies is None else list(given)
    names, chosen = TokenNames(tokenizer), chosen_heads(matrices)
    pictures = None if chosen is None else PictureTaker(chosen, names)
    heads = HeadTable(delta, check_method(method), names, pictures, each_sequence=copies is not None)
    run = Run(model, delta, heads, dict(provenance or {}), on_progress)
    run.notes += notes
    run.over(given, sites, blocks, settings, copies)
    return run.result()


def _from_texts(
    model: nn.Module,
    batches: object,
    texts: str | Sequence[str],
    tokenizer: Callable[..., Any] | None,
    tokens: int,
    batch_size: int,
) -> tuple[Iterable[Batch], list[str]]:
    from rankwise.data import check_texts, model_batches

    if batches is not None:
        raise InputError(
            "`batches` and `texts`", wanted="one of them", got="both", fix="Audit them one after the other."
        )
    several, made = check_texts(texts, tokenizer)
    sizes = {"tokens": tokens, "sequences": len(several), "batch_size": batch_size}
    return model_batches(model, several, made, **sizes)


def _check_provenance(given: Mapping[str, Any]) -> None:
    """Before anything is measured: a record that cannot be written would lose it all."""
    try:
        Provenance.model_validate({"model": "", "delta": DELTA} | dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise InputError(
            "`provenance`",
            wanted="fields of `rankwise.audit.Provenance`",
            got=f"{name}: {first['msg']}",
            fix=did_you_mean(name, Provenance.model_fields),
        ) from None
