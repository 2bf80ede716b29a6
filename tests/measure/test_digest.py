"""The digest of a pass changes with its code, and with nothing else."""

import pytest

from common.measure.digest import digest, files_of

FILES = {
    "stages/v1_a/forward.py": '"""A forward."""\nfrom common.kernels.tiles import tile\nfrom common.runtime import DEVICE\n'
    "from . import forward_plan\n\n\ndef forward(q):\n    \"\"\"Return q.\"\"\"\n    return q + 1  # one\n",
    "stages/v1_a/forward_plan.py": "X = 1\n",
    "common/kernels/tiles.py": "from stages.v0_b.backward import other\nTILE = 16\n",
    "stages/v0_b/backward.py": "Y = 2\n",
    "common/runtime.py": "DEVICE = 'cpu'\n",
}  # fmt: skip


def digest_with(path="", old="", new=""):
    assert old in FILES.get(path, "")
    return digest("v1_a", "forward", (FILES | {path: FILES.get(path, "").replace(old, new)}).get)


def test_a_pass_has_the_files_that_it_imports():
    assert files_of("v1_a", "forward", FILES.get).keys() == FILES.keys() - {"common/runtime.py"}


@pytest.mark.parametrize(("path", "old", "new", "same"), [
    ("stages/v1_a/forward.py", "# one", "# another", True),
    ("stages/v1_a/forward.py", "Return q.", "Return q plus one.", True),
    ("stages/v1_a/forward.py", "q + 1", "(q + 1)", True),
    ("stages/v1_a/forward.py", "q + 1", "q + 2", False),
    ("stages/v1_a/forward_plan.py", "X = 1", "X = 2", False),
    ("common/kernels/tiles.py", "16", "32", False),
    ("stages/v0_b/backward.py", "Y = 2", "Z = 2", False),
    ("common/runtime.py", "cpu", "cuda", True),
])  # fmt: skip
def test_only_code_changes_the_digest(path, old, new, same):
    assert (digest_with(path, old, new) == digest_with()) == same


def test_the_names_of_stages_do_not_count():
    renamed = {path.replace("v1_a", "v2_c"): text for path, text in FILES.items()}
    assert digest("v2_c", "forward", renamed.get) == digest_with()
