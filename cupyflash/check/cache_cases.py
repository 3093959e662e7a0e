"""The one table of named cases of attention over a cache: CPU path, emulator and GPU run it."""

from __future__ import annotations

from .cache_case import CacheCase

_RAGGED = (0, 1, 37, 64, 129, 200)

CACHE_CASES: tuple[CacheCase, ...] = (
    # lengths: none, one, up to the capacity
    CacheCase("cache-one-query", "smoke", _RAGGED, capacity=200),
    CacheCase("cache-one-query-d128", "smoke", (323, 5), head_dim=128),
    CacheCase("cache-one-sequence", "quick", (317,), heads_q=2),
    CacheCase("cache-all-empty", "quick", (0, 0, 0), capacity=33),
    CacheCase("cache-no-sequences", "full", ()),
    CacheCase("cache-not-causal", "quick", (61, 130), 5, causal=False),
    CacheCase("cache-long", "full", (4099, 1), 1, 64),
    # queries
    CacheCase("cache-two-queries", "quick", (1, 2, 70), 2, append=True),
    CacheCase("cache-four-queries-d128", "smoke", (97, 3, 0), 4, 128, append=True),
    CacheCase("cache-33-queries", "quick", (70, 31), 33, heads_q=2, heads_k=1, append=True),
    CacheCase("cache-300-queries", "full", (211, 0), 300, append=True),
    CacheCase("cache-more-queries-than-keys", "quick", (3, 0, 7), 5, 80),
    CacheCase("cache-packed", "quick", (0, 90, 33, 7), (40, 1, 0, 5), append=True),
    CacheCase("cache-packed-paged-d128", "quick", (33, 0, 64), (1, 37, 4), 128, page_size=16, append=True),
    CacheCase("cache-packed-mixed", "full", (0, 700, 300, 5), (257, 1, 1, 64), page_size=64, append=True, rotary=32),
    # heads and head_dim
    CacheCase("cache-mha", "quick", (70, 33), heads_q=3, heads_k=3),
    CacheCase("cache-gqa-8", "quick", (130, 67), heads_q=16, heads_k=2, head_dim=128),
    CacheCase("cache-mqa-32", "quick", (99, 41), heads_q=32, heads_k=1, head_dim=128),
    CacheCase("cache-mqa-32-four-queries", "full", (99, 41), 4, heads_q=32, heads_k=1, append=True),
    CacheCase("cache-gqa-6", "full", (99, 41), 3, heads_q=6, heads_k=2),
    CacheCase("cache-d8", "full", (99, 41), head_dim=8),
    CacheCase("cache-d80", "quick", (99, 41), head_dim=80, append=True, rotary=80),
    CacheCase("cache-d96", "full", (131, 70), head_dim=96),
    CacheCase("cache-d192", "full", (131, 70), head_dim=192),
    CacheCase("cache-d256", "quick", (131, 70, 3), head_dim=256),
    CacheCase("cache-d256-four-queries-mqa", "full", (131, 70), 4, 256, heads_q=8, heads_k=1, append=True),
    # pages
    CacheCase("cache-pages-of-1", "quick", (37, 0, 66), page_size=1),
    CacheCase("cache-pages-of-2", "quick", (37, 1, 66), page_size=2, append=True),
    CacheCase("cache-pages-of-7", "full", (37, 1, 66), page_size=7, append=True, head_dim=128),
    CacheCase("cache-pages-of-16", "smoke", (129, 16, 0, 47), page_size=16, append=True),
    CacheCase("cache-pages-of-16-d128", "quick", (129, 16, 0, 47), page_size=16, head_dim=128, heads_q=8),
    CacheCase("cache-pages-of-64", "quick", (200, 64, 63, 65), page_size=64),
    CacheCase("cache-pages-of-64-d256", "full", (200, 64, 3), 2, 256, page_size=64, append=True),
    CacheCase("cache-pages-of-100", "quick", (250, 99, 100), page_size=100, append=True, head_dim=80),
    CacheCase("cache-pages-of-256", "full", (700, 255), page_size=256, head_dim=128),
    CacheCase("cache-shared-pages", "quick", (70, 40, 97), 2, page_size=16, prefix=2, append=True),
    CacheCase("cache-shared-pages-d128", "full", (70, 40, 97), page_size=16, prefix=2, head_dim=128),
    CacheCase("cache-wide-table", "full", (70, 40), page_size=16, capacity=1000),
    # append: at the end of the capacity, at every offset in a page, more and fewer than queries
    CacheCase("cache-append", "smoke", (0, 1, 63, 64, 130), append=True, capacity=131),
    CacheCase("cache-append-each-offset", "quick", tuple(range(16)), page_size=16, append=True, capacity=20),
    CacheCase("cache-append-3-each-offset", "quick", tuple(range(9)), 3, page_size=7, append=True, head_dim=80),
    CacheCase("cache-append-more-than-queries", "full", (20, 0, 41), 2, append=True, new=7),
    CacheCase("cache-append-fewer-than-queries", "full", (20, 0, 41), 5, append=True, new=2),
    CacheCase("cache-append-300", "full", (0, 70), 300, 128, heads_q=2, page_size=64, append=True, rotary=128),
    # chosen sequences, and where they lie
    CacheCase("cache-chosen", "quick", (70, 0, 33), spare=3),
    CacheCase("cache-chosen-append-d128", "quick", (70, 0, 33), 2, 128, spare=2, append=True, rotary=64),
    CacheCase("cache-heads-first", "quick", (70, 131), append=True, memory="heads_first"),
    CacheCase("cache-heads-first-paged-d128", "full", (70, 131), 1, 128, page_size=16, memory="heads_first"),
    CacheCase("cache-padded-rows", "full", (70, 131), 2, append=True, memory="padded_rows"),
    CacheCase("cache-misaligned", "full", (70, 131), 2, append=True, memory="misaligned"),
    # rotary
    CacheCase("cache-rotary", "smoke", (0, 70, 33), 1, append=True, rotary=64),
    CacheCase("cache-rotary-interleaved-d128", "quick", (5, 70), 3, 128, append=True, rotary=64,
              rotary_interleaved=True),
    CacheCase("cache-rotary-fp32-paged", "quick", (5, 70, 15), 2, page_size=16, append=True, rotary=32,
              rotary_fp32=True),
    CacheCase("cache-rotary-short-tables", "full", (5, 70, 15), 4, append=True, rotary=64, positions=17),
    # options
    CacheCase("cache-window", "quick", (200, 13, 70), 1, window=(40, 0)),
    CacheCase("cache-window-four-queries-d128", "quick", (200, 13, 70), 4, 128, window=(33, 0), append=True),
    CacheCase("cache-window-both-sides", "full", (150, 70), 5, window=(20, 3), causal=False, page_size=16),
    CacheCase("cache-window-behind", "full", (150, 70), 3, window=(50, -9), causal=False),
    CacheCase("cache-window-sees-nothing", "full", (50, 7), 2, window=(None, -60), causal=False),
    CacheCase("cache-softcap", "quick", (150, 70), 1, softcap=2.0),
    CacheCase("cache-softcap-window-paged-d128", "full", (150, 70), 2, 128, softcap=5.0, window=(60, 0), page_size=16),
    CacheCase("cache-alibi", "quick", (150, 70, 0), 1, alibi=1),
    CacheCase("cache-alibi-each-d128", "full", (150, 70, 3), 4, 128, alibi=2, append=True, page_size=16),
    CacheCase("cache-alibi-softcap", "full", (150, 70), 3, softcap=3.0, alibi=2),
    CacheCase("cache-range", "quick", (150, 70, 33), 1, ranges=((17, 150), (0, 70), (33, 160)), capacity=160),
    CacheCase("cache-range-append-d128", "full", (150, 70, 33), 3, 128, ranges=((17, 180), (5, 71), (0, 0)),
              append=True, capacity=180),
    CacheCase("cache-range-window-paged", "full", (150, 70), 4, ranges=((64, 140), (3, 70)), window=(50, 0),
              page_size=16),
    CacheCase("cache-range-alibi", "full", (150, 70), 4, ranges=((64, 140), (3, 70)), alibi=1),
    CacheCase("cache-scale-negative", "full", (150, 70), 2, scale=-0.3),
    CacheCase("cache-scale-zero", "full", (150, 70), scale=0.0),
    CacheCase("cache-one-split", "quick", (323, 40), num_splits=1),
    CacheCase("cache-five-splits", "quick", (323, 40, 2), 2, num_splits=5, append=True),
    CacheCase("cache-batch-invariant", "quick", (323, 40, 2), batch_invariant=True),
    # NaN and inf that some queries see
    CacheCase("cache-nonfinite", "quick", (70, 33), 1, nonfinite=True),
    CacheCase("cache-nonfinite-four-queries-d128", "quick", (70, 33), 4, 128, nonfinite=True),
    CacheCase("cache-nonfinite-window-paged", "full", (150, 90), 3, nonfinite=True, window=(30, 0), page_size=16),
)  # fmt: skip
