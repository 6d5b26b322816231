"""Files in a folder that a program may read, which it is not to see: those that are closed to others, and keys.

A sandbox that shows a folder as it is gives a program the rights of its user there. Root may read everything.
"""

from __future__ import annotations

import os
import stat
import time
from functools import cache

from atropos_core import console

MOST = 1000  # private files of one folder: each is a mount
PATIENCE_S = 120.0  # for looking through one folder, on a slow disk
KEY_FOLDERS = frozenset({".ssh", ".gnupg", ".aws", ".azure", ".kube", ".docker", ".password-store"})
KEY_FILES = frozenset({
    "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk", ".netrc", "_netrc", ".git-credentials",
    ".pypirc", ".npmrc", ".env", ".pgpass", ".my.cnf", ".dockercfg", ".boto", ".s3cfg", ".vault-token", "kubeconfig",
    "credentials.json", "application_default_credentials.json",
})  # fmt: skip
KEY_STORES = (".p12", ".pfx", ".jks", ".keystore", ".kdbx", ".ppk")
MAY_HOLD_KEYS = (".pem", ".key")  # or certificates, which are public
KEY_MARK = b"PRIVATE KEY-----"


@cache
def private_in(folder: str) -> tuple[str, ...]:
    """Paths of files and folders below `folder` that others may not read, or that are named or marked as keys are. Looked for
    once in the life of this process. The folder itself if it has too many, or takes too long to look through.

    The permissions in a folder that is itself closed to others say nothing: its user closes every file (umask 077)."""
    found: list[str] = []
    try:
        closed_means_private = bool(os.stat(folder).st_mode & stat.S_IROTH)
    except OSError:
        return ()
    waiting, until = [folder], time.monotonic() + PATIENCE_S
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        continue
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if (closed_means_private and not mode & stat.S_IROTH) or _is_key(entry, mode):
                        found.append(entry.path)
                    elif stat.S_ISDIR(mode):
                        waiting.append(entry.path)
        except OSError:
            continue  # gone; or closed to this process, and so to what it starts
        if len(found) > MOST or time.monotonic() > until:
            why = (
                f"it has more than {MOST:,} private files" if len(found) > MOST else f"it takes over {PATIENCE_S:.0f} s"
            )
            console.warn(f"programs in a sandbox do not see {folder}: looking for private files in it, {why}.")
            return (folder,)
    return tuple(found)


def _is_key(entry: os.DirEntry[str], mode: int) -> bool:
    if stat.S_ISDIR(mode):
        return entry.name in KEY_FOLDERS
    name = entry.name.lower()
    if name in KEY_FILES or name.startswith(".env.") or name.endswith(KEY_STORES):
        return True
    if not name.endswith(MAY_HOLD_KEYS) or not stat.S_ISREG(mode):
        return False
    with open(entry.path, "rb") as file:
        return KEY_MARK in file.read(1 << 16)
