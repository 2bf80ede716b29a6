"""Summarize `make bench-ring` runs, in which several GPUs share a sequence."""

from common.measure.footprint import MIB_IN_MB
from common.show.results import ROOT, origin, read, spoken
from common.show.tables import PASS_NAMES, markdown, mask

COMMAND = 'make bench-ring GPUS=2 ARGS="--json results/ring-h200-x2.json"'


def shares(record: dict, records: list[dict]) -> tuple[float | None, float | None]:
    """Compare a case of several GPUs with a single GPU.

    Returns:
        Weak scaling: the rate per GPU, divided by the rate of a single GPU with 1 / ranks of the sequence. Strong scaling: the
        speedup over a single GPU with the same sequence, divided by the number of GPUs. None if there is no such case.
    """
    same = ("impl", "pass", "heads", "kv_heads", "head_dim", "causal", "dtype")
    alone = [r for r in records if "ms" in r and r["ranks"] == 1 and all(r[name] == record[name] for name in same)]
    alone, ranks = {r["seq_len"]: r for r in alone}, record["ranks"]
    part, whole = alone.get(record["seq_len"] // ranks), alone.get(record["seq_len"])
    return part and record["tflops"] / part["tflops"], whole and whole["ms"] / record["ms"] / ranks


def _table(run: dict, records: list[dict]) -> str:
    """Format a table with a row for each of some records of a run."""
    headers = ["pass", "mask", "GPUs", "S", "attention", "ms", "± IQR", "TFLOP/s per GPU", "weak scaling", "strong scaling"]
    headers += ["MB sent", "peak extra MB"]
    rows = []
    for r in sorted(records, key=lambda r: (list(PASS_NAMES).index(r["pass"]), r["causal"], r["ranks"], r["seq_len"])):
        cells = [r.get("failure"), *["-"] * 6]
        if "ms" in r:
            ratios = shares(r, run["records"]) if r["ranks"] > 1 else (None, None)
            cells = [f"{r['ms']:.3f}" + ("" if r["launch_hidden"] else "*"), f"{r['iqr_ms']:.3f}", f"{r['tflops']:.0f}"]
            cells += ["-" if ratio is None else f"{ratio:.0%}" for ratio in ratios]
            cells.append(f"{r['sent_bytes'] / 1e6:,.1f}" if "sent_bytes" in r else "-")
            cells.append(f"{r['peak_extra_mib'] * MIB_IN_MB:,.0f}")
        rows.append([PASS_NAMES[r["pass"]], mask(r["causal"]), r["ranks"], f"{r['seq_len']:,}", spoken(r["impl"]), *cells])
    parts = [markdown(rows, headers, ("pass", "mask", "attention"))]
    if any(r.get("launch_hidden") is False for r in records):
        parts.append("\\* This time may include CPU time.")
    notes = (f"{spoken(r['impl'])}, {r['ranks']} GPUs, S = {r['seq_len']:,}: {r['note']}" for r in records if r.get("note"))
    return "\n\n".join([*parts, *dict.fromkeys(notes)])


def scaling_tables(run: dict, most: bool = False) -> str:
    """Format the cases of a file of `common.measure.scaling`, with a table for each model. With `most`, leave out cases that
    have no time or fewer GPUs than others."""
    facts, of_model = run["machine_info"], {}
    ranks = max((record["ranks"] for record in run["records"] if "ms" in record), default=0)
    for record in run["records"]:
        if not most or ("ms" in record and record["ranks"] == ranks):
            model = f"H = {record['heads']}, Hkv = {record['kv_heads']}, D = {record['head_dim']}, {record['dtype']}:"
            of_model.setdefault(model, []).append(record)
    words = [
        f"K and V of {link['tokens']:,} tokens travel in {link['ms']:.2f} ms, at {link['gbps']:.0f} GB/s in each direction."
        for link in run["links"]
    ]
    settings = [facts.get("nccl", ""), *(f"{name}={value}" for name, value in facts.get("environment", {}).items())]
    words += [f"Measured on {origin(facts | {'gpu': facts['gpus']})}.", ", ".join(filter(None, settings))]
    tables = [part for model, records in of_model.items() for part in (model, _table(run, records))]
    return "\n\n".join([" ".join(filter(None, words)), *tables])


def scaling_passage() -> str:
    """Return the generated passage of docs/several-gpus.md about the runs in results/."""
    paths = sorted((ROOT / "results").glob("ring-*.json"))
    parts = [f"{scaling_tables(read(path), True)}\n\n[All cases](../results/{path.stem}.md)" for path in paths]
    return "\n\n".join(parts) or f"Not measured yet: `{COMMAND}`, then `make readme`."
