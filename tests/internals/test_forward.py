"""A batch determines how a model is called; every change of a model is undone exactly."""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from tests.support.untouched import untouched
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.utils.parametrizations import spectral_norm
from transformers.modeling_outputs import BaseModelOutput

import rankwise as rw
from rankwise._internals.batches import to_device
from rankwise._internals.forward import (
    AddedHook,
    Change,
    config_value,
    device_of,
    eval_mode,
    free_memory,
    run_model,
)
from rankwise.errors import InputError, RankwiseError
from rankwise.models import ToSTConfig, ToSTForCausalLM


class Seen(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs


def test_dicts_are_passed_by_name_and_tuples_by_position() -> None:
    x, y = torch.ones(1), torch.zeros(1)
    assert run_model(Seen(), {"x": x, "y": y}) == ((), {"x": x, "y": y})
    assert run_model(Seen(), (x, y)) == run_model(Seen(), [x, y]) == ((x, y), {})
    assert run_model(Seen(), x) == ((x,), {})


IDS = torch.arange(12).view(2, 6)
TINY = {"vocab_size": 24, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def gpt2(kind: Callable[[Any], Any]) -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config), {"past_key_values": kind(config)}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
    model = transformers.T5Model(transformers.T5Config(vocab_size=24, **sizes))
    with torch.no_grad():
        inner = BaseModelOutput(last_hidden_state=model.encoder(IDS).last_hidden_state)
    halves = (transformers.DynamicCache(), transformers.DynamicCache())
    return model, {"encoder_outputs": inner, "past_key_values": transformers.EncoderDecoderCache(*halves)}


def mamba() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.MambaConfig(state_size=4, **TINY)
    return transformers.MambaForCausalLM(config), {"cache_params": transformers.DynamicCache(config=config)}


def tost() -> tuple[nn.Module, dict[str, Any]]:
    model = ToSTForCausalLM(ToSTConfig(**TINY))
    with torch.no_grad():
        return model, {"past_key_values": model(IDS, use_cache=True).past_key_values}


def object_with_state() -> tuple[nn.Module, dict[str, Any]]:
    class Counting(nn.Module):
        def forward(self, input_ids: Tensor, calls: Any) -> Tensor:
            calls.count += 1
            return input_ids * calls.count

    calls = type("Calls", (), {"count": 0})
    return Counting(), {"calls": calls()}


def written_tensors() -> tuple[nn.Module, dict[str, Any]]:
    class Writing(nn.Module):
        def forward(self, input_ids: Tensor, state: list[Tensor]) -> Tensor:
            state[0] += 1  # as RWKV writes into its state
            state.append(input_ids)
            return input_ids * state[0]

    return Writing(), {"state": [torch.zeros(6)]}


STATES: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "dynamic cache": lambda: gpt2(lambda config: transformers.DynamicCache(config=config)),
    "static cache": lambda: gpt2(lambda config: transformers.StaticCache(config=config, max_cache_len=32)),
    "cache of an encoder-decoder": t5,
    "cache of Mamba": mamba,
    "cache of ToST": tost,
    "object": object_with_state,
    "list of tensors": written_tensors,
}


@pytest.mark.parametrize("build", STATES.values(), ids=STATES)
def test_every_run_starts_from_the_same_batch(build: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> None:
    model, state = build()
    name = "decoder_input_ids" if "encoder_outputs" in state else "input_ids"
    batch = {name: IDS, **state}
    with torch.no_grad():
        first, *others = (run_model(model.eval(), to_device(batch, IDS.device)) for _ in range(3))
        alone = model(**copy.deepcopy(batch))
    for other in (*others, alone):
        assert torch.equal(*(one if isinstance(one, Tensor) else one[0] for one in (first, other)))


# --- state of a model ------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Identity in its first call; in later calls it scales or shifts by a state that its calls change."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.number, self.last = how, 0, None
        for name in ("calls", "cache"):
            self.register_buffer(name, torch.zeros(1))
        self.plain, self.kept, self.nested = torch.zeros(1), [], {"kept": [torch.zeros(1)]}

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.calls += 1
            return x * self.calls
        if self.how == "assigned":
            self.calls = self.calls + 1
            return x * self.calls
        if self.how == "through data":
            self.calls.data.add_(1)
            return x * self.calls
        if self.how == "in the graph":
            before, self.cache = self.cache, self.cache + x.mean()
            return x + before
        if self.how == "buffer made":
            before, self.last = getattr(self, "made", 0.0), x.mean()
            self.register_buffer("made", x.detach().mean())
            return x + before
        if self.how == "number":
            self.number += 1
            return x * self.number
        if self.how == "plain tensor":
            self.plain += 1
            return x * self.plain
        if self.how == "in a list":
            self.kept.append(x.detach().mean())
            return x + sum(self.kept[:-1])
        if self.how == "in a dict":
            before, self.nested["last"] = self.nested.get("last", 0.0), x.mean()
            return x + before
        if self.how == "in place in a list":
            self.nested["kept"][0] += 1
            return x * self.nested["kept"][0]
        if self.how == "attribute":
            before, self.last = 0.0 if self.last is None else self.last, x.detach().mean()
            return x + before
        return x * 1


HOWS = (
    "in place", "assigned", "through data", "in the graph", "buffer made", "number", "plain tensor",
    "attribute", "in a list", "in a dict", "in place in a list",
)  # fmt: skip


def dynamic_llama() -> nn.Module:
    """Return a Llama whose rotary frequencies grow with the longest text so far, which it notes."""
    torch.manual_seed(0)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 100.0}
    sizes = TINY | {"intermediate_size": 24, "max_position_embeddings": 6, "rope_parameters": rope}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()


TEXT = {"input_ids": torch.randint(3, 24, (2, 12), generator=torch.Generator().manual_seed(1))}


def stateful_gpt2(how: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=24, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
    model = transformers.GPT2LMHeadModel(config).eval()
    model.transformer.drop = Stateful(how)
    return model


def records_of(audit: rw.Audit) -> list[str]:
    return [one.model_dump_json() for one in (*audit.heads, *audit.states)]


def importance_of(model: nn.Module) -> Any:
    found = rw.importance.measure_importance(
        model, [TEXT, TEXT], rw.importance.ImportanceSettings(exact=True)
    )
    return repr(found)


def compressed(model: nn.Module) -> Any:
    model = copy.deepcopy(model)
    return rw.compress(model, [TEXT], keep={"width": 0.5, "kv": 0.5}).model_dump_json()


def certified(model: nn.Module) -> Any:
    model = copy.deepcopy(model)
    rw.add_lambda_skip(model, 2.0, example=TEXT)
    return rw.certify_skip(model, TEXT).model_dump_json()


FUNCTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "audit": lambda model: records_of(rw.audit(model, [TEXT, TEXT])),
    "importance": importance_of,
    "compress": compressed,
    "certify": certified,
    "recommend": lambda model: repr(rw.skips.recommend(rw.audit(model, [TEXT]), model, TEXT).findings),
}


@pytest.mark.parametrize("how", HOWS)
def test_a_state_that_a_run_changes_is_as_before_in_every_run(how: str) -> None:
    model = stateful_gpt2(how)
    with untouched(model):
        first, again = (run_model(model, TEXT).logits for _ in range(2))
    assert torch.equal(first, again)


@functools.cache
def from_one_state(use: str) -> Any:
    return FUNCTIONS[use](stateful_gpt2("none"))


@pytest.mark.parametrize("how", ["in place", "in a list"])
@pytest.mark.parametrize("use", FUNCTIONS)
def test_every_function_runs_a_model_from_the_same_state(use: str, how: str) -> None:
    model = stateful_gpt2(how)
    with untouched(model):
        result = FUNCTIONS[use](model)
    assert result == from_one_state(use)


def test_a_text_longer_than_all_before_gives_the_same_output_in_every_run() -> None:
    model = dynamic_llama()
    with torch.no_grad(), untouched(model):
        first, again = (run_model(model, TEXT).logits for _ in range(2))
        short = run_model(model, {"input_ids": TEXT["input_ids"][:, :4]}).logits
    assert torch.equal(first, again)
    assert torch.equal(first, dynamic_llama()(**TEXT).logits)
    assert torch.equal(short, dynamic_llama()(TEXT["input_ids"][:, :4]).logits)


def test_running_statistics_of_a_model_in_training_mode_stay() -> None:
    model = stateful_gpt2("none")
    model.lm_head = nn.Sequential(model.lm_head, nn.Conv1d(12, 12, 1), nn.BatchNorm1d(12))
    model.transformer.wte = nn.Sequential(
        model.transformer.wte, spectral_norm(nn.Linear(16, 16)), nn.BatchNorm1d(12)
    )
    for module in model.modules():
        module.training = isinstance(module, nn.BatchNorm1d) or hasattr(module, "parametrizations")
    with untouched(model):
        first, again = (importance_of(model) for _ in range(2))
        assert rw.RankMonitor(TEXT).step(model, 0) is not None
    assert first == again


class Built(nn.Module):
    """Module that makes its weights in its first call, and notes this by a flag or by the weights."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.ready, self.part, self.calls = how, False, None, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.how == "flag" and not self.ready:
            self.ready, self.made = True, nn.ModuleList([nn.Linear(8, 8)])
        if self.how == "module" and self.part is None:
            self.part = nn.Linear(8, 8)
        if self.how == "parameter" and self.part is None:
            self.part = nn.Parameter(torch.eye(8))
        part = self.made[0] if self.how == "flag" else self.part
        return part(x) if isinstance(part, nn.Linear) else x @ part


@pytest.mark.parametrize("how", ["flag", "module", "parameter"])
@pytest.mark.parametrize("use", [run_model, lambda model, x: rw.RankMonitor(x).step(model, 0)])
def test_weights_that_the_first_run_makes_stay(use: Any, how: str) -> None:
    x = torch.randn(2, 6, 8)
    model = nn.Sequential(Built(how), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    use(model, x)
    made = list(model.parameters())
    with untouched(model):
        first = run_model(model, x)
    assert torch.equal(model(x), first)
    assert all(one is other for one, other in zip(made, model.parameters(), strict=True))


class Gain(Tensor):
    """Tensor with an attribute."""


@pytest.mark.parametrize("kind", ["plain", "sparse", "subclass", "mask"])
def test_buffers_keep_their_class_and_attributes_in_every_run(kind: str) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = causal_lower_right(6, 6) if kind == "mask" else torch.ones(8)
            if kind != "mask":
                self.held = self.held.as_subclass(Gain) if kind == "subclass" else self.held
                self.held = self.held.to_sparse() if kind == "sparse" else self.held
                self.held.gain = 3.0
                self.register_buffer("named", self.held)

        def forward(self, x: Tensor) -> Tensor:
            if kind == "mask":
                return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.held)
            assert type(self.named) is (Gain if kind == "subclass" else Tensor)
            if kind == "sparse":
                return x * self.named.to_dense() * self.named.gain
            return x * self.named.as_subclass(Tensor) * self.named.gain

    model, x = Held(), torch.randn(2, 6, 8)
    assert torch.equal(run_model(model, x), model(x))


def test_a_second_item_that_would_be_read_as_a_mask_is_refused() -> None:
    model = transformers.BertModel(
        transformers.BertConfig(
            vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
    )
    ids = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(InputError, match=r"2 items without names, of which the second .* `attention_mask`"):
        run_model(model, (ids, ids))
    assert run_model(model, (ids,)).last_hidden_state.shape == (1, 4, 8)


def test_a_tensor_that_is_in_a_batch_twice_is_one_tensor_in_the_call() -> None:
    x = torch.ones(2)
    (first, second, other), _ = run_model(Seen(), (x, x, x.clone()))
    assert first is second is not x
    assert other is not first


@pytest.mark.parametrize("mask", [causal_lower_right, causal_upper_left])
def test_a_mask_with_attributes_keeps_them_in_every_run(mask: Any) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, bias: Any) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)

    x = torch.randn(2, 6, 8)
    batch = to_device((x, mask(6, 6)), torch.device("cpu"))
    assert torch.allclose(run_model(Masked(), batch), Masked()(x, mask(6, 6)))


@pytest.mark.parametrize("cache", [transformers.DynamicCache, transformers.StaticCache])
def test_a_cache_with_gradients_is_refused_until_it_is_detached(cache: Any) -> None:
    more = {"max_cache_len": 32} if cache is transformers.StaticCache else {}
    model, state = gpt2(lambda config: cache(config=config, **more))
    past = state["past_key_values"]
    model(IDS, past_key_values=past)
    with pytest.raises(InputError, match=r"got tensors with gradients.*`layer.keys = layer.keys.detach\(\)`"):
        run_model(model, {"input_ids": IDS, **state})
    for layer in past.layers:
        layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
    assert run_model(model, {"input_ids": IDS, **state}).logits.shape[1] == IDS.shape[1]


TOWERS: dict[str, Callable[[nn.Module, dict[str, Tensor]], object]] = {
    "audit": lambda model, batch: rw.audit(model, [batch]),
    "compress": lambda model, batch: rw.compress(model, [batch]),
    "skip": lambda model, batch: rw.add_lambda_skip(model, example=batch),
    "certify": lambda model, batch: rw.certify_skip(model, batch),
}


@pytest.mark.parametrize("use", TOWERS)
@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_a_model_of_texts_and_images_names_the_part_for_one_of_them(name: str, use: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = getattr(transformers, f"{name}Config")(
        text_config={**sizes, "vocab_size": 24, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 8, "patch_size": 2},
    )
    model = getattr(transformers, f"{name}Model")(config).eval()
    data = {"text": {"input_ids": IDS.repeat(8, 1)}, "vision": {"pixel_values": torch.randn(2, 3, 8, 8)}}
    for kind, batch in data.items():
        with pytest.raises(RankwiseError, match=rf"add the other input, or pass `model.{kind}_model`"):
            TOWERS[use](model, batch)
        TOWERS[use](copy.deepcopy(getattr(model, f"{kind}_model")), batch)


def test_a_state_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(InputError, match=r"generator in the batch.*copied"):
        run_model(Seen(), {"rows": (row for row in IDS)})


def test_the_device_of_a_model_is_the_device_of_its_weights() -> None:
    assert device_of(nn.Linear(1, 1)) == torch.device("cpu")


class Noting(nn.Module):
    """Notes the modes that `train` was called with."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.called = nn.ModuleList(inner), []

    def train(self, mode: bool = True) -> "Noting":
        self.called.append(mode)
        super().train(mode)
        return self


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_gets_its_mode_back(fails: bool) -> None:
    frozen, within, other = Noting(), Noting(), Noting()
    model = nn.Sequential(Noting(frozen, within), nn.Sequential(other, nn.Dropout().eval()), nn.Dropout())
    model.train()
    frozen.eval()
    model[1].training = False
    modes = [module.training for module in model.modules()]
    for module in (model[0], frozen, within, other):
        module.called.clear()
    with pytest.raises(KeyError) if fails else nullcontext(), eval_mode(model):
        assert not any(module.training for module in model.modules())
        if fails:
            raise KeyError
    assert [module.training for module in model.modules()] == modes
    assert model[0].called == within.called == other.called == [False, True]
    assert frozen.called[-1] is False


def test_modes_come_back_if_one_module_refuses_its_mode() -> None:
    class Failing(nn.Module):
        def train(self, mode: bool = True) -> "Failing":
            super().train(mode)
            if mode:
                raise KeyError
            return self

    model = nn.Sequential(Failing(), nn.Dropout())
    with pytest.raises(KeyError), eval_mode(model):
        pass
    assert all(module.training for module in model.modules())


def doubled(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return 2 * output


def plus_one(module: nn.Module, args: tuple[Tensor], kwargs: Any) -> tuple[tuple[Tensor], Any]:
    return (args[0] + 1,), kwargs


def change_of(model: nn.Module) -> Change:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return Change(
        model,
        modules={"1": inner, "1.1": nn.Identity(), "0": nn.Linear(4, 4)},
        attributes={
            "": {"note": 3, "scale": None},
            "0": {"bias": None, "in_features": 5},
            "2": {"running_mean": torch.ones(4), "weight": None},
        },
        hooks=[
            AddedHook("0", "after", doubled),
            AddedHook("0", "before", plus_one, prepend=True),
            AddedHook("1", "after", doubled),
        ],
    )


def whole_state(model: nn.Module) -> list[Any]:
    """Return names and identities of all attributes of modules, in order."""
    return [
        (name, id(module), key, [*map(id, value.values()), *value] if isinstance(value, dict) else id(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    ]


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4)).eval()
    model.scale = 2.0
    model[0].register_forward_hook(lambda *_: None)
    model[0].register_forward_pre_hook(lambda *_: None)
    return model


@pytest.mark.parametrize("times", [1, 2])
def test_a_change_is_undone_exactly(times: int) -> None:
    model, x = small_model(), torch.randn(3, 4)
    before, output = whole_state(model), model(x)
    change = change_of(model)
    for _ in range(times):
        change.apply()
        assert (model.note, model.scale, model[0].bias, model[0].in_features) == (3, None, None, 5)
        assert isinstance(model[1][1], nn.Identity)
        expected = nn.functional.batch_norm(
            2 * model[1][0](2 * (x + 1) @ model[0].weight.mT), torch.ones(4), model[2].running_var,
            None, model[2].bias,
        )  # fmt: skip
        assert torch.allclose(model(x), expected)
        change.undo()
        assert whole_state(model) == before
        assert torch.equal(model(x), output)
    change.undo()  # nothing is left to undo
    assert whole_state(model) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"modules": {"1": nn.ReLU(), "7.x": nn.ReLU()}},
        {"attributes": {"0": {"in_features": 3, "weight": 3.0}}},
        {"attributes": {"0": {"in_features": 3}}, "hooks": [AddedHook("9", "after", doubled)]},
    ],
)
def test_a_change_is_applied_completely_or_not_at_all(wrong: dict[str, Any]) -> None:
    model = small_model()
    before = whole_state(model)
    with pytest.raises((AttributeError, TypeError)):
        Change(model, **wrong).apply()
    assert whole_state(model) == before


def test_a_change_is_undone_if_its_block_raises() -> None:
    model = small_model()
    before = whole_state(model)
    with pytest.raises(KeyError), change_of(model):
        raise KeyError
    assert whole_state(model) == before


def test_a_change_under_one_name_of_a_shared_module_keeps_the_other_name() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared})
    with Change(model, modules={"a": nn.Identity()}):
        assert model["b"] is shared
    assert model["a"] is model["b"] is shared


# --- configuration ---------------------------------------------------------------------------------------


def llama_with_values_per_layer(names: tuple[str, ...]) -> nn.Module:
    """Return a Llama whose configuration raises for some values, as configurations of Gemma 4 for widths."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=300, bos_token_id=None, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    config.per_layer_config = {layer: dict.fromkeys(names, 64 + layer) for layer in range(2)}
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        getattr(config, names[0], None)
    return model


NAMES = ("vocab_size", "max_position_embeddings", "pad_token_id", "num_attention_heads", "num_labels")
SAVED = ("max_position_embeddings", "num_labels")
"""Values that transformers does not read when it saves a configuration; `compress` tries that first."""
USES: dict[str, Callable[[nn.Module, Any], object]] = {
    "audit": lambda model, batch: rw.audit(model, [batch]),
    "λ-skips": lambda model, _: rw.add_lambda_skip(model),
    "compression with latency": lambda model, batch: rw.compress(
        model, [batch], parts="width", keep=0.5, time=True
    ),
}


@pytest.mark.filterwarnings("ignore:.*became slower")
@pytest.mark.parametrize("use", USES)
def test_values_of_a_configuration_may_depend_on_the_layer(use: str) -> None:
    names = SAVED if use.startswith("compression") else NAMES
    assert USES[use](llama_with_values_per_layer(names), {"input_ids": torch.randint(0, 256, (2, 9))})


def test_an_error_of_the_model_is_reported_if_the_number_of_tokens_depends_on_the_layer() -> None:
    with pytest.raises(rw.RankwiseError, match="index out of range"):
        rw.audit(llama_with_values_per_layer(NAMES), [torch.full((1, 4), 300)])


def test_the_first_value_of_a_configuration_that_is_set_is_returned() -> None:
    model = llama_with_values_per_layer(NAMES)
    assert config_value(model, "hidden_size") == config_value(model.config, "hidden_size") == 32
    assert config_value(model, "n_head", "decoder_start_token_id", "hidden_size") == 32
    assert config_value(model, "vocab_size", default=5) == 5
    assert config_value(nn.Linear(1, 1), "in_features") is None


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/user/job", "user/job/memory.max"),
        ("0::/user/job", "user/memory.max"),
        ("0::/hidden", "memory.max"),
        ("4:cpu,memory:/user/job", "memory/user/job/memory.limit_in_bytes"),
    ],
)
def test_a_control_group_or_one_around_it_limits_the_free_memory(
    line: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, listed = tmp_path / "groups", tmp_path / "listed"
    places = {"/sys/fs/cgroup": groups, "/proc/self/cgroup": listed}
    monkeypatch.setattr("rankwise._internals.forward.Path", lambda path: places[path])
    listed.write_text(f"9:cpu:/other\n{line}\n")
    (groups / file).parent.mkdir(parents=True)
    unlimited = free_memory(torch.device("cpu"))
    limit = psutil.Process().memory_info().rss + 2**30
    (groups / file).write_text(f"{limit}\n")
    assert free_memory(torch.device("cpu")) == pytest.approx(min(unlimited, 2**30), rel=0.1)
    (groups / file).write_text("max\n")
    assert free_memory(torch.device("cpu")) == pytest.approx(unlimited, rel=0.2)
    (groups / file).write_text("1\n")
    assert free_memory(torch.device("cpu")) == 0
