"""Batches and texts are measured as given, or refused with a fix."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from experiments.zoo.transformers import nano_gpt
from tests.support.modules import OnlyX
from tests.unchecked import unchecked
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import rankwise as rw
from rankwise.auditing import AuditError, text_batches
from rankwise.auditing.batches import model_batches
from rankwise.errors import InputError, RankwiseError

TEXTS = ["a short one", "another text, longer than the first", "third"]
SIZES = {
    "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 40, "num_labels": 3,
}  # fmt: skip
TOKENIZER = transformers.ByT5Tokenizer(extra_ids=0)
ENCODED = TOKENIZER(TEXTS, return_tensors="pt", padding=True)
IDS = torch.randint(3, 300, (4, 9), generator=torch.Generator().manual_seed(0))
X = torch.randn(4, 9, 8, generator=torch.Generator().manual_seed(0))


def bert(kind: str = "BertModel") -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.BertConfig(**SIZES)).eval()


class Stream(IterableDataset[Tensor]):
    """Rows of ``X``; it has no ``len``."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from X


class Strict(OnlyX):
    """Its ``forward`` has two named arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layer(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)


class SecondArgument(OnlyX):
    """Its ``forward`` has a second argument."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(x)


class Labelled(transformers.PreTrainedModel):
    """Transformers model whose second argument is labels."""

    def __init__(self) -> None:
        super().__init__(transformers.PretrainedConfig())
        self.inner = OnlyX()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return self.inner(x)


class Sentences(nn.Module):
    """Module whose ``forward`` takes a dict, as modules of sentence-transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.auto_model = bert()

    def forward(self, features: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
        states = self.auto_model(**features).last_hidden_state
        features["token_embeddings"] = states
        return features | {"sentence_embedding": states.mean(1)}


class Pooled(Sentences):
    """Its ``forward`` takes the dict alone."""

    def forward(self, input: dict[str, Tensor]) -> dict[str, Tensor]:
        return super().forward(input)


def numbers(audit: rw.Audit) -> list[list[float]]:
    return [
        [head.tokens, head.numerical_rank, head.effective_rank, head.first_token_mass] for head in audit.heads
    ]


def test_texts_are_measured_as_batches_made_by_hand() -> None:
    model, by_hand = bert(), [dict(TOKENIZER([text], return_tensors="pt")) for text in TEXTS]
    audit = rw.audit(model, text_batches(TEXTS, TOKENIZER))
    assert audit.provenance.sequences == 3
    for mine, theirs in zip(numbers(audit), numbers(rw.audit(model, by_hand)), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)  # padded rows are float32 sums of other lengths


def test_texts_are_cut_at_the_limit_of_the_model() -> None:
    batches, notes = model_batches(bert(), ["x" * 500], TOKENIZER)
    assert [batch["input_ids"].shape for batch in batches] == [(1, 40)]
    assert notes == ["sequences cut from 256 to 40 tokens, the longest the model takes"]


def test_a_model_without_a_mask_reads_one_text_per_batch() -> None:
    def letters(texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) % 60 for letter in text] for text in texts]}

    batches, [note] = model_batches(nano_gpt(), ["abcdefgh", "abcdef"], letters)
    audit = rw.audit(nano_gpt(), batches)
    assert audit.provenance.batches == audit.provenance.sequences == 2
    assert audit.heads[0].tokens == 7
    assert "one sequence in a batch" in note


def loader(x: Tensor, y: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y), batch_size=2)


NAMED = [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}]
LEFT_OUT = "labels left out of the batches: the second of two items"
EQUAL: dict[str, tuple[Any, Any, Any, list[str]]] = {
    "output of a tokenizer": (bert, [ENCODED], [dict(ENCODED)], []),
    "ids alone": (bert, [(IDS,)], NAMED, []),
    "a dict as one argument": (Sentences, [dict(ENCODED)], [(dict(ENCODED),)], []),
    "a dict as the only argument": (Pooled, [ENCODED], [(dict(ENCODED),)], []),
    "a stream without a length": (OnlyX, DataLoader(Stream(), batch_size=2), X.split(2), []),
    **{
        f"labels {tuple(y.shape)} of {len(x.shape)} axes": (make, loader(x, y), x.split(2), [LEFT_OUT])
        for make, x in ((OnlyX, X), (bert, IDS))
        for y in (torch.tensor([0, 1, 0, 1]), torch.zeros(4, 1))
    },
}


@pytest.mark.parametrize("case", EQUAL)
def test_batches_are_measured_as_named_tensors(case: str) -> None:
    make, batches, plain, notes = EQUAL[case]
    model = make().eval()
    audit = rw.audit(model, batches)
    assert numbers(audit) == numbers(rw.audit(model, plain))
    assert [note for note in audit.provenance.notes if "left out" in note] == notes


@pytest.mark.parametrize("make", [Sentences, Pooled])
def test_a_dict_that_is_one_argument_has_its_sequences_and_padding(make: type[Sentences]) -> None:
    model = make().eval()
    audit = rw.audit(model, [dict(ENCODED)], importance=True)
    inner = rw.audit(model.auto_model, [dict(ENCODED)], importance=True)
    assert numbers(audit) == numbers(inner)
    assert audit.provenance.sequences == inner.provenance.sequences == 3
    assert audit.importance.loss == f"{inner.importance.loss} (token_embeddings)"
    assert audit.importance.value == inner.importance.value
    assert [head.importance.cost for head in audit.heads] == [head.importance.cost for head in inner.heads]
    assert rw.audit(model, [(dict(ENCODED),)], importance=True).importance.loss == audit.importance.loss


def test_items_without_an_argument_are_left_out_with_one_note() -> None:
    rows = [
        {name: value[at] for name, value in ENCODED.items()} | {"labels": at, "text": TEXTS[at]}
        for at in range(3)
    ]
    audit = rw.audit(Strict().eval(), DataLoader(rows, batch_size=2))
    assert audit.provenance.sequences == 3
    [note] = [note for note in audit.provenance.notes if "left out" in note]
    assert "labels, text" in note


@pytest.mark.parametrize(("kind", "second"), [(SecondArgument, [9, 4]), (Labelled, [1, 0])])
def test_a_second_item_is_passed_to_a_model_with_a_second_argument(kind: Any, second: list[int]) -> None:
    model, seen = kind().eval(), []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[1].tolist()))
    audit = rw.audit(model, [(X[:2], torch.tensor(second))])
    assert seen == [second]
    names = "x, lengths" if kind is SecondArgument else "x, labels"
    assert (
        f"items of the batches were passed as {names}; a dict names them otherwise" in audit.provenance.notes
    )


def test_labels_of_sequences_do_not_replace_the_loss_of_next_tokens() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ids = torch.randint(3, 20, (4, 9))
    labels = torch.tensor([0, 1, 0, 1])
    labelled = rw.audit(model, loader(ids, labels), importance=True).importance
    plain = rw.audit(model, [{"input_ids": part} for part in ids.split(2)], importance=True).importance
    assert (labelled.loss, labelled.value) == (plain.loss, plain.value)


def test_a_model_may_have_a_mask_of_another_meaning() -> None:
    class Own(OnlyX):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(x, src_mask=attention_mask)

    batch = {"x": X[:2, :6], "attention_mask": torch.ones(6, 6).bool().triu(1)}
    assert rw.audit(Own().eval(), [batch]).findings == []


TOKEN_LABELS = r"its `attention_mask`\. Pass the first.*name the items.*'labels': y"
LIST = r"a single batch into a list: `\[batch\]`"
MAKE = r"`batches`, batch 1: expected a batch with tokens.*`rw\.auditing\.text_batches\(texts, tokenizer\)`"
EMPTY = "batch 1: expected a batch with tokens.*got tensors of 0 elements. Leave it out"
ROW = {name: value[0] for name, value in ENCODED.items()}
NO_BATCHES: dict[str, tuple[Any, str]] = {
    "string": ("hello", r"`batches`: expected an iterable of at least one batch, got str"),
    "nothing": (None, r"`batches`: expected an iterable of at least one batch, got NoneType"),
    "batch": (IDS, "got Tensor.*" + LIST),
    "named batch": ({"input_ids": IDS}, "got dict.*" + LIST),
    "lists of ids by name": ([dict(TOKENIZER(TEXTS))], MAKE),
    "one row": ([ROW], "one row without a batch axis.*DataLoader"),
    "list of strings": ([TEXTS], MAKE),
    "strings": (TEXTS, MAKE),
    "list of ids": ([[1, 2, 3]], MAKE),
    "number": ([3], "a batch with tokens: a dict of tensors, a tuple of tensors or a tensor, got int"),
    "long": ([{"input_ids": IDS.repeat(1, 7)}], "63 tokens are more than the 40 positions"),
    "unknown id": ([{"input_ids": IDS + 300}], "not below the 300 that the model knows"),
    "misspelled": ([{"input_id": IDS}], "Did you mean input_ids"),
    "labels of tokens": ([(IDS, IDS % 2)], TOKEN_LABELS),
    "labels of tokens in a list": ([[IDS, IDS % 2]], TOKEN_LABELS),
    "next tokens": ([(IDS, IDS.roll(-1, 1))], TOKEN_LABELS),
    "labels and more": ([[IDS, IDS % 2, torch.zeros(4)]], TOKEN_LABELS),
    "no sequence": ([{"input_ids": IDS[:0]}], EMPTY),
    "no token": ([{"input_ids": IDS[:, :0], "attention_mask": IDS[:, :0]}], EMPTY),
    "no token in a tensor": ([IDS[:, :0]], EMPTY),
    "no token in a tuple": ([(IDS[:, :0],)], EMPTY),
}
OTHER_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "misspelled mask": (
        {"model": Strict(), "batches": [{"input_ids": IDS, "attention_msk": IDS}]},
        "`forward` has no attention_msk.*attention_mask",
    ),
    "misspelled argument": (
        {"model": OnlyX(), "batches": [{"z": X}]},
        "`forward` has no z: leave them out or rename them",
    ),
    "two sequences": (
        {"model": OnlyX(), "batches": [[X[0], X[1]]]},
        r"all 2 items .* `\[\(x,\) for x, \*labels in batches\]`",
    ),
}
REFUSED = OTHER_MODELS | {
    case: ({"batches": batches}, message) for case, (batches, message) in NO_BATCHES.items()
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_data_are_refused_with_a_fix(case: str) -> None:
    given, message = REFUSED[case]
    with unchecked(), pytest.raises(RankwiseError, match=message) as caught:
        rw.audit(**{"model": bert()} | given)
    assert "shorter sequences" not in str(caught.value)


def test_a_wrong_batch_keeps_earlier_batches() -> None:
    for bad in ({"input_ids": IDS[:0]}, TEXTS):
        with unchecked(), pytest.raises(AuditError, match="batch 2") as caught:
            rw.audit(bert(), [{"input_ids": IDS}, bad])
        assert caught.value.audit is not None
        assert caught.value.audit.provenance.sequences == 4


def test_hints_name_what_numbers_prove() -> None:
    with pytest.raises(InputError, match=r"Cast the batch to torch\.float32"):
        rw.audit(OnlyX(), [torch.ones(1, 5, 8, dtype=torch.float64)])
    assert rw.audit(OnlyX(), [torch.ones(1, 5, 8)]).complete
    assert rw.audit(bert(), [{"input_ids": IDS.repeat(1, 20)[:, :40]}]).complete


class Failing(nn.Module):
    """Raises with the words of other errors."""

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("group_size: expected the size and dtype of tokens in range, image_size 3")


def test_words_of_an_error_give_no_advice() -> None:
    with pytest.raises(InputError, match=r"group_size.* to see the whole traceback\.$"):
        rw.audit(Failing(), [torch.ones(1, 8, 8)])


def test_an_audit_that_ends_in_its_first_batch_gives_no_verdict() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), Failing()).eval()
    with pytest.raises(AuditError) as caught:
        rw.audit(model, [torch.randn(2, 5, 8)])
    assert caught.value.audit is not None
    assert caught.value.audit.verdict.sentence.startswith("No verdict: the first batch did not finish.")
