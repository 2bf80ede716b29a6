"""The formulas for the bytes and FLOPs of each stage. Inputs are float16, and tiles are as wide as the head dimension.

A prediction yields the launches of a pass. Each launch is (bytes read, bytes written) or (bytes read, bytes written,
FLOPs). The comment on a launch names the tensors that it reads, writes or computes.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from cases import names_in

import stages
from common.measure.traffic import GPUS

HALF, FLOAT, INT = 2, 4, 4  # bytes of an element in float16, float32 and int32
Steps = Iterator[tuple]


@dataclass(frozen=True)
class Problem:
    """The shapes and tiles of a problem. A tile is (BLOCK_M queries, BLOCK_N keys)."""

    heads: int
    kv_heads: int  # number of K/V heads in the whole batch
    seq_q: int
    seq_k: int
    head_dim: int  # D, the head dimension of Q and K
    value_dim: int  # Dv, the head dimension of V and O
    causal: bool
    query_tile: tuple[int, int]  # the tile of programs that loop over key tiles, and of v2's forward
    key_tile: tuple[int, int]  # the tile of programs that loop over query tiles, and of v2's backward

    # The next properties are the float16 bytes of a row or a whole tensor. Float32 takes twice as many bytes.

    @property
    def row_of_q(self):
        """A row of Q, K, dQ or dK."""
        return self.head_dim * HALF

    @property
    def row_of_o(self):
        """A row of O, dO, V or dV."""
        return self.value_dim * HALF

    @property
    def q(self):
        """Q, and dQ: [B, H, Sq, D]."""
        return self.heads * self.seq_q * self.row_of_q

    @property
    def o(self):
        """O, and dO: [B, H, Sq, Dv]."""
        return self.heads * self.seq_q * self.row_of_o

    @property
    def k(self):
        """K, and dK: [B, Hkv, Sk, D]."""
        return self.kv_heads * self.seq_k * self.row_of_q

    @property
    def v(self):
        """V, and dV: [B, Hkv, Sk, Dv]."""
        return self.kv_heads * self.seq_k * self.row_of_o

    # The next properties are the bytes of tensors without the dimension D or Dv.

    @property
    def row(self):
        """m, l, LSE or delta: [B, H, Sq] float32."""
        return self.heads * self.seq_q * FLOAT

    @property
    def s(self):
        """S, and dP: [B, H, Sq, Sk] float32. P and dS in float16 take half of these bytes."""
        return self.heads * self.seq_q * self.seq_k * FLOAT

    @property
    def seen_s(self):
        """The bytes of the unmasked part of S."""
        seen = (min(i + 1, self.seq_k) for i in range(self.seq_q)) if self.causal else [self.seq_q * self.seq_k]
        return self.heads * sum(seen) * FLOAT

    # The next functions return FLOPs of matmuls.

    def flops(self, scores, of_keys, of_values):
        """Return the FLOPs of `of_keys` matmuls with D and `of_values` matmuls with Dv, each over `scores` elements of S."""
        return 2 * scores * (of_keys * self.head_dim + of_values * self.value_dim)

    @property
    def key_matmul(self):
        """The FLOPs of the matmul that computes S, dQ or dK, for all elements of S."""
        return self.flops(self.heads * self.seq_q * self.seq_k, 1, 0)

    @property
    def value_matmul(self):
        """The FLOPs of the matmul that computes O, dP or dV, for all elements of S."""
        return self.flops(self.heads * self.seq_q * self.seq_k, 0, 1)

    # The next functions count loaded tiles and rows, and computed scores. If several query heads share keys, each head loads
    # the keys again.

    @property
    def key_tiles_seen(self):
        """For each query tile of a head, return how many key tiles the query tile sees, at least in part."""
        m, n = self.query_tile
        ends = (min(start + m, self.seq_k) if self.causal else self.seq_k for start in range(0, self.seq_q, m))
        return [math.ceil(end / n) for end in ends]

    @property
    def keys_read(self):
        """Return how many rows of K (or V) all query tiles load. Tiles of K are loaded whole, up to the end of K."""
        return self.heads * sum(min(tiles * self.query_tile[1], self.seq_k) for tiles in self.key_tiles_seen)

    @property
    def kv_read(self):
        """The bytes of K and V in the rows that `keys_read` counts."""
        return self.keys_read * (self.row_of_q + self.row_of_o)

    def first_queries(self, tile):
        """For each key tile of a head, return the first row of the first query tile that sees the key tile."""
        m, n = tile
        return [min(start // m * m if self.causal else 0, self.seq_q) for start in range(0, self.seq_k, n)]

    def queries_read(self, tile):
        """Return the number of rows of Q that are loaded for all key tiles of all heads."""
        return self.heads * sum(self.seq_q - first for first in self.first_queries(tile))

    def scores_of_queries(self):
        """Return how many elements of S are computed if each program has a query tile."""
        m, n = self.query_tile
        return self.heads * sum(self.key_tiles_seen) * m * n

    def scores_of_keys(self, tile):
        """Return how many elements of S are computed if each program has a key tile."""
        m, n = tile
        tiles = sum(math.ceil((self.seq_q - first) / m) for first in self.first_queries(tile))
        return self.heads * tiles * m * n


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
    kv = p.heads // p.kv_heads * (p.k + p.v)  # K and V are read once for each query head
    yield (
        kv + queries * (p.row_of_q + state),  # for each key tile: Q and the state
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


# --- v4a: a kernel copies K first. The forward reads only the copy. The kernel of dQ reads K and the copy.


def v4a_forward(p: Problem) -> Steps:
    yield p.k, p.k
    yield from v3_forward(p)


def v4a_backward(p: Problem) -> Steps:
    yield p.k, p.k
    yield p.keys_read * p.row_of_q, 0
    yield from v3_backward(p)


# --- v5: the backward first computes delta from O and dO. Then its kernels of dQ, dK and dV read delta instead of O.


def v5_backward(p: Problem) -> Steps:
    yield 2 * p.o, p.row  # delta from O and dO, once
    yield p.q + p.o + 2 * p.row + p.kv_read, p.q, p.flops(p.scores_of_queries(), 2, 1)
    queries = p.queries_read(p.key_tile) * (p.row_of_q + p.row_of_o + 2 * FLOAT)
    yield p.k + p.v + queries, p.k + p.v, p.flops(p.scores_of_keys(p.key_tile), 2, 2)


# --- v7: the backward has five matmuls, and adds up dQ in memory.


def v7_backward(p: Problem) -> Steps:
    yield 0, 2 * p.q  # set dQ's float32 sums to 0
    yield 2 * p.o, p.row  # delta from O and dO
    queries = p.queries_read(p.key_tile)
    yield (
        p.k + p.v + queries * (p.row_of_q + p.row_of_o + 2 * FLOAT),  # K and V once; for each key tile: Q, dO, LSE, delta
        p.k + p.v + queries * 2 * p.row_of_q,  # dK and dV once; for each key tile: additions to dQ's sums
        p.flops(p.scores_of_keys(p.key_tile), 3, 2),
    )
    yield 2 * p.q, p.q  # dQ = sums * scale


# --- v8 and later: the tile sizes depend on the larger of D and Dv. The backward reads Q and dO once per 128 keys. Consumers
# have 64 rows each: in the forward from v14 on, in the backward from v15 on. CTAs take tiles from a counter: in the forward
# from v24 on, in the backward from v37 on if D and Dv are at most 64. From v44 on, the backward has tiles for D = 256.

SHARE_OF_L2 = 16 * 2**20  # SHARE in common.kernels.order, on an H100
ROWS = 64  # rows of a consumer: queries in the forward, keys in the backward
NUM_SMS = GPUS["h200"].num_sms
V34 = names_in("v34_planned_splits")  # its limits for short problems, and its function that plans splits
V43 = names_in("v43_safe_speculation")  # its numbers of first keys and of samples
V53 = names_in("v53_short_forward")  # its limit for few key tiles


def _wide(p: Problem) -> bool:
    return max(p.head_dim, p.value_dim) == 128


def _query_tiles(p: Problem):
    """Return the number of query tiles of all heads."""
    return p.heads * math.ceil(p.seq_q / p.query_tile[0])


def _forward(p: Problem, rows: int) -> tuple[int, int, int]:
    """Return a launch with the bytes of v3's forward, and the FLOPs of consumers of `rows` query rows.

    A consumer computes each key tile that at least one of its rows sees. The last query tile is computed whole.
    """
    m, n = p.query_tile
    ends = (min(start + rows, p.seq_k) if p.causal else p.seq_k for start in range(0, math.ceil(p.seq_q / m) * m, rows))
    steps = p.heads * sum(math.ceil(end / n) for end in ends)
    return p.q + p.kv_read, p.o + p.row, p.flops(steps * rows * n, 1, 1)


def _persistent_forward(p: Problem) -> tuple[int, int, int]:
    read, written, flops = _forward(p, ROWS)
    counter = _query_tiles(p) * INT  # each tile adds to the counter once
    return read + counter, written + counter, flops


def v8_forward(p: Problem) -> Steps:
    p = replace(p, query_tile=(128, 128) if _wide(p) else (256, 64))
    yield _forward(p, p.query_tile[0])


def v14_forward(p: Problem) -> Steps:
    yield _forward(replace(p, query_tile=(128, 128) if _wide(p) else (256, 64)), ROWS)


def v24_forward(p: Problem) -> Steps:
    yield 0, INT  # the counter = 0
    yield _persistent_forward(replace(p, query_tile=(128, 128) if _wide(p) else (256, 64)))


def v26_forward(p: Problem, wide_keys: int = 128) -> Steps:
    p = replace(p, query_tile=(128, wide_keys) if _wide(p) else (256, 64))
    tiles = _query_tiles(p)
    yield 0, (2 + tiles) * INT  # a counter, a flag for all tiles, and a flag for each tile are set to 0
    yield _persistent_forward(p)  # no tile fails, because the scores are close together
    yield min(tiles, NUM_SMS) * INT, 0  # each CTA of the second launch only reads the flag for all tiles


def v29_forward(p: Problem) -> Steps:
    yield from v26_forward(p, wide_keys=64)


def _few_tiles(p: Problem) -> tuple[int, int, int]:
    """For v30 to v32, return the rows of a query tile, its number of query heads, and the number of tiles of all heads.

    A tile has all query heads of a K/V head if their number divides 64 and there are then fewer tiles. Otherwise a tile has one
    query head.
    """
    m, packed = 128 if _wide(p) else 256, p.heads // p.kv_heads
    if 64 % packed or math.ceil(p.seq_q * packed / m) == math.ceil(p.seq_q / m) * packed:
        packed = 1
    return m, packed, math.ceil(p.seq_q * packed / m) * (p.heads // packed)


def _filling(p: Problem, tiles: int) -> tuple[int, int]:
    """For v31 and v32, return the number of key tiles that the last query sees, and the number of splits."""
    key_tiles = math.ceil((min(p.seq_q, p.seq_k) if p.causal else p.seq_k) / 64)
    return key_tiles, max(1, min(key_tiles, NUM_SMS // tiles))


def v30_forward(p: Problem) -> Steps:
    m, packed, _ = _few_tiles(p)
    yield from _in_parts(p, m, 64, packed, splits=1, at_once=False)


def v31_forward(p: Problem) -> Steps:
    m, packed, tiles = _few_tiles(p)
    _, splits = _filling(p, tiles)
    yield from _in_parts(p, m, 64, packed, splits, at_once=False)


def v32_forward(p: Problem) -> Steps:
    m, packed, tiles = _few_tiles(p)
    key_tiles, splits = _filling(p, tiles)
    of_a_cta = math.ceil(tiles * splits / NUM_SMS) * math.ceil(key_tiles / splits)
    yield from _in_parts(p, m, 64, packed, splits, at_once=of_a_cta <= V34["SHORT"][max(p.head_dim, p.value_dim)])


def v33_forward(p: Problem) -> Steps:
    yield from v34_forward(p, planned=False)


def v34_forward(
    p: Problem, first: bool = False, gives_up: bool = False, samples: bool = False, planned: bool = True, three: bool = False,
    spares: bool = False,
) -> Steps:  # fmt: skip
    """Yield the launches of a forward from v33 on.

    Without `planned` (v33), there are as many splits as fill the SMs. With `three` (v49b), tiles without a mask have 192 rows
    at D = 128, unless the busiest SM then computes over 4 % more rows. With `spares` (v53), the host counts the mean number of
    key tiles, and leaves out some of each query tile, when it decides whether work is short.
    """
    per_kv = p.heads // p.kv_heads
    packed = per_kv if 64 % per_kv == 0 else 1  # query heads in a tile
    seen_keys = min(p.seq_q, p.seq_k) if p.causal else p.seq_k
    squares = math.ceil(p.seq_q * packed / 128) * math.ceil(seen_keys / 128) * (p.heads // packed)
    few = p.seq_q * packed <= 128 or (not _wide(p) and squares <= V34["FEW_SQUARES"] * NUM_SMS)
    m, n = (128, 128) if few else (128 if _wide(p) else 256, 64)
    tiles = math.ceil(p.seq_q * packed / m) * (p.heads // packed)
    if three and p.head_dim == p.value_dim == 128 and not (few or p.causal):
        longer = math.ceil(p.seq_q * packed / 192) * (p.heads // packed)
        if math.ceil(longer / NUM_SMS) * 192 <= 1.04 * math.ceil(tiles / NUM_SMS) * m:
            m, tiles = 192, longer
    key_tiles = math.ceil(seen_keys / n)
    splits = 1
    if not planned:
        splits = max(1, min(key_tiles, NUM_SMS // tiles))
    elif few or tiles < NUM_SMS:
        width = p.head_dim + p.value_dim
        splits = V34["splits_of"](tiles, key_tiles, min(p.seq_q * packed, m), n, width, NUM_SMS)
    if few and key_tiles <= splits and n > ROWS:
        n, key_tiles = n // 2, key_tiles * 2
    if splits == 1 and not few and tiles == math.ceil(p.seq_q / m) * p.heads:
        packed = 1
    turns = math.ceil(math.ceil(p.seq_q * packed / m) * p.heads // packed * splits / NUM_SMS)
    widest = max(p.head_dim, p.value_dim)
    at_once = few or turns * math.ceil(key_tiles / splits) <= V34["SHORT"][widest]
    if spares:
        mean = V53["mean_keys"](p.seq_q, seen_keys, 0, m // packed) / n if p.causal else key_tiles
        at_once = few or turns * (mean / splits - V53["FEW_KEY_TILES"][widest]) <= V53["SHORT"][widest]
    yield from _in_parts(p, m, n, packed, splits, at_once, first, gives_up, samples)


def _in_parts(
    p: Problem, m: int, n: int, packed: int, splits: int, at_once: bool,
    first: bool = False, gives_up: bool = False, samples: bool = False,
) -> Steps:  # fmt: skip
    """Yield the launches of a forward from v30 on, with tiles of m rows and n keys.

    Args:
        packed: the number of query heads in a tile.
        splits: the number of parts of the keys.
        at_once: whether the kernel keeps a running maximum. Otherwise it guesses maxima. A second launch repeats failed tiles.
        first: whether the guess includes the first keys (from v39 on).
        gives_up: whether each tile first reads the failure flags of earlier tiles (from v42 on).
        samples: whether a first launch computes a sample of the scores (from v43 on).
    """
    rows = p.seq_q * packed
    jobs = math.ceil(rows / m) * p.heads // packed * splits

    def seen(end_row, split):  # number of the split's key tiles that rows before end_row see
        tiles = math.ceil((min(end_row // packed, p.seq_k) if p.causal else p.seq_k) / n)
        return math.ceil(max(tiles - split, 0) / splits)

    keys = steps = 0  # numbers of loaded keys, and of computed tiles of 64 rows and n keys
    for start, split in itertools.product(range(0, rows, m), range(splits)):
        share = max(seen(start + m, split), 1)
        keys += sum(max(0, min(n, p.seq_k - tile * n)) for tile in range(split, split + share * splits, splits))
        for row in range(start, start + m, ROWS):
            some = min(seen(row + ROWS, split), share)
            unused = (splits > 1 or at_once) and (some <= 0 or row >= rows)
            steps += 1 if unused else some
    keys, steps = (p.heads // packed * number for number in (keys, steps))
    read = splits * p.q + keys * (p.row_of_q + p.row_of_o)
    parts = splits * (2 * p.o + p.row)  # bytes of O in float32 and of the LSE, for all splits
    written = parts if splits > 1 else p.o + p.row
    if at_once:
        yield read, written, p.flops(steps * ROWS * n, 1, 1)
    else:
        counted = jobs * INT if splits == 1 or gives_up else 0
        first_keys = V43["FIRST_KEYS"] if first else 0  # number of first keys in a guess
        looks = 0  # number of flags that tiles read
        lately = V43["LATELY"].value
        if gives_up:
            looks = jobs * lately if samples else sum(min(max(job + 1 - lately, 0), lately) for job in range(jobs))
        read += p.heads // packed * splits * math.ceil(rows / m) * m // ROWS * min(first_keys, p.seq_k) * p.row_of_q
        if samples:
            yield _samples(p, m, n, packed, first_keys, (2 + lately + jobs) * INT)
        else:
            yield 0, (2 + jobs) * INT
        flops = p.flops(steps * ROWS * n, 1, 1) + p.flops(jobs * m * first_keys, 1, 0)
        yield read + counted + looks * INT, written + counted, flops
        yield min(jobs, NUM_SMS) * INT, 0
    if splits > 1:
        yield parts, p.o + p.row


def _samples(p: Problem, m: int, n: int, packed: int, first_keys: int, flags: int) -> tuple[int, int, int]:
    """Return the launch that computes v43's samples of the scores.

    The samples are spread evenly over all tiles of m rows. A sample is 64 rows' scores with the first keys and with three tiles
    of n keys.
    """
    heads, rows = p.heads // packed, p.seq_q * packed
    tiles_m = math.ceil(rows / m)
    per_kv = p.heads // p.kv_heads // packed
    group = 1
    if p.causal:
        group = min(max(SHARE_OF_L2 // (2 * p.row_of_q) // math.ceil(p.seq_k / per_kv), 1), heads)
    read, samples = 0, min(V43["LATELY"].value, NUM_SMS)
    for sample in range(samples):
        tile = sample * heads * tiles_m // samples
        inside = tile % (group * tiles_m)
        start = inside // min(group, heads - tile // (group * tiles_m) * group) * m
        start = (tiles_m - 1) * m - start + sample % (m // ROWS) * ROWS
        seen = math.ceil((min((start + ROWS) // packed, p.seq_k) if p.causal else p.seq_k) / n)
        loaded = [seen - 1, sample % seen, (sample + math.ceil(seen / 2)) % seen]
        keys = min(first_keys, p.seq_k) + sum(min(n, p.seq_k - at * n) for at in loaded)
        read += max(0, min(ROWS, rows - start)) + keys
    return read * p.row_of_q, flags, p.flops(samples * ROWS * (3 * n + first_keys), 1, 0)


def v39_forward(p: Problem) -> Steps:
    yield from v34_forward(p, first=True)


def v42_forward(p: Problem) -> Steps:
    yield from v34_forward(p, first=True, gives_up=True)


def v43_forward(p: Problem) -> Steps:
    yield from v34_forward(p, first=True, gives_up=True, samples=True)


def v49b_forward(p: Problem) -> Steps:
    yield from v34_forward(p, first=True, gives_up=True, samples=True, three=True)


def v53_forward(p: Problem) -> Steps:
    yield from v34_forward(p, first=True, gives_up=True, samples=True, spares=True)


def v8_backward(p: Problem) -> Steps:
    yield from v7_backward(replace(p, key_tile=(64 if _wide(p) else 128, 2 * ROWS)))


def _first_tiles(p: Problem, m: int) -> list[int]:
    """For each 128 keys of a head, return the first query tile that sees these keys, or else the last tile."""
    last = math.ceil(p.seq_q / m) - 1
    return [min(start // m, last) if p.causal else 0 for start in range(0, p.seq_k, 2 * ROWS)]


def v10_backward(p: Problem) -> Steps:
    m = 64 if _wide(p) else 128
    first = _first_tiles(p, m)
    queries = p.heads * sum(p.seq_q - tile * m for tile in first)
    steps = p.heads * sum(math.ceil(p.seq_q / m) - tile for tile in first)
    zero, delta, _, scale = v7_backward(p)
    yield zero
    yield delta
    yield (
        p.k + p.v + queries * (p.row_of_q + p.row_of_o + 2 * FLOAT),  # K and V once; for each key tile: Q, dO, LSE, delta
        p.k + p.v + queries * 2 * p.row_of_q,  # dK and dV once; for each key tile: additions to dQ's sums
        p.flops(steps * m * 2 * ROWS, 3, 2),
    )
    yield scale


def v11_backward(p: Problem) -> Steps:
    m = 64 if _wide(p) else 128
    stats = p.heads * math.ceil(p.seq_q / m) * m * 2 * FLOAT  # log2(e) · LSE, and delta, padded to whole tiles
    first = _first_tiles(p, m)
    queries = p.heads * sum(p.seq_q - tile * m for tile in first)
    steps = p.heads * sum(math.ceil(p.seq_q / m) - tile for tile in first)
    zero, _, (_, written, flops), scale = v10_backward(p)
    yield zero
    yield 2 * p.o + p.row, stats  # O, dO and LSE
    yield p.k + p.v + queries * (p.row_of_q + p.row_of_o) + steps * m * 2 * FLOAT, written, flops  # each step also reads stats
    yield scale


def v12_backward(p: Problem, consumers: bool = False) -> Steps:
    m = 64 if _wide(p) else 128
    tiles_m = math.ceil(p.seq_q / m)
    stats = p.heads * tiles_m * m * 2 * FLOAT  # log2(e) · LSE, and delta, padded to whole tiles
    sums = p.heads * tiles_m * m * p.head_dim * FLOAT  # dQ in float32, padded to whole tiles
    yield 2 * p.o + p.row, stats + sums  # read O, dO and LSE; set the sums to 0
    first = _first_tiles(p, m)
    queries = p.heads * sum(p.seq_q - tile * m for tile in first)
    steps = p.heads * sum(tiles_m - tile for tile in first)
    # With a causal mask and 64 queries per step, the first step's queries see no key of the second consumer. So this consumer
    # skips S, dP, dV and dK in the first step.
    unseen = p.heads * len(first) if consumers and p.causal and m == ROWS else 0
    yield (
        p.k + p.v + queries * (p.row_of_q + p.row_of_o) + steps * m * 2 * FLOAT,  # K and V once; in each step: Q, dO, stats
        p.k + p.v + steps * m * 2 * p.row_of_q,  # dK and dV once; in each step: additions to the sums
        p.flops(steps * m * 2 * ROWS, 3, 2) - p.flops(unseen * m * ROWS, 2, 2),
    )
    yield sums, p.q  # dQ in float16


def v15_backward(p: Problem) -> Steps:
    yield from v12_backward(p, consumers=True)


def v37_backward(p: Problem) -> Steps:
    (read, written), (main_read, main_written, flops), finish = v15_backward(p)
    tiles = 0 if _wide(p) else p.kv_heads * math.ceil(p.seq_k / (2 * ROWS))
    yield read, written + min(tiles, 1) * INT  # the counter = 0
    yield main_read + tiles * INT, main_written + tiles * INT, flops  # each tile adds to the counter once
    yield finish


def _wide_keys(p: Problem, matmuls_of_q: int, adds: bool) -> tuple[int, int, int]:
    """Return the launch that computes dK and dV for D = 256.

    The kernel reads K and V once. For each 64 keys, it reads Q, dO and stats (LSE and delta) of all query tiles that see
    these keys, or else of the last query tile.

    Args:
        matmuls_of_q: the number of matmuls with head dimension D in a step. Two more matmuls have Dv.
        adds: whether a step adds its part of dQ to sums in memory.
    """
    tiles_m = math.ceil(p.seq_q / ROWS)
    first = [min(start // ROWS, tiles_m - 1) if p.causal else 0 for start in range(0, p.seq_k, ROWS)]
    queries = p.heads * sum(p.seq_q - tile * ROWS for tile in first)
    steps = p.heads * sum(tiles_m - tile for tile in first)
    read = p.k + p.v + queries * (p.row_of_q + p.row_of_o) + steps * ROWS * 2 * FLOAT
    written = p.k + p.v + adds * steps * ROWS * 2 * p.row_of_q
    return read, written, p.flops(steps * ROWS * ROWS, matmuls_of_q, 2)


def v44_backward(p: Problem, matmuls_of_q: int = 4) -> Steps:
    if max(p.head_dim, p.value_dim) < 256:
        yield from v37_backward(p)
        return
    rows = p.heads * math.ceil(p.seq_q / ROWS) * ROWS  # number of query rows, padded to whole tiles
    sums = rows * p.head_dim * FLOAT
    yield 2 * p.o + p.row, rows * 2 * FLOAT + sums  # read O, dO and LSE; write stats; set the sums to 0
    yield _wide_keys(p, matmuls_of_q, adds=True)
    yield sums, p.q  # dQ in float16


def v45_backward(p: Problem) -> Steps:
    yield from v44_backward(p, matmuls_of_q=3)


def v46_backward(p: Problem, rows: int = 2 * ROWS) -> Steps:
    """Yield the launches of a backward from v46 on.

    In dQ's kernel, a consumer of `rows` rows computes each key tile that at least one of these rows sees.
    """
    if max(p.head_dim, p.value_dim) < 256:
        yield from v37_backward(p)
        return
    stats = p.heads * math.ceil(p.seq_q / ROWS) * ROWS * 2 * FLOAT  # log2(e) · LSE, and delta, padded to whole tiles
    yield 2 * p.o + p.row, stats  # O, dO and LSE
    yield _wide_keys(p, 2, adds=False)
    # The kernel of dQ reads Q, dO and stats once, and K and V for each 128 queries.
    p = replace(p, query_tile=(2 * ROWS, ROWS))
    seen = (min(end, p.seq_k) if p.causal else p.seq_k for end in range(rows, math.ceil(p.seq_q / 128) * 128 + 1, rows))
    steps = p.heads * sum(math.ceil(end / ROWS) for end in seen)
    yield p.q + p.o + stats + p.kv_read, p.q, p.flops(steps * rows * ROWS, 2, 1)


def v48_backward(p: Problem) -> Steps:
    yield from v46_backward(p, rows=ROWS)


def v51_backward(p: Problem) -> Steps:
    if max(p.head_dim, p.value_dim) == 256:
        yield from v48_backward(p)
        return
    m = 64 if _wide(p) else 128
    tiles_m = math.ceil(p.seq_q / m)
    sums = p.heads * tiles_m * m * p.head_dim * FLOAT  # dQ in float32, padded to whole tiles
    steps = p.heads * sum(tiles_m - tile for tile in _first_tiles(p, m))
    (read, written), (main_read, main_written, flops), finish = v48_backward(p)
    yield read, written - sums + p.heads * tiles_m * INT  # the tickets = 0, instead of the sums
    tickets = (steps + p.heads * tiles_m) * INT  # each step takes a ticket; a query tile's first one adds `STORED`
    yield main_read + tickets, main_written + tickets, flops
    yield finish


def formula(stage: str, pass_: str) -> Callable[[Problem], Steps]:
    """Return a stage's formula for a pass, "forward" or "backward": its own in this file, or else its parent's."""
    own = globals().get(f"{stages.version(stage)}_{pass_}")
    return own or formula(stages.parent(stage), pass_)


def total(steps: Steps) -> tuple[int, int, int]:
    """Return the bytes read, the bytes written and the FLOPs of all launches."""
    padded = ((*step, 0)[:3] for step in steps)
    return tuple(map(sum, zip(*padded, strict=True)))
