"""`python -m tests.two_devices`: JAX on the first two devices, GPUs or a CPU's, against float64 by the 2x rule.

A call and its gradients, divided by XLA in a jitted program and by shard_map, along sequences and along heads, also of
one key head for both devices; what they share is learned, too.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cupyflash
from cupyflash.check.accuracy import Oracle
from cupyflash.check.case import Case

SHAPE = (157, 189, 64, 2, 4, 2)
CASES = (
    Case("of-one-key-head", "quick", 157, 189, 64, 2, 4, 1, causal=True, sink=True),
    Case("of-heads", "quick", *SHAPE, causal=True, sink=True, alibi=1, dlse=True),
    Case("of-mods", "quick", *SHAPE, causal=True, mods="functions"),
)


def shard_map(f: Any, check: bool, **where: Any) -> Any:
    """JAX's, which has another name in 0.6.0."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(f, check_vma=check, **where)
    from jax.experimental.shard_map import shard_map as earlier

    return earlier(f, check_rep=check, **where)


def check(case: Case, dtype: str) -> None:
    """All ways to divide it."""
    inputs = case.inputs(dtype)
    oracle, names = Oracle(case.problem(dtype), *inputs), inputs.learned
    mods = inputs.features.mods
    options = {**case.options(), **({} if mods is None else {"score_mod": mods.score_mod, "mask_mod": mods.mask_mod})}
    brought = inputs.brought() if mods is None else mods.mod_arrays
    three = [jnp.asarray(x) for x in inputs[:3]]
    shared = {name: jnp.asarray(brought[name]) for name in names}
    dout = jnp.asarray(inputs.dout)
    dlse = jnp.zeros(oracle.forward[1].shape, "float32") if inputs.dlse is None else jnp.asarray(inputs.dlse)

    def call(q: Any, k: Any, v: Any, shared: Any) -> Any:
        named = shared if mods is None else {"mod_arrays": shared}
        return cupyflash.attention(q, k, v, return_lse=True, **options, **named)

    def judge(f: Any, *given: Any) -> None:
        def both(given: Any, dout: Any, dlse: Any) -> Any:
            results, back = jax.vjp(f, *given)
            return results, back((dout, dlse))

        (out, lse), (*three, learned) = jax.jit(both)(given, dout, dlse)
        assert len(out.sharding.device_set) == 2, out.sharding
        found = oracle.judge_forward(np.asarray(out), np.asarray(lse))
        found += oracle.judge_backward(*(np.asarray(x) for x in (*three, *(learned[name] for name in names))))
        assert len(found) == 5 + len(names)
        assert all(x.passed for x in found), (case.name, *map(str, found))

    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    for spec, of_lse, of_shared in ((P("x"), P("x"), P()), (P(None, None, "x"), P(None, "x"), P("x"))):
        of_keys = P() if case.heads_k == 1 and spec != P("x") else spec
        places = spec, of_keys, of_keys
        placed = [jax.device_put(x, NamedSharding(mesh, place)) for x, place in zip(three, places, strict=True)]
        whole = {name: jax.device_put(x, NamedSharding(mesh, P())) for name, x in shared.items()}
        judge(call, *placed, whole)
        if mods is not None and spec != P("x"):  # it asks for h, which in shard_map counts the heads of a part
            continue
        parts = {name: of_shared if x.shape == (case.heads_q,) else P() for name, x in shared.items()}
        for is_checked in (False, True):
            specs = {"mesh": mesh, "in_specs": (*places, parts), "out_specs": (spec, of_lse)}
            judge(shard_map(call, is_checked, **specs), *placed, whole)


def main() -> None:
    assert len(jax.devices()) >= 2, jax.devices()
    on_gpu = jax.default_backend() == "gpu"
    for case in CASES:
        check(case, "bf16" if on_gpu else "fp32")
    print("DONE")


if __name__ == "__main__":
    main()
