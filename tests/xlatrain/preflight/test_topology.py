"""Names of topologies, and what is said about wrong ones. Nothing here loads libtpu."""

from __future__ import annotations

import pytest

from xlatrain.preflight import Topology, TopologyError


@pytest.mark.parametrize(
    ("name", "slices", "chips", "devices"),
    [
        ("v5e:16x16", 1, 256, 256),
        ("v5e:4x4", 2, 32, 32),
        ("v5p:4x4x8", 1, 128, 128),
        ("tpu7x:2x2x1", 1, 4, 8),
        ("v4:2x2x2", 1, 8, 8),
    ],
)
def test_chips_and_devices(name: str, slices: int, chips: int, devices: int) -> None:
    topology = Topology.parse(name, slices)
    assert (topology.chips, topology.chips * topology.devices_per_chip) == (chips, devices)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v5e:4x5", "v5e:4x4"),
        ("v5e:32x32", "v5e:16x16"),
        ("v5p:2x2x3", "v5p:2x2x4"),
        ("v5p:8x4x4", "v5p:4x4x8"),
        ("v5p:4x4", "v5p:2x2x4"),
        ("v5q:4x4", "v5e"),
        ("v5e:", "v5e:16x16"),
        ("cuda:8", "cpu:N"),
        ("cpu:none", "cpu:8"),
    ],
)
def test_a_name_that_does_not_exist_lists_near_ones(name: str, said: str) -> None:
    with pytest.raises(TopologyError) as error:
        Topology.parse(name)
    assert said in str(error.value)


def test_slices_of_cpus_are_refused() -> None:
    with pytest.raises(TopologyError, match="no slices"):
        Topology.parse("cpu:4", 2)
