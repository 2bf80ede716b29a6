"""Launch compiled kernels with less work for the CPU than Triton's own launch.

For each launch, Triton describes all arguments, constants and options as text, and looks the compiled kernel up by this text.
Making the text is slow, most of all for TMA's descriptors. Here, each kernel has a table of compiled kernels. If two launches
have equal keys in the table, then Triton launches the same compiled kernel for both. The first launch of a key goes through
Triton.

A key has the values of the launch's constants and options, by name, and the types of its arguments. For each of TMA's
descriptors, it has the dtype, the block shape and the layout, from which Triton makes the descriptor's text, or a list that
stands for all three. For other arguments except None and floats, it has Triton's own descriptions.
"""

import copy
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Sequence

import triton
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_LAUNCHES = 1024  # a table forgets all launches when it has this many
_DESCRIPTORS = (GluonDescriptor, TensorDescriptor)
_blocks = {}  # lists that `block_of_one_kind` has returned, by id
_FIXED = (type, type(None), bool, int, float, str)  # objects of these types cannot change in place


def block_of_one_kind(block: Sequence[int]) -> list[int]:
    """Return a list to be the block shape of all descriptors of one class, dtype and layout, and of no others.

    Tables tell such descriptors apart by the list's identity, so nothing may change the list.
    """
    kept = [*block]
    _blocks[id(kept)] = kept
    return kept


def bare(run: Callable) -> tuple[Callable, Callable | None, list[dict]]:
    """Return a launcher that takes encoded descriptors, the function that encodes one, and the function's second argument for
    each of the kernel's descriptors.

    `run` is Triton's launcher. Return it and no function in three cases: the kernel has no descriptors, the GPU has no TMA, or
    the launcher differs from the launcher of Triton 3.6 and 3.7.
    """
    encoding = getattr(run, "launch", None)
    known = inspect.getclosurevars(encoding) if inspect.isfunction(encoding) else None
    tiles = known.nonlocals.get("tensordesc_meta") if known else None
    if not tiles or None in tiles or "launcher" not in known.nonlocals or "make_tensordesc_arg" not in known.globals:
        return run, None, []
    without = copy.copy(run)
    without.launch = known.nonlocals["launcher"]
    return without, known.globals["make_tensordesc_arg"], tiles


class _Thread(threading.local):
    uses_tables = False


_thread = _Thread()


class _Launcher:
    """The `run` of a kernel. It launches through a table if this thread does so, and otherwise through Triton."""

    def __init__(self, kernel: JITFunction):
        self.kernel, self.table = kernel, {}
        self.variables = {param.name for param in kernel.params if not param.is_constexpr}
        self.first_constant = next((param.num for param in kernel.params if param.is_constexpr), len(kernel.params))
        # Beside the argument, Triton's description of an argument depends on these properties of the parameter.
        self.rules = [(p.is_const, not p.do_not_specialize, not p.do_not_specialize_on_alignment) for p in kernel.params]
        self.divide = functools.lru_cache(maxsize=MOST_LAUNCHES)(self._divide)

    def __call__(self, *args, grid, warmup, **options):
        kernel, driver, key = self.kernel, triton.runtime.driver.active, None
        if _thread.uses_tables and not (warmup or kernel.pre_run_hooks or kernel.debug):
            device = driver.get_current_device()
            compiled, _, _, backend, bind = kernel.device_caches[device]
            key = self._key(device, backend, args, options)
        try:
            found = self.table.get(key)
        except TypeError:  # an option has no hash
            key = found = None
        if found:
            binary, name, run, encode, tiles, spaces, variables, before, constants, _ = found
            # If Triton's cache was emptied, Triton compiles again. If a global variable has changed, Triton fails.
            if compiled.get(name) is binary and [*map(dict.get, spaces, variables)] == before:
                values = [*args, *constants]
                if callable(grid):
                    grid = grid(dict(zip(kernel.arg_names, values, strict=True)))
                x, y, z = (*grid, 1, 1)[:3]
                for at, tile in tiles:
                    values[at : at + 1] = encode(args[at], tile)
                of_kernel = binary.function, binary.packed_metadata, None, None, None  # no hooks
                run(x, y, z, driver.get_current_stream(device), *of_kernel, *values)
                return binary
        binary = type(kernel).run(kernel, *args, grid=grid, warmup=warmup, **options)
        if key and isinstance(binary, CompiledKernel):
            names = [name for name, each in compiled.items() if each is binary]
            spaces = [space for _, space in kernel.used_global_vals.values()]
            variables = [variable for variable, _ in kernel.used_global_vals]
            values = [*map(dict.get, spaces, variables)]
            if names and all(isinstance(getattr(value, "value", value), _FIXED) for value in values):
                if len(self.table) >= MOST_LAUNCHES:
                    self.table.clear()
                constants = [*bind(*args, **options)[0].values()][len(args) :]
                run, encode, tiles = bare(binary.run)
                described = [at for at, arg in enumerate(args) if isinstance(arg, _DESCRIPTORS)]
                # The last descriptor is encoded first, because an encoded descriptor moves the arguments behind it.
                tiles = [*zip(described, tiles, strict=True)][::-1] if encode else []
                # Blocks and layouts are kept, so that their ids stay theirs.
                kept = [(getattr(arg, "block_shape", None), getattr(arg, "layout", None)) for arg in args]
                self.table[key] = binary, names[0], run, encode, tiles, spaces, variables, values, constants, kept
        return binary

    def _key(self, device: int, backend, args: tuple, options: dict) -> tuple | None:
        """Return the table's key for a launch; None if a constant is passed by position, or a variable by name."""
        if len(args) > self.first_constant or not self.variables.isdisjoint(options):
            return None
        description = triton.runtime.jit.native_specialize_impl  # not at the top, because other versions may not have it
        kinds = (*map(type, args),)
        described, others, rules = self.divide(kinds)
        key = [device, kinds, (*options,), *options.values()]
        key += map(description, itertools.repeat(backend), itertools.compress(args, others), *rules)
        for arg in itertools.compress(args, described):
            if (block := id(arg.block_shape)) in _blocks:
                key.append(block)
            else:
                key += arg.base.dtype, *arg.block_shape, id(getattr(arg, "layout", None))  # the id: hash(layout) is slow
        return tuple(key)

    def _divide(self, kinds: tuple[type, ...]) -> tuple[list[bool], list[bool], list[tuple]]:
        """Return which arguments of these types are descriptors, which need Triton's descriptions, and the columns of the rules
        for the latter. The type alone describes None and floats."""
        described = [kind in _DESCRIPTORS for kind in kinds]
        others = [kind not in (*_DESCRIPTORS, type(None), float) for kind in kinds]
        return described, others, [*zip(*itertools.compress(self.rules, others), strict=True)]


@functools.lru_cache(maxsize=512)
def _install(function: Callable):
    """Give a launcher to each kernel in the modules of `function`'s package and of this one. Only the kernels are changed."""
    packages = {name.partition(".")[0] for name in (inspect.unwrap(function).__module__, __name__)}
    modules = [vars(module) for name, module in [*sys.modules.items()] if name.partition(".")[0] in packages]
    for value in [value for names in modules for value in [*names.values()]]:
        kernel = value.fn if isinstance(value, Autotuner) else value
        if isinstance(kernel, JITFunction):
            vars(kernel).setdefault("run", _Launcher(kernel))


def with_tables(function: Callable, *tensors, **options):
    """Call a stage's `function` and let its launches use the tables. Call in one thread at a time, and with no hooks set."""
    _install(function)
    before, _thread.uses_tables = _thread.uses_tables, True
    try:
        return function(*tensors, **options)
    finally:
        _thread.uses_tables = before
