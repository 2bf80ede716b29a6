"""Progress on stderr is a live bar on a terminal, and a line every ten seconds elsewhere."""

import io

import pytest

from common.measure import progress
from common.measure.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    """A list with one number, which tqdm reads as the time. Tests change the number."""
    now = [0.0]
    monkeypatch.setattr(Progress, "_time", staticmethod(lambda: now[0]), raising=False)
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def run(clock, seconds, pieces):
    with Progress(float(seconds * pieces)) as bar:
        for piece in range(pieces):
            bar.begin(f"{piece + 1} of {pieces}, v3")
            clock[0] += seconds
            bar.update(seconds)


def test_a_file_gets_a_line_every_ten_seconds(clock, monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    run(clock, 3, 10)
    said = progress.sys.stderr.getvalue()
    assert "\r" not in said
    assert said.splitlines() == [
        "40 %, about 00:18 left: 4 of 10, v3",
        "80 %, about 00:06 left: 8 of 10, v3",
    ]
