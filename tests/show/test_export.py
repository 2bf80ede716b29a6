"""An exported stage runs without this repository."""

import programs
import pytest

import stages
from common.runtime import INTERPRETED
from common.show.export import export

CALL = """
import sys, torch
sys.path.remove(sys.argv[2])  # this repository
from mine import attention
dtype, device = torch.float16, sys.argv[1]
q, k, v = (torch.randn(1, heads, 40, 16, dtype=dtype, device=device, requires_grad=True) for heads in (2, 1, 1))
expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True)
out = attention(q, k, v, causal=True)
torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=0)
grads = (torch.autograd.grad(each, (q, k, v), torch.ones_like(each)) for each in (out, expected))
for got, right in zip(*grads):
    torch.testing.assert_close(got.float(), right.float(), atol=2e-2, rtol=0)
assert not {name.split(".")[0] for name in sys.modules} & {"common", "stages"}
sys.path.append(sys.argv[2])  # it works in the same process
import stages
stages.load(sys.argv[3])
"""


@pytest.mark.parametrize("name", [pytest.param("v3", marks=pytest.mark.long), stages.newest()])
def test_an_exported_stage_runs_alone(name, tmp_path):
    export(name, tmp_path / "mine")
    if reason := stages.unavailable(stages.resolve(name)):
        pytest.skip(reason)
    done = programs.python("-c", CALL, "cpu" if INTERPRETED else "cuda", programs.ROOT, name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    readme = (tmp_path / "mine" / "README.md").read_text()
    assert stages.resolve(name) in readme and "TRITON_INTERPRET=1" in readme and "torch 2" in readme


@pytest.mark.parametrize(("asked", "folder", "said"), [
    ("v99", "mine", "no stage is called"), ("v3", "my-stage", "not a name"), ("v3", ".", "is there already"),
    ("v3", "class", "not a name"), ("v3", "torch", "another package"), ("v3", "other/mine", "Not a directory"),
])  # fmt: skip
def test_what_cannot_be_exported_is_refused(asked, folder, said, tmp_path):
    (tmp_path / "other").touch()
    with pytest.raises(SystemExit, match=said):
        export(asked, tmp_path / folder)
