"""The stages whose pages the tests of the site look at."""

import stages
from common.show.results import same_code

FIRST = stages.resolve("v3")
# The last stage of the trunk with a changed forward, an unchanged backward, and a kernel of its own in a model of an SM.
LAST = next(
    name for name in reversed(stages.line()) if hasattr(stages.load(name), "unavailable")
    and not same_code(name, stages.parent(name), "fwd") and same_code(name, stages.parent(name), "bwd")
)  # fmt: skip
VERSION = stages.version(LAST)
