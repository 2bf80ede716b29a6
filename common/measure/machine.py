"""Find the facts that every results file states about its run: GPU, versions, commit and date."""

import contextlib
import datetime
import importlib.metadata
import subprocess
from pathlib import Path

import torch

from common.runtime import DEVICE

OTHERS = ("flash-attn-3", "xformers", "flash-attn-4")  # the packages of optional baselines


def _versions(packages) -> dict[str, str]:
    """Return the versions of the installed packages."""
    found = {}
    for name in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _commit() -> str:
    """Return the commit of this repository, or "unknown" without git or outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--abbrev=40", "--exclude=*"]
    try:
        described = subprocess.run([*command, "--dirty=+dirty"], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return described.stdout.strip() or "unknown"


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
