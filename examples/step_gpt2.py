"""Time and memory of a training step of GPT-2, with three implementations of attention.

python -m examples.step_gpt2
python -m examples.step_gpt2 --size toy --seqlen 64 --batch 2 --device cpu
"""

from __future__ import annotations

from typing import Any

import click
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from examples import measure

SIZES = {
    "small": {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257},
    "medium": {"n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257},
    "toy": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256},
}


class Training:
    """A model, its optimiser, and one batch of random tokens."""

    def __init__(self, size: str, ids: Tensor, dtype: torch.dtype) -> None:
        config = GPT2Config(n_positions=ids.shape[1], attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **SIZES[size])
        config.bos_token_id = config.eos_token_id = None
        self.model: Any = GPT2LMHeadModel._from_config(config, attn_implementation="eager").to(ids.device, dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.ids = ids

    def step(self) -> Tensor:
        """The loss, before the step."""
        loss: Tensor = self.model(self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def gradient(self) -> Tensor:
        """That of all parameters, one behind the other, without a step."""
        self.model(self.ids, labels=self.ids, use_cache=False).loss.backward()
        found = torch.cat([x.grad.float().flatten() for x in self.model.parameters()])
        self.optimizer.zero_grad()
        return found


@click.command(help=__doc__)
@click.option("--size", type=click.Choice(list(SIZES)), default="small", show_default=True)
@click.option("--batch", default=4, show_default=True, help="Sequences in a batch.")
@click.option("--seqlen", default=2048, show_default=True, help="Tokens of each.")
@click.option("--rounds", default=7, show_default=True, help="How often each is timed.")
@measure.device_option
@measure.json_option
def main(size: str, batch: int, seqlen: int, rounds: int, device: str, as_json: bool) -> None:
    where, dtype = measure.start(device)
    training = Training(size, torch.randint(0, int(SIZES[size]["vocab_size"]), (batch, seqlen)).to(where), dtype)
    gradients, memory = {}, {}
    for name in measure.IMPLEMENTATIONS:
        training.model.set_attn_implementation(name)
        gradients[name] = training.gradient()
    apart = {name: _apart(x, gradients["eager"]) for name, x in gradients.items()}
    gradients.clear()
    training.step()  # from here on the optimiser's state is there
    for name in measure.IMPLEMENTATIONS:
        training.model.set_attn_implementation(name)
        memory[name] = measure.peak_bytes(training.step, where)
    seconds = measure.in_turns(training.model, training.step, where, rounds)
    results = {
        name: {"seconds": seconds[name], "peak_bytes": memory[name], "gradient_apart": apart[name]} for name in seconds
    }
    if as_json:
        measure.show_json({"machine": measure.machine(where), "results": results})
        return
    rows = []
    for name, time in seconds.items():
        speed, ratio = f"{batch * seqlen / time:,.0f}", f"{seconds['eager'] / time:.2f}"
        shown = measure.milliseconds(time), speed, ratio, measure.mebibytes(memory[name]), f"{apart[name]:.1e}"
        rows.append((name, *shown))
    columns = ("attention", "a step", "tokens a second", "faster than eager", "memory", "gradient differs by")
    measure.show(f"GPT-2 {size}, {batch} x {seqlen} tokens, {measure.machine(where)}", columns, rows)


def _apart(x: Tensor, y: Tensor) -> float:
    """How far one vector is from another, of the other's length."""
    return float((x - y).norm() / y.norm())


if __name__ == "__main__":
    main()
