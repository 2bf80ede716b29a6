"""Readings of the GPU's energy counter become power."""

import time
from unittest.mock import Mock

import pytest

from common.measure import energy
from common.measure.energy import Reading


class Library:
    """A stand-in for NVML. Each reading adds one joule to the counter. The NVML function with the name `refused` fails."""

    def __init__(self, refused):
        self.refused, self.millijoules = refused, 0
        self.nvmlErrorString = Mock(return_value=b"Not Supported")

    def __getattr__(self, name):
        def function(*arguments):
            if name == self.refused:
                return 3
            if name.startswith("nvmlDeviceGet") and name != "nvmlDeviceGetHandleByUUID":
                self.millijoules += 1000
                arguments[-1]._obj.value = {
                    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
                    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
                    "nvmlDeviceGetClockInfo": 1590,
                    "nvmlDeviceGetTotalEnergyConsumption": self.millijoules,
                }[name]
            return 0

        return function


@pytest.fixture
def library(monkeypatch):
    """Return a function that replaces NVML with a `Library`."""
    monkeypatch.setattr(energy.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(energy.torch.cuda, "get_device_properties", lambda _: Mock(uuid="1-2"))
    return lambda refused: monkeypatch.setattr(energy.ctypes, "CDLL", lambda _: Library(refused))


def test_gauges_are_read_while_calls_run(library):
    library(None)
    gauges = energy.Gauges()
    assert gauges.limit_watts() == 700
    with gauges.watching() as readings:
        while len(readings) < 3:
            time.sleep(energy.READ_S)
    assert {(reading.mhz, reading.capped) for reading in readings} == {(1590, True)}
    assert sorted({reading.joules for reading in readings}) == [reading.joules for reading in readings]


def test_an_unsupported_nvml_function_raises_at_once(library):
    library("nvmlDeviceGetTotalEnergyConsumption")
    with pytest.raises(RuntimeError, match="NVML says: Not Supported"):
        energy.Gauges()


def readings(*steps):
    return [Reading(seconds, joules, 1500, True) for seconds, joules in steps]


def test_power_is_taken_between_steps_of_the_counter():
    """Power is measured from the counter's first update to its last: (405 - 105) joules in (2.5 - 1.5) seconds."""
    assert energy.watts(readings((0.0, 5), (1.0, 5), (1.5, 105), (2.0, 105), (2.5, 405), (3.5, 405))) == 300
    with pytest.raises(ValueError, match="less than twice"):
        energy.watts(readings((0.0, 5), (1.0, 6), (2.0, 6)))
