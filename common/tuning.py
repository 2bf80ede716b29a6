"""`triton.autotune` that one can wait for: announced, pruned to the device, compiled in parallel, shared by nearby lengths."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import triton

from common.runtime import INTERPRETED

KEY = ("bucket", "HEAD_DIM", "CAUSAL", "PRECISION")  # kernel arguments; a new combination is tuned anew


def bucket(seq_q: int, seq_k: int) -> int:
    """The power of two, at least 128, that stands for nearby sequence lengths in the tuning key."""
    return max(128, triton.next_power_of_2(max(seq_q, seq_k)))


def configs(tiles: Sequence[tuple[int, int, int, int]], pre_hook: Callable) -> list[triton.Config]:
    """A configuration for each (BLOCK_M, BLOCK_N, num_warps, num_stages)."""
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages, pre_hook=pre_hook)
        for m, n, warps, stages in tiles
    ]


def _sensible(config: triton.Config, row_bytes: int, precision: str) -> bool:
    """Whether a tile is worth compiling: small where exact float32 products keep every operand in registers."""
    rows = max(config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"])
    return rows <= 32 if precision == "ieee" else rows * row_bytes <= 32 * 1024


def autotune(configs: list[triton.Config]) -> Callable:
    """Decorate a kernel whose tiles go through descriptors; the fastest of `configs` that fits runs.

    The first call of a new `KEY` says on stderr that it is tuning, compiles what may fit in parallel and times it, a matter of
    seconds; without a GPU the first sensible configuration is taken unmeasured.
    """

    def decorate(kernel):
        def prune(configs, named_args, **kwargs):
            args = {**named_args, **kwargs}
            row_bytes = args["HEAD_DIM"] * args["k_desc"].base.element_size()
            kept = [config for config in configs if _sensible(config, row_bytes, args["PRECISION"])]
            if INTERPRETED:
                return kept[:1]
            problem = ", ".join(f"{name}={args[name]}" for name in KEY)
            print(f"tuning {kernel.__module__}.{kernel.__name__} for {problem}: {len(kept)} configurations", file=sys.stderr)
            return [config for config, compiled in zip(kept, compile_all(kernel, kept, args)) if fits(compiled)]

        # The interpreter has nothing to time; without this the autotuner would ask for a GPU driver.
        do_bench = (lambda call, quantiles: (0.0, 0.0, 0.0)) if INTERPRETED else None
        return triton.autotune(configs, KEY, prune_configs_by={"early_config_prune": prune}, do_bench=do_bench)(kernel)

    return decorate


def compile_all(kernel, configs: list[triton.Config], args: dict) -> list:
    """The kernel compiled for each configuration, in parallel and without a launch; `args` are a launch's, by name."""

    def compiled(config):
        config.pre_hook({**args, **config.kwargs})
        return kernel.run(**{**args, **config.all_kwargs(), "warmup": True})

    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool):
        for config in configs:
            compiled(config)
    return [compiled(config) for config in configs]  # by now from the kernel's cache


def fits(compiled) -> bool:
    """Whether a compiled kernel's shared memory is to be had on the current device."""
    driver = triton.runtime.driver.active
    limit = driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"]
    return compiled.metadata.shared <= limit
