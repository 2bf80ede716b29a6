"""Find the facts that every results file states about its run: GPU, versions, commit and date."""

import contextlib
import datetime
import importlib.metadata
import subprocess
from pathlib import Path

import torch

from common.runtime import DEVICE

OTHERS = ("flash-attn-3", "xformers", "flash-attn-4", "nvidia-cudnn-frontend")  # the packages of optional baselines


def _versions(packages) -> dict[str, str]:
    """Return the versions of the installed packages."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _git(*arguments) -> str:
    here = Path(__file__).resolve().parent
    return subprocess.run(["git", "-C", here, *arguments], capture_output=True, text=True, check=False).stdout.strip()


def _commit() -> str:
    """Return the commit of this repository, or "unknown" without git or outside of a checkout.

    "+dirty" follows if files differ from the commit. Files in results/ do not count, because a run may have written them.
    """
    try:
        commit = _git("rev-parse", "--verify", "HEAD")
        changed = _git("diff", "--name-only", "HEAD", "--", ":/", ":(top,exclude)results")
    except OSError:
        return "unknown"
    return commit + "+dirty" * bool(changed) if commit else "unknown"


def facts() -> dict:
    """Return the GPU (None on the interpreter), versions of torch, cuDNN, Triton and `OTHERS`, the commit, and the date."""
    return {
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "triton": importlib.metadata.version("triton"),
        "others": _versions(OTHERS),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
