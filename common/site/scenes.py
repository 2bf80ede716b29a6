"""Record what the pictures of a step show: the accesses of a stage and its parent, and the work of an SM's units."""

import tomllib
from dataclasses import dataclass, field, replace

import stages
from common.interpreter.timing import UNITS, busy
from common.measure.trace import ONE_SM, Trace, trace
from common.measure.workloads import Workload
from common.show import tracks
from common.show.results import bytes_in_words, passes
from common.show.tables import PASS_NAMES
from common.show.traces import COLORS, Mark, Panel, accesses

# The workload of most scenes, on a GPU with one SM. Other values are in the table `[scene]` of a track's benchmark.toml, and in
# a stage's scene.toml. `lengths` are those of a batch's sequences, instead of `seq_len`. With `at_once`, SMs work at the same
# time; else CTAs run one after the other.
USUAL = {"heads": 1, "seq_len": 1024, "head_dim": 64, "causal": True, "sms": 1, "lengths": [], "at_once": False}
WORDS = {  # lane -> the words of its tooltip
    "Q": "queries", "K": "keys", "V": "values", "O": "the output", "LSE": "log-sum-exp of each row of scores",
    "dO": "gradient of the output", "dQ": "gradient of the queries", "dK": "gradient of the keys",
    "dV": "gradient of the values",
    "s": "scores: every query times every key", "visible": "the mask: which keys a query sees",
    "p": "softmax of the scores", "m": "maximum of each row of scores", "l": "sum of each row of exponentials",
    "o": "the output before it is complete, in float32", "out": "the output before it is rounded",
    "dp": "gradient of p", "ds": "gradient of the scores",
    "dq": "gradient of the queries before it is rounded", "dk": "gradient of the keys before it is rounded",
    "dv": "gradient of the values before it is rounded",
    "delta": "row sums of dO ∘ O", "sums": "dQ while programs add to it, in float32", "stats": "LSE and delta of each row",
    "k8": "the keys in 8 bits", "v8": "the values in 8 bits, transposed",
    "scales": "what 1 of each key tile's 8-bit keys, and of its 8-bit values, stands for",
    "k_t": "the keys, transposed", "lse": "log-sum-exp of each part of the keys", "part": "output of each part of the keys",
    "counter": "what programs share: the next tile, and tiles to compute again",
    "state": "what programs share: the next tile, and tiles to compute again",
    "lengths": "number of keys of each sequence", "starts_q": "where each sequence starts",
    "list": "packed sequences: the tiles of all sequences, and the number of tiles that CTAs have taken",
    "tickets": "for each query tile: how many programs have come, and whether the first has stored dQ",
    "temporary": "tensors without a name in the code",
    "copies in": "copies from memory to shared memory", "copies out": "copies from shared memory to memory",
    "tensor cores": "matmuls", "exponentials": "exp2 of scores", "other instructions": "all other arithmetic",
    "shared memory": "loads and stores of shared memory by warps",
}  # fmt: skip
VISIBLE = 20000  # when a page opens, a timeline shows about this many cycles
MOST_ZOOM = 24


@dataclass
class Scene:
    """The panels for one pass of a step.

    Attributes:
        accesses: the panels with the accesses of parent and stage. v0 has one panel, because it has no parent.
        units: the panels with the work of an SM's units. A stage without a Gluon kernel has no such panel.
        shares: the panels that show which SM computes which tile, if SMs work at the same time.
    """

    pass_: str
    shape: str
    accesses: list[Panel]
    units: list[Panel]
    shares: list[Panel] = field(default_factory=list)

    @property
    def zoom(self) -> float:
        """The width of the timelines when the page opens, in multiples of the page's width."""
        return min(max(round(2 * max(panel.end for panel in self.units) / VISIBLE) / 2, 1), MOST_ZOOM)

    @property
    def moves_the_same(self) -> bool:
        """Whether parent and stage move equally many bytes."""
        moved = [panel.megabytes for panel in self.accesses]
        return len(moved) == 2 and bytes_in_words(*moved) == "the same bytes"


def described(lane: str) -> str:
    """Return the words of a lane's tooltip."""
    if lane.startswith("SM "):
        return "the tiles that this SM computes"
    return WORDS.get(lane.rstrip("\N{PRIME}"), "") + (", another copy" if lane.endswith("\N{PRIME}") else "")


def scenes(name: str) -> list[Scene]:
    """Record the passes that a stage changes, for the parent and for the stage."""
    track = tracks.read(stages.track(name))
    own = stages.directory(name) / "scene.toml"
    shape = USUAL | (track.scene if track else {}) | (tomllib.loads(own.read_text()) if own.exists() else {})
    gpu, lengths, at_once = replace(ONE_SM, num_sms=shape.pop("sms")), shape.pop("lengths"), shape.pop("at_once")
    found = []
    for pass_ in passes(name):
        workload = Workload(pass_, 1, dtype="float16", **shape)
        both = [stage for stage in (stages.parent(name), name) if stage]
        recorded = {stage: trace(stages.load(stage), workload, gpu, lengths, at_once=at_once) for stage in both}
        length = f"Sq = {workload.seq_len}, Sk = {workload.kv_len}"
        length = f"S = {workload.seq_len}" if workload.kv_len == workload.seq_len else length
        length = f"S = {', '.join(map(str, lengths))}, with a line where each sequence starts" if lengths else length
        heads = "one head" if workload.heads == 1 else f"{workload.heads} heads"
        heads += f" that share {workload.kv_heads} of K and V" if workload.kv_heads < workload.heads else ""
        words = f"{PASS_NAMES[pass_]}, {heads}, D = {workload.head_dim}, {'causal' if workload.causal else 'full'}, {length}"
        words += f", {gpu.num_sms} SMs at the same time" if at_once else ""
        units = [_units(stage, each) for stage, each in recorded.items() if any(each.spans.values())]
        shares = [_shares(stage, each) for stage, each in recorded.items() if at_once]
        found.append(Scene(pass_, words, [accesses(stage, each) for stage, each in recorded.items()], units, shares))
    return found


def _shares(stage: str, recorded: Trace) -> Panel:
    """Return the panel of a forward's persistent CTAs, with a lane for each SM. A tile lasts from loading Q to storing O."""
    times, end = {}, max(access.end or 0 for access in recorded.accesses)
    for access in recorded.accesses:
        if access.tensor in ("Q", "O"):
            rows = recorded.launches[access.launch].tile["BLOCK_M"]
            times.setdefault((access.program, access.heads[0], access.rows[0] // rows * rows, rows), []).append(access)
    order = sorted({(-first, head) for _, head, first, _ in times})  # so that a tile has the same color for all stages
    found = {f"SM {sm}": [] for sm in sorted({sm for sm, *_ in times})}
    for (sm, head, first, rows), parts in times.items():
        start, stop = min(part.start for part in parts), max(part.end for part in parts)
        words = f"head {head}, queries {first} to {first + rows - 1}: cycles {start:,.0f} to {stop:,.0f}"
        found[f"SM {sm}"].append(Mark("busy", order.index((-first, head)) % len(COLORS), start, stop, 0.0, 1.0, words))
    # A CTA loads the next tile's Q while it stores O, so tiles overlap.
    share = {lane: max(mark.end for mark in marks) / end for lane, marks in found.items()}
    return Panel(stage, "cycles of the model of an SM", end, 0, 0.0, found, busy=share)


def _units(stage: str, recorded: Trace) -> Panel:
    """Return the panel of the longest launch, with a lane for each unit of an SM."""
    spans = max(recorded.spans.values(), key=lambda spans: max((span.end for span in spans), default=0))
    spans = [span for span in spans if span.who.program.sm == 0]
    # The number of each span's partition, and the name of the function that the partition runs.
    partitions = [str(span.who).split(", partition ")[-1].replace(": _", ": ") for span in spans]
    colors = {who: place % len(COLORS) for place, who in enumerate(sorted({*partitions}))}
    found = {unit: [] for unit in UNITS}
    for who, span in zip(partitions, spans, strict=True):
        found[span.unit].append(Mark("busy", colors[who], span.start, span.end, 0.0, 1.0, f"{who}: {span.what}"))
    keys = {color: who for who, color in colors.items()}
    end = max(span.end for span in spans)
    return Panel(stage, "cycles of the model of an SM", end, len(spans), 0.0, found, keys, busy(spans, end))
