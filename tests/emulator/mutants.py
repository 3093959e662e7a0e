# ruff: noqa: E501 (source texts to be replaced)
"""Bugs planted in kernel sources: edits of header texts, for the tests that show that the emulator can fail."""

from __future__ import annotations

from dataclasses import dataclass

from cupyflash.plan.variant import kernel_sources


@dataclass(frozen=True)
class Bug:
    """One edit, and how it must show.

    Attributes:
        file, old, new: `old` stands once in kernels_cu/`file`.
        case: name in the case table.
        finds: what the message of the race detector matches; "" if the numbers are wrong.
        arch: which device is planned for.
    """

    name: str
    file: str
    old: str
    new: str
    case: str
    finds: str
    arch: str = "sm_80"

    def headers(self) -> dict[str, str]:
        text = kernel_sources()[self.file]
        assert text.count(self.old) == 1, (
            f"{self.name}: {self.old!r} stands {text.count(self.old)} times in {self.file}"
        )
        return {self.file: text.replace(self.old, self.new)}


FORWARD = (
    Bug("no barrier after the copies", "sm80/fwd_sm80.cuh", "ptx::cp_async_wait_group<kStages - 2>();\n        ptx::bar_sync();",
        "ptx::cp_async_wait_group<kStages - 2>();", "dense-d64", r"RACE, .*(tile|gemm)\.cuh:\d+"),
    Bug("wait one group too lax", "sm80/fwd_sm80.cuh", "cp_async_wait_group<kStages - 2>", "cp_async_wait_group<kStages - 1>",
        "causal-d128", r"RACE, access to the destination of cp\.async before its wait_group.*(tile|gemm)\.cuh:\d+"),
    Bug("stage requested one too early", "sm80/fwd_sm80.cuh", "request(i, Int<kStages - 1>{});", "request(i, Int<kStages>{});",
        "dense-d128", r"RACE, .*(tile|gemm)\.cuh:\d+"),
    Bug("copies of another tile's group", "sm80/fwd_sm80.cuh", "        ptx::cp_async_commit_group();\n", "", "dense-d64", r"RACE, "),
    Bug("mask off by one", "attention/mask.cuh", "ki - qi <= upper", "ki - qi <= upper + 1", "causal-d64", ""),
    Bug("no bound of the keys", "attention/mask.cuh", "bool full(int q0, int k0) const { return k0 >=",
        "bool full(int q0, int k0) const { return !kHides || k0 >=", "dense-d64", ""),
    Bug("copy out of bounds", "tile/tile.cuh", "ptx::cp_async_16(at(row, 8 * chunk), from, valid);",
        "ptx::cp_async_16(at(row, 8 * chunk), from, true);", "dense-d64", r"cp\.async at kernels_cu/tile/tile\.cuh:\d+: bytes .* of buffer '[qk]'"),
    Bug("store out of bounds", "tile/epilogue.cuh", "if (dst_row + row < n_rows && col < kValidCols)", "if (col < kValidCols)",
        "dense-d64", r"store at kernels_cu/tile/epilogue\.cuh:\d+.*(out of bounds|writes to the input|in no buffer)"),
    Bug("epilogue reads another lane's rows", "tile/epilogue.cuh", "    ptx::bar_warp_sync();\n    return is_clean(trace);",
        "    return is_clean(trace);", "dense-d64", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    Bug("O written before all lanes have repaired it", "sm80/fwd_sm80.cuh", "        ptx::bar_warp_sync();\n    }\n    write_rows", "    }\n    write_rows",
        "nan-in-visible-key-causal", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    Bug("NaN of hidden keys let through to O", "sm80/fwd_sm80.cuh", "if (!ptx::vote_all(stage_rows<T>(sQ, row0, O)))", "if (stage_rows<T>(sQ, row0, O); false)",
        "nan-in-visible-key-causal", ""),
    Bug("softmax of a repaired row without its last keys", "attention/repair_output.cuh", "i < end; i += 32", "i < end - 32; i += 32", "nan-in-visible-key-causal", ""),
    Bug("divergent shuffle", "attention/softmax.cuh", "            l[r] = quad_reduce(l[r], [](float a, float b) { return a + b; });",
        "            if (lane() != 5) l[r] = quad_reduce(l[r], [](float a, float b) { return a + b; });", "dense-d64",
        r"warp divergence|DEADLOCK"),
    Bug("divergent barrier", "sm80/fwd_sm80.cuh", "ptx::bar_sync();\n    };\n\n    AccTile", "if (lane() != 3) ptx::bar_sync();\n    };\n\n    AccTile",
        "dense-d64", r"warp divergence|DEADLOCK"),
    Bug("rows of a tile overlap", "tile/tile.cuh", "return base + row * kRowBytes + col * 2;", "return base + row * (kRowBytes - 32) + col * 2;",
        "dense-d64", r"RACE|outside"),
)  # fmt: skip

BACKWARD = (
    Bug("no barrier before dQ", "sm80/bwd_sm80.cuh", "            ptx::bar_sync();                  // dS is complete, and every warp is done with Q and dO\n",
        "", "dense-d64", r"RACE, read after write: .*(tile|gemm)\.cuh:\d+"),
    Bug("no barrier before Q and dO", "sm80/bwd_sm80.cuh", "        ptx::bar_sync();  // Q and dO are here, and every warp is done with the step before\n",
        "", "dense-d64", r"RACE, .*(tile|gemm)\.cuh:\d+"),
    Bug("no wait for Q and dO", "sm80/bwd_sm80.cuh", "        ptx::cp_async_wait_group<0>();\n        ptx::bar_sync();  // Q", "        ptx::bar_sync();  // Q",
        "dense-d64", r"RACE, access to the destination of cp\.async"),
    Bug("P and dS exchanged without a barrier", "sm80/bwd_sm80.cuh", "            ptx::bar_sync();  // P and dS are complete\n", "",
        "dense-d256", r"RACE, read after write: .*(tile|gemm)\.cuh:\d+"),
    Bug("dQ stored, not added", "sm80/bwd_sm80.cuh", "[](float (&x)[ptx::kRedWidth], float *accum) { ptx::red_add(accum, x); });",
        "[](float (&x)[ptx::kRedWidth], float *accum) { for (int i = 0; i < ptx::kRedWidth; ++i) accum[i] += x[i]; });",
        "dense-d64", r"RACE, .*buffer 'dq_accum'"),
    Bug("turn not waited for", "attention/dq_accum.cuh", "while (ptx::ld_acquire(dq_turn<V>(p, sequence, m_block)) != rank) ptx::nanosleep();", ";",
        "deterministic", r"RACE, additions in no fixed order: buffer 'dq_accum'.*dq_accum\.cuh|bwd_sm80\.cuh"),
    Bug("turn waited for by one thread only", "attention/dq_accum.cuh", "            ptx::bar_sync();  // the other threads add only after thread 0 has seen its turn\n",
        "", "deterministic", r"RACE, additions in no fixed order: buffer 'dq_accum'"),
    Bug("turn passed on too early", "attention/dq_accum.cuh", "            ptx::bar_sync();   // ... once all threads are here\n", "",
        "deterministic", r"RACE, additions in no fixed order: buffer 'dq_accum'"),
    Bug("turn never passed on", "attention/dq_accum.cuh", "ptx::st_release(dq_turn<V>(p, sequence, m_block), rank + 1);", ";", "deterministic",
        r"DEADLOCK(.|\n)*nanosleep at kernels_cu/attention/dq_accum\.cuh:\d+"),
    Bug("staging before all warps are done", "sm80/bwd_sm80.cuh", "    ptx::bar_sync();  // K and V have arrived, and every warp is done with them: they stage the results\n",
        "", "dense-d64", r"RACE, write after read: .*epilogue\.cuh:\d+"),
    Bug("ring slot of the wrong step", "sm80/bwd_sm80.cuh", "sV.base + TileKV::kBytes + i % kStages * Stage::kBytes", "sV.base + TileKV::kBytes",
        "dense-d64", r"RACE, "),
    Bug("query mask off by one", "sm80/bwd_sm80.cuh", "mask.from(q0 + first_query, k0 + key0 + lane / 4)",
        "mask.from(q0 + first_query + 1, k0 + key0 + lane / 4)", "causal-d64", ""),
    Bug("NaN of hidden queries let through to dK and dV", "sm80/bwd_sm80.cuh", "if (!ptx::vote_all(stage_rows<T>(staging, row0, acc, first_col)))",
        "if (stage_rows<T>(staging, row0, acc, first_col); false)", "nan-in-queries-d64", ""),
    Bug("dK written before all lanes have repaired it", "sm80/bwd_sm80.cuh", "            ptx::bar_warp_sync();\n        }\n        write_rows", "        }\n        write_rows",
        "nan-in-queries-d64", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    Bug("dQ written before all lanes have repaired it", "any/bwd_convert.cuh", "        ptx::bar_warp_sync();\n    }\n    write_rows", "    }\n    write_rows",
        "nan-in-hidden-key", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    Bug("statistics of another head", "sm80/bwd_sm80.cuh", "row_stats_at<M>(p, sequence, q0 + r)", "row_stats_at<1>(p, sequence, q0 + r)",
        "dense-d64", ""),
)  # fmt: skip
