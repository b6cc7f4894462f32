"""The part `blocks`: fewer layers, as a plain checkpoint."""

import copy
import functools
import math
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.compression.compression_cases import (
    BART,
    GPT,
    IDS,
    SIZES,
    VOCABULARY,
    bert,
    ids,
    in_steps,
    llama,
    made,
    opt,
    output,
    sharpened,
    siglip,
)
from tests.compression.test_heads import own_words
from tests.support.documents import compression_document
from tests.support.untouched import untouched
from torch import Tensor, nn

import rankwise as rw
from rankwise.compression.blocks_find import find, removal
from rankwise.compression.blocks_repair import repair
from rankwise.errors import CompressionError
from rankwise.importance.ablation import passes_without_blocks

FOUR: dict[str, Any] = {**SIZES, **IDS, "num_hidden_layers": 4, "num_key_value_heads": 2}
SLIDING: dict[str, Any] = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
PICTURES: dict[str, Any] = {
    "image_size": 16, "patch_size": 4, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "mlp_ratio": 1,
}  # fmt: skip
BATCH = ids(2, 12)
PAIR = BATCH | {"decoder_input_ids": ids(2, 7, 3)["input_ids"]}
IMAGES = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}


def gemma3(**sizes: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(**{**FOUR, **SLIDING, "head_dim": 8, **sizes})
    return sharpened(transformers.Gemma3ForCausalLM(config))


def qwen2_moe() -> nn.Module:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return made("Qwen2Moe", **FOUR, **sizes, shared_expert_intermediate_size=16)


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 3}
    config = transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config).eval()


def bart() -> nn.Module:
    return made("Bart", "ForConditionalGeneration", **BART | {"encoder_layers": 3, "decoder_layers": 3})


FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    # as many heads as layers: the number of heads must stay
    "bert": (partial(made, "Bert", "Model", **{**SIZES, "num_hidden_layers": 4}), BATCH),
    "gpt2": (partial(made, "GPT2", "LMHeadModel", **{**GPT, "n_layer": 4}, n_positions=64), BATCH),
    "llama": (partial(llama, 4), BATCH),
    "qwen2": (
        partial(made, "Qwen2", **FOUR, use_sliding_window=True, sliding_window=5, max_window_layers=2),
        BATCH,
    ),
    "gemma3": (gemma3, BATCH),
    "qwen2 moe": (qwen2_moe, BATCH),
    "opt": (opt, BATCH),
    "siglip": (siglip, IMAGES),
    "dinov2": (partial(made, "Dinov2", "Model", **PICTURES), IMAGES),
    "t5": (t5, PAIR),
    "bart": (bart, PAIR),
}
DECODERS = ("gpt2", "llama", "qwen2", "gemma3", "qwen2 moe", "opt")


def without(model: nn.Module, names: Iterable[str], batch: dict[str, Tensor]) -> Tensor:
    """Output of a model whose blocks `names` return their input: the reference for a smaller model."""

    def skip(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        states = args[0] if args else kwargs["hidden_states"]
        return (states, *result[1:]) if isinstance(result, tuple) else states

    handles = [model.get_submodule(name).register_forward_hook(skip, with_kwargs=True) for name in names]
    try:
        return output(model, batch)
    finally:
        for handle in handles:
            handle.remove()


@functools.cache
def found(family: str) -> Any:
    make, batch = FAMILIES[family]
    model = make()
    return model, *find(model, batch)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=2, deadline=None)
@given(data=st.data())
def test_a_smaller_model_is_the_model_with_skipped_blocks_and_its_class_loads_it(
    family: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, stacks, _ = found(family)
    batch, before = FAMILIES[family][1], output(model, FAMILIES[family][1])
    plan = {
        stack.name: data.draw(
            st.sets(
                st.sampled_from(stack.removable),
                min_size=len(stacks) == 1,
                max_size=min(2, stack.size - 1),
            )
        )
        for stack in stacks
    }
    if family == "gemma3":  # at least one block of each kind must stay
        plan["model.layers"] -= {3}
    gone = [f"{stack}.{number}" for stack, numbers in plan.items() for number in numbers]
    expected = without(model, gone, batch)
    with untouched(model):
        change = removal(model, stacks, plan)
        with change:
            assert torch.equal(output(model, batch), expected)
            for stack in stacks:
                assert len(model.get_submodule(stack.name)) == stack.size - len(plan[stack.name])
            folder = tmp_path_factory.mktemp("plain")
            model.save_pretrained(folder)
            again = type(model).from_pretrained(folder, attn_implementation=model.config._attn_implementation)
            # Loaded weights can be aligned otherwise in memory, and then products sum in another order.
            close = partial(torch.allclose, rtol=0, atol=64 * torch.finfo().eps * float(expected.abs().max()))
            if family in DECODERS:
                assert close(in_steps(model, batch)[0], in_steps(again, batch)[0])
    assert close(output(again, batch), expected)
    assert torch.equal(output(model, batch), before)


@pytest.mark.parametrize("remove", [1, 2, 3])
def test_an_encoder_decoder_without_blocks_generates(remove: int) -> None:
    """T5 sizes the cache of its decoder by the number of encoder blocks, here with one that costs nothing."""
    model: Any = t5()
    attention, mlp = model.encoder.block[1].layer
    for weight in (attention.SelfAttention.o.weight, mlp.DenseReluDense.wo.weight):
        weight.data.zero_()
    data = PAIR | {"labels": output(model, PAIR).argmax(-1)}
    costs = {block.site: block for block in rw.compress(model, [data], parts="blocks", remove=remove).blocks}
    assert not any(block.cost < costs["encoder.block.1"].cost for block in costs.values())
    assert costs["encoder.block.1"].step == (0 if remove == 1 else 2)
    left = model.config.num_layers, model.config.num_decoder_layers
    assert left[0] >= left[1]
    assert sum(left) == 6 - remove
    assert len(model.generate(PAIR["input_ids"], max_new_tokens=3)) == len(PAIR["input_ids"])


@pytest.mark.parametrize(
    ("family", "gone", "fields"),
    [
        ("bert", {1, 2}, {"num_hidden_layers": 2, "num_attention_heads": 4}),
        ("qwen2", {0, 3}, {"layer_types": ["full_attention", "sliding_attention"]}),
        ("dinov2", {0, 2}, {"stage_names": ["stem", "stage1", "stage2"], "out_indices": [2]}),
        ("t5", {1}, {"num_layers": 2, "num_decoder_layers": 3, "num_heads": 3}),
    ],
)
def test_fields_of_the_configuration_follow_the_blocks(
    family: str, gone: set[int], fields: dict[str, Any]
) -> None:
    model, stacks, _ = found(family)
    with removal(model, stacks, {stacks[0].name: gone}):
        assert {name: getattr(model.config, name) for name in fields} == fields


def hybrid() -> nn.Module:
    """Roles depend on numbers of layers: every second block has experts."""
    sizes: dict[str, Any] = {"num_experts": 2, "expert_layer_period": 2, "expert_layer_offset": 1}
    return made("Jamba", **FOUR, **sizes, attn_layer_period=1, attn_layer_offset=0)


def one_full() -> nn.Module:
    return gemma3(layer_types=["full_attention", *["sliding_attention"] * 3])


@pytest.mark.parametrize(
    ("make", "batch", "reasons"),
    [
        (t5, PAIR, {f"{side}.block.0": "relative_attention_bias" for side in ("encoder", "decoder")}),
        (one_full, BATCH, {"model.layers.0": "'model.rotary_emb.full_attention_inv_freq' with nothing"}),
        (hybrid, BATCH, {f"model.layers.{number}": "builds other modules" for number in range(3)}),
    ],
)
def test_blocks_with_another_role_stay_and_the_reason_is_named(
    make: Callable[[], nn.Module], batch: dict[str, Tensor], reasons: dict[str, str]
) -> None:
    model = make()
    done = rw.compress(model, [batch], remove=1)
    assert done.left_out.keys() == reasons.keys()
    assert all(words in done.left_out[name] for name, words in reasons.items())
    known = {block.site for block in done.blocks if not math.isnan(block.cost)}
    assert known == {block.site for block in done.blocks} - reasons.keys()


def loss(model: nn.Module, batch: dict[str, Tensor], gone: Iterable[str] = ()) -> float:
    logits = without(model, gone, {"input_ids": batch["input_ids"]})[:, :-1].flatten(0, 1)
    return float(nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten()))


@functools.cache
def decided() -> tuple[nn.Module, dict[str, Tensor]]:
    """A decoder that predicts its text, so that each block matters."""
    torch.manual_seed(0)
    sizes = {**GPT, "n_layer": 6}
    config = transformers.GPT2Config(**sizes, n_positions=64, initializer_range=0.4)
    model = transformers.GPT2LMHeadModel(config).eval()
    return model, own_words(model, ids(8, 24))


def greedy(model: nn.Module, batch: dict[str, Tensor], count: int) -> list[tuple[str, float]]:
    """Blocks in the order of removal with their joint costs: all others are run before each step."""
    names = [f"transformer.h.{number}" for number in range(6)]
    gone: list[tuple[str, float]] = []
    for _ in range(count):
        taken = [name for name, _ in gone]
        costs = {name: loss(model, batch, [*taken, name]) for name in names if name not in taken}
        name = min(costs, key=costs.__getitem__)
        gone.append((name, costs[name] - loss(model, batch)))
    return gone


def compressed(**options: Any) -> tuple[nn.Module, rw.compression.Compression]:
    original, batch = decided()
    model = type(original)(original.config).eval()
    model.load_state_dict(original.state_dict())
    return model, rw.compress(model, [batch], parts="blocks", **options)


def test_blocks_are_removed_greedily_by_their_measured_joint_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.compression.blocks_solve.TRIES", 6)
    monkeypatch.setattr("rankwise.compression.blocks_solve.repair", lambda *_: {})
    original, batch = decided()
    model, done = compressed(remove=3)
    removed = sorted((block for block in done.blocks if block.step), key=lambda block: block.step)
    expected = greedy(original, batch, 3)
    assert [block.site for block in removed] == [name for name, _ in expected]
    assert [block.joint_cost for block in removed] == pytest.approx([cost for _, cost in expected], abs=1e-5)
    alone = [loss(original, batch, [block.site]) - loss(original, batch) for block in done.blocks]
    assert [block.cost for block in done.blocks] == pytest.approx(alone, abs=1e-5)
    assert done.worst.loss_added == pytest.approx(removed[-1].joint_cost, abs=1e-5)
    assert len(model.transformer.h) == model.config.n_layer == 3
    sentence = compression_document(done).verdict.sentence
    assert sentence.startswith(
        f"3 of 6 blocks removed: loss {done.worst.loss_before:.4f} → {done.worst.loss_after:.4f}"
    )


@pytest.mark.parametrize(("keep", "left"), [(0.67, 5), (0.9, 6)])
def test_a_share_keeps_at_least_as_many_blocks(keep: float, left: int) -> None:
    model, done = compressed(keep=keep)
    assert len(model.transformer.h) == left
    assert any("nothing was removed" in note for note in done.notes) == (left == 6)


@pytest.mark.parametrize("count", [0, 2])
def test_a_tolerance_bounds_the_joint_cost(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rankwise.compression.blocks_solve.TRIES", 6)
    original, batch = decided()
    costs = [cost / loss(original, batch) for _, cost in greedy(original, batch, count + 1)]
    _, done = compressed(tolerance=(costs[count - 1] + costs[count]) / 2 if count else costs[0] / 2)
    assert sum(block.step > 0 for block in done.blocks) == count


@pytest.mark.parametrize(("family", "stack"), [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_the_repair_is_a_weighted_least_squares_fit(family: str, stack: str) -> None:
    model, stacks, _ = found(family)
    batch, layer = ids(8, 24), {"llama": "mlp.down_proj", "gpt2": "mlp.c_proj"}[family]
    rows: dict[str, Tensor] = {}

    def keep(name: str, tensor: Any) -> None:
        rows[name] = (tensor[0] if isinstance(tensor, tuple) else tensor).double().flatten(0, 1)

    blocks = [model.get_submodule(f"{stack}.{number}") for number in range(4)]
    handles = [
        blocks[0].get_submodule(layer).register_forward_hook(lambda _, args, output: keep("h", args)),
        blocks[0].register_forward_hook(lambda _, args, output: keep("before", output)),
        blocks[2].register_forward_hook(lambda _, args, output: keep("after", output)),
    ]
    output(model, batch)
    for handle in handles:
        handle.remove()
    bias = blocks[0].get_submodule(layer).bias is not None
    inputs = torch.cat([rows["h"], torch.ones(len(rows["h"]), 1)], 1) if bias else rows["h"]
    scale = 1 / rows["after"].norm(dim=1, keepdim=True)
    scaled, target = inputs * scale, (rows["after"] - rows["before"]) * scale
    ridge = (0.01 * scaled.square().sum(0).mean()).sqrt() * torch.eye(inputs.shape[1])
    stacked = torch.cat([scaled, ridge]), torch.cat([target, torch.zeros(len(ridge), target.shape[1])])
    added = torch.linalg.lstsq(*(matrix.double() for matrix in stacked)).solution
    with untouched(model):
        layers: Any = repair(passes_without_blocks(model, [batch]), stacks, {stack: {1, 2}})
    assert list(layers) == [f"{stack}.0.{layer}"]
    new, old = layers[f"{stack}.0.{layer}"], blocks[0].get_submodule(layer)
    change = (new.weight - old.weight).detach()
    expected = added[:48].T if family == "llama" else added[: change.shape[0]]
    # states in float32 carry a relative error of EPS, which the condition of the ridge magnifies to 1/√0.01
    assert float((change - expected).norm() / expected.norm()) < 1e-3
    assert not bias or float((new.bias - old.bias - added[-1]).detach().norm() / added[-1].norm()) < 1e-3


@pytest.mark.parametrize("family", ["bert", "gemma3"])
def test_a_repair_brings_states_nearer_to_the_states_after_the_gap(family: str) -> None:
    """BERT and Gemma 3 have a norm after the last layer."""
    model, stacks, _ = found(family)
    batch = ids(8, 24)
    block, gone = stacks[0].block(0), stacks[0].block(1)
    states: list[Tensor] = []
    reads = [block, gone, block]
    with untouched(model):
        layers = repair(passes_without_blocks(model, [batch]), stacks, {stacks[0].name: {1}})
    assert len(layers) == 1
    for name, change in zip(reads, ({}, {}, layers), strict=True):
        changed = copy.deepcopy(model)
        for layer, module in change.items():
            changed.set_submodule(layer, module)
        with rw.capture(changed) as trace:
            output(changed, batch)
        states += [state.tokens for state in trace.states if state.layer and state.name == name]
    plain, target, repaired = states
    errors = [(near - target).norm(dim=-1) / target.norm(dim=-1) for near in (plain, repaired)]
    assert float(errors[1].square().mean()) < 0.9 * float(errors[0].square().mean())


@pytest.mark.parametrize(("family", "plan"), [("qwen2 moe", {1}), ("llama", {0})])
def test_experts_and_gaps_at_the_start_are_not_repaired(family: str, plan: set[int]) -> None:
    model, stacks, _ = found(family)
    batch = ids(4, 20)
    assert not repair(passes_without_blocks(model, [batch]), stacks, {stacks[0].name: plan})


@pytest.mark.parametrize("helps", [True, False])
def test_a_repair_is_kept_only_if_it_helps_on_held_out_data(
    helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, _ = decided()
    if not helps:
        monkeypatch.setattr("rankwise.compression.blocks_solve.repair", worse)
    model, done = compressed(remove=1, held_out=[own_words(original, ids(8, 24, 5))])
    [gone] = [block.layer for block in done.blocks if block.step]
    left = [number for number in range(6) if number != gone]
    kept = [
        torch.equal(new.mlp.c_proj.weight, original.transformer.h[number].mlp.c_proj.weight)
        for number, new in zip(left, model.transformer.h, strict=True)
    ]
    assert kept == [not helps or number != gone - 1 for number in left]
    [note] = [note for note in done.notes if note.startswith("Repair")]
    after, before = (float(number) for number in re.findall(r"rises by (\S+) instead of (\S+) on", note)[0])
    assert ("(kept)" in note) == (after < before) == helps
    assert done.worst.loss_added == pytest.approx(min(after, before), abs=1e-3)


def worse(passes: Any, stacks: Any, plan: Any) -> dict[str, nn.Module]:
    """A repair that doubles the output of the last layer before the first gap."""
    name = f"transformer.h.{min(plan['transformer.h']) - 1}.mlp.c_proj"
    layer: Any = copy.deepcopy(passes.model.get_submodule(name))
    layer.weight.data.mul_(4)
    return {name: layer}


def test_half_precision_and_a_wrapped_model_are_compressed_in_the_same_way() -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(**batch)[0]

    inner = made("Bert", "Model", **{**SIZES, "num_hidden_layers": 4}).to(torch.bfloat16)
    done = rw.compress(Wrapper(inner).eval(), [{"batch": ids(8, 20)}], remove=2)
    assert inner.config.num_hidden_layers == len(inner.encoder.layer) == 2
    assert {weight.dtype for weight in inner.parameters()} == {torch.bfloat16}
    assert {block.site for block in done.blocks} == {f"inner.encoder.layer.{number}" for number in range(4)}


@pytest.mark.parametrize(
    ("make", "batch", "options", "said"),
    [
        (bert, BATCH, {"remove": 0}, "`remove`: expected a whole number of at least 1, got 0"),
        (bert, BATCH, {"remove": 2}, "`remove`: expected at most 1 of 2 blocks removed, got 2"),
        (bert, BATCH, {"remove": True}, "`remove`: expected a whole number of at least 1, got True"),
        (bert, BATCH, {"remove": 1, "parts": "heads"}, "part 'heads': expected .*, got none"),
        (bert, BATCH, {"remove": 1, "keep": 0.5}, "part 'blocks': expected .*, got keep and remove"),
        (t5, PAIR, {"keep": 0.1, "parts": "blocks"}, "`keep`: expected at most 4 of 6 blocks .* removes 5"),
        (llama, BATCH, {"remove": 1}, "got model.layers.0: it is the only block of its stack"),
        (
            lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval(),
            torch.randn(2, 5, 8),
            {"remove": 1},
            "layers.0: no field of a configuration of transformers is the number of blocks",
        ),
        (
            lambda: made("Albert", "Model", **SIZES, embedding_size=16),
            BATCH,
            {"remove": 1},
            "do not run once each",
        ),
    ],
)
def test_requests_that_no_blocks_fulfill_are_refused(
    make: Callable[[], nn.Module], batch: Any, options: dict[str, Any], said: str
) -> None:
    model = make()
    with untouched(model), pytest.raises(CompressionError, match=said):
        rw.compress(model, [batch], **options)
