"""Prepare the interpreters of Triton and Gluon, once, before the first launch of a kernel."""

import functools
import threading

from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.interpreter import InterpretedFunction

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
    global _installed
    with _installing:
        if not _installed:
            from common.interpreter import repairs  # not at the top, because these imports are slow
            from common.kernels import hopper

            for launcher, run in _RUNS.items():
                launcher.run = run
            repairs.install()
            from common.interpreter import asynchronous, gluon  # now, because `gluon` notes the repaired functions

            GluonJITFunction.run = gluon.run
            gluon.means(hopper.fetch_add)(gluon.fetch_add)
            gluon.means(hopper.flag_wait)(gluon.flag_wait)
            gluon.means(hopper.reduce_add)(gluon.reduce_add)
            gluon.means(hopper.async_reduce_add)(functools.partial(asynchronous.Store, adds=True))
            gluon.means(hopper.stored_wait)(asynchronous.arrival_wait)
            gluon.means(hopper.fence_async_global)(lambda: None)
            _installed = True
