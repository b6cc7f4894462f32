"""`capture`: a context in which a model's mixing operators and token states are seen as it runs."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.capture.blocks import Blocks, Place, padded
from rankwise.capture.checks import check_capturable, check_sites, training_notes
from rankwise.capture.frames import ABSENT, Frame, Frames
from rankwise.capture.layout import unpacked_groups, with_heads
from rankwise.capture.padding import is_cross, told_mask, valid_positions
from rankwise.capture.stock import (
    StockAttention,
    functional_attention,
    is_stock,
    is_stock_stack,
    quiet_names,
    stock_attention,
)
from rankwise.capture.tap import AttentionTap
from rankwise.capture.trace import MixerSite, StateSite, Trace
from rankwise.capture.unseen import mixer_like, unseen_modules
from rankwise.capture.weights import Mixed
from rankwise.errors import CaptureError
from rankwise.operators import DenseMixing, MixingOperator, SoftmaxMixing

SiteAdapter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], MixingOperator]
"""From a module, its arguments and its output to the operator it applied."""

CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past", "cache_params", "kv_cache")


class capture:  # noqa: N801  (used as a function: `with rw.capture(model) as trace`)
    r"""See every mixing operator and every token state of a model while it runs.

    The computation is left alone: outputs are bit-identical with and without it, the attention backend is not
    switched, and whatever was installed is removed however the block ends.

    Args:
        model: any `torch.nn.Module`.
        on_mixer: called with each `MixerSite` as soon as its block has run; with it, the trace keeps none.
        on_state: called with each `StateSite`; with it, the trace keeps none.
        sites: operators named by hand: module name → function of (module, args, kwargs, output) that returns
            a `MixingOperator` of shape (B, H, T, S).
        blocks: names of the residual blocks, with wildcards (``"decoder.layers.*"``), if they are not found.
        values: keep also what each operator was applied to and what the model got from it.

    Raises:
        CaptureError: when the block ends and the model was not called, or no mixer was seen in it; on
            entry, if the model is compiled or scripted.

    Example:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> with rw.capture(model) as trace:
        ...     _ = model(torch.randn(1, 5, 8))
        >>> [(site.layer, tuple(site.operator.shape)) for site in trace.mixers]
        [(0, (1, 2, 5, 5)), (1, (1, 2, 5, 5)), (2, (1, 2, 5, 5))]
        >>> [state.layer for state in trace.states]
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        on_mixer: Callable[[MixerSite], None] | None = None,
        on_state: Callable[[StateSite], None] | None = None,
        sites: Mapping[str, SiteAdapter] | None = None,
        blocks: str | None = None,
        values: bool = False,
    ) -> None:
        check_capturable(model)
        # A compiled model run eagerly is its original with another name.
        self._model: nn.Module = getattr(model, "_orig_mod", model)
        self._sites = dict(sites or {})
        check_sites(self._model, self._sites, blocks)
        self._trace = Trace()
        self._on_mixer = on_mixer or self._trace.mixers.append
        self._on_state = on_state or self._trace.states.append
        self._values = values
        self._block_pattern = blocks
        self._stack = ExitStack()
        self._captured: set[str] = set()
        self._run = -1
        self._outermost: set[str] = set()

    def __enter__(self) -> Trace:
        """Start to watch the model."""
        self._candidates = mixer_like(self._model)
        self._trace.notes.extend(training_notes(self._model))
        self._frames = Frames(self._model, quiet_names(self._model))
        self._frames.on_enter.append(self._entered)
        self._blocks = Blocks(
            self._model,
            self._frames,
            self._emit_mixer,
            self._emit_state,
            self._candidates,
            self._block_pattern,
        )
        # After the blocks' own listeners: a mixer that is itself a block must be known before it is left.
        self._frames.on_leave.insert(0, self._left)
        self._tap = AttentionTap(self._fused, self._functional, self._mixed)
        try:
            self._stack.enter_context(self._frames.following())
            self._stack.enter_context(self._tap)
        except BaseException:
            self._stack.close()
            raise
        return self._trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove everything; say what was not seen."""
        self._stack.close()
        self._tap.weights.clear()
        self._trace.unseen = unseen_modules(
            self._model, self._candidates, self._captured, self._frames.called
        )
        if kind is None and not self._captured:
            raise self._nothing_found()

    # --- what the hooks and the mode report ---------------------------------------------------------------

    def _entered(self, frame: Frame) -> None:
        if len(self._frames.running) == 1:
            self._begin(frame)
        if is_stock(frame.module) or is_stock_stack(frame.module):
            # An active function mode would switch the inference fast path off, and so change the numbers.
            frame.guards.enter_context(torch._C.DisableTorchFunction())

    def _begin(self, frame: Frame) -> None:
        if frame.name in self._outermost or self._run < 0:
            self._run += 1
            self._outermost.clear()
            self._blocks.reset()
            self._tap.weights.clear()
        self._outermost.add(frame.name)

    def _left(self, frame: Frame) -> None:
        if frame.output is None:  # it raised
            return
        if frame.name in self._sites:
            operator = self._sites[frame.name](frame.module, frame.args, frame.kwargs, frame.output)
            self._add(operator, kind=operator.kind)
        elif is_stock(frame.module) and not frame.stock_inside and not self._named_by_hand():
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._stock(stock_attention(frame.module, frame.args, frame.kwargs))
            for outer in self._frames.running:
                outer.stock_inside = True

    def _fused(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._frames.running or self._named_by_hand():
            return
        frame = self._frames.running[-1]
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = dict(zip(names, args, strict=False)) | kwargs
        query, key, value = (given[name].detach() for name in names[:3])
        mask = given.get("attn_mask")
        if mask is not None and query.dim() != 4:
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        query, unpacked = with_heads(query, frame), unpacked_groups(query, frame)
        if unpacked.shape != query.shape:
            query, output = unpacked, unpacked_groups(output, frame)
            mask = mask if mask is None or mask.shape[1] == 1 else unpacked_groups(mask, frame)
        operator = SoftmaxMixing(
            query,
            with_heads(key, frame),
            mask if mask is None or mask.dim() <= 2 else with_heads(mask.detach(), frame),
            bool(given.get("is_causal", False)),
            given.get("scale"),
        )
        self._add(operator, values=with_heads(value, frame), output=with_heads(output.detach(), frame))

    def _functional(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not self._frames.running or self._named_by_hand():
            return
        with torch.no_grad():
            attention = functional_attention(args, kwargs)
        if attention is not None:
            self._stock(attention)

    def _stock(self, attention: StockAttention) -> None:
        self._add(
            attention.operator,
            values=attention.values,
            cross=attention.cross,
            valid=attention.lengths_mask,
            windows=False,
        )

    def _mixed(self, mixed: Mixed) -> None:
        if not self._frames.running or self._named_by_hand():
            return
        frame = self._frames.running[-1]
        matrix = with_heads(mixed.matrix.detach(), frame)
        tokens = frame.tokens
        if tokens is not None and matrix.shape[-2] == 1 and matrix.shape[1] == tokens.shape[1] > 1:
            return  # one weighted sum for each token: a router, not a mixer of tokens
        values, output = (with_heads(tensor.detach(), frame) for tensor in (mixed.values, mixed.output))
        self._add(DenseMixing(matrix), values=values, output=output)

    # --- from a call to a site ----------------------------------------------------------------------------

    def _named_by_hand(self) -> bool:
        return any(frame.name in self._sites for frame in self._frames.running)

    def _add(
        self,
        operator: MixingOperator,
        *,
        kind: str = "softmax",
        values: Tensor | None = None,
        output: Tensor | None = None,
        cross: bool | None = None,
        valid: Tensor | None = None,
        windows: bool = True,
    ) -> None:
        frames = self._frames.running
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if cross is None:
                cross = is_cross(frames, operator, cached=_has_cache(frames))
            if valid is None:
                tokens, sources = valid_positions(frames, operator, cross)
            else:
                tokens, sources = valid, valid
        batch = operator.shape[0]
        site = MixerSite(
            name=frames[-1].name,
            layer=-1,
            kind=kind,
            operator=operator,
            valid_tokens=tokens,
            valid_sources=sources,
            cross=cross,
            sequences=_sequences(frames, batch) if windows else batch,
            run=self._run,
            values=values if self._values else None,
            output=output if self._values else None,
        )
        self._captured.add(site.name)
        self._blocks.add(site)

    def _emit_mixer(self, site: MixerSite, place: Place) -> None:
        with _apart(site.operator.device):
            self._on_mixer(replace(site, stack=place[0], layer=place[1]))

    def _emit_state(self, frame: Frame, place: Place, tokens: Tensor) -> None:
        with _apart(tokens.device):
            tokens, mask = padded(tokens.detach())
            if not _batch_first(frame.module):
                tokens = tokens.transpose(0, 1)
            if mask is None:
                mask = self._token_mask(frame, tokens)
            self._on_state(StateSite(frame.name, place[1], tokens, mask, place[0], self._run))

    def _token_mask(self, frame: Frame, tokens: Tensor) -> Tensor | None:
        for site in frame.pending:
            if not site.cross and site.valid_tokens.shape == tokens.shape[:2]:
                return site.valid_tokens
        return told_mask(self._frames.running, "attention_mask", tokens.shape[0], tokens.shape[1])

    def _nothing_found(self) -> CaptureError:
        if not self._frames.called:
            return CaptureError(
                "`capture`",
                wanted="the model to run inside the block",
                got="no call of it or of any of its modules",
                fix="Call the captured model itself: `with rw.capture(model) as trace: model(**batch)`.",
            )
        like = ", ".join(f"{module.name} ({module.type})" for module in self._trace.unseen[:5])
        return CaptureError(
            f"model {type(self._model).__name__}",
            wanted="at least one mixing operator",
            got=f"none; modules that look like mixers: {like or 'none'}",
            fix="Name them by hand: `rw.capture(model, sites={'layers.0.mixer': f})`, where f(module, args, "
            "kwargs, output) returns the operator, such as `rw.DenseMixing(weights)` of shape (B, H, T, S).",
        )


def _apart(device: torch.device) -> ExitStack:
    """Keep measures out of the model's run: no tap, no gradient, no autocast."""
    stack = ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device.type, enabled=False))
    return stack


def _has_cache(frames: list[Frame]) -> bool:
    return any(frame.argument(name) not in (None, ABSENT) for frame in frames for name in CACHE_ARGUMENTS)


def _sequences(frames: list[Frame], batch: int) -> int:
    """Sequences behind ``batch`` operators: an outer module that saw fewer of them cut them into windows."""
    inputs = [tokens for frame in frames if (tokens := frame.tokens) is not None and not tokens.is_nested]
    sizes = [tokens.shape[0] for tokens in inputs]
    return min((size for size in sizes if size and batch % size == 0), default=batch)


def _batch_first(module: nn.Module) -> bool:
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return module.self_attn.batch_first
    return True
