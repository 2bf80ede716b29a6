"""Start the processes (ranks) of a group, and run functions in them.

Tests share the processes, because a start takes seconds.
"""

import contextlib
import datetime
import multiprocessing
import os
import signal
import socket
from unittest import mock

import torch
import torch.distributed as dist
from triton.runtime.autotuner import Autotuner

from common.measure.aot import first_that_survives
from common.runtime import DEVICE

MOST = 3 if DEVICE == "cpu" else min(4, torch.cuda.device_count())  # maximum number of ranks in a test
TIMEOUT_S = 120  # seconds that a test waits for its processes, and that a rank waits for other ranks
# A new process, because a process that has threads or has used a GPU cannot be forked. Without a GPU, the new process imports
# everything once and is forked for each rank.
CONTEXT = multiprocessing.get_context("spawn")
INTERPRET = {"TRITON_INTERPRET": "1"} if DEVICE == "cpu" else {}  # set again, because a compiler test may have changed it


def _serve(rank, size, port, connection):
    """Call each function that comes from `connection`, in this rank. Send back (result, None) or (None, exception)."""
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
        Autotuner.prune_configs = first_that_survives  # take the first configuration without tuning, as in conftest.py
        Autotuner._bench = lambda self, *args, **kwargs: [0.0, 0.0, 0.0]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl", timeout=timeout)
    groups = {ranks: dist.new_group(list(range(ranks)), timeout=timeout) for ranks in range(1, size + 1)}
    with contextlib.suppress(EOFError):
        while True:
            function, ranks, arguments = connection.recv()
            torch.manual_seed(0)
            try:
                answer = function(groups[ranks], *arguments), None
            except Exception as error:
                answer = None, error
            connection.send(answer)
    os._exit(0)  # do not wait for ranks that have ended


def _fork(settings):
    """Fork a process for each rank, and wait until they end. Each takes a connection and closes the others."""
    os.setsid()  # `Ranks.end` kills the group
    import cases  # noqa: F401  (imports the stages before the forks)

    for mine in settings:
        if os.fork() == 0:
            for other in settings:
                if other is not mine:
                    other[-1].close()
            _serve(*mine)
    for *_, connection in settings:
        connection.close()
    for _ in settings:
        os.wait()


class Ranks:
    """Processes that run functions for tests. For each size, the first `size` processes form a group."""

    def __init__(self, size):
        self.size = size
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        pairs = [CONTEXT.Pipe() for _ in range(size)]
        self.connections = [ours for ours, _ in pairs]
        settings = [(rank, size, port, theirs) for rank, (_, theirs) in enumerate(pairs)]
        calls = [(_fork, (settings,))] if DEVICE == "cpu" else [(_serve, one) for one in settings]
        self.processes = [CONTEXT.Process(target=function, args=args, daemon=True) for function, args in calls]
        with mock.patch.dict(os.environ, INTERPRET):
            for process in self.processes:
                process.start()
        for _, theirs in pairs:
            theirs.close()

    def outcomes(self, size, function, *arguments) -> list:
        """Call `function(group, *arguments)` in `size` ranks.

        Return each result or exception. EOFError means that the rank ended.
        """
        found = []
        for connection in self.connections[:size]:
            connection.send((function, size, arguments))
        for rank, connection in enumerate(self.connections[:size]):
            assert connection.poll(TIMEOUT_S), f"rank {rank} does not answer"
            try:
                result, error = connection.recv()
                found.append(error or result)
            except EOFError as error:
                found.append(error)
        return found

    def call(self, size, function, *arguments) -> list:
        """Return the results of `outcomes`, or raise the first exception among them."""
        found = self.outcomes(size, function, *arguments)
        for outcome in found:
            if isinstance(outcome, Exception):
                raise outcome
        return found

    def end(self):
        for process in self.processes:
            if DEVICE == "cpu":
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
