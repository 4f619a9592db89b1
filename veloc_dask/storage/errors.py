"""The error tree of veloc_dask.

Every error says what happened, to which object, what was expected and found, and what to do next. Each is also a fitting
builtin, so that code which knows nothing of us (``except OSError``) still does the right thing::

    VelocError
    ├── ConfigError         (ValueError)            the configuration cannot work; raised at construction
    ├── CheckpointNotFound  (KeyError)              no such name, version or item
    ├── VersionExists       (ValueError)            the version number is taken, or a later run owns the name
    ├── IntegrityError      (OSError)               a stored copy is torn, flipped or missing
    │   └── BlockLost                               no readable copy of a block is left
    ├── TierError           (OSError)               a storage place refused: full, read-only, failing, not ours
    └── NotSupported        (TypeError)             this value cannot be saved, or not in this setting
"""

from __future__ import annotations


class VelocError(Exception):
    """Base of all errors of this package."""


class ConfigError(VelocError, ValueError):
    """The configuration cannot work; nothing was written."""


class CheckpointNotFound(VelocError, KeyError):
    """No complete checkpoint (or version, or item) of that name exists."""

    __str__ = Exception.__str__  # KeyError shows the repr of its argument, which hides line breaks


class VersionExists(VelocError, ValueError):
    """The version number is taken, or a later run has taken over the name."""


class IntegrityError(VelocError, OSError):
    """A stored copy does not match what was written: torn, flipped or missing."""


class BlockLost(IntegrityError):
    """No readable copy of a block is left anywhere."""


class TierError(VelocError, OSError):
    """A storage place refused a read or a write."""


class NotSupported(VelocError, TypeError):
    """The value cannot be saved, or cannot be saved with these settings."""
