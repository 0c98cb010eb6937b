"""manifest.json of a finished folder: the SHA-256 of every file, so that a flipped bit has a name."""

from pathlib import Path

from modicum.store.atomic import write_json
from modicum.store.errors import UserError
from modicum.store.hashes import hash_file
from modicum.store.reading import read_json

MANIFEST = "manifest.json"


def write_manifest(directory: Path) -> dict[str, str]:
    """Hash every file below `directory` into its manifest.json; returns {relative name: SHA-256}."""
    names = sorted(
        path.relative_to(directory).as_posix()
        for path in directory.rglob("*")
        if path.is_file() and path != directory / MANIFEST
    )
    hashes = {name: hash_file(directory / name) for name in names}
    write_json(directory / MANIFEST, {"files": hashes})
    return hashes


def read_manifest(directory: Path) -> dict[str, str]:
    """The manifest's {relative name: SHA-256}. Raises UserError when it is missing or not readable as one."""
    path = directory / MANIFEST
    if not path.is_file():
        raise UserError(f"{path}: missing, so the folder is not complete; take another checkpoint")
    try:
        files = read_json(path)["files"]
        return {str(name): str(digest) for name, digest in files.items()}
    except (UserError, KeyError, AttributeError):
        raise UserError(f"{path}: not a manifest; the folder is damaged, take another checkpoint") from None


def verify_manifest(directory: Path) -> None:
    """Raise UserError naming every file that is missing or whose bytes changed since the manifest was written."""
    faults = []
    for name, digest in read_manifest(directory).items():
        path = directory / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            faults.append(f"{directory / MANIFEST}: names a file outside its folder: {name}")
        elif not path.is_file():
            faults.append(f"{path}: missing")
        elif hash_file(path) != digest:
            faults.append(f"{path}: damaged (its SHA-256 is not the one in {MANIFEST})")
    if faults:
        raise UserError("\n".join([*faults, "take another checkpoint, or copy these files again"]))
