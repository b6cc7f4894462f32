"""The RG-LRU of Griffin and RecurrentGemma, as transformers computes it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rankwise.operators import SemiseparableMixing
from rankwise.tracing.adapters.base import CONTINUED, Adapter, CallsInside, check_on_device, named
from rankwise.tracing.mixing_calls import MixingCall
from rankwise.tracing.module_calls import ModuleCall

SHARPNESS = 8.0
"""The constant c of De et al., "Griffin", 2024, eq. 4."""


class RGLRUAdapter(Adapter):
    """One operator for each channel, a scan with a state of one number: its decay and gates from its weights.

    Values are what the unit was given, after the short convolution; the output is the unit's own. The unit
    knows no padding mask: where padding comes first, real tokens do depend on it, as they do in the model.
    """

    classes = frozenset({"RecurrentGemmaRglru"})

    def reads(self, module: nn.Module) -> bool:
        """Whether it is the unit of transformers' RecurrentGemma."""
        return named(module, self.classes)

    def why_not(self, call: ModuleCall) -> str | None:
        """It goes on from a state that its first token does not reset."""
        state, positions = getattr(call.module, "recurrent_states", None), call.argument("position_ids")
        fresh = state is None or not bool(state.any()) or bool((positions[:, 0] == 0).all())
        return None if fresh else CONTINUED

    def output_projection(self, module: nn.Module) -> tuple[str, int] | None:
        """What the unit gives."""
        return "", 0

    def mixing(self, call: ModuleCall, inside: CallsInside, values: bool) -> MixingCall:
        """The linear recurrence of a whole sequence."""
        unit: Any = call.module
        check_on_device(unit.recurrent_param, unit.input_gate_weight, unit.recurrent_gate_weight)
        given = call.argument("activations").detach()
        reset = call.argument("position_ids") == 0
        heads = given.unflatten(-1, (unit.num_attention_heads, -1))
        enters = _gate(heads, unit.input_gate_weight, unit.input_gate_bias)
        decays = _gate(heads, unit.recurrent_gate_weight, unit.recurrent_gate_bias)
        log_decay = -SHARPNESS * decays * F.softplus(unit.recurrent_param.detach())
        scale = torch.where(reset[..., None], 1.0, (1 - (2 * log_decay).exp()).sqrt())
        log_decay = log_decay.masked_fill(reset[..., None], -torch.inf)
        ones = given.new_ones(given.shape[0], 1, given.shape[1], 1)
        step = enters * scale.to(given.dtype)
        operator = SemiseparableMixing(ones, ones, log_decay.transpose(1, 2), step.transpose(1, 2))
        output = call.output.detach().transpose(1, 2)[..., None]
        return MixingCall(operator, given.transpose(1, 2)[..., None], output, whole=True)


def _gate(heads: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """σ of a linear map inside each head, (B, T, D)."""
    return torch.sigmoid(torch.einsum("bthi,hio->btho", heads, weight.detach()) + bias.detach()).flatten(2)
