"""Text generation from a paged cache, with NumPy, CuPy or PyTorch alone.

The model has two layers and no training: its weights are written down. It continues a text with what followed the same
two letters before (an induction head; Olsson et al. 2022), so what it says can be read.

\b
    layer 0  two query heads share a key head; rotary embedding lets them look one and two letters back
    layer 1  looks for letters that came after the same two (head 0) or the same one (head 1), and copies them

Prompts of different lengths go into the cache packed, in one call; then each call adds one letter to each text. Every
letter is compared with that of the whole text computed without a cache.

\b
    python -m examples.generate
    python -m examples.generate --library torch --letters 60 --prompt "one two three. one t"
"""

from __future__ import annotations

import importlib
from typing import Any

import click
import numpy as np

import cupyflash

LETTERS = [chr(i) for i in range(32, 127)]
HALF = 64  # of a head: a letter's vector; and the frequencies of rotary embedding
POSITIONS = 4096
PROMPTS = (
    "the cat sat on the mat. the dog ran to the park. the c",
    "one two three four. one two th",
    "Tell me what I tell you three times: what I t",
)


class Model:
    """The weights, as arrays of one library, and what the two layers compute of them."""

    def __init__(self, library: str) -> None:
        self.xp = importlib.import_module(library)
        self.is_torch = library == "torch"
        self.device = "cuda" if self.is_torch and self.xp.cuda.is_available() else "cpu"
        on_gpu = library == "cupy" or self.device == "cuda"
        self.dtype = self.xp.float16 if on_gpu else self.xp.float32
        rng = np.random.default_rng(0)
        frequencies = rng.uniform(0, np.pi, HALF)
        angles = np.arange(POSITIONS)[:, None] * frequencies
        self.cos, self.sin = self.array(np.cos(angles)), self.array(np.sin(angles))
        self.embedding = self.array(rng.choice((-1.0, 1.0), (len(LETTERS), HALF)) / HALF**0.5)
        back = -np.array([[1.0], [2.0]]) * frequencies  # turned by the position i, they point to i - 1 and i - 2
        self.look_back = self.array(np.concatenate((np.cos(back), np.sin(back)), axis=1))
        self.here = self.array(np.concatenate((np.ones(HALF), np.zeros(HALF)))[None])

    def array(self, x: np.ndarray, dtype: Any = None) -> Any:
        """A NumPy array as one of the library, where the model runs."""
        dtype = dtype or self.dtype
        return self.xp.asarray(x, dtype=dtype, device=self.device) if self.is_torch else self.xp.asarray(x, dtype=dtype)

    def next_letters(self, letters: Any, last: Any, attend: Any) -> Any:
        """What comes after the letters at `last`, of packed texts.

        Args:
            letters: (total,) numbers of letters.
            attend: (layer, q, k, v, rotary) -> out, where q (total, 2, 2 HALF) and k, v (total, 1, 2 HALF).
        """
        own = self.embedding[letters]
        total, nothing = len(own), self.xp.zeros_like(own)
        q, k = (self.join([x[None]] * total) for x in (self.look_back, self.here))
        before = attend(0, q, k, self.pair(own, nothing), True)[:, :, :HALF]  # (total, 2, HALF)
        one, two = before[:, :1], before[:, 1:]
        q = self.join((self.pair(own, one[:, 0]), self.pair(own, nothing)), axis=1)
        k = self.pair(one[:, 0], two[:, 0])
        found = attend(1, q, k, self.pair(own, nothing), False)[last][:, :, :HALF]
        scores = found[:, 0] + 0.25 * found[:, 1]
        return (scores[:, None, :] * self.embedding).sum(-1).argmax(-1)

    def join(self, arrays: Any, axis: int = 0) -> Any:
        return self.xp.concatenate(tuple(arrays), axis=axis)

    def pair(self, a: Any, b: Any) -> Any:
        """(total, HALF) twice as one head (total, 1, 2 HALF)."""
        return self.join((a, b), axis=1)[:, None]

    def to_host(self, x: Any) -> list[int]:
        return [int(n) for n in (x.get() if hasattr(x, "get") else x)]


# How sharply each layer looks, and how much layer 1 prefers what is near: of equal matches the last one counts.
SCALE = (0.5, 20.0)
SLOPE = 0.02


MOST = 512  # letters of a text


class Cached:
    """Generation of several texts from a cache in pages."""

    def __init__(self, model: Model, pages: int = 256, page_size: int = 16) -> None:
        self.model = model
        like = model.embedding
        self.cache = cupyflash.PagedCache(
            pages, page_size, heads_k=1, head_dim=2 * HALF, like=like, layers=2, max_seqlen=MOST
        )
        self.slopes = model.array(np.full(2, SLOPE), model.xp.float32)

    def step(self, sequences: list[int], texts: list[list[int]]) -> list[int]:
        """Add letters to sequences, a prompt or a single one each; what comes next after each."""
        counts = [len(text) for text in texts]
        places = self.cache.append(sequences, counts)

        def attend(layer: int, q: Any, k: Any, v: Any, rotary: bool) -> Any:
            tables = {"rotary_cos": self.model.cos, "rotary_sin": self.model.sin} if rotary else {}
            slopes = {} if rotary else {"alibi_slopes": self.slopes}
            return cupyflash.attention_with_cache(
                q, *self.cache[layer], k=k, v=v, **places, **tables, **slopes, causal=True, scale=SCALE[layer]
            )

        letters = self.model.array(np.concatenate(texts), self.model.xp.int64)
        last = self.model.array(np.cumsum(counts) - 1, self.model.xp.int64)
        return self.model.to_host(self.model.next_letters(letters, last, attend))


def recomputed(model: Model, text: list[int]) -> int:
    """What comes after a text, from all of it, without a cache."""

    def turned(x: Any) -> Any:
        cos, sin = model.cos[: len(text), None], model.sin[: len(text), None]
        a, b = x[..., :HALF], x[..., HALF:]
        return model.join((a * cos - b * sin, a * sin + b * cos), axis=-1)

    def attend(layer: int, q: Any, k: Any, v: Any, rotary: bool) -> Any:
        slopes = {} if rotary else {"alibi_slopes": model.array(np.full(2, SLOPE), model.xp.float32)}
        q, k = (turned(q), turned(k)) if rotary else (q, k)
        return cupyflash.attention(q[None], k[None], v[None], causal=True, scale=SCALE[layer], **slopes)[0]

    last = model.array(np.array([len(text) - 1]), model.xp.int64)
    return model.to_host(model.next_letters(model.array(np.array(text), model.xp.int64), last, attend))[0]


def generate(library: str, prompts: tuple[str, ...], count: int) -> list[str]:
    """Each prompt with `count` letters more; the first twice, from one copy of its keys and values."""
    model = Model(library)
    engine = Cached(model, pages=max(256, (len(prompts) + 1) * MOST // 16))
    texts = [[LETTERS.index(letter) for letter in prompt] for prompt in prompts]
    sequences = [engine.cache.allocate() for _ in texts]
    new = engine.step(sequences, texts)
    texts.append(list(texts[0]))  # a second continuation of the first prompt, which takes another way
    sequences.append(engine.cache.fork(sequences[0]))
    new.append(LETTERS.index("d"))
    for _ in range(count):
        for text, letter in zip(texts, new, strict=True):
            text.append(letter)
        new = engine.step(sequences, [text[-1:] for text in texts])
        assert new == [recomputed(model, text) for text in texts], "the cache changed what the model says"
    for sequence in sequences:
        engine.cache.free(sequence)
    assert engine.cache.free_pages == engine.cache.k.shape[1]
    return ["".join(LETTERS[letter] for letter in text) for text in texts]


@click.command(help=__doc__)
@click.option("--library", type=click.Choice(("numpy", "cupy", "torch")), default="numpy", show_default=True)
@click.option("--letters", type=click.IntRange(1, 400), default=40, show_default=True, help="Added to each prompt.")
@click.option("--prompt", "prompts", multiple=True, help="May be given several times.  [default: three texts]")
def main(library: str, letters: int, prompts: tuple[str, ...]) -> None:
    for prompt in prompts:
        if not prompt or set(prompt) - set(LETTERS) or len(prompt) + letters > MOST:
            raise click.BadParameter(
                f"{prompt!r:.40}: expected 1 to {MOST - letters} of the letters {''.join(LETTERS)}",
                param_hint="--prompt",
            )
    for text in generate(library, prompts or PROMPTS, letters):
        click.echo(text)


if __name__ == "__main__":
    main()
