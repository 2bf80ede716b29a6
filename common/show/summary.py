"""Write the first lines of a benchmark's output: a stage's gain over its parent, and a table of some implementations."""

from collections import Counter

import stages
from common.show.results import implementations, mean_ratio
from common.show.tables import PASS_NAMES, markdown

LINES, COLUMNS = 15, 100  # the summary has at most this many lines and columns
MOST_GROUPS = 4  # the table has columns for at most this many pairs of pass and head dimension
NO_GPU = "There is no GPU. µs at peak is the time of the counted bytes and FLOPs at an H200's peak rates."


def _times(records: list[dict], impl: str | None, on_gpu: bool, **values) -> dict:
    """Return an implementation's time for each workload. Use only records whose fields have these `values`."""
    time = "ms" if on_gpu else "roofline_us"
    workload = ("pass", "seq_len", "kv_len", "batch", "heads", "kv_heads", "head_dim", "value_dim", "causal", "dtype")
    workload += ("score_std", "sink", "sink_key", "sink_head")
    return {
        tuple(record.get(name) for name in workload): record[time]
        for record in records
        if record["impl"] == impl and record.get(time) and all(record[name] == value for name, value in values.items())
    }


def _gain(records, impl, over, on_gpu, **values) -> float | None:
    return mean_ratio(_times(records, impl, on_gpu, **values), _times(records, over, on_gpu, **values))


def _total(records, impl, name, **values) -> float:
    return sum(r[name] for r in records if r["impl"] == impl and name in r and all(r[key] == v for key, v in values.items()))


def _change(before: float, after: float) -> str:
    """Return in words how `after` compares with `before`: "1.94 times fewer", or "as many"."""
    if round(before / after, 2) == 1:
        return "as many"
    return f"{before / after:.2f} times fewer" if after < before else f"{after / before:.2f} times more"


def _steps(records, names, on_gpu) -> dict[str, float]:
    """Return each stage's speed divided by its parent's speed. Leave out a stage whose parent was not measured."""
    gains = {name: _gain(records, name, stages.parent(name), on_gpu) for name in names if stages.position(name)}
    return {name: gain for name, gain in gains.items() if gain}


def _headline(records, subject, over, on_gpu) -> list[str]:
    """Return lines that compare the speed of the stages `subject` and `over`, one line for each pass."""
    if over == subject:
        return [f"{subject}:"]
    role = "its parent" if over == stages.parent(subject) else "the first stage of this run"
    lines = [f"{subject} compared with {role}, {over}:"]
    for pass_, name in PASS_NAMES.items():
        if not (gain := _gain(records, subject, over, on_gpu, **{"pass": pass_})):
            continue
        text = f"  {name}: {gain:.2f} times as fast"
        if on_gpu and (cudnn := _gain(records, subject, "sdpa-cudnn", on_gpu, **{"pass": pass_})):
            text += f", {100 * cudnn:.0f} % of cuDNN's speed"
        if not on_gpu:
            moved, flops = (
                _change(*(sum(_total(records, impl, name, **{"pass": pass_}) for name in kinds) for impl in (over, subject)))
                for kinds in (("bytes_read", "bytes_written"), ("flops_executed",))
            )
            text += f" at peak, {moved} bytes, {flops} FLOPs"
        lines.append(text)
    return lines


def _failures(records) -> list[str]:
    """Return a line that names the cases without a measurement."""
    counted = Counter((record["impl"], record["failure"]) for record in records if "failure" in record)
    parts = [f"{impl} {failure}" + (f" ({number} cases)" if number > 1 else "") for (impl, failure), number in counted.items()]
    text = f"Not measured: {', '.join(parts)}."
    return [text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"] if parts else []


def _chosen(names, first: list, steps: dict, room: int) -> list[str]:
    """Return at most `room` of the names: the libraries, the stages `first`, then the stages with the largest gains."""
    ranked = [name for name in names if not stages.position(name)] + first
    ranked += sorted(steps, key=steps.get, reverse=True) + names
    kept = [name for name in dict.fromkeys(ranked) if name in names][:room]
    return [name for name in names if name in kept]


def summary(records: list[dict], machine: dict, about: str | None = None) -> str:
    """Summarize a run in at most `LINES` lines of `COLUMNS` columns: gains over the parent, by pass and head dimension.

    Args:
        records, machine: as for `common.show.tables.speed_table`.
        about: the stage whose gain over its parent comes first. With None, the newest stage's gain over the run's first stage
            comes first.
    """
    on_gpu = machine["gpu"] is not None
    names = implementations(records)
    ours = [name for name in names if stages.position(name)]
    if not ours:
        return ""
    subject = about if about in ours else [name for name in ours if not stages.is_dead_end(name) or name == ours[0]][-1]
    over = stages.parent(subject) if about and stages.parent(subject) in names else ours[0]
    steps = _steps(records, names, on_gpu)
    notes = _failures(records) + ([] if on_gpu else [NO_GPU])
    lines = _headline(records, subject, over, on_gpu)
    groups = list(dict.fromkeys((record["pass"], record["head_dim"]) for record in records))[:MOST_GROUPS]
    groups.sort(key=lambda group: (list(PASS_NAMES).index(group[0]), group[1]))
    room = LINES - len(lines) - len(notes) - 4  # an empty line, two header lines, and the note on left-out names
    chosen = _chosen(names, [subject, over, ours[0]], steps, room)
    rows = []
    for name in chosen:
        row = [name]
        for pass_, head_dim in groups:
            values = {"pass": pass_, "head_dim": head_dim}
            times = _times(records, name, on_gpu, **values)
            amount = "-"
            if times and on_gpu:
                amount = f"{_total(records, name, 'flops', **values) / sum(times.values()) / 1e9:.0f}"
            elif times:
                amount = f"{total:.0f}" if (total := sum(times.values())) >= 100 else f"{total:.3g}"
            gain = _gain(records, name, stages.parent(name), on_gpu, **values)
            row.append(amount + (f" ×{gain:.2f}" if gain else ""))
        rows.append(row)
    unit = "TFLOP/s" if on_gpu else "µs at peak"
    headers = [f"{unit}, × parent", *(f"{pass_}, D={head_dim}" for pass_, head_dim in groups)]
    lines += ["", *markdown(rows, headers, (headers[0],)).splitlines()]
    if len(chosen) < len(names):
        notes.insert(0, f"The tables below have {len(names) - len(chosen)} more implementations.")
    return "\n".join(lines + notes)
