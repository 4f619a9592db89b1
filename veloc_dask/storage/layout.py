"""Every path of the format, version 1, and the rules for names. Nothing else builds a path.

The remote tier and each node-local tier hold nearly the same tree below ``<name>/``::

    <name>/v00000012.json                    the root               (node-local: a claim on the number, without a remote tier)
    <name>/v00000012-<attempt>/root.json     the root               (node-local tiers only)
    <name>/v00000012-<attempt>/              a Zarr v3 group; table/ holds the block table
    <name>/protected-<run uuid>/             blocks of ``protect``; never has a root     (node-local tiers only)
    <name>/runs/00000003.json                the third run that saved under this name    (remote tier only)

A name is checked before it becomes a path, and a path that was read from storage is checked before it is opened:
relative, no ``..``, no empty part, no backslash, no NUL, and so never outside of its directory. Dask keys are never paths.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable

from veloc_dask.storage.errors import ConfigError, IntegrityError

ROOT_DIGITS = 8
MAX_VERSION = 10**ROOT_DIGITS - 1
META = "_meta"  # items that describe other items (an empty dataframe, divisions) live in this subgroup
TABLE = "table"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ROOT = re.compile(r"v([0-9]{8})\.json")  # not \d, which takes the digits of every script
_ATTEMPT = re.compile(r"v([0-9]{8})-([0-9a-f]{32})")
_PROTECTED = re.compile(r"protected-([0-9a-f]{32})")
_RUN = re.compile(r"([0-9]{8})\.json")
_PART = re.compile(r"[A-Za-z0-9_=-][A-Za-z0-9._=-]{0,79}")


def check_name(name: object) -> str:
    """Return `name` if it may name a checkpoint, else raise ConfigError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"checkpoint name {name!r}: expected 1 to 128 letters, digits, dots, dashes or underscores, "
            "the first one a letter or a digit"
        )
    return name


def check_version(version: object) -> int:
    """Return `version` if it may number a version, else raise ConfigError."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version <= MAX_VERSION:
        raise ConfigError(f"version {version!r}: expected an int from 0 to {MAX_VERSION}")
    return version


def check_object(path: str) -> str:
    """Return `path` if it is a safe relative object path, else raise IntegrityError (it was read from storage)."""
    parts = path.split("/")
    if len(path) > 1024 or any(p in ("", ".", "..") or "\\" in p or "\0" in p or len(p) > 255 for p in parts):
        raise IntegrityError(f"object path {path!r} leads outside of its version; the block table is not trustworthy")
    return path


def root_name(version: int) -> str:
    return f"v{version:0{ROOT_DIGITS}d}.json"


def attempt_name(version: int, attempt: str) -> str:
    return f"v{version:0{ROOT_DIGITS}d}-{attempt}"


def protected_name(run_uuid: str) -> str:
    return f"protected-{run_uuid}"


def run_name(run: int) -> str:
    return f"{run:0{ROOT_DIGITS}d}.json"


def parse_root(entry: str) -> int | None:
    """The version of a root's file name, None for other entries."""
    found = _ROOT.fullmatch(entry)
    return int(found[1]) if found else None


def parse_attempt(entry: str) -> tuple[int, str] | None:
    """Version and attempt of an attempt's directory name, None for other entries."""
    found = _ATTEMPT.fullmatch(entry)
    return (int(found[1]), found[2]) if found else None


def parse_protected(entry: str) -> str | None:
    found = _PROTECTED.fullmatch(entry)
    return found[1] if found else None


def parse_run(entry: str) -> int | None:
    found = _RUN.fullmatch(entry)
    return int(found[1]) if found else None


def segment_path(number: int) -> str:
    return f"{TABLE}/{number:05d}.seg"


def key_path(key: object, number: int) -> str:
    """The directory of a protected key: a digest, since keys may be of any length and hold anything.

    The number tells the snapshots of a key apart that is protected, unprotected and protected again.
    """
    digest = hashlib.sha256(repr(key).encode(errors="surrogatepass")).hexdigest()[:40]
    return f"{digest[:2]}/{digest}-{number}"


def item_path(parts: Iterable[object], taken: set[str]) -> str:
    """A readable, unique directory for the item found at `parts` (dict keys and list positions) of a saved value.

    Parts that are not plain words get a digest appended, so ``{"u": ...}`` lies in ``u/`` and ``{"u/../v": ...}`` in
    something harmless. Paths that are the same but for case (some file systems fold it) get a number, and so do those that
    would lie inside another item: ``{1: ..., "1": {"c": ...}}``.

    Parameters
    ----------
    taken
        What earlier calls for the same version have returned, folded, and their directories with a slash at the end; the
        caller keeps it, and starts with an empty one.
    """
    words = [str(p) for p in parts] or ["value"]
    clean = [
        w
        if _PART.fullmatch(w) and w.casefold() not in (META, TABLE) and not w.casefold().endswith(".json")
        else re.sub(r"[^A-Za-z0-9_=-]", "_", w)[:40] + "="
        for w in words
    ]
    path = "/".join(clean)
    if clean != words or len(path) > 400:
        path = (
            path[:400].rstrip("/.")
            + "-"
            + hashlib.sha256("\0".join(words).encode(errors="surrogatepass")).hexdigest()[:12]
        )
    *above, last = path.split("/")
    directory = ""
    for part in above:
        directory = _free(directory + part, lambda p: p not in taken) + "/"
    path = _free(directory + last, lambda p: taken.isdisjoint((p, p + "/")))
    folded = path.casefold()
    taken.add(folded)
    taken.update(folded[: n + 1] for n, c in enumerate(folded) if c == "/")
    return path


def _free(path: str, is_free: Callable[[str], bool]) -> str:
    """The path, with the first number after it for which its folded form is free."""
    found, n = path, 1
    while not is_free(found.casefold()):
        n += 1
        found = f"{path}={n}"
    return found
