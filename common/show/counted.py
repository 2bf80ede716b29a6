"""Show counted bytes and FLOPs, and beside them the gains that earlier runs measured on a GPU."""

import stages
from common.measure.footprint import MIB_IN_MB
from common.measure.progress import COLUMNS
from common.show import results
from common.show.results import stage_order
from common.show.tables import PASS_NAMES, grouped, legend

HEADERS = ["MB read", "MB written", "MFLOP", "measured", "launches", "peak extra MB", "tiles"]


def measured(impl: str, pass_: str, head_dim: int) -> tuple[str, str] | None:
    """Return a stage's measured speed over its parent's, such as "×1.51 (1.30–1.70)", and the run: the GPU and the commit.

    Return None if no run has both stages.
    """
    parent = stages.parent(impl) if stages.position(impl) else None
    found = parent and results.gain(results.runs(), impl, parent, pass_, head_dim)
    return found and (str(found[0]), results.place(found[1].machine))


def _total(records, impl, pass_, *fields) -> int:
    return sum(r[name] for r in records for name in fields if (r["impl"], r["pass"]) == (impl, pass_) and "failure" not in r)


def summary(records: list[dict], about: str | None = None) -> str:
    """Compare a stage with its parent, one line for each pass. Return "" if the run does not have both.

    Args:
        records: all records of a run without a GPU, including failures.
        about: the stage; None means the run's newest stage.
    """
    impls = sorted({record["impl"] for record in records}, key=stage_order)
    about = about or impls[-1]
    parent = stages.parent(about) if stages.position(about) else None
    if not {about, parent} <= {*impls}:
        return ""
    lines = [f"{about} compared with its parent, {parent}:"]
    head_dims = sorted({record["head_dim"] for record in records})
    for pass_, name in PASS_NAMES.items():
        moved, flops = (
            [_total(records, impl, pass_, *fields) for impl in (parent, about)]
            for fields in (("bytes_read", "bytes_written"), ("flops_executed",))
        )
        if all(moved):
            lines.append(f"  {name}: {results.bytes_in_words(*moved)}, {results.bytes_in_words(*flops, 'FLOPs')}")
            gains = [(head_dim, measured(about, pass_, head_dim)) for head_dim in head_dims]
            lines += [f"    measured at D={head_dim}: {found[0]} as fast ({found[1]})" for head_dim, found in gains if found]
    return "\n".join(lines)


def _cells(record, found: tuple[str, str] | None) -> dict:
    """Return a record's cells by header. `found` is what `measured` returns."""
    return {
        "MB read": f"{record['bytes_read'] / 1e6:,.3f}",
        "MB written": f"{record['bytes_written'] / 1e6:,.3f}",
        "MFLOP": f"{record['flops_executed'] / 1e6:,.1f}",
        "measured": found[0] if found else "-",
        "launches": record["kernel_launches"],
        "peak extra MB": f"{record['peak_extra_mib'] * MIB_IN_MB:,.3f}",
        "tiles": record["tiles"] or "-",
    }


def tables(records: list[dict], machine: dict, wide: bool) -> str:
    """Format the tables of `common.show.tables.grouped`.

    Args:
        records: all records of a run without a GPU, including failures; or those of `common.show.counts`.
        machine: the versions, the commit, the date, and `tiles`, the GPU whose tiles the kernels had.
        wide: whether to show all columns and the full names of stages.
    """
    parts = [
        f"CPU, interpreted, tiles of the {machine['tiles']}, torch {machine['torch']}, triton {machine['triton']}, "
        f"commit {results.short_commit(machine['commit'])}, {machine['date']}",
        "MB are the bytes that the kernels request. PyTorch's operators count arguments and results once.\n"
        "MFLOP are the FLOPs that run, those of masked scores included where a kernel computes them.\n"
        "measured: the speed over the parent's on a GPU, a mean over both masks and long and short S.",
    ]

    def case(record):
        return record["impl"], record["pass"], record["head_dim"]

    found = {each: measured(*each) for each in dict.fromkeys(map(case, records))}
    parts += grouped(records, HEADERS, lambda record, _: _cells(record, found[case(record)]), None if wide else COLUMNS)
    places = dict.fromkeys(place for _, place in filter(None, found.values()))
    parts += [f"measured on: {'; '.join(places)}"] if places else []
    return "\n\n".join([*parts, *legend("\n".join(parts))])
