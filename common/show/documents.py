"""Write the generated parts of the documents, from the committed results. `make readme` runs this module."""

import ast
import difflib
import functools
import itertools
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import stages
from common.measure import files, terminal, traffic
from common.measure.counter import Launch
from common.measure.footprint import MIB_IN_MB
from common.measure.workloads import Workload
from common.show import counts, front, packed, results, tracks, worked
from common.show.profiles import energy_table, traffic_table, units_table
from common.show.scaling import scaling_passage, scaling_tables
from common.show.story import without_notes
from common.show.tables import PASS_NAMES, legend, markdown, mask, speed_table

PREDICTION = "../../docs/measuring.md#predictions"  # from a stage's README
PREDICTED = f"predicted, {results.COUNTED_AT} tokens"  # a column


def _spans(name: str) -> list[tuple]:
    """Return the spans of a stage's tables: a pass that the stage changes, a head dimension and a mask."""
    return [*itertools.product(results.passes(name), results.HEAD_DIMS, (False, True))]


def _step_table(rows: dict[tuple, list[str]], headers: list[str]) -> str:
    """Format a table with a row for each span."""
    table = [[PASS_NAMES[pass_], head_dim, mask(causal), *row] for (pass_, head_dim, causal), row in rows.items()]
    return markdown(table, ["pass", "D", "mask", *headers], ("pass", "mask"))


def predicted_ms(count: dict | None, gpu: traffic.Gpu) -> float | None:
    """Return the time that `common.measure.traffic.predict` gives for the papers' batch; None without a count or rates."""
    rates = traffic.measured_rates(gpu, "float16")
    if not count or not rates:
        return None
    return 1e3 * traffic.predict([Launch(**launch) for launch in count["launches"]], rates, count["heads_at_once"])


def traffic_of_step(name: str) -> str:
    """Format the counted traffic and FLOPs of a stage and its parent. Rows in which nothing changes are left out."""
    parent = stages.parent(name)
    columns = {
        "MB read": lambda count: f"{count['bytes_read'] / 1e6:.2f}",
        "MB written": lambda count: f"{count['bytes_written'] / 1e6:.2f}",
        "total MB": lambda count: f"{results.moved(count) / 1e6:.2f}",
        "MFLOP": lambda count: f"{count['flops_executed'] / 1e6:.0f}",
        "FLOP / byte": lambda count: f"{count['flops_executed'] / results.moved(count):.1f}",
        "kernel launches": lambda count: str(count["kernel_launches"]),
        "peak extra MB": lambda count: f"{count['peak_extra_mib'] * MIB_IN_MB:.2f}",
    }
    for gpu in map(traffic.GPUS.get, results.GPUS):
        columns[f"predicted ms, 16k tokens, {gpu.name}"] = lambda count, gpu=gpu: f"{predicted_ms(count, gpu):.3f}"
    rows = {}
    for span in _spans(name):
        both = [results.counted(stage, *span) for stage in (parent, name) if stage]
        if None in both:
            return "Not counted yet."
        cells = [[show(count) for count in both] for show in columns.values()]
        if not parent or any(len(set(cell)) > 1 for cell in cells):
            rows[span] = [f"**{' → '.join(cell)}**" if len(set(cell)) > 1 else cell[0] for cell in cells]
    if not rows:
        return f"Same bytes and FLOPs as {results.spoken(parent)}."
    link = "[One head](../../docs/measuring.md#counted-traffic)"
    return f"{link}, {results.COUNTED_AT} tokens; [predictions]({PREDICTION}).\n\n{_step_table(rows, list(columns))}"


def predicted(name: str, gpu: traffic.Gpu, *span) -> str | None:
    """Format the predicted gain of a step over its parent on a GPU, such as "×1.50"; None without a prediction."""
    counted = (results.counted(stage, *span) for stage in (stages.parent(name), name))
    before, after = (predicted_ms(count, gpu) for count in counted)
    return f"×{before / after:.2f}" if before and after else None


def gain_table(name: str) -> str:
    """Format a step's measured gain: on its track's benchmark, or on the papers' workloads for a stage of the trunk."""
    if not results.passes(name):
        return f"{results.spoken(name)} has the same code as {results.spoken(stages.parent(name))}."
    return track_gains(name) if tracks.read(stages.track(name)) else trunk_gains(name)


def trunk_gains(name: str) -> str:
    """Format a step's predicted gain and its measured gain by sequence length. For the first stage, format its milliseconds."""
    parent, found = stages.parent(name), results.runs()
    used = {span: results.newest(found, *span[:2], name, *filter(None, [parent])) for span in _spans(name)}
    changed = []

    def cell(run, work):
        if not run or not (times := run.times(name, [work])):
            return "-"
        if not parent:
            return f"{times[work]:.2f}"
        gain = results.ratio([run], name, parent, [work])
        changed.append(gain and gain.changed)
        return gain.short if gain else "-"

    cells = {span: [cell(run, results.paper(*span, s)) for s in results.LENGTHS] for span, run in used.items()}
    kept = [column for column in range(len(results.LENGTHS)) if any(row[column] != "-" for row in cells.values())]
    headers = [f"{results.LENGTHS[column]} tokens" for column in kept]
    rows = {span: [row[column] for column in kept] for span, row in cells.items()}
    where = results.places(filter(None, used.values()))
    if not parent:
        return f"The table shows milliseconds ({where}).\n\n{_step_table(rows, headers)}"
    gpus = ((span, traffic.GPUS.get(results.gpu_of(run.machine).lower())) for span, run in used.items() if run)
    forecasts = {span: predicted(name, gpu, *span) for span, gpu in gpus if gpu}
    rows = {span: [forecasts.get(span) or "-", *row] for span, row in rows.items()}
    caption = [f"Speed over {results.spoken(parent)}" + (f" ({where}{results.CHANGED * any(changed)})." if where else ".")]
    table = _step_table(rows, [PREDICTED, *headers])
    return f"{' '.join([*caption, *legend(table)])}\n\n{table}"


def _words(work: Workload) -> tuple[str, ...]:
    """Return the properties of a workload in words: two workloads of a track may differ in each."""
    return (
        PASS_NAMES[work.pass_], f"D = {work.head_dim}", f"{work.seq_len} {'query' if work.seq_len == 1 else 'queries'}",
        f"{work.kv_len} keys", mask(work.causal),
        f"H / Hkv = {work.heads // work.kv_heads}", f"B = {work.batch}", work.dtype,
        work.label.partition(f" {work.dtype} ")[2] or "narrow scores",
    )  # fmt: skip


def groups(works: list[Workload]) -> dict[str, list[Workload]]:
    """Group workloads by each property that tells more than the properties before it. Return the groups by their names."""
    kept, found = [], {"all workloads": works}
    for words in zip(*map(_words, works), strict=True):
        if len(set(words)) > 1 and all(len({*zip(old, words, strict=True)}) > len(set(old)) for old in kept):
            kept.append(words)
            for work, word in zip(works, words, strict=True):
                found.setdefault(word, []).append(work)
    return found


def track_gains(name: str) -> str:
    """Format a step's measured gain on its track's benchmark: over all workloads, then over groups of workloads."""
    key = stages.track(name)
    found, parent, first = tracks.runs_of(key), stages.parent(name), stages.parent(stages.line(key)[0])
    works = list(dict.fromkeys(work for run in found for work in run.works if work.pass_ in results.passes(name)))
    columns = {f"× {results.spoken(old)}": old for old in dict.fromkeys((parent, first))}
    rows = {}
    for words, group in groups(works).items():
        gains = [results.ratio(found, name, old, group) for old in columns.values()]
        share = results.ratio(found, name, results.FASTEST, group)
        rows[words] = [str(gain or "-") for gain in gains] + [share.percent if share else "-"]
    is_first = name == stages.line(key)[0]
    what = f"The track's benchmark: {tracks.read(key).words}." * is_first
    if all(row[0] == "-" for row in rows.values()):
        return f"{what} Not measured yet.".strip()
    where = results.places(found)
    table = markdown([[words, *row] for words, row in rows.items()], [where, *columns, "% of fastest"], (where,))
    # docs/reading.md explains †
    caption = [what + tracks.unmeasured(key) * is_first, *legend(table.replace(results.CHANGED, ""))]
    return f"{' '.join(caption)}\n\n{table}".strip()


# generated passages that a stage's README may have
PASSAGES = {
    "traffic": traffic_of_step, "gain": gain_table, "steps": worked.steps, "row": worked.softmax_by_hand,
    "order": worked.order_by_keys, "programs": worked.order_by_queries, "packed": packed.table,
}  # fmt: skip
KEPT = (  # the files of results/ whose tables are committed; `make table` prints the tables of any file
    "wide-h200", "energy-d128-h200", "ring-h200-x2", "ring-million-h200-x2"
)  # fmt: skip


def _run_tables(saved: dict) -> str:
    """Format the tables of a run of the benchmark, or of `make traffic`."""
    records = saved.get("records") or [each["extra_info"] for each in saved["benchmarks"]] + saved["failures"]
    if saved["machine_info"]["gpu"]:
        return speed_table(records, saved["machine_info"])
    return counts.tables(results.present(records), saved["machine_info"], wide=True)


KINDS = {  # a field of a file, or of its first record or case -> the heading, and the function that formats the file
    "benchmarks": ("Benchmark", _run_tables),
    "links": ("One sequence shared by several GPUs", scaling_tables),
    "flops_executed": ("Counted traffic", _run_tables),
    "joules": ("Energy and the power limit", energy_table),
    "counted": ("Counted and measured traffic", traffic_table),
    "kernels": ("How busy each unit is, and why warps wait", units_table),
}


def tables_of(path: Path) -> str:
    """Return a document for a JSON file of a measurement: a heading and the file's tables. The file's contents decide which.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no JSON file with tables. The message says which files have tables.
    """
    try:
        result = json.loads(path.read_text())
        fields = {*result, *(result.get("records") or result.get("cases") or [()])[0]}
        if "cases" in result and "impl" in fields:
            result["cases"] = results.present(result["cases"])
        heading, table = next(kind for field, kind in KINDS.items() if field in fields and "machine_info" in fields)
        return f"# {heading}: {path.stem}\n\n{table(result)}\n"
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration):
        known = "runs that `make bench` saved have some, and so have most files of results/ whose stages still exist"
        raise ValueError(f"{path} has no tables; {known}") from None


def step_hunk() -> str:
    """Return v5's change to `_accumulate_dkv`, as a diff without NOTEs."""
    versions = []
    for name in map(stages.resolve, ("v4", "v5")):
        text = without_notes(stages.source(name, "backward.py"))
        kernel = next(node for node in ast.parse(text).body if getattr(node, "name", "") == "_accumulate_dkv")
        versions.append(text.splitlines()[kernel.body[0].lineno : kernel.end_lineno])  # without the parameters
    lines = list(difflib.unified_diff(*versions, n=0, lineterm=""))[2:]
    return "```diff\n{}\n```".format("\n".join(line for line in lines if not line.startswith("@@")))


def first_kernel() -> str:
    """Return a table of the lines of examples/first_kernel.py from the kernel on. A line's comment says what it does."""
    _, mark, code = (results.ROOT / "examples" / "first_kernel.py").read_text().partition("@triton.jit")
    lines = f"{mark}{code}".partition("\n\n\nif __name__")[0].splitlines()
    rows = [[f"`{line}`", words] for line, _, words in (line.partition("  # ") for line in lines if line)]
    return markdown(rows, ["line", "what it does"], ("line", "what it does"))


def old_names() -> str:
    """Return a table of the names that stages had before they were a tree."""
    found = {}
    for old, new in stages.moved().items():
        found.setdefault(new, []).append(f"`{old}`")
    rows = [[", ".join(old), f"[{new}](../stages/{new})"] for new, old in found.items()]
    return markdown(rows, ["old name", "now"], ("old name", "now")) if rows else "No stage has moved."


# The passages that README.md, CONTRIBUTING.md and docs/ may have between markers.
FRONT = {
    "headline": lambda: front.headline(results.runs()), "ladder": lambda: front.ladder(results.runs()), "hunk": step_hunk,
    "scaling": scaling_passage, "names": old_names, "kernel": first_kernel,
}  # fmt: skip


def with_passages(text: str, passages: dict[str, Callable[[], str]]) -> str:
    """Return a document's text with new passages between its markers."""
    marked = re.compile(r"(<!-- (\w+): make readme -->\n).*?(<!-- /\2 -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}\n{passages[found[2]]()}\n\n{found[3]}", text)


def documents() -> dict[Path, str]:
    """Return the new text of each document that has generated parts."""
    pages = [*results.ROOT.glob("*.md"), *results.ROOT.glob("docs/*.md"), results.ROOT / "results" / "README.md"]
    found = {path: with_passages(path.read_text(), FRONT) for path in pages}
    for name in itertools.filterfalse(stages.is_experiment, stages.names()):
        passages = {passage: functools.partial(write, name) for passage, write in PASSAGES.items()}
        path = results.ROOT / "stages" / name / "README.md"
        found[path] = with_passages(path.read_text(), passages)
    for path in (results.ROOT / "results" / f"{name}.json" for name in KEPT):
        if path.exists():
            found[path.with_suffix(".md")] = tables_of(path)
    return found


def main(argv: list[str]):
    """Run the command line."""
    terminal.prepare()
    description = "Rewrite the generated parts of the documents from results/, or print the tables of one file."
    parser = terminal.Parser(prog="python -m common.show.documents", description=description)
    parser.add_argument("file", type=Path, nargs="?", help="a saved run or another file of results/, whose tables are printed")
    options = parser.parse_args(argv)
    if options.file:
        try:
            print(tables_of(options.file), end="")
        except (OSError, ValueError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
    else:
        for path, text in documents().items():
            files.replace(path, text)


if __name__ == "__main__":
    main(sys.argv[1:])
