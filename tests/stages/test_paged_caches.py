"""Stages that take caches in pages are right for every page size, and never read what follows a sequence."""

import random

import pytest
import torch
from cases import LONG, available, make_inputs, set_names, taking_pages, usual
from test_lengths import SCALE, Unread, assert_right, on_device
from torch.func import vmap

import stages
from common import recording
from common.checks import BOTTOM_RIGHT
from common.interpreter import schedule
from common.runtime import DEVICE, INTERPRETED, Device, interpreted_as

HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture(params=usual(list(filter(stages.track, taking_pages()))))
def taking(request):
    """A stage that takes caches in pages."""
    return available(request.param)


class Cache:
    """A cache in pages: q, k, v, lengths and the table. Behind each sequence, and in pages without a sequence, there is NaN.

    Pages are in any order. The numbers of pages behind a sequence are other sequences' pages, or no pages at all.
    """

    def __init__(self, page_size, lengths, seq_q=1, head_dim=64, dtype=HALF, pages=None, shared=0, seed=0, **heads):
        draw = random.Random(seed)
        self.page_size, self.given = page_size, lengths
        pages = pages or max(1, -(-max(lengths) // page_size))  # of a sequence
        self.lengths = [min(max(length, 0), pages * page_size) for length in lengths]
        number = len(lengths) * pages + 2
        order = draw.sample(range(number), number)
        rows = [order[at * pages : (at + 1) * pages] for at in range(len(lengths))]
        rows = [rows[0][:shared] + row[shared:] for row in rows]  # all sequences begin with the same pages
        self.q, *_ = make_inputs(seq_q, 1, head_dim, dtype, batch=len(lengths), **heads)
        self.k, self.v = (
            torch.full((number, page_size, *t.shape[1::2]), torch.nan, dtype=dtype, device=DEVICE)
            for t in make_inputs(1, 1, head_dim, dtype, batch=1, **heads)[1:3]
        )
        for row, length in zip(rows, self.lengths, strict=True):
            for at, page in enumerate(row):
                rest = min(max(length - at * page_size, 0), page_size)
                for tensor in (self.k, self.v):
                    unset = tensor[page, :rest, 0, 0].isnan()
                    tensor[page, :rest][unset] = torch.randn(tensor[page, :rest].shape, device=DEVICE).to(dtype)[unset]
        self.kept = [
            [number for at, number in enumerate(row) if at * page_size < length]
            for row, length in zip(rows, self.lengths, strict=True)
        ]
        wrong = -1, number, 2**31 - 1, -(2**31), rows[0][0]
        table = [kept + [draw.choice(wrong) for _ in range(pages - len(kept))] for kept in self.kept]
        self.options = {"cache_seqlens": on_device(lengths), "page_table": on_device(table)}

    def attention(self, stage, causal=True, **others):
        options = self.options | {"causal": causal, "scale": SCALE, "return_lse": True} | others
        return stage.attention(self.q, self.k, self.v, **options)

    def unpaged(self):
        """Return k and v, [B, Hkv, S, D], with zeros behind each sequence."""
        capacity = self.options["page_table"].shape[1] * self.page_size
        found = []
        for tensor in (self.k, self.v):
            whole = tensor.new_zeros(len(self.kept), capacity, *tensor.shape[2:])
            for own, kept, length in zip(whole, self.kept, self.lengths, strict=True):
                own[:length] = tensor[kept].flatten(0, 1)[:length]
            found.append(whole.transpose(1, 2))
        return found

    def check(self, stage, causal=True, **others):
        """Assert that each sequence's results are right, and return `out`."""
        out, lse = self.attention(stage, causal, **others)
        assert_right(out, lse, self.q, *self.unpaged(), self.lengths, causal)
        return out


def edges(page_size):
    """Return lengths around the ends of pages and of key tiles, which have 64 or 128 keys; the capacity, and beyond."""
    ends = {0, 1, page_size - 1, page_size, page_size + 1, 63, 65, 127, 128, 129, 3 * page_size, 320}
    return [*sorted(ends), 2**31 - 1, -5]


# (queries, heads, K/V heads, D, Dv, dtype, causal)
PROBLEMS = [
    (1, 4, 1, 128, 128, BRAIN, False),
    (1, 2, 2, 64, 64, HALF, True),
    (3, 16, 1, 64, 128, BRAIN, BOTTOM_RIGHT),
    (5, 4, 1, 256, 256, HALF, True),
    (70, 2, 1, 128, 64, HALF, True),
    (200, 2, 1, 64, 32, BRAIN, True),
    (300, 1, 1, 16, 16, HALF, False),
]
SIZES = (16, 64, 256, 32, 128, 512)


def sizes_of_pages():
    """Yield (problem, page size). The interpreter's default run takes one size for each problem."""
    for place, problem in enumerate(PROBLEMS):
        for size in SIZES:
            marks = [pytest.mark.long] if INTERPRETED and size != SIZES[place % 3] else []
            yield pytest.param(problem, size, id=f"{problem}-{size}", marks=marks)


@pytest.mark.parametrize("problem, page_size", list(sizes_of_pages()))
def test_every_length_is_right_in_one_batch(taking, problem, page_size):
    seq_q, heads, kv_heads, head_dim, value_dim, dtype, causal = problem
    options = {"heads": heads, "kv_heads": kv_heads, "value_dim": value_dim, "pages": -(-320 // page_size)}
    lengths = edges(page_size) if LONG or DEVICE == "cuda" else edges(page_size)[::2]
    Cache(page_size, lengths, seq_q, head_dim, dtype, **options).check(taking, causal)


@pytest.mark.parametrize("seed", range(6 if LONG else 1))
@pytest.mark.parametrize("page_size, splits", [(16, 3), (64, 2), (256, 9)])
def test_splits_of_keys(taking, page_size, splits, seed, monkeypatch):
    """Splits may have no keys, or only keys beyond the table. Threads run in other orders with other seeds."""
    schedule.restart_seeds(seed)
    monkeypatch.setattr(recording, "is_watched", lambda: True)  # recorded launches would not have this number of splits
    set_names(monkeypatch, taking.__name__.removeprefix("stages."), splits_of=lambda *_: splits)
    Cache(page_size, [0, 1, 100, 257], 2, heads=4, kv_heads=1, seed=seed).check(taking)


@pytest.mark.parametrize("page_size", [16, 256])
def test_sequences_share_pages(taking, page_size):
    lengths = [4 * page_size - 3, 4 * page_size, 2 * page_size + 1]
    Cache(page_size, lengths, 2, heads=2, kv_heads=1, shared=2).check(taking)


@pytest.mark.parametrize("page_size", SIZES[:3])
def test_pages_in_order_are_like_a_cache_in_one_piece(taking, page_size):
    cache = Cache(page_size, [300, 5], 3, heads=2, kv_heads=1)
    lengths = cache.options["cache_seqlens"]
    expected = taking.attention(cache.q, *cache.unpaged(), causal=True, scale=SCALE, cache_seqlens=lengths)
    torch.testing.assert_close(cache.check(taking), expected)


@pytest.mark.skipif(not INTERPRETED, reason="a GPU would hold the whole table")
def test_a_table_of_more_than_2_to_the_31_pages(taking, tmp_path):
    """The table is a sparse file of zeros, except the last sequence's first number. Its offset is more than 2**31."""
    batch, pages = 18, 2**27 - 64
    table = torch.from_file(f"{tmp_path}/table", shared=True, size=batch * pages, dtype=torch.int32).view(batch, pages)
    table[-1, 0] = 1
    q, k, _, _ = make_inputs(1, 16, 16, HALF, batch=batch, heads=1)
    k = k[:2].transpose(1, 2)  # two pages, which are both K and V
    with interpreted_as(Device(num_sms=2)):
        out = taking.attention(q, k, k, cache_seqlens=on_device([1] * batch), page_table=table)
    assert (out[:-1] == k[0, 0]).all() and (out[-1] == k[1, 0]).all()


@pytest.mark.skipif(not INTERPRETED, reason="watches the interpreter's kernels")
@pytest.mark.parametrize("page_size", [16, 256])
def test_pages_behind_a_sequence_are_never_read(taking, page_size):
    """TMA gets the number of such a page only with rows outside of the page. Here, it would read a page of NaN."""
    cache = Cache(page_size, [page_size + 1, 0], pages=3, heads=1)
    spare = next(page for page in range(len(cache.k)) if page not in sum(cache.kept, []))
    table = [kept + [spare] * (3 - len(kept)) for kept in cache.kept]
    cache.check(taking, page_table=on_device(table))


def test_the_table_may_have_any_strides(taking):
    cache = Cache(16, [40, 70, 3], 2, heads=2, kv_heads=1)
    table = cache.options["page_table"]
    expected = cache.check(taking)
    for other in (table.T.contiguous().T, torch.stack((table, table + 1), -1)[..., 0]):
        assert not other.is_contiguous() and torch.equal(cache.attention(taking, page_table=other)[0], expected)


def test_k_and_v_may_have_any_strides(taking):
    """Pages may hold K and V side by side, or heads before keys; rows that are not aligned are copied."""
    cache = Cache(16, [40, 17], 2, heads=2, kv_heads=2)
    expected = cache.check(taking)
    k, v = cache.k, cache.v
    for cache.k, cache.v in (
        torch.stack((k, v), 1).unbind(1),
        [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)],
        [torch.cat((t, t), -1)[..., 3:67].copy_(t) for t in (k, v)],
    ):
        assert torch.equal(cache.attention(taking)[0], expected)


def test_the_host_never_reads_the_table(taking):
    cache = Cache(16, [40, 17], heads=2, kv_heads=1)
    with Unread():
        cache.attention(taking)
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            cache.attention(taking)
        finally:
            torch.cuda.set_sync_debug_mode("default")


BATCHES = ([40, 100, 3], [100, 0, 64], [1, 99, 17], [64, 65, 100])


def overwrite(cache, other):
    """Copy another cache's values into a cache's tensors."""
    for own, new in zip(
        (cache.q, cache.k, cache.v, *cache.options.values()), (other.q, other.k, other.v, *other.options.values()), strict=True
    ):
        own.copy_(new)
    cache.lengths, cache.kept = other.lengths, other.kept


def test_repeated_calls_take_new_tables(taking):
    """On a GPU, later calls replay the second call's launches with their own tables, also where one tensor is overwritten."""
    kept, overwritten = [], Cache(16, BATCHES[0], 2, pages=7, heads=2, kv_heads=1)
    for seed, lengths in enumerate(BATCHES):
        kept.append(Cache(16, lengths, 2, pages=7, heads=2, kv_heads=1, seed=seed))  # keeps it, so that each gets other memory
        kept[-1].check(taking)
        overwrite(overwritten, kept[-1])
        overwritten.check(taking)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("calls", [1, 3])
@pytest.mark.parametrize("page_size", SIZES[:3])
def test_a_captured_graph_is_right_for_later_tables(taking, calls, page_size):
    cache = Cache(page_size, BATCHES[0], 2, pages=7, heads=8, kv_heads=2)
    for _ in range(calls):
        cache.attention(taking)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = cache.attention(taking)
    for seed, lengths in enumerate(BATCHES):
        overwrite(cache, Cache(page_size, lengths, 2, pages=7, heads=8, kv_heads=2, seed=seed))
        graph.replay()
        assert_right(out, lse, cache.q, *cache.unpaged(), cache.lengths, True)


def test_compiled_without_a_graph_break(taking):
    def model(q, k, v, lengths, table):
        return taking.attention(q * 2, k, v, causal=True, cache_seqlens=lengths, page_table=table + 0)

    cache = Cache(16, [40, 17], 3, heads=2, kv_heads=1)
    given = cache.q, cache.k, cache.v, *cache.options.values()
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    torch.testing.assert_close(compiled(*given), model(*given))
    torch._dynamo.reset()


def test_as_an_operator_of_pytorch(taking):
    """The dispatcher, which a profiler uses, gives the same. So does autocast."""
    cache = Cache(16, [40, 17], 3, heads=2, kv_heads=1)
    operator = getattr(torch.ops.kernel_evolution, f"{taking.__name__.removeprefix('stages.')}_forward").default
    torch.library.opcheck(operator, (cache.q, cache.k, cache.v, True, SCALE, 0, *cache.options.values()))
    expected, _ = cache.attention(taking)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert torch.equal(cache.attention(taking)[0], expected)
    cache.q, cache.k, cache.v = cache.q.float(), cache.k.float(), cache.v.float()
    with torch.autocast(DEVICE, HALF):
        assert torch.equal(cache.attention(taking)[0], expected)


@pytest.mark.parametrize("shared", [False, True])
def test_vmap(taking, shared):
    """Each element of the mapped dimension has a table of its own, and pages of its own or pages that all share."""
    first, second = Cache(16, [40, 17], 3, heads=2, kv_heads=1), Cache(16, [3, 48], 3, heads=2, kv_heads=1, seed=1)
    if shared:
        second.k, second.v = first.k, first.v
        second.options["page_table"], second.options["cache_seqlens"] = first.options["page_table"].flip(0), on_device([17, 40])
    both = zip(*((one.q, one.k, one.v, *one.options.values()) for one in (first, second)), strict=True)
    stacked = [one if shared and at in (1, 2) else torch.stack((one, two)) for at, (one, two) in enumerate(both)]

    def call(q, k, v, lengths, table):
        return taking.attention(q, k, v, causal=True, scale=SCALE, cache_seqlens=lengths, page_table=table)

    out = vmap(call, (0, None, None, 0, 0) if shared else 0)(*stacked)
    for number, cache in enumerate((first, second)):
        torch.testing.assert_close(out[number], cache.attention(taking)[0])


FIRST = Cache(16, [20, 3], 2, 16, heads=4, kv_heads=2)
GOOD = {"q": FIRST.q, "k": FIRST.k, "v": FIRST.v, **FIRST.options}
ELSEWHERE = "cpu" if DEVICE == "cuda" else "meta"  # a device on which no kernel runs
TABLE = GOOD["page_table"]
BAD = {
    "no lengths": ({"cache_seqlens": None}, ValueError, "page_table needs cache_seqlens"),
    "a list": ({"page_table": [[1, 2]]}, TypeError, "page_table must be a torch.Tensor, got list"),
    "int64": ({"page_table": TABLE.long()}, TypeError, "page_table must be int32, got torch.int64"),
    "sparse": ({"page_table": TABLE.to_sparse()}, TypeError, "page_table must be a dense tensor"),
    "another batch": ({"page_table": TABLE[:1]}, ValueError, r"page_table must have the shape \(2, .* got \(1, 2\)"),
    "one dimension": ({"page_table": TABLE[:, 0]}, ValueError, r"page_table must have the shape \(2, .* got \(2,\)"),
    "no pages": ({"page_table": TABLE[:, :0]}, ValueError, r"page_table must have the shape \(2, .* got \(2, 0\)"),
    "elsewhere": ({"page_table": TABLE.to(ELSEWHERE)}, ValueError, "page_table must be on the device of q"),
    "k of three dimensions": ({"k": GOOD["k"][0]}, ValueError, r"k must have 4 dimensions \[pages, page_size, .*, got 3"),
    "another D": ({"k": GOOD["k"].repeat(1, 1, 1, 2)}, ValueError, r"k must be \[pages, .*\] with the head_dim of q"),
    "other pages": ({"v": GOOD["v"][:1]}, ValueError, "v must have k's pages, page size and heads"),
    "heads before keys": ({n: GOOD[n].transpose(1, 2) for n in "kv"}, ValueError, "the heads of q must be a multiple"),
    "short pages": ({n: GOOD[n][:, :8] for n in "kv"}, ValueError, "page_size, .*, must be a power of two .* got 8"),
    "pages of 48": ({n: GOOD[n].repeat(1, 3, 1, 1) for n in "kv"}, ValueError, "page_size, .*, must be a power of two .* 48"),
    "wrong lengths": ({"cache_seqlens": on_device([1])}, ValueError, r"cache_seqlens must have the shape \(2,\)"),
    "float32": ({n: GOOD[n].float() for n in "qkv"}, TypeError, "with cache_seqlens, q, k and v must be float16 or bfloat16"),
}


@pytest.mark.parametrize("wrong, error, message", BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(wrong, error, message):
    with pytest.raises(error, match=message):
        stages.load(taking_pages()[0]).attention(**GOOD | wrong)


def test_other_stages_refuse_a_table():
    for name in set(stages.names()) - set(taking_pages()):
        with pytest.raises(NotImplementedError, match=f"{name} takes no page_table"):
            stages.load(name).attention(**GOOD)


@pytest.mark.parametrize("which", "qkv")
def test_gradients_are_refused(taking, which):
    with pytest.raises(NotImplementedError, match="cache_seqlens has no gradients"):
        taking.attention(**GOOD | {which: GOOD[which].clone().requires_grad_()})
