"""The formulas for the bytes and FLOPs of v0 to v5 and of a Gluon stage. Inputs are float16, and tiles are as wide as D.

A formula yields the launches of a pass. Each launch is (bytes read, bytes written) or (bytes read, bytes written, FLOPs). The
comment on a launch names the tensors that it reads, writes or computes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cases import first_with

import stages

HALF, FLOAT = 2, 4  # bytes of an element in float16 and float32
Steps = Iterator[tuple]


@dataclass
class Problem:
    """The shapes and tiles of a problem with batch size 1. A tile is (BLOCK_M queries, BLOCK_N keys)."""

    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    head_dim: int  # D, the head dimension of Q and K
    value_dim: int  # Dv, the head dimension of V and O
    causal: bool
    query_tile: tuple[int, int]  # the tile of programs that loop over key tiles, and of v2's forward
    key_tile: tuple[int, int]  # the tile of programs that loop over query tiles, and of v2's backward

    def __post_init__(self):
        # The bytes of rows and of whole tensors in float16. Float32 takes twice as many.
        self.row_of_q = self.head_dim * HALF  # a row of Q, K, dQ or dK
        self.row_of_o = self.value_dim * HALF  # a row of O, dO, V or dV
        self.q = self.heads * self.seq_q * self.row_of_q  # Q or dQ: [H, Sq, D]
        self.o = self.heads * self.seq_q * self.row_of_o  # O or dO: [H, Sq, Dv]
        self.k = self.kv_heads * self.seq_k * self.row_of_q  # K or dK: [Hkv, Sk, D]
        self.v = self.kv_heads * self.seq_k * self.row_of_o  # V or dV: [Hkv, Sk, Dv]
        # The bytes of float32 tensors without the dimension D or Dv.
        self.row = self.heads * self.seq_q * FLOAT  # m, l, LSE or delta: [H, Sq]
        self.s = self.heads * self.seq_q * self.seq_k * FLOAT  # S or dP: [H, Sq, Sk]
        # The FLOPs of the matmul that computes S, dQ or dK, and of that for O, dP or dV, for all elements of S.
        self.key_matmul = self.flops(self.heads * self.seq_q * self.seq_k, 1, 0)
        self.value_matmul = self.flops(self.heads * self.seq_q * self.seq_k, 0, 1)

    @property
    def seen_s(self):
        """The bytes of the unmasked part of S."""
        return self.heads * FLOAT * sum(min(i + 1, self.seq_k) if self.causal else self.seq_k for i in range(self.seq_q))

    def flops(self, scores, of_keys, of_values):
        """The FLOPs of `of_keys` matmuls with D and `of_values` matmuls with Dv, each over `scores` elements of S."""
        return 2 * scores * (of_keys * self.head_dim + of_values * self.value_dim)

    # The next functions count loaded tiles and rows, and computed scores. If several query heads share keys, each head loads
    # the keys again.

    @property
    def key_tiles_seen(self):
        """For each query tile of a head: how many key tiles the query tile sees, at least in part."""
        m, n = self.query_tile
        ends = (min(start + m, self.seq_k) if self.causal else self.seq_k for start in range(0, self.seq_q, m))
        return [math.ceil(end / n) for end in ends]

    @property
    def kv_read(self):
        """The bytes of K and V that all query tiles load. Tiles are loaded whole, up to the end of K."""
        rows = self.heads * sum(min(tiles * self.query_tile[1], self.seq_k) for tiles in self.key_tiles_seen)
        return rows * (self.row_of_q + self.row_of_o)

    def first_queries(self, tile):
        """For each key tile of a head: the first row of the first query tile that sees the key tile."""
        m, n = tile
        return [min(start // m * m if self.causal else 0, self.seq_q) for start in range(0, self.seq_k, n)]

    def queries_read(self, tile):
        """The number of rows of Q that are loaded for all key tiles of all heads."""
        return self.heads * sum(self.seq_q - first for first in self.first_queries(tile))

    def scores_of_queries(self):
        """How many elements of S are computed if each program has a query tile."""
        return self.heads * sum(self.key_tiles_seen) * math.prod(self.query_tile)

    def scores_of_keys(self, tile):
        """How many elements of S are computed if each program has a key tile."""
        tiles = sum(math.ceil((self.seq_q - first) / tile[0]) for first in self.first_queries(tile))
        return self.heads * tiles * math.prod(tile)


# --- v0: most lines of PyTorch read or write all of S. A matmul reads K or V once for all query heads that share a K/V head,
# and writes dK or dV once.


def _masked(p: Problem) -> Steps:
    if p.causal:
        mask = p.seq_q * p.seq_k  # one byte per element, the same for every head
        yield 0, mask  # ones
        yield mask, mask  # tril
        yield mask, mask  # not
        yield p.s + mask, p.s  # masked_fill


def v0_forward(p: Problem) -> Steps:
    yield p.q + p.k, p.s, p.key_matmul  # S = Q Kᵀ
    yield p.s, p.s  # · scale
    yield from _masked(p)
    yield p.s, p.row  # m
    yield p.s + p.row, p.s  # S - m
    yield p.s, p.s  # exp
    yield p.s, p.row  # l
    yield p.s + p.row, p.s  # P / l
    yield p.s, p.s // 2  # in float16
    yield p.s // 2 + p.v, 2 * p.o, p.value_matmul  # O = P V, float32
    yield 2 * p.o, p.o  # in float16
    yield p.row, p.row  # log l
    yield 2 * p.row, p.row  # m + log l
    yield p.o, p.o  # O is copied to the output tensor


def v0_backward(p: Problem) -> Steps:
    yield p.q + p.k, p.s, p.key_matmul  # S = Q Kᵀ
    yield p.s, p.s  # · scale
    yield from _masked(p)
    yield p.s + p.row, p.s  # S - LSE
    yield p.s, p.s  # P = exp
    yield p.s, p.s // 2  # in float16
    yield p.s // 2 + p.o, 2 * p.v, p.value_matmul  # dV = Pᵀ dO, float32
    yield p.o + p.v, p.s, p.value_matmul  # dP = dO Vᵀ
    yield p.o, 2 * p.o  # O in float32
    yield p.o, 2 * p.o  # dO in float32
    yield 4 * p.o, 2 * p.o  # O ∘ dO
    yield 2 * p.o, p.row  # delta
    yield p.s + p.row, p.s  # dP - delta
    yield p.s // 2 + p.s, p.s  # P ∘
    yield p.s, p.s // 2  # dS in float16
    yield p.s // 2 + p.k, 2 * p.q, p.key_matmul  # dQ = dS K, float32
    yield p.s // 2 + p.q, 2 * p.k, p.key_matmul  # dK = dSᵀ Q, float32
    yield from _scaled_and_stored(p)


def _scaled_and_stored(p: Problem) -> Steps:
    yield 2 * p.q, 2 * p.q  # dQ · scale
    yield 2 * p.k, 2 * p.k  # dK · scale
    yield 2 * p.q, p.q  # dQ, dK and dV in float16
    yield 2 * p.k, p.k
    yield 2 * p.v, p.v


# --- v1: the forward's kernel reads S twice and writes P once. The kernels do not read masked scores.


def v1_forward(p: Problem) -> Steps:
    yield p.q + p.k, p.s, p.key_matmul  # S = Q Kᵀ
    yield 2 * p.seen_s, p.s // 2 + p.row  # S is read for m and l, and again for P; P and LSE are written
    yield p.s // 2 + p.v, 2 * p.o, p.value_matmul  # O = P V, float32
    yield 2 * p.o, p.o  # in float16


def v1_backward(p: Problem) -> Steps:
    yield p.q + p.k, p.s, p.key_matmul  # S = Q Kᵀ
    yield p.seen_s + p.row, p.s // 2  # P from S and LSE
    yield p.s // 2 + p.o, 2 * p.v, p.value_matmul  # dV = Pᵀ dO
    yield p.o + p.v, p.s, p.value_matmul  # dP = dO Vᵀ
    yield p.seen_s // 2 + p.seen_s + 2 * p.o, p.s // 2  # dS from P, dP, O and dO
    yield p.s // 2 + p.k, 2 * p.q, p.key_matmul  # dQ = dS K
    yield p.s // 2 + p.q, 2 * p.k, p.key_matmul  # dK = dSᵀ Q
    yield from _scaled_and_stored(p)


# --- v2: no kernel stores S. For each key tile, the forward reads the query tiles that see it, and reads and writes their O, m
# and l. A forward program has one query head. A backward program has one K/V head and its query heads.


def v2_forward(p: Problem) -> Steps:
    yield 0, 2 * p.o + 2 * p.row  # O = 0 in float32, m = -inf, l = 0
    queries = p.queries_read(p.query_tile)
    state = 2 * p.row_of_o + 2 * FLOAT  # O, m and l
    yield (
        p.heads // p.kv_heads * (p.k + p.v) + queries * (p.row_of_q + state),  # K and V once; for each key tile: Q, the state
        queries * state,
        p.flops(p.scores_of_keys(p.query_tile), 1, 1),
    )
    yield 2 * p.o, p.o  # O in float16
    yield p.row, p.row  # log2 l
    yield 2 * p.row, p.row  # m + log2 l
    yield p.row, p.row  # LSE: the natural logarithm


def v2_backward(p: Problem) -> Steps:
    yield 0, 2 * p.q  # dQ = 0 in float32
    queries = p.queries_read(p.key_tile)
    dq = 2 * p.row_of_q
    yield (
        p.k + p.v + queries * (p.row_of_q + 2 * p.row_of_o + FLOAT + dq),  # K and V once; for each key tile: Q, dO, O, LSE, dQ
        p.k + p.v + queries * dq,  # dK and dV once; for each key tile: dQ
        p.flops(p.scores_of_keys(p.key_tile), 3, 2),
    )
    yield 2 * p.q, p.q  # dQ in float16


# --- v3 and v4: the forward reads each query tile once, and writes its O once. It reads K and V for each query tile. A backward
# program for dK and dV has a key tile and all query heads that share its keys.


def v3_forward(p: Problem) -> Steps:
    yield p.q + p.kv_read, p.o + p.row, p.flops(p.scores_of_queries(), 1, 1)


def v3_backward(p: Problem) -> Steps:
    # The kernel of dQ reads Q, dO, O and LSE once, and K and V for each query tile. It computes S and dP too.
    yield p.q + 2 * p.o + p.row + p.kv_read, p.q, p.flops(p.scores_of_queries(), 2, 1)
    # The kernel of dK and dV reads K and V once, and Q, dO, O and LSE for each key tile. It computes S and dP again.
    queries = p.queries_read(p.key_tile) * (p.row_of_q + 2 * p.row_of_o + FLOAT)
    yield p.k + p.v + queries, p.k + p.v, p.flops(p.scores_of_keys(p.key_tile), 2, 2)


# --- v5: the backward first computes delta from O and dO. Then its kernels of dQ, dK and dV read delta instead of O.


def v5_backward(p: Problem) -> Steps:
    yield 2 * p.o, p.row  # delta from O and dO, once
    yield p.q + p.o + 2 * p.row + p.kv_read, p.q, p.flops(p.scores_of_queries(), 2, 1)
    queries = p.queries_read(p.key_tile) * (p.row_of_q + p.row_of_o + 2 * FLOAT)
    yield p.k + p.v + queries, p.k + p.v, p.flops(p.scores_of_keys(p.key_tile), 2, 2)


# --- The first stage with a producer, in Gluon: the forward is v3's with tiles of its own. The backward has five matmuls, and
# adds up dQ in memory.


def producer_forward(p: Problem) -> Steps:
    yield from v3_forward(replace(p, query_tile=(128, 128) if max(p.head_dim, p.value_dim) > 64 else (256, 64)))


def producer_backward(p: Problem) -> Steps:
    m, n = 64 if max(p.head_dim, p.value_dim) > 64 else 128, 128
    tiles = math.ceil(p.seq_q / m)
    stats = p.heads * tiles * m * 2 * FLOAT  # log2(e) · LSE, and delta, padded to whole tiles
    sums = p.heads * tiles * m * p.head_dim * FLOAT  # dQ in float32, padded to whole tiles
    yield 2 * p.o + p.row, stats + sums  # read O, dO and LSE; set the sums to 0
    # Each key tile begins with the first query tile that sees it. If none does, it has no steps.
    first = [min(start // m, tiles) if p.causal else 0 for start in range(0, p.seq_k, n)]
    queries = p.heads * sum(max(p.seq_q - tile * m, 0) for tile in first)
    padded = p.heads * sum(tiles - tile for tile in first) * m  # `queries`, with whole tiles
    yield (
        p.k + p.v + queries * (p.row_of_q + p.row_of_o) + padded * 2 * FLOAT,  # K and V once; in each step: Q, dO, stats
        p.k + p.v + padded * 2 * p.row_of_q,  # dK and dV once; in each step: additions to the sums
        p.flops(padded * n, 3, 2),
    )
    yield sums, p.q  # dQ in float16


def added_by_splits(p: Problem, splits: int) -> Steps:
    """What the launches of a backward move more if `splits` CTAs share each key tile, and each takes at least one of its steps.

    The L2 cache does the additions, so they only write.
    """
    tiles = p.kv_heads * math.ceil(p.seq_k / 128)
    sums = tiles * 128 * (p.head_dim + p.value_dim) * FLOAT  # dK and dV, in whole tiles
    taken = (splits - 1) * tiles * 4 if max(p.head_dim, p.value_dim) < 128 else 0  # persistent CTAs count the tiles they took
    yield 0, sums  # set the sums to 0
    read, written = (splits - 1) * (p.k + p.v), splits * sums - p.k - p.v  # K and V for each CTA; additions, not dK and dV
    yield read + taken, written + taken
    yield sums, p.k + p.v  # dK and dV in float16


def added_by_wide_splits(p: Problem, splits: int, query_splits: int) -> Steps:
    """The same for D or Dv = 256, if `splits` CTAs share each tile of 64 keys, and `query_splits` each tile of 128 queries.

    Launches that round accumulators come last.
    """
    rows_of_k = p.kv_heads * math.ceil(p.seq_k / 64) * 64 * (splits > 1)  # rows of accumulators, in whole tiles
    rows_of_q = p.heads * math.ceil(p.seq_q / 64) * 64 * (query_splits > 1)
    of_dk, of_dv, of_dq = rows_of_k * p.head_dim * FLOAT, rows_of_k * p.value_dim * FLOAT, rows_of_q * p.head_dim * FLOAT
    yield 0, of_dq + of_dk + of_dv  # set the accumulators to 0
    yield (splits - 1) * (p.k + p.v), splits * (of_dk + of_dv) - (p.k + p.v) * (splits > 1)  # as above
    stats = rows_of_q * 2 * FLOAT  # log2(e) · LSE, and delta
    # Q, dO and stats for each CTA; additions, not dQ
    yield (query_splits - 1) * (p.q + p.o + stats), query_splits * of_dq - p.q * (query_splits > 1)
    if query_splits > 1:
        yield of_dq, p.q  # dQ in float16
    if splits > 1:
        yield of_dk, p.k
        yield of_dv, p.v


FORMULAS = {  # a stage's version -> the formulas of its forward and its backward
    "v0": (v0_forward, v0_backward),
    "v1": (v1_forward, v1_backward),
    "v2": (v2_forward, v2_backward),
    "v3": (v3_forward, v3_backward),
    "v4": (v3_forward, v3_backward),
    "v5": (v3_forward, v5_backward),
    stages.version(first_with("def _producer(", "backward")): (producer_forward, producer_backward),
}


def predicted(version: str, pass_: str, p: Problem) -> tuple[int, int, int]:
    """Return the bytes read, the bytes written and the FLOPs of all launches. `pass_` is "fwd" or "bwd"."""
    launches = ((*step, 0)[:3] for step in FORMULAS[version][("fwd", "bwd").index(pass_)](p))
    return tuple(map(sum, zip(*launches, strict=True)))
