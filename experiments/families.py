"""Claim: capture sees every mixer of these model families, and sees it exactly.

Builds each family tiny and with random float64 weights (no download), runs one batch, and compares what was
captured with what the model itself computed:

- outputs with and without capture, bit by bit;
- the captured matrix times the values, with what the model's own attention gave;
- the captured matrix, with the eager twin's ``output_attentions``;
- the captured states, with ``output_hidden_states``.

    python -m experiments.families

writes docs/models.md (fifteen seconds on one core). Expected: every mixer and every state, bit-identical
outputs, M V within 1e-12 of the model's own; matrices and states of the fused model within 1e-4 of those that
its eager twin reports, which takes some of its softmaxes in float32.
"""

import argparse
import math
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from experiments.family_checks import Family, Row, check, replay_attention, replay_layer
from experiments.render import fill_page, markdown_table
from experiments.state_space_checks import STATE_SPACE_HEADINGS, StateSpaceRow, check_state_space
from experiments.state_space_models import STATE_SPACE
from experiments.tiny_models import (
    BERT,
    IMAGE,
    LLAMA,
    hand_written,
    hidden_inputs,
    hugging_face,
    image_inputs,
    nano_gpt,
    seq2seq_inputs,
    text_inputs,
    torch_attention,
    torch_encoder,
    torch_transformer,
    two_hidden_inputs,
)

PAGE = Path(__file__).parents[1] / "docs" / "models.md"

HEADINGS = (
    "family",
    "attention",
    "mixers",
    "states",
    "operator",
    "max \\|M V − own output\\|",
    "max \\|M − `output_attentions`\\|",
    "max \\|state − `hidden_states`\\|",
    "outputs bit-identical",
)


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of a row."""
    mixers, states = row.trace.mixers, row.trace.states
    kinds = sorted({type(site.operator).__name__ for site in mixers})
    return (
        row.family.name,
        attention_of(row),
        f"{len(mixers)} of {row.family.mixers}",
        f"{len(states)} of {row.family.states}",
        ", ".join(f"`{kind}`" for kind in kinds),
        *(shown(error) for error in (row.product_error, row.attention_error, row.state_error)),
        "yes" if row.identical else "no",
    )


def attention_of(row: Row) -> str:
    """How the model computes its attention."""
    if row.family.replay is not None:
        return "PyTorch's own layer"
    return "fused" if row.implementation == "sdpa" else "softmax written out"


def shown(error: float) -> str:
    """A difference as the table gives it."""
    if math.isnan(error):
        return "not offered"
    return f"{error:.0e}" if error else "0"


def page(rows: Iterable[Row], state_space: Iterable[StateSpaceRow], command: str) -> str:
    """The whole page: provenance, tables, and what they rest on."""
    import transformers

    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    where = f"Python {platform.python_version()}, {platform.machine()} CPU"
    return fill_page(
        "models",
        {
            "command": command,
            "where": f"{versions}, {where}",
            "table": markdown_table(HEADINGS, [cells(row) for row in rows]),
            "state_space": markdown_table(STATE_SPACE_HEADINGS, [row.cells for row in state_space]),
        },
    )


T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
DISTIL = {"vocab_size": 64, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
BLOOM = {"vocab_size": 64, "hidden_size": 32, "n_layer": 3, "n_head": 4}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "num_heads": [2, 4], "window_size": 4}
MODERN = BERT | {"global_attn_every_n_layers": 2, "local_attention": 6}
DEBERTA = BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
ESM, ESM_NORM = BERT | {"mask_token_id": 4}, "encoder.emb_layer_norm_after"
OPT = BERT | {"ffn_dim": 48, "word_embed_proj_dim": 32}
MOE = LLAMA | {"num_local_experts": 3}
WINDOWED = LLAMA | {"sliding_window": 5}
TEXT, IMAGES = text_inputs, image_inputs
FAMILIES = [
    Family("BERT", hugging_face("BertModel", **BERT), TEXT, 3, 4),
    Family("RoBERTa", hugging_face("RobertaModel", **BERT), TEXT, 3, 4),
    Family("DistilBERT", hugging_face("DistilBertModel", **DISTIL), TEXT, 3, 4),
    Family("ALBERT", hugging_face("AlbertModel", **BERT | {"embedding_size": 16}), TEXT, 3, 4),
    Family("ELECTRA", hugging_face("ElectraModel", **BERT | {"embedding_size": 32}), TEXT, 3, 4),
    Family("ModernBERT", hugging_face("ModernBertModel", **MODERN), TEXT, 3, 4, final_norm="final_norm"),
    Family("DeBERTa-v2", hugging_face("DebertaV2Model", **DEBERTA), TEXT, 3, 4, fused=False),
    Family("GPT-2", hugging_face("GPT2Model", **GPT), TEXT, 3, 4, final_norm="ln_f"),
    Family("OPT", hugging_face("OPTModel", **OPT), TEXT, 3, 4, final_norm="decoder.final_layer_norm"),
    Family("GPT-NeoX", hugging_face("GPTNeoXModel", **BERT), TEXT, 3, 4, final_norm="final_layer_norm"),
    Family("Bloom", hugging_face("BloomModel", **BLOOM), TEXT, 3, 4, fused=False, final_norm="ln_f"),
    Family("Falcon", hugging_face("FalconModel", **BERT), TEXT, 3, 4, final_norm="ln_f"),
    Family("Llama", hugging_face("LlamaModel", **LLAMA), TEXT, 3, 4, final_norm="norm"),
    Family("Mistral", hugging_face("MistralModel", **WINDOWED), TEXT, 3, 4, final_norm="norm"),
    Family("Qwen3", hugging_face("Qwen3Model", **LLAMA), TEXT, 3, 4, final_norm="norm"),
    Family("Mixtral", hugging_face("MixtralModel", **MOE), TEXT, 3, 4, final_norm="norm"),
    Family("Gemma-2", hugging_face("Gemma2Model", **WINDOWED), TEXT, 3, 4, fused=False, final_norm="norm"),
    Family("Phi-3", hugging_face("Phi3Model", **LLAMA), TEXT, 3, 4, final_norm="norm"),
    Family("T5", hugging_face("T5Model", **T5), seq2seq_inputs, 9, 8, final_norm="final_layer_norm"),
    Family("ViT", hugging_face("ViTModel", **BERT | IMAGE), IMAGES, 3, 4),
    Family("Swin", hugging_face("SwinModel", **SWIN | {"depths": [2, 2]}), IMAGES, 4, 5),
    Family("ESM", hugging_face("EsmModel", **ESM), TEXT, 3, 4, final_norm=ESM_NORM),
    Family("nanoGPT style", nano_gpt, TEXT, 3, 4),
    Family("hand-written einsum", hand_written, hidden_inputs, 3, 4, fused=False),
    Family("torch TransformerEncoder", torch_encoder, hidden_inputs, 3, 4, False, replay=replay_layer),
    Family("torch Transformer", torch_transformer, two_hidden_inputs, 6, 6, False, replay=replay_layer),
    Family("torch MultiheadAttention", torch_attention, hidden_inputs, 3, 4, False, replay=replay_attention),
]  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Check all families (or some) and write the page; the exit status says whether all is as claimed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = [*(family.name for family in FAMILIES), *STATE_SPACE]
    parser.add_argument("--families", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--page", type=Path, default=PAGE, help="where to write (default: docs/models.md)")
    given = parser.parse_args(arguments)
    rows = [
        check(family, implementation)
        for family in FAMILIES
        if family.name in given.families
        for implementation in family.implementations
    ]
    state_space = [check_state_space(name) for name in STATE_SPACE if name in given.families]
    given.page.write_text(page(rows, state_space, "python -m experiments.families"), encoding="utf-8")
    print(f"wrote {given.page}")
    wrong = [row for row in rows if not (row.complete and row.identical)]
    for row in wrong:
        print(f"not as claimed: {row.family.name} ({row.implementation})", file=sys.stderr)
    wrong_too = [row.name for row in state_space if not (row.complete and row.identical)]
    for name in wrong_too:
        print(f"not as claimed: {name}", file=sys.stderr)
    return 1 if wrong or wrong_too else 0


if __name__ == "__main__":
    raise SystemExit(main())
