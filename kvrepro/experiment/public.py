"""Public data: data/sources.yml names files with commit and checksum; `kvrepro data` lists them, `kvrepro data NAME`
fetches one."""

import hashlib
import http.client
import os
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from kvrepro.errors import InputError
from kvrepro.paths import CACHE, DATA, replaced

SOURCES = DATA / "sources.yml"


def sources() -> dict[str, dict[str, Any]]:
    """The manifest: source name -> title, url, commit, licence, citation, files {path: {bytes, sha256}}."""
    return dict(yaml.safe_load(SOURCES.read_text(encoding="utf-8")))


def fetch(name: str) -> Path:
    """The verified local path of a public file ("artifact/data/longbench-balanced.jsonl", or the end of its path where
    that is unique), or the folder of a whole source ("artifact").

    Looks into the folders of $KVREPRO_DATA (read only), then data/cache, else downloads.
    Raises InputError when there is no network, and for a file with another size or checksum, which stays as it is.
    """
    manifest = sources()
    if name in manifest:
        source, paths = name, list(manifest[name]["files"])
    else:
        matches = [(s, p) for s in manifest for p in manifest[s]["files"] if f"/{s}/{p}".endswith(f"/{name}")]
        if len(matches) != 1:
            what = "is not in" if not matches else f"names {len(matches)} files of"
            raise InputError(f"'{name}' {what} data/sources.yml: see `kvrepro data`")
        source, paths = matches[0][0], [matches[0][1]]
    own_folders = [Path(folder) for folder in os.environ.get("KVREPRO_DATA", "").split(os.pathsep) if folder]
    folders = [place for folder in own_folders for place in (folder, folder / source)]
    folder = next((f for f in folders if all((f / path).is_file() for path in paths)), CACHE / source)
    for path in paths:
        file, entry = folder / path, manifest[source]["files"][path]
        if not file.is_file():
            _download(manifest[source]["url"].format(path=path), file, entry, f"{source}/{path}")
        _check(file, entry, f"remove it and run: kvrepro data {source}/{path}")
    return folder if name in manifest else folder / paths[0]


def _check(file: Path, entry: dict[str, Any], way_out: str) -> None:
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise InputError(f"{file} has {size} of {entry['bytes']} bytes: {way_out}")
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != entry["sha256"]:
        raise InputError(f"{file} has sha256 {digest[:12]}..., expected {entry['sha256'][:12]}...: {way_out}")


def _download(url: str, file: Path, entry: dict[str, Any], name: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replaced(file) as part:  # never under the final name until it is whole and right
            with urllib.request.urlopen(url, timeout=30) as reply, part.open("wb") as out:
                shutil.copyfileobj(reply, out)
            _check(part, entry, "the download is not the file of the manifest; try again")
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        way_out = f"connect to the network, or set KVREPRO_DATA to a folder that holds it as {name}"
        raise InputError(f"cannot download {url} ({reason}): {way_out}") from None
