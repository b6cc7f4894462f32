"""Hooks of λ-skips: generation, precisions, compilation, checkpoints, DDP, dropout and nested tensors."""

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from experiments.zoo.transformers import BERT, GPT, LLAMA, hugging_face, text_inputs
from tests.skips.cases import FOUND, outputs, same
from tests.support.modules import SelfAttention
from tests.support.torch_names import hook_stores
from tests.support.untouched import untouched
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from rankwise.skips import SkipError, Skips, add_lambda_skip, remove_lambda_skip, skips_of

LANGUAGE = {
    "BERT": hugging_face("BertForMaskedLM", "BertConfig", **BERT),
    "GPT-2": hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT),
    "Llama": hugging_face("LlamaForCausalLM", "LlamaConfig", **LLAMA),
}
families = pytest.mark.parametrize("name", LANGUAGE)
TEXT = text_inputs()


def with_skips(name: str, value: float = 0.8) -> tuple[nn.Module, Skips]:
    model = LANGUAGE[name]()
    return model, filled(add_lambda_skip(model), value)


def filled(skips: Skips, value: float) -> Skips:
    for parameter in skips.values():
        parameter.data.fill_(value)
    return skips


def gradients(model: nn.Module, run: Callable[..., object] | None = None) -> list[Tensor]:
    model.zero_grad()
    (model if run is None else run)(**TEXT).logits.square().mean().backward()
    return [parameter.grad.clone() for parameter in skips_of(model).values()]


def all_close(first: list[Tensor], second: list[Tensor], rtol: float, atol: float = 1e-8) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.allclose(one, other, rtol=rtol, atol=atol) for one, other in pairs)


@pytest.mark.parametrize("name", ["GPT-2", "Llama"])
def test_generation_does_not_depend_on_the_cache(name: str) -> None:
    def generated(model: nn.Module, cache: bool) -> Tensor:
        return model.generate(**TEXT, max_new_tokens=5, do_sample=False, use_cache=cache)

    model, _ = with_skips(name)
    assert torch.equal(generated(model, True), generated(model, False))
    assert not torch.equal(generated(model, True), generated(LANGUAGE[name](), True))  # λ has an effect


@families
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, "autocast"])
def test_a_lambda_of_1_changes_nothing_in_other_precisions(name: str, dtype: Any) -> None:
    auto = dtype == "autocast"
    model = LANGUAGE[name]() if auto else LANGUAGE[name]().to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=auto):
        before = outputs(model, TEXT)
        skips = add_lambda_skip(model)
        assert same(outputs(model, TEXT), before)
    wide = torch.float32 if auto else torch.promote_types(dtype, torch.float32)
    assert {parameter.dtype for parameter in skips.values()} == {wide}


@families
def test_checkpointing_does_not_change_gradients(name: str) -> None:
    model, _ = with_skips(name)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = gradients(model)
    model.gradient_checkpointing_enable()
    assert all_close(plain, gradients(model), rtol=1e-4)  # float32 sums, possibly in another order


def test_models_with_skips_compile_to_one_graph() -> None:
    torch.compiler.reset()
    model = hugging_face("GPT2LMHeadModel", "GPT2Config", **GPT | {"n_layer": 1})()
    filled(add_lambda_skip(model), 0.8)
    eager = gradients(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all_close(gradients(model, compiled), eager, rtol=1e-3, atol=1e-5)
    assert all_close(outputs(compiled, TEXT), outputs(model, TEXT), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, fully_shard])
def test_lambda_is_trained_under_ddp_and_fsdp2(wrap: Callable[[nn.Module], nn.Module]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, skips = with_skips("GPT-2")
        alone = gradients(model)
        wrapped = wrap(model)
        sharded = [one.full_tensor() if wrap is fully_shard else one for one in gradients(model, wrapped)]
        assert all_close(sharded, alone, rtol=1e-5)
        before = {name: float(parameter.detach().mean()) for name, parameter in skips.items()}
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert all(float(parameter.detach().mean()) != before[name] for name, parameter in skips.items())
        del wrapped  # if DDP is the last to hold the process group, its end can wait for the GIL forever
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["GPT-2", "ViT"])
def test_dropout_acts_on_the_branch_alone(name: str) -> None:
    """If dropout removes all branches, three blocks without a norm on the residual return λ³·x."""
    model, batch = FOUND[name][0]()
    skips = filled(add_lambda_skip(model), 3.0)
    blocks = model.get_submodule(next(iter(skips.places.values())).block.rpartition(".")[0])
    states: list[Any] = []
    blocks[0].register_forward_pre_hook(lambda module, args: states.append(args[0]))
    blocks[-1].register_forward_hook(lambda module, args, out: states.append(out))
    model.train()
    for path, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.p = 1.0
        if "embed" in path or path == "drop":  # otherwise, the input of the blocks would be 0
            module.eval()
    model(**batch)
    last = states[1][0] if isinstance(states[1], tuple) else states[1]
    assert states[0].abs().max() > 0
    assert torch.allclose(last, 27 * states[0], rtol=1e-5, atol=1e-5)


def test_functional_dropout_is_noted() -> None:
    model, batch = FOUND["OPT"][0]()
    skips = add_lambda_skip(model, example=batch)
    assert any("in training, the dropout after decoder.layers.0.self_attn" in note for note in skips.notes)


def test_lambda_is_in_the_state_dict_and_is_converted() -> None:
    model, skips = with_skips("GPT-2", 0.3)
    keys = [key for key in model.state_dict() if key.endswith("lambda_skip")]
    assert len(keys) == len(skips) == 3
    model.to(torch.float64)
    assert {parameter.dtype for parameter in skips.values()} == {torch.float64}
    other, others = with_skips("GPT-2", 1.0)
    other.load_state_dict(model.state_dict())
    assert all(math.isclose(parameter.item(), 0.3, rel_tol=1e-6) for parameter in others.values())


def test_addition_and_removal_restore_modes_gradients_and_the_seed() -> None:
    model = LANGUAGE["GPT-2"]().train()
    model.transformer.h[1].eval()
    next(model.parameters()).requires_grad_(False)
    with untouched(model):
        add_lambda_skip(model)
        remove_lambda_skip(model)


class SeveralForms(nn.Module):
    """Causal mixer whose output is a tensor, a tuple or an output of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: Tensor, form: str) -> Any:
        y = self.map(x).tanh().cumsum(1)
        return {"tensor": y, "tuple": (y, x), "output": BaseModelOutput(last_hidden_state=y)}[form]


class SeveralFormsBlock(nn.Module):
    """Compute out(skip·x + mixer(norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer, self.out = nn.LayerNorm(8), SeveralForms(), nn.Linear(8, 8)
        self.skip = 1.0

    def forward(self, x: Tensor, form: str) -> Tensor:
        mixed = self.mixer(self.norm(x), form)
        mixed = mixed if form == "tensor" else mixed[0]
        return self.out(x + mixed if self.skip == 1 else self.skip * x + mixed)


@pytest.mark.parametrize(
    ("example", "forms"),
    [
        ("tensor", ["tensor", "tuple", "output"]),  # such as a tensor without a cache, and a tuple with one
        ("tuple", ["tensor", "tuple", "output"]),
        ("output", ["output"]),
    ],
)
def test_a_mixer_may_return_another_form_of_output_than_for_the_example(
    example: str, forms: list[str]
) -> None:
    model, x = SeveralFormsBlock().eval(), torch.randn(2, 5, 8)
    before = [model(x, form) for form in forms]
    skips = add_lambda_skip(model, example=(x, example))
    assert list(skips) == ["mixer"]
    assert same([model(x, form) for form in forms], before)
    filled(skips, 0.5)
    got = [model(x, form) for form in forms]
    remove_lambda_skip(model)
    model.skip = 0.5
    torch.testing.assert_close(got, [model(x, form) for form in forms])


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()


def padded() -> dict[str, Tensor]:
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    return {"src": torch.randn(2, 5, 8), "src_key_padding_mask": mask}


def test_lambda_acts_on_nested_tensors_of_padded_rows() -> None:
    model, batch = encoder(), padded()
    filled(add_lambda_skip(model, example=batch), 0.5)
    wanted = model(**batch)  # with gradients, torch makes no nested tensors
    with torch.no_grad():
        got = model(**batch)
    real = ~batch["src_key_padding_mask"]
    torch.testing.assert_close(got[real], wanted[real])


def test_a_lambda_per_channel_is_refused_on_nested_tensors() -> None:
    model, batch = encoder(), padded()
    add_lambda_skip(model, per="channel", example=batch)
    with torch.no_grad(), pytest.raises(SkipError, match="enable_nested_tensor=False"):
        model(**batch)


# --- stored residuals ------------------------------------------------------------------------------------


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


def test_a_part_that_runs_outside_its_block_uses_no_residual() -> None:
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
    hooks = [hook for module in model.modules() for hook in hook_stores(module)[0].values()]
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


def block_gradients(block: Checkpointed, x: Tensor) -> list[Tensor]:
    block.zero_grad()
    block(x.clone().requires_grad_()).square().sum().backward()
    return [parameter.grad.clone() for parameter in block.parameters()]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_block_needs_the_module_that_reads_the_residual(reentrant: bool) -> None:
    block, x = Checkpointed().eval(), torch.randn(2, 5, 8)
    add_lambda_skip(block, init=0.5, example=x)
    wanted = block_gradients(block, x)
    block.part, block.reentrant = "branch", reentrant
    assert all_close(wanted, block_gradients(block, x), rtol=1e-5, atol=1e-6)
    block.part = "mixer"
    with pytest.raises(SkipError, match=r"expected a checkpoint around the whole block"):
        block_gradients(block, x)


def test_checkpointed_blocks_with_dropout_have_their_skips_in_training_mode() -> None:
    """The backward pass of the search runs checkpointed blocks again, without dropout as the first time."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.dropout = SelfAttention(), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mix(self.dropout(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(3)])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    assert len(add_lambda_skip(Model().train(), example=torch.randn(2, 5, 8))) == 3
