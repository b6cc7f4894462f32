"""Text models: the stack of blocks without output head (`ToSTModel`), and the causal language model."""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from rankwise._internals.torch_private import values_known
from rankwise.errors import InputError
from rankwise.models.block import Block, make_norm
from rankwise.models.configuration import ToSTConfig
from rankwise.models.mixer_cache import MixerCache
from rankwise.models.mixers.mixer import as_bool_mask
from rankwise.models.pretrained import PACKED, ToSTPreTrainedModel

PREFIX_TUNING = "Prefix tuning of peft passes a cache that no ToST model reads: use prompt tuning or LoRA."


class ToSTModel(ToSTPreTrainedModel):
    """Text model without output head: token embedding, blocks and a final norm.

    Examples:
        >>> import torch
        >>> config = ToSTConfig(vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> ToSTModel(config)(torch.tensor([[1, 2, 3]])).last_hidden_state.shape
        torch.Size([1, 3, 16])
    """

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        learned = config.position_embeddings == "learned"
        self.embed_positions = (
            nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config) if config.norm_position == "pre" else nn.Identity()
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Shaped[Tensor, "B S"] | None = None,
        position_ids: Int[Tensor, "..."] | None = None,
        past_key_values: MixerCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the token states after the last block, (B, T, D), and the cache if requested.

        Args:
            input_ids: token ids of this call, (B, T).
            attention_mask: 1 (or true) for real tokens; one value per token of this call, or per token
                so far.
            position_ids: positions from 0, counting either all tokens or, by default, only real tokens.
            past_key_values: cache returned by an earlier call.
            inputs_embeds: embeddings to use instead of ``input_ids``.
            use_cache: True to return the cache; by default as configured, but False in training mode.
            output_hidden_states: True to also return the input of each block and the output of the last norm.
            **kwargs: arguments that transformers passes to every model; only ``return_dict`` has an effect.

        Raises:
            InputError: if a mask or a position is invalid, a text is too long, or an argument is unknown.
        """
        self._loss_options(kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            got = "neither" if input_ids is None else "both"
            raise InputError("`forward`", expected="input_ids or inputs_embeds", got=got, fix="Pass one.")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._cache(past_key_values, use_cache)
        mask = _mask_of_call(attention_mask, x, 0 if cache is None else cache.length)
        x = self.dropout(self._with_positions(x, mask, position_ids, cache))
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states: tuple[Tensor, ...] = ()
        for index, layer in enumerate(self.layers):
            states += (x,) if output_hidden_states else ()
            past = None if cache is None else cache.states[index]
            x, new = layer(x, attention_mask=mask, state=past, return_state=cache is not None)
            if cache is not None:
                cache.states[index] = new
        x = self.norm(x)
        if cache is not None:
            cache.advance(mask, x.shape[0], x.shape[1], x.device)
        return BaseModelOutputWithPast(
            last_hidden_state=x,
            past_key_values=cache,
            hidden_states=(*states, x) if output_hidden_states else None,
        )

    def _cache(self, past: MixerCache | None, use_cache: bool | None) -> MixerCache | None:
        """Return the cache for this call, None if none is used; raise if ``past`` does not fit the model."""
        if past is not None and not self.config.causal:
            raise InputError(
                "`past_key_values`",
                expected="None",
                got=f"a {type(past).__name__}",
                fix="A model with causal=False reads all tokens of a text in one call: leave the cache out. "
                + PREFIX_TUNING,
            )
        if past is None:
            if use_cache is None:
                use_cache = self.config.use_cache and not self.training
            checkpointed = self.gradient_checkpointing and self.training
            wanted = use_cache and self.config.causal and not checkpointed
            return MixerCache(len(self.layers)) if wanted else None
        if not isinstance(past, MixerCache) or len(past) != len(self.layers):
            raise InputError(
                "`past_key_values`",
                expected=f"the MixerCache of {len(self.layers)} layers that an earlier call returned",
                got=f"a {type(past).__name__} of {len(past)}",
                fix=f"Leave it out on the first call. {PREFIX_TUNING}",
            )
        return past

    def _with_positions(
        self, x: Tensor, mask: Tensor | None, position_ids: Tensor | None, cache: MixerCache | None
    ) -> Tensor:
        """Return x, plus learned position embeddings if any; raise if positions are invalid or too large."""
        biased = self.config.position_bias and "tssa" in self.config.layer_types
        bounded = self.embed_positions is not None or biased
        if not bounded and position_ids is None:
            return x
        before, length = (None, 0) if cache is None else (cache.counts, cache.length)
        counted = (
            torch.arange(x.shape[1], device=x.device)[None] if mask is None else mask.long().cumsum(1) - 1
        )
        if before is not None:
            counted = before[:, None] + counted
        counted = counted.clamp(min=0).expand(x.shape[:2])  # clamped, because left padding counts as −1
        if position_ids is not None:
            _check_positions(position_ids, counted, mask, length)
        if bounded:
            _check_length(counted, x.shape[1] + length, self.config.max_position_embeddings)
        if self.embed_positions is None:
            return x
        return x + self.embed_positions(counted if position_ids is None else position_ids)


class ToSTForCausalLM(ToSTPreTrainedModel, GenerationMixin):
    """Causal language model: `ToSTModel` and an output head that shares weights with the embedding.

    Examples:
        >>> import torch
        >>> config = ToSTConfig(vocab_size=11, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
        >>> model = ToSTForCausalLM(config).eval()
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).shape
        torch.Size([1, 7])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def _get_name(self) -> str:
        """Return the name of this class, by which `Trainer` knows that labels are shifted.

        Subclasses and the classes that FSDP2 creates need the same name.
        """
        return ToSTForCausalLM.__name__

    def __init__(self, config: ToSTConfig) -> None:
        super().__init__(config)
        if not config.causal:
            raise InputError(
                "ToSTForCausalLM", expected="causal=True", got="causal=False", fix="Set causal=True."
            )
        self.model = ToSTModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the model creates its own cache on the first call."""
        return False

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, *others: Any) -> None:
        """Raise InputError if a cache class of transformers is requested, because it would be ignored."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise InputError(
                "`cache_implementation`",
                expected="None",
                got=repr(generation_config.cache_implementation),
                fix="The model creates its own MixerCache: leave the argument out.",
            )
        super()._prepare_cache_for_generation(generation_config, *others)

    @can_return_tuple
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Shaped[Tensor, "B S"] | None = None,
        position_ids: Int[Tensor, "..."] | None = None,
        past_key_values: MixerCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        labels: Int[Tensor, "B T"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Int[Tensor, " N"] = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits of the next token, (B, T, vocab_size), and a loss if labels are passed.

        All other arguments have the same meaning as for `ToSTModel`.

        Args:
            labels: the same tokens as ``input_ids``, because the loss shifts them; −100 excludes a token.
            logits_to_keep: number of last tokens for which logits are returned, or token indices; 0 for all.
            **kwargs: arguments of the loss, such as ``num_items_in_batch``, and arguments of `ToSTModel`.
        """
        options = self._loss_options(kwargs)
        output = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache,
            output_hidden_states, return_dict=True,
        )  # fmt: skip
        kept = slice(-logits_to_keep or None, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **options
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
        )


def _mask_of_call(attention_mask: Tensor | None, x: Tensor, before: int) -> Bool[Tensor, "B T"] | None:
    """Return the mask of this call's tokens; None if all are real, because the model is then faster."""
    if attention_mask is None:
        return None
    rows, tokens = x.shape[:2]
    columns = attention_mask.shape[-1]
    # `==` is used, because torch.compile does not support `in` for symbolic lengths.
    fits = columns == tokens or columns == before + tokens
    if attention_mask.ndim != 2 or attention_mask.shape[0] != rows or not fits:
        raise InputError(
            "`attention_mask`",
            expected=f"({rows}, {tokens})" + (f" or ({rows}, {before + tokens})" if before else ""),
            got=f"{tuple(attention_mask.shape)}",
            fix="Pass 1 for real tokens and 0 for padding, of this call's tokens or of all so far.",
        )
    mask = as_bool_mask(attention_mask[:, columns - tokens :])
    return None if values_known(mask) and bool(mask.all()) else mask


def _check_positions(position_ids: Tensor, counted: Tensor, mask: Tensor | None, before: int) -> None:
    """Raise InputError if position ids count neither all tokens nor only the real tokens."""
    if not values_known(position_ids, counted, mask):
        return
    rows, tokens = counted.shape
    fits = tuple(position_ids.shape) in ((tokens,), (1, tokens), (rows, tokens))
    all_tokens = torch.arange(before, before + tokens, device=counted.device)
    padding = torch.zeros_like(counted, dtype=torch.bool) if mask is None else ~mask
    if not fits or not any(bool(((position_ids == way) | padding).all()) for way in (counted, all_tokens)):
        raise InputError(
            "`position_ids`",
            expected=f"{before}, {before + 1}, … for each row, over its real tokens or over all",
            got=f"{position_ids.flatten()[:8].tolist()}, shape {tuple(position_ids.shape)}",
            fix=PACKED,
        )


def _check_length(positions: Tensor, most: int, limit: int) -> None:
    """Raise InputError if a position has no embedding. In a compiled graph, the embedding raises instead."""
    if most > limit and values_known(positions) and int(positions.max()) >= limit:
        raise InputError(
            "length of the text",
            expected=f"at most max_position_embeddings = {limit} tokens",
            got=f"{int(positions.max()) + 1}",
            fix='Cut the text. A model with position_embeddings="none" and position_bias=False has no bound.',
        )
