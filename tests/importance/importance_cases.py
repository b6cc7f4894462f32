"""Tiny models, gates by hand, and importance as arrays per mixer."""

from itertools import groupby

import numpy as np
import torch
import transformers
from tests.support.modules import kind
from torch import nn

import rankwise as rw
from rankwise.importance import ImportanceSettings
from rankwise.tracing import Intervention, capture

CHEAP = ImportanceSettings(exact=False, probes=0, tolerance=None)
SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}


def language_model(seed=0, **sizes):
    """Return a GPT-2 whose predictions are far from uniform, so that removal has a cost."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(vocab_size=24, n_positions=32, initializer_range=0.4, **SIZES | sizes)
    return transformers.GPT2LMHeadModel(config).eval().double()


def encoder(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=24, initializer_range=0.3, **sizes)
    return transformers.BertModel(config, add_pooling_layer=False).eval().double()


def bert(kind, **more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return getattr(transformers, kind)(transformers.BertConfig(vocab_size=24, **sizes, **more)).eval()


def t5(kind):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(vocab_size=24, decoder_start_token_id=0, **sizes)
    return getattr(transformers, kind)(config).eval()


def ids(sequences=3, tokens=10, seed=1):
    return torch.randint(3, 24, (sequences, tokens), generator=torch.Generator().manual_seed(seed))


class Scaled(Intervention):
    """Multiply the output of a head, or the update of a block, by ξ."""

    def __init__(self, gate, site="", head=0, block=""):
        self.gate, self.site, self.head = gate, site, head
        self.blocks = frozenset({block} if block else ())

    def on_heads(self, heads):
        if heads.call_id.module != self.site:
            return None
        values = heads.values.clone()
        values[:, self.head] *= self.gate
        return values

    def on_block(self, block):
        return block.input + self.gate * (block.output - block.input)


def run_scaled(model, given, gate, **where):
    with capture(model, intervention=Scaled(gate, **where), on_mixer=lambda site: None):
        return model(**given)


class Heads(nn.Module):
    """Attention with any number of heads of width 1 over small states."""

    def __init__(self, heads, width=4):
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * heads), nn.Linear(heads, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, 1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


Classifier = kind(
    lambda self, x: self.head(self.inner(x).mean(1)), "Classifier", inner=lambda: Heads(2),
    head=lambda: nn.Linear(4, 3),
)  # fmt: skip


class MixerArrays:
    """Importance of the heads of one mixer: every field of `HeadImportance` as an array (H,)."""

    def __init__(self, heads):
        self.ids = [head for head, _ in heads]
        self.site, self.layer, self.why_not = self.ids[0].site, self.ids[0].layer, heads[0][1].why_not
        self._known = [known for _, known in heads]

    def __getattr__(self, name):
        return np.array([getattr(known, name) for known in self._known])


class Measured:
    """Importance by mixer, with the fields of its record."""

    def __init__(self, importance):
        self.heads, self._record = importance.heads, importance.record
        groups = groupby(importance.heads.items(), lambda item: item[0].at(None))
        self.sites = [MixerArrays(list(heads)) for _, heads in groups]

    def __getattr__(self, name):
        return getattr(self._record, name)


def measure(model, batches, settings=None, **options):
    """Measure importance, by estimates if no settings are given."""
    settings = settings or ImportanceSettings(exact=False)
    return Measured(rw.importance.measure_importance(model, batches, settings, **options))
