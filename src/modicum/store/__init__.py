"""Files that are whole or not there: atomic writes, hashes, manifests, run directories, and the user's error.

The lowest room: it knows nothing of models or text, and imports no other room.
"""

from modicum.store.atomic import (
    atomic_directory,
    refuse_taken,
    remove_leftovers,
    write_bytes,
    write_json,
    write_text,
)
from modicum.store.cache import cache_folder
from modicum.store.errors import UserError, written_by_numpy
from modicum.store.fingerprint import Fingerprints
from modicum.store.hashes import hash_file, hash_json, hash_tree
from modicum.store.lock import run_lock
from modicum.store.manifest import verify_manifest, write_manifest
from modicum.store.memory import free_memory, memory_limit
from modicum.store.processor import processor_flags, processor_name
from modicum.store.reading import read_json
from modicum.store.run import RunDirectory
from modicum.store.stage import Stage, StageManifest, peak_memory_bytes

__all__ = [
    "Fingerprints",
    "RunDirectory",
    "Stage",
    "StageManifest",
    "UserError",
    "atomic_directory",
    "cache_folder",
    "free_memory",
    "hash_file",
    "hash_json",
    "hash_tree",
    "memory_limit",
    "peak_memory_bytes",
    "processor_flags",
    "processor_name",
    "read_json",
    "refuse_taken",
    "remove_leftovers",
    "run_lock",
    "verify_manifest",
    "write_bytes",
    "write_json",
    "write_manifest",
    "write_text",
    "written_by_numpy",
]
