"""Tune kernels like `triton.autotune`, but in less time.

The tuner drops configurations that do not suit the device, compiles the others in parallel, and times them. It prints a line to
stderr for each tuning. Similar sequence lengths use the same configuration.
"""

import collections
import copy
import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import triton
from triton.compiler import CompiledKernel
from triton.runtime.autotuner import Autotuner

from common.recording import depends_on
from common.runtime import INTERPRETED, architecture, current_device, shared_memory_limit

WITH_TMA = range(90, 1000)  # compute capabilities of GPUs with TMA (Hopper and newer), times 10
KEY = ("bucket", "HEAD_DIM", "VALUE_DIM", "CAUSAL", "PRECISION")  # kernel arguments; new values cause a new tuning
FINALISTS = 3  # this many of the fastest configurations are timed again
FINAL_ROUNDS = 4  # each finalist is timed again this many times
REST_S = 0.06  # seconds of rest before the finalists are timed, so that earlier work does not change the clock
AS_FAST = 1.01  # times up to this multiple of the shortest time count as equal, because the difference is noise
_tuning = threading.RLock()
_picks = {}  # (text of the file, kernel name) -> tuning cache


def bucket(seq_q: int, seq_k: int) -> int:
    """Return the longer length, rounded up to a power of two from 128 to 4096. This number is `bucket` in `KEY`."""
    return 1 << min(max(7, (max(seq_q, seq_k) - 1).bit_length()), 12)  # triton.next_power_of_2 is too slow for every call


def configs(tiles: Sequence[tuple[int, int, int, int]], pre_hook: Callable | None) -> list[triton.Config]:
    """Make a configuration for each (BLOCK_M, BLOCK_N, num_warps, num_stages)."""
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages, pre_hook=pre_hook)
        for m, n, warps, stages in tiles
    ]


def sensible(config: triton.Config, row_bytes: int, precision: str, has_tma: bool) -> bool:
    """Return whether a configuration is worth compiling for rows of `row_bytes` bytes.

    Exact float32 matmuls allow only small tiles, because every operand is in registers. A GPU without TMA also allows only
    small tiles, because its registers hold an address for each element of a tile.
    """
    rows = max(config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"])
    if precision == "ieee" or not has_tma:
        return rows <= 32
    return rows * row_bytes <= 32 * 1024


def tuners(stage) -> dict[str, Autotuner]:
    """Return a stage's autotuned kernels as {name: kernel}.

    The stage is a module, or any object with `forward` and `backward`.
    """
    found = (*stage.forward.__globals__.items(), *stage.backward.__globals__.items())
    return {name: value for name, value in found if isinstance(value, Autotuner)}


def _time(call, quantiles):
    """Return quantiles of a configuration's time in milliseconds. If kernels are interpreted, all are 0."""
    if INTERPRETED:
        return [0.0] * len(quantiles)
    return triton.runtime.driver.active.get_benchmarker()(call, quantiles=quantiles, warmup=5, rep=25)


class _Tuner(Autotuner):
    """A Triton Autotuner that tunes for each device. Several threads may call it."""

    def run(self, *args, **kwargs):
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        key = (current_device(), *(named[name] for name in KEY))
        config = self._picked(key) or self._tune(key, args, kwargs)
        depends_on(lambda: self._picked(key) is config)
        if config.pre_hook:
            config.pre_hook({**named, **config.all_kwargs()})
        self.best_config = config  # configuration of the last call
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def _picked(self, key):
        return self.configs[0] if len(self.configs) == 1 else self.cache.get(key)

    def _tune(self, key, args, kwargs):
        def bench(config):
            return self._bench(*args, config=config, **kwargs)

        with _tuning:  # time one kernel at a time
            if key not in self.cache:  # another thread may have tuned for this key meanwhile
                depends_on(lambda: False)  # never replay this call: its recording would include the timed launches
                self.nargs = dict(zip(self.arg_names, args, strict=False))
                try:
                    timings = {config: bench(config) for config in self.prune_configs(kwargs)}
                    picked = self._fastest(timings, bench)
                finally:
                    self.nargs = None  # free the caller's tensors
                self.configs_timings = timings
                self.cache[key] = picked
        return self.cache[key]

    def _fastest(self, timings, bench):
        """Time the fastest few configurations again in several rounds, and return the fastest of them.

        A GPU's clock changes while the GPU works. Each round times every finalist once, so all run at about the same clock. If
        several finalists are within `AS_FAST` of the shortest time, the first in the stage's list wins.
        """
        fastest = sorted(timings, key=timings.get)[:FINALISTS]
        finalists = [config for config in timings if config in fastest]
        if len(finalists) == 1:
            return finalists[0]
        time.sleep(REST_S)
        rounds = [[bench(config)[0] for config in finalists] for _ in range(FINAL_ROUNDS)]
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
        return next(config for config, median in zip(finalists, medians, strict=True) if median <= AS_FAST * min(medians))


def _prune(kernel, configs, named_args, **kwargs):
    """Return the sensible configurations that fit into shared memory. If kernels are interpreted, return only the first."""
    args = {**named_args, **kwargs}
    row_bytes = max(args["HEAD_DIM"], args["VALUE_DIM"]) * (4 if args["PRECISION"] == "ieee" else 2)
    has_tma = INTERPRETED or architecture() in WITH_TMA
    kept = [config for config in configs if sensible(config, row_bytes, args["PRECISION"], has_tma)]
    if INTERPRETED:
        return kept[:1]
    problem = ", ".join(f"{name}={args[name]}" for name in KEY)
    print(f"tuning {kernel.__module__}.{kernel.__name__} for {problem}: {len(kept)} configurations", file=sys.stderr)
    compiled = zip(kept, compile_all(kernel, kept, args), strict=True)
    return [config for config, binary in compiled if binary.metadata.shared <= shared_memory_limit()]


def autotune(configs: list[triton.Config]) -> Callable:
    """Decorate a kernel so that each call runs the fastest of the `configs` that fit the device.

    The kernel must load its tiles through descriptors: pointers to a large tile would fill the registers. The first call with
    new values of the arguments in `KEY` takes some seconds, because it compiles and times the configurations (see `sensible`).
    Interpreted kernels take the first sensible configuration. Stages with identical files share their choices.
    """

    def decorate(kernel):
        pruned = {"early_config_prune": functools.partial(_prune, kernel)}
        tuner = _Tuner(kernel, kernel.arg_names, configs, KEY, None, None, prune_configs_by=pruned, do_bench=_time)
        text = Path(kernel.fn.__code__.co_filename).read_text()
        tuner.cache = _picks.setdefault((text, kernel.__name__), tuner.cache)
        return tuner

    return decorate


def compile_all(kernel, configs: list[triton.Config], args: dict) -> list:
    """Compile the kernel for each configuration in parallel, without a launch.

    Args:
        args: the launch arguments by name.

    Raises:
        The compiler's exceptions.
    """

    def compiled(kernel, config):
        if config.pre_hook:
            config.pre_hook({**args, **config.kwargs})
        return kernel.run(**{**args, **config.all_kwargs(), "warmup": True})

    # During a compilation, a kernel's cache has a placeholder, which a launch by another thread must not find. So compile a
    # copy of the kernel with separate caches. An error here would leave the asynchronous mode on, so only the last line raises
    # errors.
    apart = copy.copy(kernel)
    vars(apart).pop("run", None)  # it launches the original (`common.launching`)
    apart.device_caches = collections.defaultdict(apart.create_binder)
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for config in configs:
            compiled(apart, config)
    done = {
        key: binary for key, binary in apart.device_caches[current_device()][0].items() if isinstance(binary, CompiledKernel)
    }
    kernel.device_caches[current_device()][0].update(done)
    # Compile failed configurations again, which raises their errors. Some fail only in parallel, because threads that call
    # `ast.parse` disturb each other in CPython 3.11 and 3.12.
    return [compiled(kernel, config) for config in configs]
