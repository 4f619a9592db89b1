"""veloc_dask: very low overhead checkpointing for Dask.

What a Dask cluster holds is saved from the workers' memory to node-local storage at memory speed, migrated to remote storage
in the background, and comes back from the nearest surviving copy instead of being computed again.
"""

from veloc_dask.checkpointer import Checkpointer, Tier
from veloc_dask.errors import (
    BlockLost,
    CheckpointNotFound,
    ConfigError,
    IntegrityError,
    NotSupported,
    TierError,
    VelocError,
    VersionExists,
)
from veloc_dask.handle import SaveHandle
from veloc_dask.progress import progress
from veloc_dask.scheduler_plugin import VelocPlugin

__version__ = "0.1.0"

__all__ = [
    "BlockLost",
    "CheckpointNotFound",
    "Checkpointer",
    "ConfigError",
    "IntegrityError",
    "NotSupported",
    "SaveHandle",
    "Tier",
    "TierError",
    "VelocError",
    "VelocPlugin",
    "VersionExists",
    "progress",
]
