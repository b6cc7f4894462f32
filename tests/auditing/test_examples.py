"""Tokens are named by text and position."""

from collections import Counter
from itertools import chain
from types import SimpleNamespace

import torch

from rankwise.auditing.examples import HeadExamples, TokenNames, peak_names
from rankwise.operators import DenseMixing
from rankwise.tracing import CapturedMixer


class Words:
    """A tokenizer whose token n is the word "wn"; 0 opens a text."""

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[0, *map(len, text.split())] for text in texts]}

    def decode(self, ids: list[int]) -> str:
        return "".join("[CLS]" if one == 0 else f" w{one}" for one in ids)


def test_a_tokenizer_without_decode_names_tokens_by_id() -> None:
    assert TokenNames(lambda texts: {}).text(4) == "id 4"


def test_tokens_are_named_by_text_and_position() -> None:
    names = TokenNames(Words())
    ids = torch.tensor([0, 5, 6])
    assert peak_names(names, ids, 0, 3) == {"[CLS], the first token", "the first token", "[CLS]"}
    assert peak_names(names, ids, 2, 3) == {"w6, the last token", "the last token", "w6"}
    assert peak_names(names, None, 1, 3) == {"token 1"}
    assert [names.text(7), TokenNames().text(7)] == ["w7", "id 7"]
    space = SimpleNamespace(decode=lambda ids: " ")
    assert TokenNames(space).text(3) == "␣"


def of_most(named: list[list[str]]) -> tuple[str, int]:
    return HeadExamples(named=len(named), names=Counter(chain(*named))).peak


def test_the_most_frequent_name_wins_and_among_equals_text_and_position() -> None:
    same = [["[CLS], the first token", "the first token", "[CLS]"]] * 2
    assert of_most(same) == ("[CLS], the first token", 2)
    words = [[f"w{n}, the first token", "the first token", f"w{n}"] for n in range(3)]
    assert of_most(words) == ("the first token", 3)
    assert of_most([[f"w{n}, token {n}", f"token {n}", f"w{n}"] for n in range(1, 4)]) == ("", 0)
    assert of_most([]) == ("", 0)


def test_the_peak_of_a_head_is_named_without_padding() -> None:
    real = torch.tensor([[False, True, True, True]])
    operator = DenseMixing(torch.eye(4)[None, None])
    site = CapturedMixer("attention", 0, "softmax", operator, valid_tokens=real, valid_sources=real)
    names = TokenNames(Words()).peaks(site, {"input_ids": torch.tensor([[9, 1, 2, 3]])}, [[1]])
    assert names == [[{"w2, token 1", "token 1", "w2"}]]
