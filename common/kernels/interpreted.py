"""Prepare the interpreters of Triton and Gluon, once, before the first launch of a kernel."""

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
            from common.interpreter import gluon, repairs  # not at the top, because these imports are slow

            for launcher, run in _RUNS.items():
                launcher.run = run
            repairs.install()
            GluonJITFunction.run = gluon.run
            _installed = True
