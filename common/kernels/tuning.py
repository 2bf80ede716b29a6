"""`triton.autotune` that one can wait for: announced, pruned to the device, compiled in parallel, shared by nearby lengths."""

import collections
import copy
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

from common.kernels.replay import depends_on
from common.runtime import INTERPRETED, architecture, current_device, shared_memory_limit

WITH_COPY_ENGINE = range(90, 1000)  # architectures: from Hopper on descriptors are the hardware's
KEY = ("bucket", "HEAD_DIM", "VALUE_DIM", "CAUSAL", "PRECISION")  # kernel arguments; a new combination is tuned anew
FINALISTS = 3  # configurations that are timed again …
FINAL_ROUNDS = 4  # … in turns, so often …
REST_S = 0.06  # … after a rest, so that the GPU's clock does not depend on what was timed before
AS_FAST = 1.01  # times the shortest time: what differs by less may differ the other way next time
_tuning = threading.RLock()
_picks = {}  # by the text of its file and its name: what is kept of a kernel's tuning. A stage that changes nothing shares it.


def bucket(seq_q: int, seq_k: int) -> int:
    """The power of two, from 128 to 4096, that stands for nearby sequence lengths in the tuning key."""
    return 1 << min(max(7, (max(seq_q, seq_k) - 1).bit_length()), 12)  # not triton's function: every call asks, and it is slow


def configs(tiles: Sequence[tuple[int, int, int, int]], pre_hook: Callable | None) -> list[triton.Config]:
    """A configuration for each (BLOCK_M, BLOCK_N, num_warps, num_stages)."""
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=warps, num_stages=stages, pre_hook=pre_hook)
        for m, n, warps, stages in tiles
    ]


def sensible(config: triton.Config, row_bytes: int, precision: str, has_copy_engine: bool) -> bool:
    """Whether a tile is worth compiling for rows of that many bytes.

    Only the small ones are where exact float32 matmuls keep every operand in registers, and where there is no TMA,
    so that a descriptor becomes an address in registers for every element.
    """
    rows = max(config.kwargs["BLOCK_M"], config.kwargs["BLOCK_N"])
    if precision == "ieee" or not has_copy_engine:
        return rows <= 32
    return rows * row_bytes <= 32 * 1024


def tuners(stage) -> dict[str, Autotuner]:
    """The autotuned kernels of a stage, a module or anything else with `forward` and `backward`, by name."""
    found = (*stage.forward.__globals__.items(), *stage.backward.__globals__.items())
    return {name: value for name, value in found if isinstance(value, Autotuner)}


def _time(call, quantiles):
    """Milliseconds of a configuration; on the interpreter, where there is nothing to time, all are the same."""
    if INTERPRETED:
        return [0.0] * len(quantiles)
    return triton.runtime.driver.active.get_benchmarker()(call, quantiles=quantiles, warmup=5, rep=25)


class _Tuner(Autotuner):
    """`triton.autotune`'s, but for each device, and safe for threads: what a call needs it keeps to itself."""

    def run(self, *args, **kwargs):
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        key = (current_device(), *(named[name] for name in KEY))
        config = self._picked(key) or self._tune(key, args, kwargs)
        depends_on(lambda: self._picked(key) is config)
        if config.pre_hook:
            config.pre_hook({**named, **config.all_kwargs()})
        self.best_config = config  # of the last call
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    def _picked(self, key):
        return self.configs[0] if len(self.configs) == 1 else self.cache.get(key)

    def _tune(self, key, args, kwargs):
        def bench(config):
            return self._bench(*args, config=config, **kwargs)

        with _tuning:  # one kernel at a time, which others would disturb
            if key not in self.cache:  # another thread's doing, meanwhile
                depends_on(lambda: False)  # a recording of this call has what is launched to be timed
                self.nargs = dict(zip(self.arg_names, args, strict=False))
                try:
                    timings = {config: bench(config) for config in self.prune_configs(kwargs)}
                    picked = self._fastest(timings, bench)
                finally:
                    self.nargs = None  # it holds the caller's tensors
                self.configs_timings = timings
                self.cache[key] = picked
        return self.cache[key]

    def _fastest(self, timings, bench):
        """The first in the list of those that are as fast as any: the fastest few are timed again, in turns, to know.

        A GPU's clock rises and falls while it is at work. Timings of one configuration after another show that too; in turns,
        all of them meet the same clock. Between equals the order of the list decides, and not chance.
        """
        fastest = sorted(timings, key=timings.get)[:FINALISTS]
        finalists = [config for config in timings if config in fastest]
        if len(finalists) == 1:
            return finalists[0]
        time.sleep(REST_S)
        rounds = [[bench(config)[0] for config in finalists] for _ in range(FINAL_ROUNDS)]
        medians = [statistics.median(times) for times in zip(*rounds, strict=True)]
        return next(config for config, median in zip(finalists, medians, strict=True) if median <= AS_FAST * min(medians))


def autotune(configs: list[triton.Config]) -> Callable:
    """Decorate a kernel whose tiles go through descriptors; the fastest of `configs` that fits the device runs.

    The first call of a new `KEY` on a device says on stderr that it is tuning, compiles what may fit in parallel and times it,
    in some seconds. The fastest few are timed again, in turns, and the first in `configs` that is within `AS_FAST` of the best
    is taken: noise does not choose, and the same code runs with the same tiles. On the interpreter the first sensible
    configuration is taken. A kernel whose whole file is that of another, which was tuned before, takes that one's choice.
    """

    def decorate(kernel):
        def prune(configs, named_args, **kwargs):
            args = {**named_args, **kwargs}
            row_bytes = max(args["HEAD_DIM"], args["VALUE_DIM"]) * (4 if args["PRECISION"] == "ieee" else 2)
            has_copy_engine = INTERPRETED or architecture() in WITH_COPY_ENGINE
            kept = [config for config in configs if sensible(config, row_bytes, args["PRECISION"], has_copy_engine)]
            if INTERPRETED:
                return kept[:1]
            problem = ", ".join(f"{name}={args[name]}" for name in KEY)
            print(f"tuning {kernel.__module__}.{kernel.__name__} for {problem}: {len(kept)} configurations", file=sys.stderr)
            compiled = zip(kept, compile_all(kernel, kept, args), strict=True)
            return [config for config, binary in compiled if binary.metadata.shared <= shared_memory_limit()]

        tuner = _Tuner(
            kernel, kernel.arg_names, configs, KEY, None, None, prune_configs_by={"early_config_prune": prune}, do_bench=_time
        )
        text = Path(kernel.fn.__code__.co_filename).read_text()
        tuner.cache = _picks.setdefault((text, kernel.__name__), tuner.cache)
        return tuner

    return decorate


def compile_all(kernel, configs: list[triton.Config], args: dict) -> list:
    """The kernel compiled for each configuration, in parallel and without a launch; `args` are a launch's, by name.

    Raises:
        What the compiler raises for a configuration, compiled alone.
    """

    def compiled(kernel, config):
        if config.pre_hook:
            config.pre_hook({**args, **config.kwargs})
        return kernel.run(**{**args, **config.all_kwargs(), "warmup": True})

    # In a copy with caches of its own: until a compilation is done, and for ever where it fails, what the cache holds is not a
    # kernel yet, which a launch by another thread must not find. An error would leave the mode switched on, and is dropped.
    apart = copy.copy(kernel)
    apart.device_caches = collections.defaultdict(apart.create_binder)
    with ThreadPoolExecutor() as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for config in configs:
            compiled(apart, config)
    done = {
        key: binary for key, binary in apart.device_caches[current_device()][0].items() if isinstance(binary, CompiledKernel)
    }
    kernel.device_caches[current_device()][0].update(done)
    return [compiled(kernel, config) for config in configs]  # what failed in parallel is compiled here, alone
