"""`capture`: context manager that records the mixing operators and token states of a running model.

A module call goes through five steps. Each step sets the fields of `ModuleCall` that are named in it:

1. The call begins. `ModuleCalls` sets name, module, args, kwargs, serial, and the parent's ``called_inside``.
2. `capture._entered` starts a new forward pass if the call is the outermost. In PyTorch's own layers it turns
   the function mode off (``exit_stack``). `RunningReaders.entered` sets ``reader``. `BlockFinder.entered`
   sets ``block`` if the module may be a block.
3. The module runs. `AttentionMode` reports attention functions. `capture._add` makes a `CapturedMixer`
   of each and sets ``mixed_inside``; `BlockFinder.add` hands it to the innermost ``block``.
   Functions that mix tokens without attention extend ``other_mixing``.
4. The call ends. `ModuleCalls` sets kwargs, output and raised, and closes ``exit_stack``.
5. `capture._left` runs `Substitution.left`. `capture._read` makes a `CapturedMixer` if ``sites=``, a reader
   or PyTorch's own layer determines the operator. If a reader of an outer call reads this call, `_read`
   records it in the outer call's ``inner``. `BlockFinder.left` decides if the call is a block, and
   `BlockStacks` reports the mixers and states of the block.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise._internals.torch_private import is_mapped, original_of, without_torch_function
from rankwise.errors import CaptureError, ShapeError
from rankwise.operators import MixingOperator
from rankwise.tracing import model_checks, read_operators, torch_layers
from rankwise.tracing.attention_mode import AttentionMode
from rankwise.tracing.axes import learned_tokens
from rankwise.tracing.block_finder import BlockFinder
from rankwise.tracing.block_stacks import BlockStacks
from rankwise.tracing.explicit_softmax import SoftmaxFollower, SoftmaxProduct
from rankwise.tracing.interventions import HeadOutputs, Intervention, Substitution
from rankwise.tracing.module_calls import CallCounter, CallId, ModuleCall, ModuleCalls
from rankwise.tracing.read_operators import MixingCall
from rankwise.tracing.readers import reader_of
from rankwise.tracing.readers.base import NO_TOKENS, RunningReaders
from rankwise.tracing.torch_layers import is_torch_layer
from rankwise.tracing.trace import CapturedMixer, CapturedState, Trace
from rankwise.tracing.uncaptured import Sightings, looks_like_mixer

OperatorFunction = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], MixingOperator]
"""Function (module, args, kwargs, output) that returns the operator of the finished call."""
IN_VMAP = "it ran inside `torch.vmap`, where tensors lack the mapped axis; call it without"
Added = tuple[MixingCall, CapturedMixer]
"""A captured attention call and the `CapturedMixer` (operator with address) made from it."""


class capture:  # noqa: N801  (used as a function: `with rw.capture(model) as trace`)
    """Record every mixing operator and every token state of a model while it runs.

    The computation is unchanged: outputs are bit-identical with and without a capture, and the attention
    backend is not switched. All hooks are removed when the block ends, also after an error.

    Args:
        model: any `torch.nn.Module`.
        on_mixer: function that receives each `CapturedMixer` as soon as its block has run; ``trace.mixers``
            then stays empty.
        on_state: function that receives each `CapturedState`; ``trace.states`` then stays empty.
        sites: functions by module name, for mixers that are not found. A function gets (module, args, kwargs,
            output) of a call, and returns the operator of shape (B, H, T, S).
        blocks: pattern of the names of the residual blocks (``"decoder.layers.*"``), if they are not found.
        values: True to keep also the values V and the product M V of each operator, "attention" to keep only
            the values of attention.
        intervention: object that replaces outputs of heads and blocks. The model's outputs then change, and
            PyTorch's own layers do not use their inference fast path.

    Raises:
        CaptureError: at the start, if the model is compiled or scripted, or its layers are split over
            processes; at the end, if the model was not called or no mixer was found.
        InputError: if a name in ``sites`` or the pattern ``blocks`` matches no module.

    Examples:
        >>> import torch, rankwise as rw
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        >>> with rw.capture(model) as trace:
        ...     _ = model(torch.randn(1, 5, 8))
        >>> [(mixer.layer, tuple(mixer.operator.shape)) for mixer in trace.mixers]
        [(0, (1, 2, 5, 5)), (1, (1, 2, 5, 5)), (2, (1, 2, 5, 5))]
        >>> [state.layer for state in trace.states]
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        on_mixer: Callable[[CapturedMixer], None] | None = None,
        on_state: Callable[[CapturedState], None] | None = None,
        sites: Mapping[str, OperatorFunction] | None = None,
        blocks: str | None = None,
        values: bool | Literal["attention"] = False,
        intervention: Intervention | None = None,
    ) -> None:
        model_checks.check_capturable(model)
        # If the user turns compilation off, PyTorch runs the original module, so this module gets the hooks.
        self._model = original_of(model)
        self._sites = dict(sites or {})
        model_checks.check_sites(self._model, self._sites, blocks)
        self._trace = Trace()
        self._on_mixer = on_mixer or self._trace.mixers.append
        self._on_state = on_state or self._trace.states.append
        self._values, self._intervention, self._block_pattern = values, intervention, blocks
        self._stack, self._entered_once = ExitStack(), False
        self._sightings = Sightings()
        self._outermost: set[str] = set()
        self._emitted: set[type] = set()

    def __enter__(self) -> Trace:
        """Add hooks and start to record."""
        if self._entered_once:
            raise CaptureError(
                "`capture`", expected="one `with` block for each", got="a capture that was started before",
                fix="Start a new capture: `with rw.capture(model) as trace: ...`; captures may be nested.",
            )  # fmt: skip
        self._entered_once = True
        self._trace.notes.extend(model_checks.training_notes(self._model))
        self._mode = AttentionMode(
            {F.scaled_dot_product_attention: self._fused, torch.ops.higher_order.flex_attention: self._flex},
            self._explicit,
            self._other,
            self._ignores,
            self._functional,
        )
        hookless = torch_layers.modules_in_torch_layers(self._model)
        self._calls = ModuleCalls(self._model, hookless, on_enter=self._entered, on_leave=self._left)
        self._call_counter = CallCounter()
        self._substitution = Substitution(self._intervention, self._calls, self._call_counter)
        modules = dict(self._model.named_modules())
        readers = {name: reader for name, module in modules.items() if (reader := reader_of(module))}
        self._readers = RunningReaders(readers, self._calls, self._sightings, self._values is True)
        self._mixer_like = {name for name, module in modules.items() if looks_like_mixer(module)} - {""}
        self._mixer_like |= set(readers)
        self._stacks = BlockStacks(self._emit, self._note)
        self._blocks = BlockFinder(
            self._model, self._calls, self._stacks, self._mixer_like, self._block_pattern
        )
        try:
            self._stack.enter_context(self._mode)
            self._stack.enter_context(self._calls.following())
        except BaseException:
            self._stack.close()
            raise
        return self._trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the hooks, list the modules that were not captured, and raise if no mixer was found."""
        self._stack.close()
        self._mode.weights = SoftmaxFollower()
        if kind is None:
            self._stacks.finish()
            if self._emitted == {CapturedMixer}:
                self._note(model_checks.NO_STATES)
        seen = self._sightings
        for (name, reason), exact in seen.left_out.items():
            if exact and name in seen.captured:
                self._note(f"other calls of a mixer that was captured were left out: {reason}")
        candidates = self._mixer_like | set(self._sites)
        self._trace.uncaptured = list(seen.uncaptured(self._model, candidates, self._calls.called))
        if self._calls.in_other_thread:
            self._note(model_checks.OTHER_THREAD)
        if kind is None and CapturedMixer not in self._emitted:
            raise model_checks.nothing_found(self._model, self._trace, self._calls, bool(seen.captured))

    # --- callbacks of the hooks and of the function mode --------------------------------------------------

    def _entered(self, call: ModuleCall) -> None:
        if len(self._calls.running) == 1:
            if call.name in self._outermost or self._stacks.forward_pass < 0:
                self._stacks.finish()
                self._stacks.forward_pass += 1
                self._substitution.new_pass()
                self._outermost.clear()
                self._mode.weights = SoftmaxFollower()
            self._outermost.add(call.name)
        fast = is_torch_layer(call.module, torch_layers.FAST_PATH)
        call.exit_stack.enter_context(self._mode.switched(on=self._substitution.on or not fast))
        if not self._named_by_hand():
            self._readers.entered(call)
            self._substitution.entered(call)
        self._blocks.entered(call)

    def _left(self, call: ModuleCall) -> None:
        if is_torch_layer(call.module) and call.block is None:
            self._blocks.entered(call)  # keyword arguments of PyTorch's own layers are known only now
        if not call.raised:
            if not self._named_by_hand():
                self._substitution.left(call)
            self._read(call)
            self._sightings.note_other_mixing(call)
        # This step is the last, because a module may be both a mixer and a block.
        self._blocks.left(call)

    def _read(self, call: ModuleCall) -> None:
        if call.name in self._sites:
            with self._outside_model(None):
                made = self._sites[call.name](call.module, call.args, call.kwargs, call.output)
            self._add(model_checks.checked_operator(made, call.name))
        elif self._readers.inside:
            with self._outside_model(None):
                mixing = self._readers.left(call)
            if mixing is not None:
                self._add(mixing, call_id=call.call_id)
        elif is_torch_layer(call.module) and not call.mixed_inside and not self._named_by_hand():
            reason = torch_layers.why_not_known(call.module, call.called_inside)
            if reason is not None:
                self._sightings.leave_out(call.name, reason)
                return
            outer = self._calls.running[-2] if len(self._calls.running) > 1 else None
            read = partial(torch_layers.layer_mixing, call.module, call.args, call.kwargs, outer)
            with without_torch_function(), torch.no_grad():
                self._try(read, *call.tensors[:1])

    def _down_to_mixer(self) -> list[ModuleCall]:
        """Return the running calls down to the mixer, which is the outermost of nested PyTorch layers."""
        running = self._calls.running
        layers = [depth for depth, call in enumerate(running, 1) if is_torch_layer(call.module)]
        # Subclasses count too, because the fast path of an outer layer does not call the attention inside.
        inside = isinstance(running[-1].module, torch_layers.LAYERS) and not self._named_by_hand()
        return running[: layers[0]] if inside and layers else running

    def _fused(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        given = dict(zip(read_operators.FUSED_ARGUMENTS, args, strict=False)) | kwargs
        if given.get("dropout_p", 0.0) > 0:
            self._note(model_checks.DROPOUT_NOTE)
        read = partial(read_operators.fused_mixing, given, output, self._calls.running[-1])
        return self._replace(self._try(read, output, given["query"]), output)

    def _flex(self, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> Any:
        output, *others = outputs
        read = partial(read_operators.flex_mixing, args, output, self._calls.running[-1])
        changed = self._replace(self._try(read, output, args[0]), output)
        return None if changed is None else (changed, *others)

    def _functional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `multi_head_attention_forward`, and let an intervention replace the outputs of heads."""
        replaced, calls = self._substitution.on, self._down_to_mixer()
        output = None if replaced else F.multi_head_attention_forward(*args, **kwargs)
        outer = calls[-2] if len(calls) > 1 and is_torch_layer(calls[-1].module) else calls[-1]
        with without_torch_function(), torch.no_grad():
            read = partial(torch_layers.functional_mixing, args, kwargs, outer)
            added = self._try(read, *calls[-1].tensors[:1])
        if not replaced:
            return output
        with without_torch_function():
            return torch_layers.attention_by_heads(args, kwargs, partial(self._replace_heads, added))

    def _explicit(self, product: SoftmaxProduct, output: Tensor) -> Tensor | None:
        calls = self._calls.running
        reason = read_operators.why_no_tokens(product, calls)
        if reason is None:
            read = partial(read_operators.explicit_mixing, product, calls[-1])
            return self._replace(self._try(read, product.matrix), output)
        if reason not in read_operators.WITHIN_TOKENS:
            self._sightings.leave_out(calls[-1].name, reason)
        return None

    def _replace(self, added: Added | None, output: Tensor) -> Tensor | None:
        """Return the mixer's output with the heads of the intervention. Return None if nothing changes."""
        axes = None if added is None else added[0].axes
        if axes is None or not self._substitution.on:
            return None
        heads = self._replace_heads(added, axes.to_heads(output))
        return None if heads is None else axes.from_heads(heads)

    def _replace_heads(self, added: Added | None, heads: Tensor) -> Tensor | None:
        if added is None:
            return None
        _, mixer = added
        return self._substitution.heads(HeadOutputs(mixer.call_id, heads))

    def _other(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note dropout, learned vectors next to tokens, and functions that mix tokens without attention."""
        if func in model_checks.DROPOUTS and all(output is not value for value in (*args, *kwargs.values())):
            self._note(model_checks.DROPOUT_NOTE)
        elif func is torch.cat and args:
            learned = learned_tokens(args[0], output)
            if learned:
                self._note(
                    f"{learned} of {output.shape[1]} tokens are learned vectors, such as class tokens or "
                    "registers"
                )
        else:
            self._sightings.note_function(self._calls.running, func, args, kwargs, output)

    # --- from an operator to its mixer --------------------------------------------------------------------

    def _named_by_hand(self) -> bool:
        return any(call.name in self._sites for call in self._calls.running)

    def _ignores(self) -> bool:
        """Return True outside of the model, and in calls that a reader or a ``sites=`` function reads."""
        return not self._calls.running or self._named_by_hand() or self._readers.inside

    def _note(self, note: str) -> None:
        if note not in self._trace.notes:
            self._trace.notes.append(note)

    def _try(self, read: Callable[[], MixingCall | None], *tensors: Tensor) -> Added | None:
        """Add the operator of a call to the trace. If it cannot be read, list the module as not captured."""
        name = self._down_to_mixer()[-1].name
        shard, mapped = any(map(model_checks.is_shard, tensors)), any(map(is_mapped, tensors))
        if shard or mapped or any(0 in tensor.shape for tensor in tensors if not tensor.is_nested):
            reason = model_checks.SHARD if shard else IN_VMAP if mapped else NO_TOKENS
            self._sightings.leave_out(name, reason)
            return None
        try:
            mixing = read()
        except torch.OutOfMemoryError:
            raise
        except (ShapeError, RuntimeError) as error:
            why = str(error)
            if isinstance(error, ShapeError):
                # Leave out the fix of the error: it addresses users who build operators themselves.
                why = f"{error.subject}: expected {error.expected}, got {error.got}"
            self._sightings.leave_out(name, f"its call of attention cannot be read ({why})")
            return None
        return None if mixing is None else self._add(mixing)

    def _add(self, mixing: MixingCall, call_id: CallId | None = None) -> Added:
        around = self._down_to_mixer()
        number = self._call_counter.count(around[-1].name) if call_id is None else call_id
        for note in read_operators.axis_notes(mixing, around):
            self._note(note)
        mixer = read_operators.captured_mixer(mixing, around, self._stacks.forward_pass, self._values, number)
        for call in self._calls.running:
            call.mixed_inside = True
        self._sightings.captured.add(mixer.name)
        self._blocks.add(mixer)
        return mixing, mixer

    def _emit(self, captured: CapturedMixer | CapturedState) -> None:
        self._emitted.add(type(captured))
        tensor = captured.operator if isinstance(captured, CapturedMixer) else captured.tokens
        listener: Any = self._on_mixer if isinstance(captured, CapturedMixer) else self._on_state
        with self._outside_model(tensor.device):
            listener(captured)

    def _outside_model(self, device: torch.device | None) -> ExitStack:
        """Return a context without function modes, hooks and gradients; autocast is off on ``device``."""
        stack = ExitStack()
        for context in (self._calls.paused(), without_torch_function(), torch.no_grad()):
            stack.enter_context(context)
        if device is not None and torch.amp.autocast_mode.is_autocast_available(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        return stack
