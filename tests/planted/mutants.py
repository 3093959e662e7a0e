# ruff: noqa: E501 (a bug a line)
"""Bugs planted in the kernels: what becomes of marked statements, for the tests that show that the emulator can fail."""

from __future__ import annotations

from dataclasses import dataclass

from cupyflash.gpu.device import Device

from . import shared
from .markers import Edit, change, files, without
from .shared import Planted


@dataclass(frozen=True)
class Bug:
    """What is planted, and how it must show.

    Attributes:
        edits: one, or several that make one bug.
        case: name in the case table.
        finds: what the message of the race detector matches; "" if the numbers are wrong.
        arch: which device is planned for; sm_count: with how many multiprocessors.
    """

    name: str
    edits: Edit | tuple[Edit, ...]
    case: str
    finds: str = ""
    arch: str = "sm_80"
    sm_count: int = 2

    @property
    def all_edits(self) -> tuple[Edit, ...]:
        return self.edits if isinstance(self.edits, tuple) else (self.edits,)

    @property
    def family(self) -> str:
        """The kernels of that device."""
        return "sm90" if self.arch == "sm_90" else "sm80"

    @property
    def dtype(self) -> str:
        return Device.synthetic(self.arch).dtypes[0]

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(marker for edit in self.all_edits for marker in edit.markers)

    @property
    def file(self) -> str:
        """The header with the first marker."""
        return files()[self.markers[0]]

    def headers(self) -> Planted:
        """The changed headers, in which it is alive."""
        return shared.headers(self.all_edits)


FORWARD = (
    Bug("no barrier after the copies", without("tile-landed"), "dense-d64", r"RACE, .*(tile|gemm|operands)\.cuh:\d+"),
    Bug("wait one group too lax", change("tile-copied", "kStages - 2", "kStages - 1"), "causal-d128", r"RACE, access to the destination of cp\.async before its wait_group.*(tile|gemm|operands)\.cuh:\d+"),
    Bug("stage requested one too early", change("slot-of-v-free", "kStages - 1", "kStages"), "dense-d128", r"RACE, .*(tile|gemm|operands)\.cuh:\d+"),
    Bug("copies of another tile's group", without("one-group-a-tile"), "dense-d64", r"RACE, "),
    Bug("mask off by one", change("causal-diagonal", "<= upper", "<= upper + 1"), "causal-d64"),
    Bug("no bound of the keys", change("whole-block", "k0 >= first_key(q0 + M - 1)", "!kHides || k0 >= first_key(q0 + M - 1)"), "dense-d64"),
    Bug("copy out of bounds", change("rows-that-exist", "valid", "true"), "dense-d64", r"cp\.async at kernels_cu/tile/tile\.cuh:\d+: bytes .* of buffer '[qk]'"),
    Bug("store out of bounds", change("inside-the-array", "dst_row + row < n_rows && col < kValidCols", "col < kValidCols"), "dense-d64", r"store at kernels_cu/tile/epilogue\.cuh:\d+.*(out of bounds|writes to the input|in no buffer)"),
    Bug("epilogue reads another lane's rows", without("rows-staged-by-the-warp"), "dense-d64", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    Bug("O written before all lanes have repaired it", without("o-repaired-by-the-warp"), "nan-in-visible-key-causal", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    Bug("NaN of hidden keys let through to O", change("o-is-finite-sm80", "!ptx::vote_all(stage_rows<T>(sO, mine.row0, O, mine.col0))", "stage_rows<T>(sO, mine.row0, O, mine.col0); false"), "nan-in-visible-key-causal"),
    Bug("softmax of a repaired row without its last keys", change("softmax-of-all-keys", "i < end", "i < end - 32"), "nan-in-visible-key-causal"),
    Bug("O not divided by the sum of P", change("o-divided-by-its-sum", "1.f / l[r]", "1.f"), "dense-d64"),
    Bug("divergent shuffle", change("row-sum-of-four-lanes", "l[r] = quad_reduce", "if (lane() != 5) l[r] = quad_reduce"), "dense-d64", r"warp divergence|DEADLOCK"),
    Bug("divergent barrier", change("tile-landed", "ptx::bar_sync()", "if (lane() != 3) ptx::bar_sync()"), "dense-d64", r"warp divergence|DEADLOCK"),
    Bug("maximum of one warp's keys alone", without("maximum-of-both-warps"), "dense-d256", arch="sm_100"),
    Bug("maximum left behind any score", change("m-not-far-behind", "4.f", "1000.f"), "scores-in-the-hundreds"),
    Bug("a warp alone decides that maxima grow", change("any-of-both-warps", "ptx::bar_red_or(barrier(), 64, x)", "ptx::vote_any(x)"), "outliers-d256", r"DEADLOCK", arch="sm_100"),
    Bug("sum of one warp's keys alone", without("row-sum-of-both-warps"), "dense-d256", arch="sm_100"),
    Bug("maxima read before the other warp has written them", without("rows-of-both-there"), "dense-d256", r"RACE, read after write: .*shared_rows\.cuh:\d+", arch="sm_100"),
    Bug("O from a warp's own P alone", change("p-of-the-other-warp", "1 - still.part", "still.part"), "dense-d256", arch="sm_100"),
    Bug("rows of a tile overlap", change("rows-lie-apart", "row * kRowBytes", "row * (kRowBytes - 32)"), "dense-d64", r"RACE|outside"),
    Bug("columns of a step in the place of others", change("place-of-the-step", "step % kPeriod", "0"), "dense-d64"),
    Bug("chunks of P in the place of others", change("chunk-behind", "first ^", "first +"), "dense-d256", r"RACE, write after write: .*element\.cuh:\d+", arch="sm_100"),
)  # fmt: skip

BACKWARD = (
    Bug("no barrier before dQ", without("ds-complete"), "dense-d64", r"RACE, read after write: .*(tile|gemm|operands)\.cuh:\d+"),
    Bug("no barrier before Q and dO", without("q-and-do-landed"), "dense-d64", r"RACE, .*(tile|gemm|operands)\.cuh:\d+"),
    Bug("no wait for Q and dO", without("q-and-do-copied"), "dense-d64", r"RACE, access to the destination of cp\.async"),
    Bug("P and dS exchanged without a barrier", without("p-and-ds-complete"), "softcap-causal", r"RACE, read after write: .*(tile|gemm|operands)\.cuh:\d+"),
    Bug("dQ stored, not added", change("dq-added", "ptx::red_add(accum, x);", "for (int i = 0; i < ptx::kRedWidth; ++i) accum[i] += x[i];"), "dense-d64", r"RACE, .*buffer 'dq_accum'"),
    Bug("turn not waited for", without("turn-awaited-sm80"), "deterministic", r"RACE, additions in no fixed order: buffer 'dq_accum'.*bwd_sm80\.cuh:\d+"),
    Bug("turn waited for by one thread only", without("turn-seen-by-all"), "deterministic", r"RACE, additions in no fixed order: buffer 'dq_accum'"),
    Bug("turn said to have been seen", change("additions-of-all-threads", "missing != 0", "false"), "deterministic-d128", r"RACE, additions in no fixed order: buffer 'dq_accum'"),
    Bug("turn passed on too early", change("turn-to-pass-on", "left =", "if (fresh_thread() == 0) ptx::st_release(mine.turn, mine.rank + 1); left ="), "deterministic-d128", r"RACE, additions in no fixed order: buffer 'dq_accum'"),
    Bug("turn never passed on", without("turn-passed-on-sm80"), "deterministic", r"DEADLOCK(.|\n)*nanosleep at kernels_cu/attention/dq_accum\.cuh:\d+"),
    Bug("staging before all warps are done", without("keys-read-by-all"), "dense-d64", r"RACE, write after read: .*(epilogue|element)\.cuh:\d+"),
    Bug("ring slot of the wrong step", change("slot-of-the-step", "+ i % kStages * Stage::kBytes", ""), "dense-d64", r"RACE, "),
    Bug("query mask off by one", change("mask-from-the-lane-bwd-sm80", "q0 + first_query", "q0 + first_query + 1"), "causal-d64"),
    Bug("NaN of hidden queries let through to dK and dV", change("dk-and-dv-finite-sm80", "!ptx::vote_all(stage_rows<T>(staging, row0, acc, col))", "stage_rows<T>(staging, row0, acc, col); false"), "nan-in-queries-d64"),
    Bug("dK written before all lanes have repaired it", without("dk-repaired-by-the-warp"), "nan-in-queries-d64", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    Bug("dQ written before all lanes have repaired it", without("dq-repaired-by-the-warp"), "nan-in-hidden-key", r"RACE, read after write: .*epilogue\.cuh:\d+"),
    Bug("statistics of another head", change("statistics-of-the-visit-sm80", "row_stats_at<M>", "row_stats_at<1>"), "dense-d64"),
)  # fmt: skip
