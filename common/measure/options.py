"""Define command-line options that several commands share, and functions that check and convert their values."""

import argparse
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import stages
from common.checks import HEAD_DIMS
from common.kernels.hopper import unavailable
from common.measure import files, machine, terminal
from common.measure.workloads import DTYPES, Workload
from common.runtime import DEVICE


def single(parse: Callable) -> Callable:
    """Return a function for argparse's `type` that converts the text of one value with `parse`.

    `parse` raises ValueError with a message for the user if the text is invalid.
    """

    def parse_text(text):
        try:
            return parse(text.strip())
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_text


def list_of(parse: Callable) -> Callable:
    """Return a function for argparse's `type` that converts a comma-separated list, each entry with `parse`."""
    return single(lambda text: [parse(entry.strip()) for entry in text.split(",")])


def one_of(choices: Iterable) -> Callable:
    """Return a function that looks up a text in `choices`: a dict from texts to values, or values, whose texts are their names.

    If `choices` lacks the text, the returned function raises ValueError with a list of the choices.
    """
    choices = choices if isinstance(choices, dict) else {str(choice): choice for choice in choices}

    def parse(text):
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return choices[text]

    return parse


def positive(text: str) -> int:
    """Parse a whole number of at least 1. Raise ValueError for other texts."""
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def sink(text: str) -> tuple[float, int, int | None]:
    """Parse an attention sink: NATS, NATS@KEY or NATS@KEY/HEAD. Raise ValueError for other texts.

    Returns:
        The score in nats, the number of the key, and the number of the K/V head; None means all heads.
    """
    found = re.fullmatch(r"([\d.]+)(?:@(\d+)(?:/(\d+))?)?", text)
    if not found:
        raise ValueError(f"{text!r} is not a sink such as 16, 16@100 or 16@100/0: a score of at least 0, a key and a K/V head")
    nats, key, head = found.groups()
    return float(nats), int(key or 0), int(head) if head else None


def unwritable(directory: Path) -> str | None:
    """Return why a directory is not writable, or None if it is writable."""
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        return error.strerror
    return None


def json_path(text: str) -> Path:
    """Return the absolute path of a file to write. The directory must be writable. The file must not be a device or pipe."""
    path = Path(text).absolute()
    if path.exists() and not path.is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a file")
    if reason := unwritable(path.parent):
        raise argparse.ArgumentTypeError(f"{text!r} cannot be written: {reason}")
    return path


HEAD_DIM = one_of(HEAD_DIMS)
YES_NO = one_of({"no": False, "yes": True})
PACKED, PAGES, EIGHT_BITS = "packed", "pages", "8-bit"

LISTS = {  # option that takes a list -> (function that converts an item, help text)
    "--stage": (stages.resolve, "such as v3"),
    "--seq-len": (positive, "any"),
    "--head-dim": (HEAD_DIM, ", ".join(map(str, HEAD_DIMS))),
    "--heads": (positive, "any"),
    "--kv-heads": (positive, "any divisor of the heads (default: as many as heads)"),
    "--value-dim": (HEAD_DIM, f"{', '.join(map(str, HEAD_DIMS))} (default: the head dimension)"),
    "--causal": (YES_NO, "no, yes"),
    "--lengths": (
        one_of({"no": False, "yes": True, PACKED: PACKED, PAGES: PAGES, EIGHT_BITS: EIGHT_BITS}),
        "no, yes: each sequence has its own length, packed: and all follow each other, pages: and lies in pages of 16 keys, "
        "8-bit: and k and v have 8 bits",
    ),
    "--dtype": (one_of(DTYPES.keys()), ", ".join(DTYPES)),
}


def add_list(parser: argparse.ArgumentParser, flag: str, default: str | None):
    """Add an option of `LISTS`, which takes a comma-separated list.

    `default` is the list as a user would type it. If `default` is None, the option's default value is [None].
    """
    parse, help_text = LISTS[flag]
    if default:
        help_text += f" (default: {'all' if default.split(',') == stages.names() else default})"
    parser.add_argument(flag, type=list_of(parse), default=default or [None], metavar="LIST", help=help_text)


def add_implementations(parser: argparse.ArgumentParser, baselines: Iterable[str]):
    """Add --impl, which takes a list of baselines and stages.

    The default is all baselines, the trunk from v3 on, and the last stage of each track.
    """
    usual = [*stages.line()[3:], *(name for key in stages.tracks() for name in stages.line(key)[-1:])]
    parser.add_argument(
        "--impl", type=list_of(lambda text: text if text in baselines else stages.resolve(text)), metavar="LIST",
        default=",".join([*baselines, *usual]), help="baselines and stages to measure (default: %(default)s)",
    )  # fmt: skip


def workloads_of(parser: argparse.ArgumentParser, **lists) -> list[Workload]:
    """Return a workload of batch size 1 in float16 for each combination of values.

    Each entry of `lists` has the values of one field of `Workload`. The last field changes fastest. If the number of heads is
    no multiple of the number of K/V heads, the program exits with status 2.
    """
    combinations = itertools.product(*lists.values())
    try:
        return [Workload(**dict(zip(lists, values, strict=True)), batch=1, dtype="float16") for values in combinations]
    except ValueError as error:
        parser.error(f"argument --kv-heads: {error}")


def command(module: str, description: str, file: str | None = None) -> argparse.ArgumentParser:
    """Prepare the output of `python -m module`, and return its parser. `file` describes the JSON file that it writes."""
    terminal.prepare()
    parser = terminal.Parser(prog=f"python -m {module}", description=description.partition("\n")[0])
    if file:
        parser.add_argument("file", type=json_path, help=file)
    return parser


def require_hopper(module: str):
    """Raise SystemExit unless a Hopper GPU is in use."""
    on_gpu = DEVICE == "cuda" and torch.cuda.is_available()
    if reason := unavailable() if on_gpu else "needs a Hopper GPU (sm_90)":
        raise SystemExit(f"{module} {reason}")


def read_json(path: Path, *keys: str) -> dict:
    """Return the content of a JSON file that a command has written. Raise SystemExit if the file has no such keys."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise SystemExit(f"{path} is no file that this command has written")
    return found


def write_json(path: Path, content):
    """Write a JSON file. Raise SystemExit with the reason if this fails."""
    try:
        files.replace(path, json.dumps(content, indent=1))
    except OSError as error:  # the directory may have changed since `json_path` checked it
        raise SystemExit(f"{path} cannot be written: {error.strerror}") from None


def write_cases(path: Path, cases: list[dict], **facts):
    """Write measured cases with the facts of this machine, and further facts."""
    write_json(path, {"machine_info": machine.facts() | facts, "cases": cases})
