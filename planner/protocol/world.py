"""What all processes of a run share."""

from __future__ import annotations

from dataclasses import dataclass

from core.config import Config
from kv_transfer.inprocess.model import Dice
from planner.protocol.blocks import BlockContents
from planner.protocol.etcd import Etcd
from planner.protocol.event_log import EventLog
from planner.protocol.network import Network
from planner.protocol.nic import Nic
from planner.protocol.virtual_loop import VirtualLoop


@dataclass(frozen=True, slots=True)
class World:
    """The parts of a simulation that are no process.

    Attributes:
        dice: orders what is concurrent; the only one of a run.
        contents: what full blocks must hold.
    """

    config: Config
    loop: VirtualLoop
    dice: Dice
    log: EventLog
    network: Network
    nic: Nic
    etcd: Etcd
    contents: BlockContents
