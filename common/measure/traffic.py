"""Count the traffic and FLOPs of each stage on the CPU, and predict its time from the rates of a GPU.

`common.measure.counter` explains what counts. Every kernel has the tiles and the number of programs that it would have on the
chosen GPU. The stages before v4 use the fixed tiles of `common.kernels.tiles`. An autotuned kernel takes the fixed tile too, if
one of its configurations has this tile. So stages differ in their ideas and not in tuning.

The command `python -m common.show.counts` prints the counts.
"""

import contextlib
import json
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from common.kernels.tiles import key_tile, query_tile
from common.kernels.tuning import WITH_TMA, sensible, tuners
from common.measure.aot import SHARED_LIMIT
from common.measure.counter import Count, Launch, count
from common.measure.workloads import DTYPES, Workload
from common.runtime import Device, interpreted_as

RESULTS = Path(__file__).parents[2] / "results"


class Rates(NamedTuple):
    """What a GPU does in a second, and what a launch costs."""

    tflops: float  # of matmuls that accumulate in float32
    hbm_gbps: float
    l2_gbps: float  # the rate at which all SMs together read from the L2 cache
    launch_us: float  # the time that one more empty kernel adds to a queue of kernels


@dataclass(frozen=True)
class Gpu:
    """The properties of a GPU on which counts and predictions depend."""

    name: str
    arch: int  # the architecture, such as 80 for sm_80
    num_sms: int
    l2_mb: float

    def share(self, heads: int) -> "Gpu":
        """Return the part of this GPU that one head has if the GPU computes `heads` heads at once."""
        return replace(self, num_sms=max(1, self.num_sms // heads), l2_mb=self.l2_mb / heads)

    def interpreted(self):
        """Return a context in which the interpreter acts as this GPU."""
        return interpreted_as(Device(self.arch, SHARED_LIMIT[self.arch], self.num_sms))


GPUS = {
    # https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/, the SXM module. The H200 has the same chip.
    "h100": Gpu("H100", 90, 132, 50),
    "h200": Gpu("H200", 90, 132, 50),
    # https://developer.nvidia.com/blog/nvidia-ampere-architecture-in-depth/
    "a100": Gpu("A100", 80, 108, 40),
}


def measured_rates(gpu: Gpu, dtype: str) -> Rates | None:
    """Return the rates that `common.measure.ceilings` measured on a GPU, or None if there is no such measurement."""
    path = RESULTS / f"ceilings-{gpu.name.lower()}.json"
    found = json.loads(path.read_text()) if path.exists() else {"matmul_tflops": {}}
    if dtype not in found["matmul_tflops"]:
        return None
    return Rates(found["matmul_tflops"][dtype], found["hbm_gbps"], found["l2_gbps"], found["launch_us"])


@contextlib.contextmanager
def tiles_of(gpu: Gpu, stage, head_dim: int, dtype: torch.dtype, tuned: dict[str, tuple[int, int]] | None = None):
    """Enter a context in which a stage's kernels have the tiles and the number of programs that they have on a GPU.

    Args:
        stage: a module, or any object with `forward` and `backward`.
        head_dim: the larger of q's and v's head dimensions.
        tuned: the (BLOCK_M, BLOCK_N) of autotuned kernels by name, if known.
    """
    with gpu.interpreted(), contextlib.ExitStack() as restored:
        for name, tuner in tuners(stage).items():
            tile = (tuned or {}).get(name) or _likely_tile(gpu, tuner, head_dim, dtype)
            config = triton.Config(dict(zip(("BLOCK_M", "BLOCK_N"), tile, strict=True)), pre_hook=tuner.configs[0].pre_hook)
            restored.callback(setattr, tuner, "configs", tuner.configs)
            tuner.configs = [config]  # the autotuner takes the only configuration without timing
        yield


def _likely_tile(gpu, tuner, head_dim, dtype):
    """Return the fixed tile (`key_tile` or `query_tile`) if one of the kernel's configurations for this GPU has it.

    Otherwise return the first configuration's tile.
    """
    precision = "ieee" if dtype == torch.float32 else "tf32"
    options = [head_dim * dtype.itemsize, precision, gpu.arch in WITH_TMA]
    tiles = [(c.kwargs["BLOCK_M"], c.kwargs["BLOCK_N"]) for c in tuner.configs if sensible(c, *options)]
    keeps_keys = any(name.startswith("dk_") for name in tuner.arg_names)
    fixed = (key_tile if keeps_keys else query_tile)(head_dim, dtype)
    fixed = fixed["BLOCK_M"], fixed["BLOCK_N"]
    return fixed if fixed in tiles else tiles[0]


def stage_call(stage, workload: Workload, inputs, **lengths):
    """Return a function that runs a forward or a backward. Before a backward, `stage_call` itself runs the forward once.

    `lengths` is empty, or has the argument with which both passes take sequences of different lengths.
    """
    options = {"causal": workload.causal, "scale": workload.head_dim**-0.5, **lengths}
    *qkv, grad_out = inputs
    if workload.pass_ == "fwd":
        return lambda: stage.forward(*qkv, **options)
    results = stage.forward(*qkv, **options)
    return lambda: stage.backward(grad_out, *qkv, *results, **options)


def count_stage(stage, workload: Workload, gpu: Gpu, tuned: dict[str, tuple[int, int]] | None = None) -> Count:
    """Count one pass of a stage with the tiles of a GPU. `tiles_of` explains the arguments `stage` and `tuned`."""
    with tiles_of(gpu, stage, max(workload.head_dim, workload.value_dim), DTYPES[workload.dtype], tuned):
        counted = count(stage_call(stage, workload, workload.inputs()))
    for launch, crossing in zip(counted.launches, compulsory(counted.launches, gpu.l2_mb * 1e6), strict=True):
        launch.crossing = crossing
    return counted


def compulsory(launches: list[Launch], l2_bytes: float) -> list[int]:
    """Return for each launch the bytes that must cross between HBM and the L2 cache, however often CTAs request them.

    The L2 cache is empty first. It keeps whole allocations, the last used ones that fit. So a launch reads an allocation from
    HBM at most once, and only if the cache does not hold it. Written bytes cross when the cache needs their room.
    """
    held = OrderedDict()  # allocation -> (its bytes, its bytes that HBM lacks), the last used at the end
    crossing = []
    for launch in launches:
        crossing.append(0)
        for operand in (each for each in launch.operands if each.read or each.written):
            nbytes, lacking = held.pop(operand.allocation, (None, 0))
            if nbytes is None:
                crossing[-1] += min(operand.read, operand.nbytes)
            held[operand.allocation] = operand.nbytes, max(lacking, min(operand.written, operand.nbytes))
        while sum(nbytes for nbytes, _ in held.values()) > l2_bytes:
            _, (_, lacking) = held.popitem(last=False)
            crossing[-1] += lacking
    return crossing


def predict(launches: list[Launch], rates: Rates, heads: int = 1) -> float:
    """Predict the seconds that launches take one after the other.

    Each launch costs `launch_us`, and the longest of three times: its compulsory bytes (`crossing`) at HBM's rate, its
    requested bytes at the L2 cache's rate, and its FLOPs at the matmul rate, which is twice as high in 8 bits. The prediction
    assumes work for all SMs, and that the L2 cache holds what a launch rereads. It knows no other unit, such as that of the
    exponentials. Kernels that draw less power than a matmul can be up to a tenth faster than the measured matmul rate.

    Args:
        heads: the launches are those of one head, counted on a GPU's `share`. The prediction is for this number of heads.
    """
    seconds = len(launches) * rates.launch_us / 1e6
    for launch in launches:
        hbm, l2 = launch.crossing / (rates.hbm_gbps * 1e9), (launch.read + launch.written) / (rates.l2_gbps * 1e9)
        seconds += heads * max(hbm, l2, (launch.flops - launch.eight_bit_flops / 2) / (rates.tflops * 1e12))
    return seconds


def costs(counted: Count) -> dict:
    """Return a count as fields of a results file's record."""
    tiles = ("×".join(map(str, launch.tile.values())) for launch in counted.launches if launch.tile)
    return {
        "bytes_read": counted.read,
        "bytes_written": counted.written,
        "flops_executed": counted.flops,
        "kernel_launches": len(counted.launches),
        "peak_extra_mib": counted.peak / 2**20,
        "tiles": ", ".join(dict.fromkeys(tiles)),
    }
