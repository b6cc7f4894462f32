"""Trainings by the Trainer of transformers have the losses of a loop in float64, step by step."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.unchecked import unchecked
from trainings import KINDS, build, by_hand, by_trainer, difference
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.models.auto import modeling_auto

import rankwise as rw
from rankwise.errors import InputError
from rankwise.models import (
    MIXERS,
    ToSTConfig,
    ToSTForCausalLM,
    ToSTForSequenceClassification,
    parameter_groups,
)

pytest.importorskip("accelerate")
STEPS = 4
# Losses are means of 8 or more numbers in float32, and target values differ little from the outputs; bfloat16
# keeps 8 bits.
TOLERANCE, IN_BF16 = 1e-5, 0.1
LIKE = {
    "ToSTModel": "LlamaModel",
    "ToSTForCausalLM": "LlamaForCausalLM",
    "ToSTForSequenceClassification": "LlamaForSequenceClassification",
    "ToSTForImageClassification": "ViTForImageClassification",
}
"""The class of transformers that each model stands next to."""


ONE_EACH = ("language", "text", "image", "GPT-2 with λ-skips")
"""A kind for each way in which a model takes labels."""
CASES = [
    *((kind, "accumulation") for kind in KINDS),
    *((kind, "label smoothing") for kind in ONE_EACH),
    # cases that depend neither on labels nor on the kind of model
    *(("language", case) for case in ("checkpointing", "compile", "resume", "bf16")),
    ("image", "best model"),
    ("GPT-2 with λ-skips", "resume"),
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_a_training_has_the_losses_of_a_loop_in_float64(kind: str, case: str, tmp_path: Path) -> None:
    with unchecked() if case == "compile" else nullcontext():
        found, trainer = by_trainer(kind, case, STEPS, tmp_path)
    assert difference(found, by_hand(kind, case, STEPS)) < (IN_BF16 if case == "bf16" else TOLERANCE)
    if case == "best model":
        measured = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert trainer.evaluate()["eval_loss"] == pytest.approx(min(measured), rel=1e-6)


@pytest.mark.extra
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_have_the_losses_of_a_loop_in_float64(kind: str, tmp_path: Path) -> None:
    """Without ``target_modules``, as peft knows the models."""
    pytest.importorskip("peft")
    found, trainer = by_trainer(kind, "LoRA", STEPS, tmp_path)
    assert difference(found, by_hand(kind, "LoRA", STEPS)) < TOLERANCE
    assert {
        name.split(".")[-3][:5] for name, one in trainer.model.named_parameters() if one.requires_grad
    } == {"lora_"}


class Subclass(ToSTForCausalLM):
    """Class that no list of transformers knows."""


def test_label_smoothing_shifts_labels_of_a_subclass_compiled_in_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ToSTConfig(vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = Subclass(config).eval()
    model.compile(backend="eager")
    options = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], label_smoothing_factor=0.1)
    ids = torch.randint(11, (2, 8))
    with unchecked(), torch.no_grad():
        loss = Trainer(model, options).compute_loss(model, {"input_ids": ids, "labels": ids})
        logits = model(ids).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1
    )
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_lists_of_class_names_hold_the_models() -> None:
    lists = {name: held for name, held in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")}
    for own, other in LIKE.items():
        where = [name for name, held in lists.items() if other in held.values()]
        assert where, other
        assert [name for name, held in lists.items() if own in held.values()] == where
        assert all(lists[name]["tost"] == own for name in where)
    # the entries are names alone: the Auto classes still find every class
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 11}
    assert type(AutoModelForCausalLM.from_config(ToSTConfig(**small))) is ToSTForCausalLM
    llama = LlamaConfig(**small, intermediate_size=8)
    assert type(AutoModelForCausalLM.from_config(llama)) is LlamaForCausalLM


def test_a_plain_trainer_decays_what_parameter_groups_leave_out(tmp_path: Path) -> None:
    """The Trainer decides by names and LayerNorm only, so that no mark on a parameter reaches it."""

    def decayed(**given: object) -> set[str]:
        arguments = TrainingArguments(str(tmp_path), weight_decay=0.1, report_to=[], use_cpu=True)
        optimizer = Trainer(model, arguments, **given).create_optimizer()
        names = {id(weight): name for name, weight in model.named_parameters()}
        return {
            names[id(one)]
            for group in optimizer.param_groups
            if group["weight_decay"]
            for one in group["params"]
        }

    for kind in ("language", "image", "GPT-2 with λ-skips"):
        model = build(kind)
        wanted = parameter_groups(model, 0.1)
        own = decayed(optimizer_cls_and_kwargs=(torch.optim.AdamW, {"params": wanted, "lr": 0.1}))
        assert own == decayed(optimizers=(torch.optim.AdamW(wanted), None))
        left_out = decayed() - own
        assert own < decayed()
        assert any("skip" in name for name in left_out)
        assert not any("skip" in name or "temperature" in name or "norm" in name for name in own)


@pytest.mark.extra
def test_lists_of_adapters_hold_the_models() -> None:
    """Every adapter that knows Llama; each mixer has a module that it changes."""
    peft = pytest.importorskip("peft")
    from peft.utils import constants

    lists = {name: held for name, held in vars(constants).items() if name.endswith("_MODULES_MAPPING")}
    assert len(lists) > 3
    assert [name for name, held in lists.items() if "llama" in held and "tost" not in held] == []
    for config in (peft.LoraConfig(r=2), peft.IA3Config(), peft.LNTuningConfig()):
        for mixer in MIXERS:
            small = ToSTConfig(hidden_size=48, num_hidden_layers=2, vocab_size=11, layer_types=mixer)
            adapted = peft.get_peft_model(ToSTForCausalLM(small), config)
            assert len([one for one in adapted.parameters() if one.requires_grad]) >= 4


@pytest.mark.extra
@pytest.mark.parametrize("causal", [True, False])
def test_prefix_tuning_is_refused_and_prompt_tuning_works(causal: bool) -> None:
    peft = pytest.importorskip("peft")
    small = ToSTConfig(hidden_size=48, num_hidden_layers=2, vocab_size=11, causal=causal)
    kind = ToSTForCausalLM if causal else ToSTForSequenceClassification
    task = "CAUSAL_LM" if causal else "SEQ_CLS"
    batch = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2, 3]] if causal else [1])}
    prefixed = peft.get_peft_model(kind(small), peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=2))
    with unchecked(), pytest.raises(InputError, match=r"Prefix tuning of peft .* use prompt tuning or LoRA"):
        prefixed(**batch)
    prompted = peft.get_peft_model(kind(small), peft.PromptTuningConfig(task_type=task, num_virtual_tokens=2))
    prompted(**batch).loss.backward()
    assert rw.RankMonitor(batch).step(prompted, 0) is not None
