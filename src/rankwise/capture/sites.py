"""From an attention call to the site a reader gets."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from rankwise.capture.calls import Call
from rankwise.capture.chains import snapshot
from rankwise.capture.frames import Frame
from rankwise.capture.layout import sequences_behind
from rankwise.capture.padding import is_cross, valid_positions
from rankwise.capture.trace import MixerSite


def mixer_site(call: Call, frames: Sequence[Frame], kind: str, run: int, values: bool) -> MixerSite:
    """What is known of a call where it happened; its stack and layer are still to come.

    Args:
        call: what it mixed with.
        frames: the calls of modules around it, outermost first.
        kind: the field's name for the mixer.
        run: number of the forward pass.
        values: whether to keep what it was applied to and gave, safe from later changes in place.
    """
    operator = call.operator
    with torch._C.DisableTorchFunction(), torch.no_grad():
        cross = is_cross(frames, operator) if call.cross is None else call.cross
        if call.lengths is None:
            tokens, sources = valid_positions(frames, operator, cross)
        else:
            added = operator.shape[-1] - operator.shape[-2]
            tokens, sources = call.lengths, F.pad(call.lengths, (0, added), value=True)
        return MixerSite(
            name=frames[-1].name,
            layer=-1,
            kind=kind,
            operator=operator,
            valid_tokens=tokens,
            valid_sources=sources,
            cross=cross,
            sequences=operator.shape[0] if call.whole else sequences_behind(frames, operator),
            run=run,
            values=_kept(call.values) if values else None,
            output=_kept(call.output) if values else None,
            finish=call.finish if values else None,
            path=call.path if values else None,
            projection=call.projection,
        )


def _kept(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else snapshot(tensor)
