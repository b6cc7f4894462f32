"""Models under real conditions: with caches, in half precision, checkpointed, compiled, offloaded."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from capture_zoo import (
    HEADS,
    Attention,
    Block,
    Stack,
    attention_block,
    fused,
    heads_of,
    hidden,
    kind,
    merged,
    plain,
    scores,
    seen,
    stack_of,
)
from experiments.zoo.transformers import FAMILIES, LLAMA, TOKEN_IDS
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rankwise as rw
from rankwise.errors import CaptureError, SkipError
from rankwise.tracing import compiled_modules

by_name = {family.name: family for family in FAMILIES}
both_mixes = pytest.mark.parametrize("mix", [plain, fused])


def llama(how="sdpa"):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TOKEN_IDS | LLAMA, attn_implementation=how)
    return transformers.LlamaForCausalLM(config).eval()


def layers_of(records):
    return [record.layer for record in records]


# --- caches -------------------------------------------------------------------------------------------------

PROMPT, KEEP = torch.randint(5, 60, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_each_step_of_generation_is_a_forward_pass(how):
    model = llama(how)
    given = {"attention_mask": KEEP, "max_new_tokens": 4, "do_sample": False}
    alone = model.generate(PROMPT, **given)
    with rw.capture(model) as trace:
        captured = model.generate(PROMPT, **given)
    assert torch.equal(alone, captured)
    assert [site.forward_pass for site in trace.mixers] == [step for step in range(4) for _ in range(3)]
    assert layers_of(trace.mixers) == [0, 1, 2] * 4
    assert not any(site.cross for site in trace.mixers)
    for site in trace.mixers:
        tokens, sources = 5 if site.forward_pass == 0 else 1, 5 + site.forward_pass
        assert site.operator.shape == (2, 4, tokens, sources)  # also where one token's heads are packed
        real = torch.cat([KEEP.bool(), torch.ones(2, site.forward_pass, dtype=torch.bool)], 1)
        assert torch.equal(site.valid_sources, real)
        assert torch.equal(site.valid_tokens, real[:, -tokens:])
        sums = site.operator.dense().sum(-1)
        assert (sums[site.valid_tokens[:, None].expand_as(sums)] - 1).abs().max() < 1e-5
    assert layers_of(trace.states) == [0, 1, 2, 3] * 4


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_a_step_with_a_cache_is_the_last_row_of_the_whole_matrix(how):
    model, ids = llama(how), torch.randint(5, 60, (1, 6))
    whole = seen(model, ids, use_cache=False)
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
        with rw.capture(model) as step:
            model(ids[:, 5:], past_key_values=cache)
    for one, last in zip(whole.mixers, step.mixers, strict=True):
        assert (one.operator.dense()[:, :, -1:] - last.operator.dense()).abs().max() < 1e-5


def test_unused_columns_of_a_static_cache_are_not_valid():
    model = llama()
    with rw.capture(model) as trace:
        model.generate(PROMPT, max_new_tokens=3, do_sample=False, cache_implementation="static")
    assert {site.operator.shape[-1] for site in trace.mixers if site.forward_pass} == {7}
    assert [int(site.valid_sources[0].sum()) for site in trace.mixers[::3]] == [5, 6, 7]
    assert all(site.valid_tokens.all() for site in trace.mixers)


def test_a_later_run_with_the_same_static_cache_changes_no_operator():
    import transformers

    model, first, second = llama(), *torch.randint(5, 60, (2, 1, 5))
    alone = seen(model, first, use_cache=False)
    cache = transformers.StaticCache(model.config, max_cache_len=5)
    with torch.no_grad(), rw.capture(model) as trace:
        model(first, past_key_values=cache)
        cache.reset()
        model(second, past_key_values=cache)
    for site, own in zip(trace.mixers, alone.mixers, strict=False):
        assert (site.operator.dense() - own.operator.dense()).abs().max() < 1e-5


def test_queries_and_keys_that_the_model_overwrites_change_no_operator():
    class Overwriting(nn.Module):
        def forward(self, x):
            q, k, v = x.sigmoid(), x.tanh().exp(), 1 * x
            mixed = F.scaled_dot_product_attention(q, k, v)
            self.weights = (q @ k.mT / x.shape[-1] ** 0.5).softmax(-1)
            q.zero_()
            k.zero_()
            return mixed

    model = nn.Sequential(Overwriting())
    (site,) = seen(model, torch.randn(2, 7, 8)).mixers
    assert (site.operator.dense()[:, 0] - model[0].weights).abs().max() < 1e-5


def test_an_encoder_decoder_runs_its_encoder_once_while_it_generates():
    import transformers

    config = by_name["T5"].build("sdpa").config
    config.decoder_start_token_id = 0
    model = transformers.T5ForConditionalGeneration(config).eval()
    with rw.capture(model) as trace:
        model.generate(PROMPT, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert [site.stack == "encoder.block" for site in trace.mixers] == [True] * 3 + [False] * 18
    steps = [(site.forward_pass, site.cross, tuple(site.operator.shape[-2:])) for site in trace.mixers[3:]]
    assert steps == [
        place for at in range(3) for _ in range(3) for place in ((at, False, (1, at + 1)), (at, True, (1, 5)))
    ]


# --- precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["BERT", "Llama", "T5", "Swin", "Gemma-2", "nanoGPT style"])
def test_half_precision_changes_no_output(name, dtype):
    family = by_name[name]
    model = family.build(family.implementations[0]).to(dtype)
    batch = {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in family.inputs().items()
    }
    trace = seen(model, **batch)
    assert len(trace.mixers) == family.mixers
    for site in trace.mixers:
        matrix = site.operator.dense()
        assert matrix.dtype == torch.float32
        values = site.values.repeat_interleave(matrix.shape[1] // site.values.shape[1], 1)
        # The model rounds queries, keys and weights to its own precision: scores of size ≤ 100.
        error = (matrix @ values.float() - site.output.float()).abs().max() / values.float().abs().max()
        assert error < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["BERT", "Llama", "torch TransformerEncoder", "nanoGPT style"])
def test_autocast_changes_no_output(name):
    family = by_name[name]
    with torch.autocast("cpu", torch.bfloat16):
        trace = seen(family.build(family.implementations[0]), **family.inputs())
    assert len(trace.mixers) == family.mixers
    assert {site.operator.dtype for site in trace.mixers} <= {torch.bfloat16, torch.float32}


def test_inference_mode_changes_no_output():
    with torch.inference_mode():
        assert len(seen(stack_of(), hidden()).states) == 4


# --- training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_records_each_block_once(reentrant):
    model = llama().train()
    with warnings.catch_warnings():  # renamed in transformers 5.x, the old name stays until 6
        warnings.simplefilter("ignore", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    alone = model(PROMPT, labels=PROMPT).loss
    alone.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with rw.capture(model) as trace:
        loss = model(PROMPT, labels=PROMPT).loss
        loss.backward()
    assert torch.equal(alone, loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    assert layers_of(trace.mixers) == [0, 1, 2]
    assert layers_of(trace.states) == [0, 1, 2, 3]
    assert trace.notes == []


class Checkpointed(Stack):
    """Every block runs again in the backward pass."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm(x)


@both_mixes
@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_run_again_in_the_backward_pass_are_recorded_once(mix, reentrant):
    model = Checkpointed(lambda: Block(Attention(mix)))
    model.reentrant, runs = reentrant, []
    model.blocks[0].register_forward_pre_hook(lambda *given: runs.append(1))
    with rw.capture(model) as trace:
        torch.autograd.backward([model(hidden().requires_grad_()).sum()])
    assert len(runs) == 2
    assert layers_of(trace.mixers) == [0, 1, 2]
    assert layers_of(trace.states) == [0, 1, 2, 3]
    assert {site.forward_pass for site in trace.mixers} == {0}


class Dropping(nn.Module):
    """A block with dropout by a module, or by the fused function."""

    def __init__(self, fuse):
        super().__init__()
        self.attention = Attention(self.fused if fuse else self.plain)
        self.drop = nn.Dropout(0.0 if fuse else 0.3)

    def plain(self, q, k, v):
        return self.drop((q @ k.mT).softmax(-1)) @ v

    def fused(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)

    def forward(self, x):
        return x + self.attention(x)


@pytest.mark.parametrize("fuse", [False, True])
def test_dropout_is_noted_and_not_part_of_the_operator(fuse):
    model, x = Stack(lambda: Dropping(fuse), 2).train(), hidden()
    torch.manual_seed(1)
    alone = model(x)
    torch.manual_seed(1)
    with rw.capture(model) as trace:
        captured = model(x)
    assert torch.equal(alone, captured)
    (note,) = trace.notes
    assert "dropout was active in" in note
    assert "call model.eval()" in note
    for site in trace.mixers:
        assert (site.operator.dense().sum(-1) - 1).abs().max() < 1e-5
    assert seen(model.eval(), x).notes == []


@pytest.mark.parametrize(
    "drop",
    [
        lambda weights: nn.Dropout(0.5)(weights),  # made in the forward pass, it is in training mode
        lambda weights: F.dropout(weights, 0.5),
        lambda weights: torch.dropout(input=weights, p=0.5, train=True),
        lambda weights: F.dropout(F.dropout2d(weights, training=False), 0.0),
    ],
)
def test_dropout_in_evaluation_mode_is_noted(drop):
    def forward(self, x):
        q = heads_of(x)
        self.changed = drop(torch.ones(1, 1, 8, 8))
        return x + merged(drop(scores(q, q).softmax(-1)) @ q)

    model, x = kind(forward)().eval(), hidden()
    with rw.capture(model) as trace:
        model(x)
    notes = [note for note in trace.notes if "dropout was active" in note]
    assert len(notes) == bool((model.changed != 1).any())
    assert all("training=self.training" in note for note in notes)
    weights = scores(heads_of(x), heads_of(x)).softmax(-1)
    assert (trace.mixers[0].operator.dense() - weights).abs().max() < 1e-6


def test_functional_gradients_are_unchanged():
    model, x = stack_of(), hidden()
    parameters = dict(model.named_parameters())

    def loss(given):
        return torch.func.functional_call(model, given, (x,)).sum()

    alone = torch.func.grad(loss)(parameters)
    with rw.capture(model) as trace:
        captured = torch.func.grad(loss)(parameters)
    assert all(torch.equal(alone[name], captured[name]) for name in alone)
    assert len(trace.mixers) == 3


# --- compiled, scripted, offloaded --------------------------------------------------------------------------


def compiled(how):
    model = stack_of()
    if how == "wrapped":
        return torch.compile(model, backend="eager")
    (model.blocks[1] if how == "a part" else model).compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("how", "name"), [("wrapped", "OptimizedModule"), ("in place", "Stack"), ("a part", r"blocks\.1")]
)
def test_a_compiled_model_is_an_error_with_a_remedy(how, name):
    model = compiled(how)
    assert compiled_modules(model)
    with pytest.raises(CaptureError, match=rf"compiled module '{name}'.*set_stance\(\"force_eager\"\)"):
        rw.capture(model)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), rw.capture(model) as trace:
        model(hidden())
    assert [site.name for site in trace.mixers] == [f"blocks.{at}.attention" for at in range(3)]
    assert len(trace.states) == 4


@pytest.mark.parametrize(("backend", "visible"), [("eager", True), ("aot_eager", False)])
def test_a_function_compiled_inside_a_model_computes_the_same(backend, visible):
    """Its attention is captured if its operations run one by one, and reported otherwise."""
    parts = [Block(Attention(torch.compile(mix, backend=backend))) for mix in (plain, fused)]
    model, x = nn.Sequential(attention_block(), *parts).eval(), hidden()
    with torch.no_grad():
        before, trace, after = model(x), seen(model, x), model(x)
    torch.compiler.reset()
    assert torch.equal(before, after)
    inside = ["1.attention", "2.attention"]
    assert [site.name for site in trace.mixers] == ["0.attention", *(inside if visible else [])]
    assert [module.name for module in trace.uncaptured] == ([] if visible else inside)
    assert all("compiled" in module.reason for module in trace.uncaptured)
    assert layers_of(trace.states) == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "program", [torch.jit.trace, lambda model, x: torch.export.export(model, (x,)).module()]
)
def test_a_program_made_of_a_model_is_refused_by_every_verb(program):
    model, x = program(stack_of(fused, depth=1), hidden()), hidden()
    with pytest.raises(CaptureError, match="got a program of TorchScript or torch"):
        rw.capture(model)
    with pytest.raises(CaptureError, match="Pass the module that it was made of"):
        rw.compress(model, [x], keep=0.5)
    with pytest.raises(SkipError, match="Use the model itself first"):
        rw.add_lambda_skip(model, example=x)


@torch.library.custom_op("rankwise_tests::attention", mutates_args=())
def custom_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return plain(q, k, v)


def test_another_attention_kernel_is_reported():
    reason = r"blocks\.0\.attention \(Attention\), .*a fused kernel, a custom or compiled operation"
    with pytest.raises(CaptureError, match=reason):
        seen(stack_of(custom_attention), hidden())


@pytest.mark.parametrize(
    ("name", "way"),
    [  # accelerate cannot offload the third model: its layers read the weights of other modules
        *[(name, way) for name in ("BERT", "Llama") for way in ("offload", "dispatch")],
        ("torch TransformerEncoder", "dispatch"),
    ],
)
def test_models_with_device_hooks_are_captured(name, way):
    import accelerate

    family = by_name[name]
    model = family.build("sdpa")
    if way == "dispatch":
        places = {child: "cpu" for child, _ in model.named_children()}
        accelerate.dispatch_model(model, places, force_hooks=True)
    else:
        accelerate.cpu_offload(model, execution_device="cpu")
    trace = seen(model, **family.inputs())
    assert len(trace.mixers) == family.mixers
    assert len(trace.states) == family.states
    assert trace.uncaptured == trace.notes == []


# --- sizes --------------------------------------------------------------------------------------------------


@both_mixes
def test_one_token_of_one_sequence_is_captured(mix):
    trace = seen(stack_of(mix), hidden(1, 1))
    assert {tuple(site.operator.shape) for site in trace.mixers} == {(1, HEADS, 1, 1)}
    assert not any(site.cross for site in trace.mixers)
    assert all((site.operator.dense() == 1).all() for site in trace.mixers)


@both_mixes
@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
def test_calls_without_tokens_or_sequences_are_left_out(mix, batch, tokens):
    model = stack_of(mix)
    reason = pytest.raises(CaptureError, match="it was called with no tokens or no sequences")
    for further, expected in (([], reason), ([hidden()], nullcontext())):
        with torch.no_grad(), expected, rw.capture(model) as trace:
            for x in (hidden(batch, tokens), *further):
                model(x)
    assert {site.forward_pass for site in trace.mixers} == {1}
