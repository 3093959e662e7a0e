"""Small models of transformers with random weights, twice: one eager, one by cupyflash."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
import transformers

import cupyflash.transformers

_COMMON = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_GQA = _COMMON | {"num_key_value_heads": 2}
# What is special of each; the class of its configuration follows from that of the model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi": ("PhiForCausalLM", _COMMON | {"hidden_size": 160, "num_attention_heads": 2}),  # head_dim 80
    "gpt2": (
        "GPT2LMHeadModel",
        {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0}
        | {"bos_token_id": 1, "eos_token_id": None, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "llama": ("LlamaForCausalLM", _GQA),
    "qwen3": ("Qwen3ForCausalLM", _GQA | {"head_dim": 32}),
    "mistral": ("MistralForCausalLM", _GQA | {"sliding_window": 6}),
    "gemma2": (
        "Gemma2ForCausalLM",
        _GQA | {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0, "tie_word_embeddings": False},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        _GQA | {"head_dim": 16, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
}
# With another head_dim for v (MLA).
LATENT: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        _COMMON
        | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
        | {"num_key_value_heads": 4, "first_k_dense_replace": 2},
    ),
}
CHUNKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": (
        "Llama4ForCausalLM",
        _GQA | {"head_dim": 16, "num_local_experts": 2, "attention_chunk_size": 6, "intermediate_size_mlp": 96},
    ),
}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _COMMON | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "modernbert": ("ModernBertModel", _COMMON | {"local_attention": 8, "global_attn_every_n_layers": 2}),
}
_SEQ2SEQ = {"vocab_size": 128, "pad_token_id": 0, "decoder_start_token_id": 1, "eos_token_id": None}
SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": (
        "BartForConditionalGeneration",
        _SEQ2SEQ
        | {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "dropout": 0.0}
        | {"decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "max_position_embeddings": 64}
        | {"forced_eos_token_id": None},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        _SEQ2SEQ | {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
    ),
}
EVERY = MODELS | LATENT | CHUNKED | ENCODERS | SEQ2SEQ

cupyflash.transformers.register()
logging.getLogger("transformers").setLevel(logging.ERROR)


def build(name: str, implementation: str, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights: those of equal seeds are equal."""
    kind, settings = EVERY[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**copy.deepcopy(settings | changes))
    torch.manual_seed(seed)
    model = model_class._from_config(config, attn_implementation=implementation)
    assert model.config._attn_implementation == implementation
    with torch.no_grad():
        for parameter, x in model.named_parameters():
            if x.dim() > 1 or parameter.endswith("sinks"):
                x.normal_(std=0.1 if name == "t5" else 0.15)  # T5 does not scale its scores
    return model.eval()


def tokens(batch: int = 3, seqlen: int = 17) -> Any:
    return torch.randint(2, 128, (batch, seqlen), generator=torch.Generator().manual_seed(batch * seqlen))


def padding(side: str, batch: int = 3, seqlen: int = 17) -> Any:
    """(batch, seqlen): 1 for tokens, 0 for padding; the last sequence has none."""
    mask = torch.ones(batch, seqlen, dtype=torch.int64)
    for b, n in enumerate((5, 9, 0)[:batch]):
        if n and side != "none":
            mask[b, :n] = 0
    return mask.flip(1) if side == "right" else mask


def labels_of(ids: Any, mask: Any) -> Any:
    """Labels for tokens that are predicted by tokens: what follows padding is predicted from nothing."""
    hidden = mask == 0
    hidden[:, 1:] |= mask[:, :-1] == 0
    return ids.masked_fill(hidden, -100)


def logits_and_gradients(model: Any, ids: Any, mask: Any, **inputs: Any) -> tuple[Any, dict[str, Any]]:
    """(tokens, vocabulary), those of tokens that are no padding, and the gradients of the loss by parameter."""
    model.zero_grad()
    out = model(ids, attention_mask=mask, labels=labels_of(ids, mask), **inputs)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return out.logits[mask.bool()].detach(), gradients


def greedy(model: Any, ids: Any, mask: Any, count: int = 9, **options: Any) -> Any:
    """(batch, count): the next tokens."""
    options = {"do_sample": False, "max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0} | options
    generated = model.generate(ids, attention_mask=mask, **options)
    return generated if model.config.is_encoder_decoder else generated[:, ids.shape[1] :]
