"""A test with an argument `stage` or `part` runs for the stages, or the passes, that tests/cases.py chooses."""

import gc
import os
import threading
import zlib
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # set before torch and numpy load; more threads do not help small problems

import numpy  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

os.environ.setdefault("TRITON_INTERPRET", "0" if torch.cuda.is_available() else "1")  # set before Triton loads

import cases  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402

import stages  # noqa: E402
from common.interpreter.schedule import restart_seeds  # noqa: E402
from common.kernels import interpreted  # noqa: E402
from common.measure.aot import first_that_survives  # noqa: E402
from common.runtime import INTERPRETED  # noqa: E402

ROOT = Path(__file__).parents[1]

if INTERPRETED:
    interpreted.install()  # now, because fixtures change the interpreter


def pytest_make_parametrize_id(val):
    """Write float16 instead of dtype0 in the name of a test."""
    return str(val).removeprefix("torch.") if isinstance(val, torch.dtype) else None


def pytest_configure(config):
    """Note whether long tests are asked for. Stop with one clear error if a stage has a syntax error, or if a stage or bench.py
    needs a missing stage.

    Otherwise many tests would fail for unclear reasons.
    """
    cases.LONG = "not long" not in config.option.markexpr
    try:
        cases.asked()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if not hasattr(config, "workerinput") and (found := stages.syntax_errors(*stages.names())):
        raise pytest.UsageError("\n".join(found))
    if lines := cases.needs_of_stages_that_are_gone(ROOT):
        raise pytest.UsageError("these lines need a stage that has no directory:\n" + "\n".join(lines))


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_auto_num_workers():
    """Return the number of test processes: one per CPU core, but at most eight if they share a GPU."""
    processors = len(os.sched_getaffinity(0))
    return processors if INTERPRETED else min(8, processors)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(obj):
    """Collect no tests marked `long` unless they are asked for."""
    return [] if not cases.LONG and _is_long(getattr(obj, "pytestmark", ())) else None


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    """Give `stage` and `part` their values, and drop parameters marked `long` unless they are asked for.

    Dropping them before pytest combines parameters saves most of the time of a collection.
    """
    parametrized = list(metafunc.definition.iter_markers("parametrize"))
    for mark in () if cases.LONG else parametrized:
        names, values, *more = mark.args
        object.__setattr__(mark, "args", (names, [one for one in values if not _is_long(getattr(one, "marks", ()))], *more))
    if "stage" in metafunc.fixturenames and all(mark.args[0] != "stage" for mark in parametrized):
        metafunc.parametrize("stage", cases.tested(), indirect=True)
    if "part" in metafunc.fixturenames:
        every = metafunc.definition.get_closest_marker("every_part")
        metafunc.parametrize(
            "part", cases.parts() if every else cases.usual_parts(metafunc.function.__name__), ids=str, indirect=True
        )


def pytest_collection_modifyitems(items):
    """Begin with tests of several ranks. At the end of a run, several test processes would share them, and each start ranks."""
    items.sort(key=lambda item: "ranks" not in getattr(item, "fixturenames", ()))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Let garbage collections skip the million objects of modules and tests, which stay until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _is_long(marks):
    """Return whether one of the marks is `long`. `marks` is a mark or a list, as in a module's `pytestmark`."""
    marks = marks if isinstance(marks, (list, tuple)) else [marks]
    return any(mark.name == "long" for mark in marks)


@pytest.fixture
def stage(request):
    """The module of a stage, with `attention`, `forward` and `backward` (see `cases.tested`)."""
    return cases.available(request.param)


@pytest.fixture
def part(request):
    """A pass of a stage (see `cases.usual_parts`)."""
    cases.available(request.param.name)
    return request.param


@pytest.fixture(scope="session")
def ranks():
    """A group of processes (`ranks.Ranks`)."""
    from ranks import MOST, Ranks

    if MOST < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(MOST)
    yield ranks
    ranks.end()


@pytest.fixture
def unordered(stage):
    """The stage's `UNORDERED`: the names of results that the stage adds up in no fixed order."""
    return getattr(stage, "UNORDERED", ())


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)
    yield
    if torch.are_deterministic_algorithms_enabled():  # the test has switched these algorithms on
        torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _orders_of_its_own(request):
    """Seed the interpreter's order of threads by the test's name, so that a failing test also fails when it runs alone."""
    restart_seeds(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def real_tuning():
    """Let the autotuner compile and time its configurations in a test with this fixture, as it does for a user."""


@pytest.fixture(autouse=True)
def _quick_tuning(request, monkeypatch):
    """On a GPU, let the autotuner take the first configuration that fits, without timing.

    The tests have hundreds of problems, and tuning for each would take too long. The tests of the autotuner check every
    configuration.
    """
    if "real_tuning" not in request.fixturenames:
        monkeypatch.setattr(Autotuner, "prune_configs", first_that_survives)
        monkeypatch.setattr(Autotuner, "_bench", lambda self, *args, **kwargs: [0.0, 0.0, 0.0])


@pytest.fixture(autouse=True)
def _refuse_to_write_outside(monkeypatch):
    """On the interpreter, raise an error if a kernel writes outside of its arguments.

    Otherwise the write could crash the process.
    """
    if not INTERPRETED:
        return
    prepare, store = interpreter.GridExecutor._init_args_hst, interpreter.InterpreterBuilder.create_masked_store
    running = threading.local()  # the address ranges to which the thread's kernel may write

    def remember_arguments(executor, args, kwargs):
        on_host = prepare(executor, args, kwargs)
        tensors = [
            getattr(value, "base", value) for value in (*on_host[0], *on_host[1].values())
        ]  # `base` is a descriptor's tensor
        storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
        running.allowed = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages]
        return on_host

    def checked_store(builder, pointers, value, mask, *args, **kwargs):
        addresses = pointers.data[numpy.asarray(mask.data)]
        inside = [(addresses >= first) & (addresses + value.data.itemsize <= end) for first, end in running.allowed]
        assert numpy.logical_or.reduce(inside).all(), "a kernel writes outside all of its arguments"
        return store(builder, pointers, value, mask, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", remember_arguments)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", checked_store)
