"""A folder of compiled code, each file named by a hash of all that it was made from.

Nothing here is ever stale: a change of the text, of the target or of LLVM changes the name. Files are
written whole under another name and then renamed, and carry a digest, so that neither a killed process nor
a truncated or foreign file gives more than a fresh compilation.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from functools import cache
from pathlib import Path

import platformdirs

_DIGEST_BYTES = hashlib.sha256().digest_size


def content_hash(*parts: str) -> str:
    """A short hexadecimal hash of some texts, kept apart from one another."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:24]


@cache
def cache_folder() -> Path:
    """Where compiled code is kept: ``NUMBA_MLA_CACHE_DIR``, or the user's cache folder, or a temporary one.

    The last is for homes that cannot be written; it holds for this user and machine until it is cleaned up.
    """
    named = os.environ.get("NUMBA_MLA_CACHE_DIR")
    fallback = Path(tempfile.gettempdir()) / f"numba_mla-{getattr(os, 'getuid', lambda: 'user')()}"
    candidates = [Path(named)] if named else [Path(platformdirs.user_cache_dir("numba_mla", appauthor=False))]
    for folder in [*candidates, fallback]:
        if _is_writable(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix="numba_mla-"))


def _is_writable(folder: Path) -> bool:
    """Whether the folder is there (or can be made), is the user's own, and takes files."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            return False
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def load(name: str) -> bytes | None:
    """The content kept under a name; None if there is none or it is damaged."""
    try:
        data = (cache_folder() / name).read_bytes()
    except OSError:
        return None
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def save(name: str, content: bytes) -> None:
    """Keep some content under a name; where the folder cannot be written, nothing is kept."""
    folder = cache_folder()
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}-")
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
        os.replace(temporary, folder / name)
    except OSError:
        return
