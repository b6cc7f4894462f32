"""The stored residual of a λ-skip: each call, thread and recomputation has its own."""

import threading

import pytest
import torch
from experiments.zoo.transformers import LLAMA, hugging_face
from tests.support.modules import SelfAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankwise.skips import SkipError, add_lambda_skip

llama = hugging_face("LlamaModel", "LlamaConfig", **LLAMA)


def skipped_llama() -> nn.Module:
    model = llama()
    add_lambda_skip(model, init=0.5)
    return model


def test_threads_do_not_share_a_residual() -> None:
    """Two calls wait for each other after each has read its residual and before any adds it."""
    model = skipped_llama()
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


def test_a_part_that_runs_alone_does_not_use_a_residual() -> None:
    x = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    alone = []
    for model in (skipped_llama(), llama()):
        rotations = model.rotary_emb(x, torch.arange(5)[None])
        model.layers[0].input_layernorm(torch.randn(1, 3, 32))  # reads a residual that must not be used
        alone.append(model.layers[0].self_attn(x, position_embeddings=rotations, attention_mask=None)[0])
    assert torch.equal(*alone)


def test_a_call_that_fails_leaves_no_residual() -> None:
    model, ids = skipped_llama(), torch.arange(3, 9)[None]
    wanted = model(input_ids=ids)[0]
    fails = model.layers[0].self_attn.register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(input_ids=ids)
    fails.remove()
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    slots = [hook.held.slot for hook in hooks if hasattr(hook, "held")]
    assert len(slots) == 6  # two hooks before modules of each of three blocks
    assert all(slot.residual is None and not slot.open for slot in slots)
    assert torch.equal(model(input_ids=ids)[0], wanted)


class Checkpointed(nn.Module):
    """Block that checkpoints its mixer, or its branch: the mixer with the norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), SelfAttention(), nn.Linear(8, 8)
        self.part, self.reentrant = "none", False

    def forward(self, x: Tensor) -> Tensor:
        if self.part == "mixer":
            branch = checkpoint(self.mix, self.norm(x), use_reentrant=self.reentrant)
        elif self.part == "branch":
            branch = checkpoint(lambda y: self.mix(self.norm(y)), x, use_reentrant=self.reentrant)
        else:
            branch = self.mix(self.norm(x))
        return self.out(x + branch)


def gradients(block: Checkpointed, x: Tensor) -> list[Tensor]:
    block.zero_grad()
    block(x.clone().requires_grad_()).square().sum().backward()
    return [parameter.grad.clone() for parameter in block.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_block_needs_the_module_that_reads_the_residual(reentrant: bool) -> None:
    block, x = Checkpointed().eval(), torch.randn(2, 5, 8)
    add_lambda_skip(block, init=0.5, example=x)
    wanted = gradients(block, x)
    block.part, block.reentrant = "branch", reentrant
    for one, other in zip(wanted, gradients(block, x), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    block.part = "mixer"
    with pytest.raises(SkipError, match=r"expected a checkpoint around the whole block"):
        gradients(block, x)
