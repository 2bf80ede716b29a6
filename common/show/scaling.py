"""Summarize `make bench-ring` runs, in which several GPUs share a sequence."""

from pathlib import Path

from common.measure.footprint import MIB_IN_MB
from common.show.results import ROOT, implementations, origin, read, spoken
from common.show.tables import PASS_NAMES, markdown, mask

COMMAND = 'make bench-ring GPUS=2 ARGS="--json results/ring-h200-x2.json"'


def ring_files() -> list[Path]:
    """Return the files of the runs in results/, sorted by name."""
    return sorted((ROOT / "results").glob("ring-*.json"))


def _key(record, ranks, seq_len):
    shared = (record[name] for name in ("impl", "pass", "heads", "kv_heads", "head_dim", "causal", "dtype"))
    return *shared, ranks, seq_len


class Scaling:
    """A run's measured cases, to compare several GPUs with a single GPU."""

    def __init__(self, run: dict):
        self.records = [record for record in run["records"] if "ms" in record]
        self.names = implementations(self.records)
        self.ranks = max((record["ranks"] for record in self.records), default=0)
        self._by_case = {_key(r, r["ranks"], r["seq_len"]): r for r in self.records}

    def weak(self, record: dict) -> float | None:
        """Return the rate per GPU, divided by the rate of a single GPU with 1 / ranks of the sequence.

        Return None if the single GPU was not measured.
        """
        alone = self._by_case.get(_key(record, 1, record["seq_len"] // record["ranks"]))
        return record["tflops"] / alone["tflops"] if alone else None

    def strong(self, record: dict) -> float | None:
        """Return the speedup over a single GPU with the same sequence, divided by the number of GPUs. Return None if the
        single GPU was not measured."""
        alone = self._by_case.get(_key(record, 1, record["seq_len"]))
        return alone["ms"] / record["ms"] / record["ranks"] if alone else None

    def is_drawn(self) -> bool:
        """Return whether the run used several numbers of GPUs, so that a plot has lines."""
        return len({record["ranks"] for record in self.records}) > 1


def _summary(path):
    """Format a table of the cases that used the run's largest number of GPUs. The caption has the GPUs, versions, commit and
    date."""
    run = read(path)
    facts, found = run["machine_info"], Scaling(run)
    most = [record for record in found.records if record["ranks"] == found.ranks]
    rows = []
    for r in sorted(most, key=lambda r: (list(PASS_NAMES).index(r["pass"]), r["causal"], r["seq_len"])):
        shares = ("-" if share is None else f"{share:.0%}" for share in (found.weak(r), found.strong(r)))
        memory = [f"{r[name] * MIB_IN_MB:,.0f}" if name in r else "-" for name in ("peak_extra_mib", "held_mib")]
        start = [PASS_NAMES[r["pass"]], mask(r["causal"]), f"{r['seq_len']:,}", spoken(r["impl"])]
        rows.append([*start, f"{r['ms']:.2f}", f"{r['tflops']:.0f}", *shares, *memory])
    headers = ["pass", "mask", "S", "attention", "ms", "TFLOP/s per GPU", "weak scaling", "strong scaling"]
    headers += ["peak extra MB", "MB of the ring"]
    models = dict.fromkeys(f"H = {r['heads']}, Hkv = {r['kv_heads']}, D = {r['head_dim']}, {r['dtype']}" for r in most)
    links = [
        f" K and V of {link['tokens']:,} tokens travel in {link['ms']:.2f} ms, at {link['gbps']:.0f} GB/s in each direction."
        for link in run["links"]
    ]
    caption = (
        f"{'; '.join(models)}.{''.join(links)} Measured on {origin(facts | {'gpu': facts['gpus']})}. "
        f"More cases: [{path.stem}.md](../results/{path.stem}.md)."
    )
    return f"{caption}\n\n{markdown(rows, headers, ('pass', 'mask', 'attention'))}"


def scaling_passage() -> str:
    """Return the generated passage of docs/several-gpus.md about the runs in results/."""
    files = ring_files()
    if not files:
        return f"Not measured yet: `{COMMAND}`, then `make plots readme`."
    drawn = [path.stem for path in files if Scaling(read(path)).is_drawn()]
    return "\n\n".join([*map(_summary, files), *(f"![TFLOP/s of each GPU, {name}](../plots/{name}.png)" for name in drawn)])
