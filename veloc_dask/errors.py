"""The errors of veloc_dask, for users; the tree is drawn in `veloc_dask.storage.errors`."""

from veloc_dask.storage.errors import (
    BlockLost,
    CheckpointNotFound,
    ConfigError,
    IntegrityError,
    NotSupported,
    TierError,
    VelocError,
    VersionExists,
)

__all__ = [
    "BlockLost",
    "CheckpointNotFound",
    "ConfigError",
    "IntegrityError",
    "NotSupported",
    "TierError",
    "VelocError",
    "VersionExists",
]
