"""Models as they are really run: with caches, in half precision, checkpointed, compiled, offloaded."""

import warnings

import pytest
import torch
from capture_zoo import HEADS, WIDTH, Attention, Block, Stack, fused, hidden, plain, stack_of
from experiments.families import FAMILIES
from experiments.tiny_models import LLAMA, TOKEN_IDS
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import rankwise as rw
from rankwise.errors import CaptureError
from rankwise.tracing import compiled_modules

by_name = {family.name: family for family in FAMILIES}


def llama(how="sdpa", **settings):
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TOKEN_IDS | LLAMA | settings, attn_implementation=how)
    return transformers.LlamaForCausalLM(config).eval()


# --- caches -------------------------------------------------------------------------------------------------

PROMPT, KEEP = torch.randint(5, 60, (2, 5)), torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_generation_with_a_cache(how):
    model = llama(how)
    given = {"attention_mask": KEEP, "max_new_tokens": 4, "do_sample": False}
    alone = model.generate(PROMPT, **given)
    with rw.capture(model) as trace:
        watched = model.generate(PROMPT, **given)
    assert torch.equal(alone, watched)
    assert [(site.forward_pass, site.layer) for site in trace.mixers] == [
        (r, at) for r in range(4) for at in range(3)
    ]
    assert not any(site.cross for site in trace.mixers)
    for site in trace.mixers:
        tokens = 5 if site.forward_pass == 0 else 1
        sources = 5 + site.forward_pass
        assert site.operator.shape == (2, 4, tokens, sources)  # also where one token's heads are packed
        real = torch.cat([KEEP.bool(), torch.ones(2, site.forward_pass, dtype=torch.bool)], 1)
        assert torch.equal(site.valid_sources, real)
        assert torch.equal(site.valid_tokens, real[:, -tokens:])
        sums = site.operator.dense().sum(-1)
        assert (sums[site.valid_tokens[:, None].expand_as(sums)] - 1).abs().max() < 1e-5
    assert [state.layer for state in trace.states] == [0, 1, 2, 3] * 4


@pytest.mark.parametrize("how", ["sdpa", "eager"])
def test_a_cached_step_is_the_last_row_of_the_whole(how):
    model, ids = llama(how), torch.randint(5, 60, (1, 6))
    with torch.no_grad(), rw.capture(model) as whole:
        model(ids, use_cache=False)
    with torch.no_grad():
        cache = model(ids[:, :5], use_cache=True).past_key_values
        with rw.capture(model) as step:
            model(ids[:, 5:], past_key_values=cache)
    for one, last in zip(whole.mixers, step.mixers, strict=True):
        assert (one.operator.dense()[:, :, -1:] - last.operator.dense()).abs().max() < 1e-5


def test_a_static_cache_has_columns_that_nobody_sees_yet():
    model = llama()
    with rw.capture(model) as trace:
        model.generate(PROMPT, max_new_tokens=3, do_sample=False, cache_implementation="static")
    assert {site.operator.shape[-1] for site in trace.mixers if site.forward_pass} == {7}
    assert [int(site.valid_sources[0].sum()) for site in trace.mixers[::3]] == [5, 6, 7]
    assert all(site.valid_tokens.all() for site in trace.mixers)


def test_an_encoder_decoder_that_generates():
    family = by_name["T5"]
    import transformers

    config = family.build("sdpa").config
    config.decoder_start_token_id = 0
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    with rw.capture(model) as trace:
        model.generate(PROMPT, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    encoder = [site for site in trace.mixers if site.stack == "encoder.block"]
    assert len(encoder) == 3
    steps = [(site.forward_pass, site.cross, tuple(site.operator.shape[-2:])) for site in trace.mixers[3:]]
    assert steps == [
        place for at in range(3) for _ in range(3) for place in ((at, False, (1, at + 1)), (at, True, (1, 5)))
    ]


# --- precision ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["BERT", "Llama", "T5", "Swin", "Gemma-2", "nanoGPT style"])
def test_weights_in_half_precision(name, dtype):
    family = by_name[name]
    how = family.implementations[0]
    model = family.build(how).to(dtype)
    batch = {
        key: value.to(dtype) if value.is_floating_point() else value for key, value in family.inputs().items()
    }
    with torch.no_grad():
        alone = model(**batch)
        with rw.capture(model, values=True) as trace:
            watched = model(**batch)
    first, second = (out if isinstance(out, torch.Tensor) else out[0] for out in (alone, watched))
    assert torch.equal(first, second)
    assert len(trace.mixers) == family.mixers
    for site in trace.mixers:
        matrix = site.operator.dense()
        assert matrix.dtype == torch.float32
        values = site.values.repeat_interleave(matrix.shape[1] // site.values.shape[1], 1)
        # The model rounds queries, keys and weights to its own precision: scores of size ≤ 100.
        error = (matrix @ values.float() - site.output.float()).abs().max() / values.float().abs().max()
        assert error < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", ["BERT", "Llama", "torch TransformerEncoder", "nanoGPT style"])
def test_autocast(name):
    family = by_name[name]
    model, batch = family.build(family.implementations[0]), family.inputs()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        alone = model(**batch)
        with rw.capture(model) as trace:
            watched = model(**batch)
    first, second = (out if isinstance(out, torch.Tensor) else out[0] for out in (alone, watched))
    assert torch.equal(first, second)
    assert len(trace.mixers) == family.mixers
    assert {site.operator.dtype for site in trace.mixers} <= {torch.bfloat16, torch.float32}


def test_inference_mode():
    model, x = stack_of(), hidden()
    with torch.inference_mode():
        alone = model(x)
        with rw.capture(model) as trace:
            watched = model(x)
    assert torch.equal(alone, watched)
    assert len(trace.states) == 4


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
    assert [site.layer for site in trace.mixers] == [0, 1, 2]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]
    assert trace.notes == []


class Checkpointed(Stack):
    """Every block runs again in the backward pass."""

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.norm(x)


@pytest.mark.parametrize("mix", [plain, fused])
@pytest.mark.parametrize("reentrant", [True, False])
def test_blocks_that_run_again_in_the_backward_pass_are_recorded_once(mix, reentrant):
    model = Checkpointed(lambda: Block(Attention(mix)))
    model.reentrant, runs = reentrant, []
    model.blocks[0].register_forward_pre_hook(lambda *given: runs.append(1))
    with rw.capture(model) as trace:
        torch.autograd.backward([model(hidden().requires_grad_()).sum()])
    assert len(runs) == 2
    assert [site.layer for site in trace.mixers] == [0, 1, 2]
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]
    assert {site.forward_pass for site in trace.mixers} == {0}


class Dropping(nn.Module):
    """A block with dropout of one kind."""

    def __init__(self, kind):
        super().__init__()
        self.attention = Attention(getattr(self, kind))
        self.drop = nn.Dropout(0.3 if kind == "module" else 0.0)

    def module(self, q, k, v):
        return self.drop((q @ k.mT).softmax(-1)) @ v

    def sdpa(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)

    def forward(self, x):
        return x + self.attention(x)


@pytest.mark.parametrize("kind", ["module", "sdpa"])
def test_dropout_is_said_and_not_in_the_operator(kind):
    model, x = Stack(lambda: Dropping(kind), 2), hidden()
    torch.manual_seed(1)
    alone = model.train()(x)
    torch.manual_seed(1)
    with rw.capture(model) as trace:
        watched = model(x)
    assert torch.equal(alone, watched)
    (note,) = trace.notes
    assert "dropout was on in" in note
    assert "call model.eval()" in note
    for site in trace.mixers:
        assert (site.operator.dense().sum(-1) - 1).abs().max() < 1e-5
    with rw.capture(model.eval()) as trace:
        model(x)
    assert trace.notes == []


# --- compiled, scripted, offloaded --------------------------------------------------------------------------


def compiled(how):
    """The model, and what its user calls."""
    model = stack_of()
    if how == "wrapped":
        return torch.compile(model, backend="eager")
    (model.blocks[1] if how == "a part" else model).compile(backend="eager")
    return model


@pytest.mark.parametrize(
    ("how", "name"), [("wrapped", "OptimizedModule"), ("in place", "Stack"), ("a part", r"blocks\.1")]
)
def test_a_compiled_model_is_an_error_that_says_what_to_do(how, name):
    model = compiled(how)
    assert compiled_modules(model)
    with pytest.raises(CaptureError, match=rf"compiled module '{name}'.*set_stance\(\"force_eager\"\)"):
        rw.capture(model)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"), rw.capture(model) as trace:
        model(hidden())
    assert [site.name for site in trace.mixers] == [f"blocks.{at}.attention" for at in range(3)]
    assert len(trace.states) == 4


@pytest.mark.parametrize(("backend", "seen"), [("eager", True), ("aot_eager", False)])
def test_a_function_compiled_inside_a_model_gives_the_same_with_and_without(backend, seen):
    """Its operations are seen if they still run one by one, and told if they do not."""
    parts = [Block(Attention(torch.compile(mix, backend=backend))) for mix in (plain, fused)]
    model, x = nn.Sequential(Block(Attention(plain)), *parts, nn.LayerNorm(WIDTH)).eval(), hidden()
    with torch.no_grad():
        alone = model(x)
        with rw.capture(model) as trace:
            watched = model(x)
        again = model(x)
    torch._dynamo.reset()
    assert torch.equal(alone, watched)
    assert torch.equal(alone, again)
    inside = ["1.attention", "2.attention"]
    assert [site.name for site in trace.mixers] == ["0.attention", *(inside if seen else [])]
    assert [module.name for module in trace.uncaptured] == ([] if seen else inside)
    assert all("compiled" in module.reason for module in trace.uncaptured)
    assert [state.layer for state in trace.states] == [0, 1, 2, 3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_model_is_an_error():
    with pytest.raises(
        CaptureError, match="expected a module whose operations run in Python, got a TorchScript"
    ):
        rw.capture(torch.jit.trace(stack_of(fused, depth=1), hidden()))


@pytest.mark.parametrize("way", ["offload", "dispatch"])
@pytest.mark.parametrize("name", ["BERT", "Llama", "torch TransformerEncoder"])
def test_models_with_device_hooks(name, way):
    import accelerate

    family = by_name[name]
    model, batch = family.build("sdpa"), family.inputs()
    if way == "dispatch":
        places = {child: "cpu" for child, _ in model.named_children()}
        accelerate.dispatch_model(model, places, force_hooks=True)
    elif name.startswith("torch"):
        pytest.skip("accelerate itself cannot offload it: its layers read the weights of other modules")
    else:
        accelerate.cpu_offload(model, execution_device="cpu")
    with torch.no_grad():
        alone = model(**batch)
        with rw.capture(model) as trace:
            watched = model(**batch)
    first, second = (out if isinstance(out, torch.Tensor) else out[0] for out in (alone, watched))
    assert torch.equal(first, second)
    assert len(trace.mixers) == family.mixers
    assert len(trace.states) == family.states
    assert trace.uncaptured == []
    assert trace.notes == []


@torch.library.custom_op("rankwise_tests::attention", mutates_args=())
def custom_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return plain(q, k, v)


def test_another_attention_kernel_is_reported():
    model = stack_of(custom_attention)
    reason = r"blocks\.0\.attention \(Attention\), .*a fused kernel, a custom or compiled operation"
    with torch.no_grad(), pytest.raises(CaptureError, match=reason), rw.capture(model):
        model(hidden())


def test_functional_gradients():
    model = stack_of()
    parameters, x = dict(model.named_parameters()), hidden()

    def loss(given):
        return torch.func.functional_call(model, given, (x,)).sum()

    alone = torch.func.grad(loss)(parameters)
    with rw.capture(model) as trace:
        watched = torch.func.grad(loss)(parameters)
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    assert len(trace.mixers) == 3


# --- tiny and large -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", [plain, fused])
def test_one_token_of_one_sequence(mix):
    model = stack_of(mix)
    with torch.no_grad(), rw.capture(model) as trace:
        model(hidden(1, 1))
    assert {tuple(site.operator.shape) for site in trace.mixers} == {(1, HEADS, 1, 1)}
    assert not any(site.cross for site in trace.mixers)
    assert all((site.operator.dense() == 1).all() for site in trace.mixers)


@pytest.mark.parametrize("mix", [plain, fused])
@pytest.mark.parametrize(("batch", "tokens"), [(0, 3), (2, 0)])
def test_no_tokens_and_no_sequences(mix, batch, tokens):
    model = stack_of(mix)
    reason = "it was called with no tokens or no sequences"
    with torch.no_grad(), pytest.raises(CaptureError, match=reason), rw.capture(model):
        model(hidden(batch, tokens))
    with torch.no_grad(), rw.capture(model) as trace:
        model(hidden(batch, tokens))
        model(hidden())
    assert {site.forward_pass for site in trace.mixers} == {1}
