"""Count the traffic and FLOPs of each stage on the CPU, and compute its time at a GPU's published peaks.

`common.measure.counter` explains what counts. Every kernel has the tiles and the number of programs that it would have on the
chosen GPU. The stages before v4 use the fixed tiles of `common.kernels.tiles`. An autotuned kernel takes the fixed tile too, if
one of its configurations has this tile. So stages differ in their ideas and not in tuning.

The command `python -m common.show.counts` prints the counts.
"""

import contextlib
from dataclasses import dataclass

import torch
import triton

import stages
from common.kernels.tiles import key_tile, query_tile
from common.kernels.tuning import WITH_TMA, sensible, tuners
from common.measure.aot import SHARED_LIMIT
from common.measure.counter import Count, Launch, count
from common.measure.workloads import DTYPES, Workload
from common.runtime import Device, interpreted_as


@dataclass(frozen=True)
class Gpu:
    """The published peaks of a GPU: dense float16 matmuls accumulated in float32, and memory bandwidth."""

    name: str
    arch: int  # the architecture, such as 80 for sm_80
    num_sms: int
    tflops: float
    tb_per_s: float
    source: str  # addresses of the pages with these numbers

    @property
    def peaks(self) -> str:
        return f"{self.name}, {self.tflops:g} TFLOP/s and {self.tb_per_s:g} TB/s"

    def unavailable(self, stage_name: str) -> str | None:
        """Return why a stage cannot run on this GPU, or None if it can."""
        with self.interpreted():
            return stages.unavailable(stage_name)

    def interpreted(self):
        """Return a context in which the interpreter acts as this GPU."""
        return interpreted_as(Device(self.arch, SHARED_LIMIT[self.arch], self.num_sms))


GPUS = {
    # The page gives 1,979 TFLOP/s with sparsity. Without sparsity, the rate is half of this. The number of SMs is that of the
    # H100 SXM, which has the same chip: https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/.
    "h200": Gpu("NVIDIA H200 SXM", 90, 132, 989, 4.8, "https://www.nvidia.com/en-us/data-center/h200/"),
    # The number of SMs is from https://developer.nvidia.com/blog/nvidia-ampere-architecture-in-depth/.
    "a100": Gpu(
        "NVIDIA A100 80GB SXM", 80, 108, 312, 2.039,
        "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    ),
    # The page gives 759 TOPS in FP4 with sparsity. Dense float16 with float32 accumulation has a sixteenth of this rate. In the
    # architecture's whitepaper, the RTX 5090 has the rates 3,352 and 209.5. The bandwidth is 128 data lines times 28 Gbit/s
    # each. The number of SMs is 4,608 cores (from the page) divided by 128 cores per SM (from the whitepaper).
    "rtx5060ti": Gpu(
        "NVIDIA GeForce RTX 5060 Ti", 120, 36, 47.4, 0.448,
        "https://www.nvidia.com/en-us/geforce/graphics-cards/50-series/rtx-5060-family/ and "
        "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf",
    ),
}  # fmt: skip


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


def stage_call(stage, workload: Workload, inputs):
    """Return a function that runs a pass of a stage.

    If the pass is only a backward, `stage_call` itself runs the forward once.
    """
    options = {"causal": workload.causal, "scale": workload.head_dim**-0.5}
    *qkv, grad_out = inputs
    if workload.pass_ == "fwd":
        return lambda: stage.forward(*qkv, **options)
    if workload.pass_ == "fwd+bwd":
        return lambda: stage.backward(grad_out, *qkv, *stage.forward(*qkv, **options), **options)
    results = stage.forward(*qkv, **options)
    return lambda: stage.backward(grad_out, *qkv, *results, **options)


def count_stage(stage, workload: Workload, gpu: Gpu, tuned: dict[str, tuple[int, int]] | None = None) -> Count:
    """Count one pass of a stage with the tiles of a GPU. `tiles_of` explains the arguments `stage` and `tuned`."""
    with tiles_of(gpu, stage, max(workload.head_dim, workload.value_dim), DTYPES[workload.dtype], tuned):
        return count(stage_call(stage, workload, workload.inputs()))


def roofline(launches: list[Launch], gpu: Gpu) -> tuple[float, str]:
    """Return the seconds that the launches take at a GPU's peaks, and whether "bytes" or "FLOPs" limit most of this time.

    The launches run one after the other. Each takes the time for its bytes or the time for its FLOPs, whichever is longer. All
    bytes move at memory bandwidth, although caches are faster.
    """
    seconds = {"bytes": 0.0, "FLOPs": 0.0}
    for launch in launches:
        moving, computing = (launch.read + launch.written) / (gpu.tb_per_s * 1e12), launch.flops / (gpu.tflops * 1e12)
        seconds["bytes" if moving > computing else "FLOPs"] += max(moving, computing)
    return sum(seconds.values()), max(seconds, key=seconds.get)


def costs(counted: Count, gpu: Gpu, dtype: str) -> dict:
    """Return a count as fields of a results file's record.

    float32 gets no roofline, because `Gpu` has the peak of float16 only.
    """
    tiles = ("×".join(map(str, launch.tile.values())) for launch in counted.launches if launch.tile)
    seconds, bound = (None, None) if dtype == "float32" else roofline(counted.launches, gpu)
    return {
        "bytes_read": counted.read,
        "bytes_written": counted.written,
        "flops_executed": counted.flops,
        "kernel_launches": len(counted.launches),
        "peak_extra_mib": counted.peak / 2**20,
        "tiles": ", ".join(dict.fromkeys(tiles)),
        "roofline_us": seconds and seconds * 1e6,
        "bound": bound,
    }
