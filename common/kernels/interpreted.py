"""Prepare the interpreters of Triton and Gluon, once, before the first launch of a kernel."""

import threading

import triton.language as tl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

_RUNS = {launcher: launcher.run for launcher in (InterpretedFunction, GluonJITFunction)}
_installing = threading.RLock()
_installed = False


def install_at_first_launch():
    """Let the first launch of a kernel, Triton's or Gluon's, call `install`."""

    def first_run(self, *args, **kwargs):
        install()
        return self.run(*args, **kwargs)

    for launcher in _RUNS:
        launcher.run = first_run


def install():
    """Repair Triton's interpreter, and interpret Gluon's launches. Tools that change an interpreter call this first."""
    with _installing:
        if not _installed:
            _install()


def _install():
    global _installed
    from common.interpreter import asynchronous, gluon, repairs  # not at the top, because these imports are slow
    from common.kernels import hopper

    for launcher, run in _RUNS.items():
        launcher.run = run
    if isinstance(tl.sum, JITFunction):  # Triton was imported before TRITON_INTERPRET was set
        repairs.adopt_language()
    repairs.repair_bfloat16()
    repairs.repair_loop_bounds()
    repairs.add_descriptor_reductions()
    repairs.refuse_stores_before_a_tensor()
    repairs.patch_the_language_once()
    repairs.check_overflow_cheaply()
    repairs.look_types_up_once()
    repairs.run_one_kernel_at_a_time()
    gluon.install()

    @gluon.means(hopper.async_reduce_add)
    def reduce_add(tensor_desc, coord, src):
        asynchronous.Store(tensor_desc, coord, src, adds=True)

    gluon.means(hopper.stored_wait)(asynchronous.arrival_wait)
    gluon.means(hopper.fence_async_global)(lambda: None)
    gluon.means(hopper.fetch_add)(gluon.fetch_add_in_memory)
    gluon.means(hopper.flag_wait)(gluon.wait_in_memory)
    gluon.means(hopper.reduce_add)(gluon.add_in_memory)
    _installed = True
