"""Score (query, document) pairs of different lengths, padded on the left, as Qwen3-Reranker does.

The score of a pair is the probability of "yes" against "no" as the next token behind it. The weights are random: what
is compared is what three implementations of attention need for the same scores.

\b
    python -m examples.rerank_qwen3
    python -m examples.rerank_qwen3 --size toy --device cpu
"""

from __future__ import annotations

import copy
from typing import Any

import click
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples import measure

VOCABULARY, PAD, NO, YES = 4096, 0, 1, 2
SIZES = {  # of the 0.6B model all but the vocabulary
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128},
    "toy": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16},
}


def make_pairs(count: int, longest: int) -> tuple[Tensor, Tensor]:
    """Token ids and mask, (count, longest): documents of a quarter of the longest to all of it, padded on the left."""
    lengths = torch.linspace(longest // 4, longest, count).round().long()
    mask = (torch.arange(longest) >= longest - lengths[:, None]).long()
    ids = torch.randint(3, VOCABULARY, (count, longest)) * mask + PAD * (1 - mask)
    return ids, mask


@torch.no_grad()
def score(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """(count,): the probability of "yes" for each pair."""
    logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1).logits[:, -1, [NO, YES]]
    return logits.float().softmax(-1)[:, 1]


def build(size: str, implementation: str, longest: int, device: torch.device, dtype: torch.dtype) -> Any:
    config = Qwen3Config(vocab_size=VOCABULARY, pad_token_id=PAD, max_position_embeddings=longest, **SIZES[size])
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(copy.deepcopy(config), attn_implementation=implementation)
    for x in model.parameters():
        if x.dim() > 1:
            torch.nn.init.normal_(x, std=0.08)
    return model.to(device, dtype).eval()


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="0.6b", show_default=True)
@click.option("--pairs", default=16, show_default=True, help="Pairs in a batch.")
@click.option("--longest", default=2048, show_default=True, help="Tokens of the longest pair.")
@click.option("--rounds", default=5, show_default=True, help="How often each is timed.")
@measure.device_option
@measure.json_option
def main(size: str, pairs: int, longest: int, rounds: int, device: str, as_json: bool) -> None:
    where, dtype = measure.start(device)
    ids, mask = (x.to(where) for x in make_pairs(pairs, longest))
    model = build(size, "eager", longest, where, dtype)
    scores, memory = {}, {}
    for name in measure.IMPLEMENTATIONS:
        model.set_attn_implementation(name)
        scores[name] = score(model, ids, mask)
        memory[name] = measure.peak_bytes(lambda: score(model, ids, mask), where)
    seconds = measure.in_turns(model, lambda: score(model, ids, mask), where, rounds)
    apart = {name: (x - scores["eager"]).abs().max().item() for name, x in scores.items()}
    results = {
        name: {"seconds": seconds[name], "peak_bytes": memory[name], "largest_difference": apart[name]}
        for name in seconds
    }
    if as_json:
        measure.show_json(
            {"machine": measure.machine(where), "padding": 1 - mask.float().mean().item(), "results": results}
            | {"scores": {name: x.tolist() for name, x in scores.items()}}
        )
        return
    rows = []
    for name, time in seconds.items():
        ratio = f"{seconds['eager'] / time:.2f}"
        rows.append((name, measure.milliseconds(time), ratio, measure.mebibytes(memory[name]), f"{apart[name]:.1e}"))
    title = f"{pairs} pairs of up to {longest} tokens, {1 - mask.float().mean().item():.0%} padding, {size}"
    columns = ("attention", "time", "faster than eager", "memory beyond the weights", "scores differ by")
    measure.show(f"{title}, {measure.machine(where)}", columns, rows)


if __name__ == "__main__":
    main()
