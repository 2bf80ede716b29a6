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


def _table(found: Scaling, records: list[dict], every_column: bool) -> str:
    """Format a table with a row for each record. Without `every_column`, leave out what differs only between all cases."""
    rows = []
    for r in sorted(records, key=lambda r: (list(PASS_NAMES).index(r["pass"]), r["causal"], r["ranks"], r["seq_len"])):
        row = {"pass": PASS_NAMES[r["pass"]], "mask": mask(r["causal"]), "GPUs": str(r["ranks"])}
        row |= {"S": f"{r['seq_len']:,}", "attention": spoken(r["impl"]), "ms": r.get("failure", "")}
        names = ("± IQR", "TFLOP/s per GPU", "weak scaling", "strong scaling", "MB sent", "peak extra MB")
        values = ["-"] * len(names)
        if "ms" in r:
            row["ms"] = f"{r['ms']:.3f}" + ("" if r["launch_hidden"] else "*")
            ratios = (found.weak(r), found.strong(r)) if r["ranks"] > 1 else (None, None)
            shares = ("-" if ratio is None else f"{ratio:.0%}" for ratio in ratios)
            sent = f"{r['sent_bytes'] / 1e6:,.1f}" if "sent_bytes" in r else "-"
            values = [f"{r['iqr_ms']:.3f}", f"{r['tflops']:.0f}", *shares, sent, f"{r['peak_extra_mib'] * MIB_IN_MB:,.0f}"]
        row |= zip(names, values, strict=True)
        rows.append(row if every_column else {name: row[name] for name in row if name not in ("GPUs", "± IQR", "MB sent")})
    parts = [markdown([list(row.values()) for row in rows], list(rows[0]), ("pass", "mask", "attention"))]
    if any(r.get("launch_hidden") is False for r in records):
        parts.append("\\* The CPU was not ahead of the GPU, so this time includes CPU time.")
    notes = (f"{spoken(r['impl'])}, {r['ranks']} GPUs, S = {r['seq_len']:,}: {r['note']}" for r in records if r.get("note"))
    return "\n\n".join([*parts, *dict.fromkeys(notes)])


def _model(record) -> str:
    return f"H = {record['heads']}, Hkv = {record['kv_heads']}, D = {record['head_dim']}, {record['dtype']}"


def _origin(run) -> str:
    """Say how fast K and V travel, and where and when the run was measured."""
    facts = run["machine_info"]
    links = [
        f"K and V of {link['tokens']:,} tokens travel in {link['ms']:.2f} ms, at {link['gbps']:.0f} GB/s in each direction. "
        for link in run["links"]
    ]
    return f"{''.join(links)}Measured on {origin(facts | {'gpu': facts['gpus']})}."


def scaling_tables(run: dict) -> str:
    """Format all cases of a run of `common.measure.scaling`, with a table for each model.

    Args:
        run: a dict. "machine_info" describes the GPUs. "records" is a list with a dict for each case, which has the fields of
            `Workload.record`, "impl" and "ranks", and either measured values or "failure" and "note". "links" is a list of
            results of `common.measure.scaling.link`.
    """
    facts, found, of_model = run["machine_info"], Scaling(run), {}
    for record in run["records"]:
        of_model.setdefault(_model(record), []).append(record)
    settings = [facts.get("nccl", ""), *(f"{name}={value}" for name, value in facts.get("environment", {}).items())]
    parts = [f"{_origin(run)} {', '.join(filter(None, settings))}".rstrip()]
    for model, records in of_model.items():
        parts += [f"{model}:", _table(found, records, every_column=True)]
    return "\n\n".join(parts)


def _summary(path):
    """Format the cases that used the run's largest number of GPUs, and a link to all cases."""
    run = read(path)
    found = Scaling(run)
    most = [record for record in found.records if record["ranks"] == found.ranks]
    models = "; ".join(dict.fromkeys(map(_model, most)))
    caption = f"{models}. {_origin(run)} More cases: [{path.stem}.md](../results/{path.stem}.md)."
    return f"{caption}\n\n{_table(found, most, every_column=False)}"


def scaling_passage() -> str:
    """Return the generated passage of docs/several-gpus.md about the runs in results/."""
    files = ring_files()
    if not files:
        return f"Not measured yet: `{COMMAND}`, then `make plots readme`."
    drawn = [path.stem for path in files if Scaling(read(path)).is_drawn()]
    return "\n\n".join([*map(_summary, files), *(f"![TFLOP/s of each GPU, {name}](../plots/{name}.png)" for name in drawn)])
