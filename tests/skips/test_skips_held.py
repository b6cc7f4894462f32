"""A residual on its way to where it is added: one for each call, each thread and each recomputation."""

import threading

import pytest
import torch
from experiments.zoo.transformers import LLAMA, hugging_face
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankwise.skips import SkipError, add_lambda_skip

llama = hugging_face("LlamaModel", "LlamaConfig", **LLAMA)


def llama_at(scale: float) -> nn.Module:
    model = llama()
    with torch.no_grad():
        for parameter in add_lambda_skip(model).values():
            parameter.fill_(scale)
    return model


def test_a_thread_is_not_given_the_residual_of_another() -> None:
    """Two calls meet where each has read its residual and none has added it."""
    model = llama_at(0.5)
    batches = [torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(at)) for at in (0, 1)]
    with torch.no_grad():
        wanted = [model(input_ids=ids)[0] for ids in batches]
    meeting = threading.Barrier(2, timeout=60)

    def meet(*given: object) -> None:
        meeting.wait()

    for layer in model.layers:
        layer.self_attn.register_forward_pre_hook(meet)
    got: dict[int, Tensor] = {}

    def run(at: int) -> None:
        with torch.no_grad():
            got[at] = model(input_ids=batches[at])[0]

    threads = [threading.Thread(target=run, args=(at,)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at in (0, 1):
        assert torch.allclose(got[at], wanted[at], rtol=1e-4, atol=1e-5)


def test_a_part_alone_does_not_use_what_another_left() -> None:
    model, plain = llama_at(0.5), llama()
    block, x = model.layers[0], torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    rotations = model.rotary_emb(x, torch.arange(5)[None])
    block.input_layernorm(torch.randn(1, 3, 32))
    alone, _ = block.self_attn(x, position_embeddings=rotations, attention_mask=None)
    wanted, _ = plain.layers[0].self_attn(x, position_embeddings=rotations, attention_mask=None)
    assert torch.equal(alone, wanted)


def test_a_call_that_fails_leaves_nothing() -> None:
    model = llama_at(0.5)
    ids = torch.arange(3, 9)[None]
    wanted = model(input_ids=ids)[0]
    block = model.layers[0]
    fails = block.self_attn.register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids)
    fails.remove()
    slots = [
        hook.held.slot
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if hasattr(hook, "held")
    ]
    assert len(slots) == 6  # two hooks before modules of each of three blocks
    assert all(slot.residual is None and not slot.open for slot in slots)
    assert torch.equal(model(input_ids=ids)[0], wanted)


class Attention(nn.Module):
    """Attention of one argument."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Block(nn.Module):
    """A block that can checkpoint its mixer alone, or the norm with it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), Attention(), nn.Linear(8, 8)
        self.part, self.reentrant = "none", False

    def forward(self, x: Tensor) -> Tensor:
        if self.part == "mixer":
            branch = checkpoint(self.mix, self.norm(x), use_reentrant=self.reentrant)
        elif self.part == "branch":
            branch = checkpoint(lambda y: self.mix(self.norm(y)), x, use_reentrant=self.reentrant)
        else:
            branch = self.mix(self.norm(x))
        return self.out(x + branch)


def gradients(block: Block, x: Tensor) -> list[Tensor]:
    block.zero_grad()
    block(x.clone().requires_grad_()).square().sum().backward()
    return [parameter.grad.clone() for parameter in block.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_within_a_block(reentrant: bool) -> None:
    torch.manual_seed(0)
    block, x = Block().eval(), torch.randn(2, 5, 8)
    add_lambda_skip(block, init=0.5, example=x)
    wanted = gradients(block, x)
    block.part, block.reentrant = "branch", reentrant
    for one, other in zip(wanted, gradients(block, x), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    block.part = "mixer"
    with pytest.raises(SkipError, match=r"expected a checkpoint around the whole block"):
        gradients(block, x)
