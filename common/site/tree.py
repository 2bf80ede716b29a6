"""Place the stages for the drawing on the start page: the trunk as a line, each track where it branches off."""

from typing import NamedTuple

import stages
from common.show import tracks
from common.show.story import idea

STEP, ROW = 36, 58  # distances of two stages in a line, and of two lines
LABEL = 22  # the label of a stage ends this far below it
SIDE, ABOVE = 14, 15  # a dead end stands behind its parent and above, the second one above the first


class Node(NamedTuple):
    """A stage in the drawing."""

    version: str
    label: str  # the version, in a track without the track's name
    idea: str
    kind: str  # "trunk", "track" or "dead"
    title: str  # the track's name and title, in the track's first stage
    x: int
    y: int
    parent: tuple[int, int] | None  # the parent's x and y

    @property
    def edge(self) -> str:
        """The line from the parent as an SVG path. A line down begins below the parent's label."""
        x, y = self.parent
        return f"M{x} {y + LABEL if self.y > y else y}V{self.y}H{self.x}"


def lines(track: str = stages.TRUNK) -> list[list[str]]:
    """Return the stages of the trunk, then those of each track that starts from one of them, and so on."""
    line = stages.line(track)
    starts = [other for other in stages.tracks() if stages.parent(stages.line(other)[0]) in line]
    return [line, *(below for other in starts for below in lines(other))]


def nodes() -> list[Node]:
    """Return all stages with their places. Each line has a row of its own, and begins behind the stage that it starts from."""
    at, found = {}, []
    for row, line in enumerate(lines()):
        first = at[stages.parent(line[0])][0] + STEP if row else 0
        at |= {name: (first + place * STEP, row * ROW) for place, name in enumerate(line)}
    for name in filter(stages.is_dead_end, stages.names()):
        x, y = at[stages.parent(name)]
        beside = [other for other in at if stages.is_dead_end(other) and stages.parent(other) == stages.parent(name)]
        at[name] = x + SIDE, y - ABOVE * (1 + len(beside))
    for name, place in at.items():
        track, parent = stages.track(name), stages.parent(name)
        kind = "dead" if stages.is_dead_end(name) else "track" if track else "trunk"
        begins, about = track and name == stages.line(track)[0], tracks.read(track)
        title = f"{track}: {about.title}" if begins and about else track if begins else ""
        version = stages.version(name)
        found.append(Node(version, version.removeprefix(track or ""), idea(name), kind, title, *place, at.get(parent)))
    return found
