"""`capture`: a context in which a model's mixing operators and token states are seen as it runs."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.capture.adapters import Reader
from rankwise.capture.blocks import Blocks
from rankwise.capture.calls import ROUTER, Call, fused_arguments, fused_call, mixed_call, why_no_tokens
from rankwise.capture.chains import Chains
from rankwise.capture.checks import (
    check_capturable,
    check_sites,
    check_unused,
    checked_operator,
    dropout_note,
    nothing_found,
    training_notes,
)
from rankwise.capture.frames import Frame, Frames
from rankwise.capture.sharding import SHARD, is_shard
from rankwise.capture.sites import mixer_site
from rankwise.capture.stock import (
    functional_call,
    is_stock,
    is_stock_stack,
    quiet_names,
    stock_call,
    why_not_known,
)
from rankwise.capture.tap import AttentionTap
from rankwise.capture.trace import MixerSite, StateSite, Trace
from rankwise.capture.unseen import mixed_without_operator, mixer_like, unseen_modules, whose_tokens
from rankwise.capture.weights import Mixed
from rankwise.errors import ShapeError
from rankwise.operators import MixingOperator

SiteAdapter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], MixingOperator]
"""From a module, its arguments and its output to the operator it applied."""


NO_STATES = (
    "no token states were found: no item of a list of modules mixes and gives back (B, T, D) states of the "
    "shape it read; name the residual blocks in `blocks=` if there are any"
)
OTHER_THREAD = (
    "the model was also called in another thread than the one that entered `capture`; those calls were not "
    "looked at"
)


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
            entry, if the model is compiled or scripted, or its layers are split over processes.

    Examples:
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
        self._entered_once = False
        self._captured: set[str] = set()
        self._left_out: dict[str, str] = {}
        self._others: dict[str, str] = {}
        self._outermost: set[str] = set()
        self._mixers = self._states = 0

    def __enter__(self) -> Trace:
        """Start to watch the model."""
        check_unused(self._entered_once)
        self._entered_once = True
        self._trace.notes.extend(training_notes(self._model))
        self._tap = AttentionTap(self._fused, self._functional, self._mixed, self._mixed_otherwise)
        self._frames = Frames(self._model, quiet_names(self._model))
        self._reader = Reader(self._model, self._frames, self._values)
        self._candidates = mixer_like(self._model) | self._reader.names
        self._frames.on_enter.append(self._entered)
        # Before the blocks' own listener: a mixer that is itself a block must be known when it is left.
        self._frames.on_leave.append(self._left)
        self._chains = Chains(self._emit_mixer, self._emit_state, self._trace.notes)
        self._blocks = Blocks(self._model, self._frames, self._chains, self._candidates, self._block_pattern)
        try:
            self._stack.enter_context(self._tap)
            self._stack.enter_context(self._frames.following())
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
        if kind is None:
            self._blocks.finish()
            if self._mixers and not self._states:
                self._note(NO_STATES)
        for name, reason in self._reader.left_out:
            self._left_out.setdefault(name, reason)
            if name in self._captured:
                self._note(f"other calls of a mixer that was captured were left out: {reason}")
        self._trace.unseen = unseen_modules(
            self._model,
            self._candidates | set(self._sites),
            self._captured,
            self._frames.called,
            self._left_out,
            self._others,
        )
        if self._frames.elsewhere:
            self._note(OTHER_THREAD)
        if kind is None and not self._mixers:
            raise nothing_found(self._model, self._trace, self._frames, ran=bool(self._captured))

    # --- what the hooks and the mode report ---------------------------------------------------------------

    def _entered(self, frame: Frame) -> None:
        if len(self._frames.running) == 1:
            self._begin(frame)
        stock = is_stock(frame.module) or is_stock_stack(frame.module)
        frame.guards.enter_context(self._tap.switched(on=not stock))
        if not self._named_by_hand():
            self._reader.entered(frame)

    def _begin(self, frame: Frame) -> None:
        if frame.name in self._outermost or self._chains.run < 0:
            self._blocks.finish()
            self._chains.run += 1
            self._outermost.clear()
            self._tap.weights.clear()
        self._outermost.add(frame.name)

    def _left(self, frame: Frame) -> None:
        if frame.raised:
            return
        if frame.name in self._sites:
            with self._apart(None):
                made = self._sites[frame.name](frame.module, frame.args, frame.kwargs, frame.output)
            self._add(checked_operator(made, frame.name), kind=made.kind)
        elif self._reader.inside:
            with self._apart(None):
                call = self._reader.left(frame)
            if call is not None:
                self._add(call, kind=call.operator.kind)
        elif is_stock(frame.module) and not frame.mixed_inside and not self._named_by_hand():
            reason = why_not_known(frame.module, frame.called_inside)
            if reason is None:
                with torch._C.DisableTorchFunction(), torch.no_grad():
                    given = (frame.module, frame.args, frame.kwargs, self._outer(frame))
                    self._try(partial(stock_call, *given), *frame.tensors[:1])
            else:
                self._left_out.setdefault(frame.name, reason)
        self._others |= mixed_without_operator(frame, self._captured, self._blocks.may_be(frame.name))

    def _outer(self, frame: Frame) -> Frame | None:
        running = self._frames.running
        return running[-2] if len(running) > 1 else None

    def _fused(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._frames.running and not self._read_otherwise():
            given = fused_arguments(args, kwargs)
            if given.get("dropout_p", 0.0) > 0:
                self._note(dropout_note("fused attention"))
            self._try(partial(fused_call, given, output, self._frames.running[-1]), output, given["query"])

    def _functional(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._frames.running and not self._read_otherwise():
            with torch.no_grad():
                frame = self._frames.running[-1]
                self._try(partial(functional_call, args, kwargs, frame), *frame.tensors[:1])

    def _mixed(self, mixed: Mixed) -> None:
        if not self._frames.running or self._read_otherwise():
            return
        reason = why_no_tokens(mixed, self._frames.running)
        if reason is None:
            self._try(partial(mixed_call, mixed, self._frames.running[-1]), mixed.matrix)
        elif reason != ROUTER:  # which looks like no mixer
            self._left_out.setdefault(self._frames.running[-1].name, reason)

    def _mixed_otherwise(self, what: str, lengths: set[int]) -> None:
        if self._frames.running and not self._read_otherwise():
            reader = whose_tokens(self._frames.running, what, lengths)
            if reader is not None:
                reader.others.setdefault(self._frames.running[-1].name, what)

    # --- from a call to a site ----------------------------------------------------------------------------

    def _named_by_hand(self) -> bool:
        return any(frame.name in self._sites for frame in self._frames.running)

    def _read_otherwise(self) -> bool:
        """Whether what is running is no business of the tap."""
        return self._named_by_hand() or self._reader.inside

    def _note(self, note: str) -> None:
        if note not in self._trace.notes:
            self._trace.notes.append(note)

    def _try(self, call: Callable[[], Call | None], *tensors: Tensor) -> None:
        """Add what a call mixed with; a call that we cannot read must not stop the model."""
        name = self._frames.running[-1].name
        if any(is_shard(tensor) for tensor in tensors):
            self._left_out.setdefault(name, SHARD)
            return
        if any(0 in tensor.shape for tensor in tensors if not tensor.is_nested):
            self._left_out.setdefault(name, "it was called with no tokens or no sequences")
            return
        try:
            made = call()
        except torch.OutOfMemoryError:
            raise
        except (ShapeError, RuntimeError) as error:
            self._left_out.setdefault(name, f"attention was seen inside it in a way we cannot read: {error}")
        else:
            if made is not None:
                self._add(made)

    def _add(self, call: Call, kind: str = "softmax") -> None:
        site = mixer_site(call, self._frames.running, kind, self._chains.run, self._values)
        for frame in self._frames.running:
            frame.mixed_inside = True
        self._captured.add(site.name)
        self._blocks.add(site)

    def _emit_mixer(self, site: MixerSite) -> None:
        self._mixers += 1
        with self._apart(site.operator.device):
            self._on_mixer(site)

    def _emit_state(self, state: StateSite) -> None:
        self._states += 1
        with self._apart(state.tokens.device):
            self._on_state(state)

    def _apart(self, device: torch.device | None) -> ExitStack:
        """Keep measures out of the model's run: no tap, no hook, no gradient; on a device, no autocast."""
        stack = ExitStack()
        stack.enter_context(self._frames.still())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.no_grad())
        if device is not None and torch.amp.autocast_mode.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        return stack
