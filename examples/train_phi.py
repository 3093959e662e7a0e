"""Train a tiny Phi on Python functions until it knows them, and let it complete ``def factorial(n):``.

It is trained with cupyflash, on whole functions padded on the right, and completes several prompts at once, padded on
the left, with eager attention and with cupyflash: both must write the same. On a GPU it takes a few minutes, in bf16;
the toy on a CPU learns little.

\b
    python -m examples.train_phi
    python -m examples.train_phi --size toy --steps 4 --batch 2 --characters 90 --longest 20 --device cpu
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.syntax import Syntax
from torch import Tensor
from transformers import PhiConfig, PhiForCausalLM

from examples import measure

PAD, BEGIN, END, VOCABULARY = 0, 1, 2, 128  # a token a character
PROMPTS = ("def factorial(n):", "def gcd(a, b):", "def is_prime(n):")
SIZES = {  # all with head_dim 80, as Phi has it
    "small": {"hidden_size": 640, "intermediate_size": 2560, "num_hidden_layers": 6, "num_attention_heads": 8},
    "toy": {"hidden_size": 160, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def functions(characters: int) -> list[str]:
    """The source of those in snippets.py that are no longer than that."""
    source = (Path(__file__).parent / "snippets.py").read_text()
    found = [part.strip() + "\n" for part in source.split("\n\n\n") if part.startswith("def ")]
    return [text for text in found if len(text) <= characters]


def encode(texts: list[str], side: str, device: torch.device, end: bool) -> tuple[Tensor, Tensor]:
    """Ids and mask, (texts, longest), padded on one side."""
    rows = [[BEGIN, *text.encode("ascii"), *([END] if end else [])] for text in texts]
    longest = max(map(len, rows))
    gaps = [[PAD] * (longest - len(row)) for row in rows]
    ids = [gap + row if side == "left" else row + gap for row, gap in zip(rows, gaps, strict=True)]
    found = torch.tensor(ids, device=device)
    return found, (found != PAD).long()


def decode(ids: Tensor) -> str:
    codes = ids.tolist()
    codes = codes[: codes.index(END)] if END in codes else codes
    return bytes(c for c in codes if c > END).decode("ascii")


def train(model: Any, texts: list[str], steps: int, batch: int, learning_rate: float) -> list[float]:
    """The losses, one a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps + 1)
    losses = []
    model.train()
    for _ in range(steps):
        chosen = [texts[i] for i in torch.randint(len(texts), (batch,)).tolist()]
        ids, mask = encode(chosen, "right", model.device, end=True)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            loss = model(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return [float(x) for x in losses]


@torch.no_grad()
def complete(model: Any, implementation: str, longest: int) -> list[str]:
    """What the model writes behind the prompts, greedily."""
    model.set_attn_implementation(implementation)
    ids, mask = encode(list(PROMPTS), "left", model.device, end=False)
    options = {"do_sample": False, "max_new_tokens": longest, "pad_token_id": PAD, "eos_token_id": END}
    with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
        return [decode(row) for row in model.eval().generate(ids, attention_mask=mask, **options)]


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="small", show_default=True)
@click.option("--steps", default=600, show_default=True, help="Steps of training.")
@click.option("--batch", default=32, show_default=True, help="Functions in a batch.")
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--characters", default=1000, show_default=True, help="Leave out longer functions.")
@click.option("--longest", default=200, show_default=True, help="Characters to complete at most.")
@measure.device_option
@measure.json_option
def main(
    size: str, steps: int, batch: int, learning_rate: float, characters: int, longest: int, device: str, as_json: bool
) -> None:
    where, _ = measure.start(device)
    config = PhiConfig(
        vocab_size=VOCABULARY, max_position_embeddings=1024, pad_token_id=PAD, bos_token_id=BEGIN, eos_token_id=END,
        attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **SIZES[size],
    )  # fmt: skip
    model = PhiForCausalLM._from_config(config, attn_implementation="cupyflash").to(where)
    begin = time.perf_counter()
    texts = functions(characters)
    losses = train(model, texts, steps, batch, learning_rate)
    seconds = time.perf_counter() - begin
    eager, ours = (complete(model, name, longest) for name in ("eager", "cupyflash"))
    known = [any(text.startswith(taught) for taught in texts) for text in ours]
    if as_json:
        measure.show_json(
            {"machine": measure.machine(where), "seconds": seconds, "losses": losses, "eager": eager, "cupyflash": ours}
            | {"same": eager == ours, "known": known}
        )
    else:
        shown = [0, steps // 4, steps // 2, steps - 1]
        rows = [(f"{i + 1}", f"{losses[i]:.3f}") for i in sorted(set(shown))]
        measure.show(f"Phi {size}: {steps} steps in {seconds:.0f} s, {measure.machine(where)}", ("step", "loss"), rows)
        Console().print(Syntax(ours[0], "python", background_color="default"))
        rows = [
            (prompt, "yes" if a == b else "NO", "yes" if knows else "no")
            for prompt, a, b, knows in zip(PROMPTS, eager, ours, known, strict=True)
        ]
        measure.show("Completed", ("prompt", "the same with eager", "as it was taught"), rows)
    if eager != ours:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
