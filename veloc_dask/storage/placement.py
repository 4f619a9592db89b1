"""Which tier a block goes to. Pure: devices with their state in, a decision out; no clock, no I/O.

``Policy`` is the seam behind which the adaptive policies of the paper (Nicolae et al., IPDPS 2019, algorithm 2) go; the
first one is ``hybrid-naive``: the fastest tier that has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Device(msgspec.Struct, frozen=True):
    """What a policy knows of one node-local tier, fast ones first in any sequence of them."""

    name: str
    capacity_nbytes: int
    used_nbytes: int  # by all processes of the node, reservations included
    usable: bool  # False while it is full, failing or read-only and not yet probed again


class Choice(msgspec.Struct, frozen=True):
    """The decision: a device by its position, ``wait`` for a flush to end, or neither (no local tier can take it)."""

    device: int | None = None
    wait: bool = False


class Policy(Protocol):
    """One block's placement. Called again after a ``wait``, or after the chosen device failed."""

    def __call__(self, nbytes: int, devices: Sequence[Device]) -> Choice: ...


def hybrid_naive(nbytes: int, devices: Sequence[Device]) -> Choice:
    """The first usable device with room for `nbytes`: the paper's baseline.

    Examples
    --------
    >>> ram = Device("ram", 100, 90, True)
    >>> disk = Device("disk", 1000, 0, True)
    >>> hybrid_naive(20, [ram, disk])
    Choice(device=1, wait=False)
    """
    for position, device in enumerate(devices):
        if device.usable and device.used_nbytes + nbytes <= device.capacity_nbytes:
            return Choice(device=position)
    return Choice()
