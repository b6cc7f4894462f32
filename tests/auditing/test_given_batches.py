"""Batches and texts as people hold them: measured, or refused with the cure that helps."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.families import nano_gpt
from tests.unchecked import unchecked
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwise as rw
from rankwise._internals.forward import run_model
from rankwise.auditing import AuditError
from rankwise.auditing.batches import check_rows
from rankwise.errors import InputError

TEXTS = ["a short one", "another text, longer than the first", "third"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer(extra_ids=0)


@pytest.fixture(scope="module")
def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=40,
    )  # fmt: skip
    return BertModel(config).eval()


def numbers(audit: rw.Audit) -> list[list[float]]:
    return [
        [head.tokens, head.numerical_rank, head.effective_rank, head.first_token_mass] for head in audit.heads
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_texts_are_the_batches_a_user_would_make_whatever_their_size(
    bert: nn.Module, tokenizer: Any, batch_size: int
) -> None:
    by_hand = [dict(tokenizer([text], return_tensors="pt")) for text in TEXTS]
    audit = rw.audit(bert, texts=TEXTS, tokenizer=tokenizer, batch_size=batch_size)
    assert audit.provenance.sequences == 3
    for mine, theirs in zip(numbers(audit), numbers(rw.audit(bert, by_hand)), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)  # padded rows go through float32 sums of other lengths


def test_texts_are_cut_at_tokens_and_at_what_the_model_takes(bert: nn.Module, tokenizer: Any) -> None:
    long = "x" * 500
    assert rw.audit(bert, texts=[long], tokenizer=tokenizer, tokens=16).heads[0].tokens == 16
    audit = rw.audit(bert, texts=long, tokenizer=tokenizer)
    assert (audit.heads[0].tokens, audit.provenance.sequences) == (40, 1)
    assert any("40 tokens, the longest the model takes" in note for note in audit.provenance.notes)


def test_a_model_without_a_mask_reads_one_text_at_a_time(tokenizer: Any) -> None:
    def small(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) % 60 for letter in text] for text in texts]}

    audit = rw.audit(nano_gpt(), texts=["abcdefgh", "abcdef"], tokenizer=small)
    assert audit.provenance.batches == audit.provenance.sequences == 2
    assert audit.heads[0].tokens == 7
    assert any("one sequence in a batch" in note for note in audit.provenance.notes)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"texts": ["a"]},
            r"`tokenizer`: expected the tokenizer of the model, .* got none.*AutoTokenizer",
        ),
        ({"texts": ["a"], "tokenizer": 3}, "`tokenizer`: expected .* got int"),
        ({"texts": [], "tokenizer": len}, "`texts`: expected at least one text"),
        ({"texts": ["", " "], "tokenizer": len}, "at least one with a token"),
        ({"texts": ["a", 3], "tokenizer": len}, "number 2: expected a str, got int"),
        ({"texts": 3, "tokenizer": len}, "`texts`: expected a list of strings, got int"),
        ({"texts": ["a"], "tokenizer": len, "batches": []}, "expected one of them, got both"),
        ({}, r"`batches`: expected an iterable of batches, got none.*texts=\[…\]"),
        ({"batches": "hello"}, r"got str\. Pass strings with their tokenizer"),
        ({"batches": torch.zeros(1, 4)}, r"got Tensor.*rw\.audit\(model, \[batch\]\)"),
    ],
)
def test_what_is_no_data_is_refused_with_its_cure(bert: nn.Module, given: dict[str, Any], says: str) -> None:
    with unchecked(), pytest.raises(InputError, match=says):
        rw.audit(bert, **given)


def encoded(tokenizer: Any) -> Any:
    return tokenizer(TEXTS, return_tensors="pt", padding=True)


def test_what_a_tokenizer_gives_is_a_batch(bert: nn.Module, tokenizer: Any) -> None:
    made = encoded(tokenizer)
    assert numbers(rw.audit(bert, [made])) == numbers(rw.audit(bert, [dict(made)]))


def test_a_loader_of_dicts_with_labels_and_strings_works(tokenizer: Any) -> None:
    class Strict(nn.Module):
        """Takes the two tensors by name and nothing else."""

        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(300, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.layer(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)

    model, made = Strict().eval(), dict(encoded(tokenizer))
    rows = [
        {name: value[at] for name, value in made.items()} | {"labels": at, "text": TEXTS[at]}
        for at in range(3)
    ]
    audit = rw.audit(model, DataLoader(rows, batch_size=2))
    assert any("labels, text" in note for note in audit.provenance.notes)
    assert audit.provenance.sequences == 3
    [one] = [note for note in audit.provenance.notes if "left out" in note]
    assert audit.provenance.notes.count(one) == 1
    with pytest.raises(rw.RankwiseError, match=r"`forward` has no attention_msk.*attention_mask"):
        rw.audit(model, [{"input_ids": made["input_ids"], "attention_msk": made["attention_mask"]}])


class OnlyX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_a_loader_of_x_and_y_works_where_y_has_no_place(shape: tuple[int, ...]) -> None:
    x, model = torch.randn(4, 9, 8), OnlyX().eval()
    audit = rw.audit(model, DataLoader(TensorDataset(x, torch.zeros(shape)), batch_size=2))
    assert numbers(audit) == numbers(rw.audit(model, x.split(2)))
    assert any("labels left out" in note for note in audit.provenance.notes)


def test_a_second_item_that_the_model_takes_is_given_to_it() -> None:
    class WithLengths(OnlyX):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            self.lengths = lengths
            return super().forward(x)

    model = WithLengths().eval()
    rw.audit(model, [(torch.randn(2, 9, 8), torch.tensor([9, 4]))])
    assert model.lengths.tolist() == [9, 4]


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_labels_of_sequences_are_no_mask(bert: nn.Module, shape: tuple[int, ...]) -> None:
    ids, labels = torch.randint(3, 300, (4, 9)), torch.tensor([0, 1, 0, 1]).view(shape)
    audit = rw.audit(bert, DataLoader(TensorDataset(ids, labels), batch_size=2))
    assert numbers(audit) == numbers(rw.audit(bert, [{"input_ids": one} for one in ids.split(2)]))
    assert audit.provenance.notes == ["labels left out of the batches: the second of two items"]


def test_labels_of_tokens_are_refused_in_the_place_of_a_mask(bert: nn.Module) -> None:
    """Tokens labelled 0 would be hidden, and nobody told."""
    ids = torch.randint(3, 300, (4, 9))
    for items in ([ids, ids % 2], [ids, ids.roll(-1, 1)], [ids, ids % 2, torch.zeros(4)]):
        for batch in (tuple(items), items):
            with pytest.raises(
                InputError, match=r"its `attention_mask`\. Pass the first.*name the items.*'labels': y"
            ):
                rw.audit(bert, [batch])
            with pytest.raises(InputError, match="attention_mask"):
                run_model(bert, batch)
    named = rw.audit(bert, [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}])
    assert numbers(rw.audit(bert, [(ids,)])) == numbers(named)


def test_labels_are_given_to_a_transformers_model_that_takes_them_second() -> None:
    from transformers import PretrainedConfig, PreTrainedModel

    class Labelled(PreTrainedModel):
        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            self.labels = labels
            return self.layer(x)

    model = Labelled().eval()
    rw.audit(model, [(torch.randn(2, 9, 8), torch.tensor([1, 0]))])
    assert model.labels is not None
    assert model.labels.tolist() == [1, 0]


def test_next_tokens_are_lost_whatever_labels_the_sequences_have() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=1, n_head=2)).eval()
    ids = torch.randint(3, 20, (4, 9))
    loader = DataLoader(TensorDataset(ids, torch.tensor([0, 1, 0, 1])), batch_size=4)
    labelled = rw.audit(model, loader, importance=True).importance
    plain = rw.audit(model, [{"input_ids": ids}], importance=True).importance
    assert (labelled.loss, labelled.value) == (plain.loss, plain.value)


def test_two_sequences_in_a_list_are_not_taken_for_labels() -> None:
    with pytest.raises(rw.RankwiseError, match=r"all 2 items .* `\[\(x,\) for x, \*labels in batches\]`"):
        rw.audit(OnlyX().eval(), [[torch.randn(9, 8), torch.randn(9, 8)]])


def wrong(tokenizer: Any) -> Iterator[tuple[Any, str]]:
    made = encoded(tokenizer)
    yield [dict(tokenizer(TEXTS))], r"not tensors\. Use `tokenizer\(texts, return_tensors=\"pt\""
    yield [{name: value[0] for name, value in made.items()}], "one row without a batch axis.*DataLoader"
    yield [TEXTS], r"texts=\[…\], tokenizer"
    yield TEXTS, r"texts=\[…\], tokenizer"
    yield [[1, 2, 3]], r"torch\.tensor\(\[row\]\)"
    yield [3], "A batch is a dict of tensors"
    yield [{"input_ids": torch.zeros(1, 60, dtype=torch.long)}], "60 tokens are more than the 40 positions"
    yield [{"input_ids": torch.full((1, 9), 300)}], "not below the 300 that the model knows"
    yield [{"input_id": made["input_ids"]}], "Did you mean input_ids"


def test_every_wrong_batch_names_its_own_cure(bert: nn.Module, tokenizer: Any) -> None:
    for batches, says in wrong(tokenizer):
        with unchecked(), pytest.raises(rw.RankwiseError, match=says) as caught:
            rw.audit(bert, batches)
        assert "shorter sequences" not in str(caught.value)


def test_a_row_of_nothing_but_padding_is_refused_and_what_came_before_is_kept(bert: nn.Module) -> None:
    ids = torch.randint(1, 300, (3, 5))
    mask = torch.ones_like(ids)
    mask[2, 1:] = 0
    good = {"input_ids": ids, "attention_mask": mask.clone()}
    mask[1] = 0
    said = "`attention_mask` of batch 2: .* nothing but padding in row 1"
    with pytest.raises(AuditError, match=said) as told:
        rw.audit(bert, [good, {"input_ids": ids, "attention_mask": mask}])
    assert told.value.audit is not None
    assert told.value.audit.provenance.sequences == 3


def test_rows_of_several_choices_are_checked_one_by_one(bert: nn.Module) -> None:
    ids, mask = torch.randint(1, 300, (2, 3, 8)), torch.ones(2, 3, 8)
    mask[:, :, 6:] = 0
    check_rows(bert, {"input_ids": ids, "attention_mask": mask}, 1)
    mask[1, 2] = 0
    with pytest.raises(InputError, match="nothing but padding in row 1, 2, counted"):
        check_rows(bert, {"input_ids": ids, "attention_mask": mask}, 1)


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": torch.ones(2, 5), "attention_mask": torch.zeros(2, 9)},
        {"input_ids": torch.ones(5), "attention_mask": torch.zeros(5)},
        {"input_ids": torch.zeros(2, 0), "inputs_embeds": torch.zeros(2, 5, 16)},
    ],
    ids=["a mask of another shape", "no batch axis", "embedded tokens"],
)
def test_batches_whose_padding_is_unknown_are_accepted(bert: nn.Module, batch: dict[str, Any]) -> None:
    check_rows(bert, batch, 1)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_a_batch_without_tokens_is_named(bert: nn.Module, shape: tuple[int, int]) -> None:
    ids = torch.zeros(shape, dtype=torch.long)
    for batch in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": ids}, ids, (ids,)):
        with pytest.raises(InputError, match=re.escape(f"with tokens, got the shape {shape}")):
            rw.audit(bert, [batch])


def test_a_probe_without_tokens_is_refused_at_the_first_step_of_any_number(
    bert: nn.Module, tmp_path: Path
) -> None:
    ids, mask = torch.randint(1, 300, (2, 5)), torch.ones(2, 5)
    mask[1] = 0
    monitor = rw.RankMonitor({"input_ids": ids, "attention_mask": mask}, folder=tmp_path / "audits")
    for model in (bert, nn.DataParallel(bert)):
        with pytest.raises(InputError, match="nothing but padding in row 1"):
            monitor.step(model, 1)
    assert not (tmp_path / "audits").exists()


class Unready(nn.Module):
    """Its ``forward`` is there and says that something is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no such kernel here")


class LightningModule(nn.Module):
    """Has the ``forward`` that Lightning's own class has."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Training(LightningModule):
    """A user's, with a `training_step` alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def patched() -> nn.Module:
    """A ``forward`` that was given to the module, and none to its class."""
    model = Training()
    model.forward = Unready().forward
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [(Training(), True), (Unready(), False), (torch.compile(Unready()), False), (patched(), False)],
)
def test_a_forward_that_is_not_there_is_told_from_what_it_says(model: nn.Module, says: bool) -> None:
    with pytest.raises(AuditError) as told:
        rw.audit(model.eval(), [torch.ones(2, 3, 8)])
    assert ("define `forward`" in str(told.value)) == says
    assert ("model.net" in str(told.value)) == says


def test_both_remedies_for_a_missing_forward_give_the_audit_of_the_inner_module() -> None:
    class Mended(Training):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    model, batches = Mended().eval(), [torch.randn(2, 3, 8)]
    ours, inner = rw.audit(model, batches), rw.audit(model.net, batches)
    assert [head.effective_rank for head in ours.heads] == [head.effective_rank for head in inner.heads]
    assert len(inner.heads) == 2


def test_masks_of_other_models_may_say_what_is_hidden() -> None:
    class Own(OnlyX):
        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.layer(x, src_mask=attention_mask)

    batch = {"x": torch.randn(2, 6, 8), "attention_mask": torch.ones(6, 6).bool().triu(1)}
    assert rw.audit(Own().eval(), [batch]).findings == []


def test_errors_of_offloaded_weights_are_not_taken_for_others() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(3, 2, device="meta")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("metadata")

    with pytest.raises(AuditError, match="KeyError: 'metadata'"):
        rw.audit(Fails(), [torch.tensor([[1, 2]])])


def test_weights_on_the_device_meta_are_named() -> None:
    model = nn.Sequential(nn.Embedding(5, 8), nn.TransformerEncoderLayer(8, 2, batch_first=True)).to("meta")
    with pytest.raises(AuditError, match=r"model Sequential: .* got weights on the device meta"):
        rw.audit(model, [torch.tensor([[1, 2, 3]])])


def test_whole_batches_before_a_wrong_one_are_kept(bert: nn.Module, tokenizer: Any) -> None:
    with unchecked(), pytest.raises(AuditError, match=re.escape("batch 2")) as caught:
        rw.audit(bert, [encoded(tokenizer), TEXTS])
    assert caught.value.audit is not None
    assert caught.value.audit.provenance.sequences == 3


@pytest.mark.parametrize(
    ("kind", "labels", "said"),
    [
        (
            "BertForSequenceClassification",
            [0, 9],
            r"from 0 to 2, as BertForSequenceClassification has 3 classes",
        ),
        ("BertForTokenClassification", [[0, 1, 9, -100]] * 2, r"has 3 classes.*got 9\. .*`num_labels`"),
        (
            "BertForMaskedLM",
            [[0, 1, 999, -100]] * 2,
            r"from 0 to 299, .*has 300 tokens of its vocabulary.*got 999",
        ),
        ("BertForSequenceClassification", [0, -1], r"got -1"),
    ],
)
def test_labels_out_of_range_are_named_with_their_range(kind: str, labels: list[Any], said: str) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=3,
    )  # fmt: skip
    model = getattr(transformers, kind)(config).eval()
    ids = torch.tensor([[5, 6, 7, 8]] * 2)
    good = {"input_ids": ids, "labels": torch.zeros_like(torch.tensor(labels))}
    bad = {"input_ids": ids, "labels": torch.tensor(labels)}
    with pytest.raises(AuditError, match=said) as refused:
        rw.audit(model, [bad])
    assert str(refused.value).startswith("labels of batch 1: expected whole numbers")
    with pytest.raises(AuditError, match="labels of batch 2") as later:
        rw.audit(model, [good, bad])
    assert later.value.audit.provenance.batches == 1


def test_a_quantised_layer_of_torch_fails_by_itself_and_the_cure_is_named():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = torch.ao.quantization.quantize_dynamic(
        torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), {torch.nn.Linear}
    )
    batch = torch.randn(1, 5, 8)
    with torch.no_grad(), pytest.raises(AttributeError):
        model(batch)
    with pytest.raises(AuditError, match="set_fastpath_enabled"):
        rw.audit(model, [batch])
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert len(rw.audit(model, [batch]).heads) == 2
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
