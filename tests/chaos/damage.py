"""Files at rest, damaged as a failing disk would, and what must be said or put right after it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

from swarm_support import ROLLOUT

from barnraise.protocol.manifest import WEIGHTS_FILE, check_shard
from barnraise.protocol.messages import Manifest, Signed
from barnraise.protocol.version_folder import folder_matches
from barnraise.protocol.wire import decode

MAX_LAG = ROLLOUT["max_lag"]
Outcome = Callable[[], str]
"""Why a damaged file was neither found nor repaired, ``""``: it was. Called when all is at rest again."""


def damage(how: str, home: Path, log: Path, random: Random) -> Outcome | None:
    """Damage a file of that kind below ``home`` (a node's data, or the run folder); None: there is none yet.

    Its process is not alive, but for ``version while it lives``. ``log``: where it will say so.
    """
    said = log.stat().st_size if log.exists() else 0

    def tells(*words: str) -> Outcome:
        def outcome() -> str:
            with log.open("rb") as file:
                file.seek(said)
                text = file.read().decode(errors="replace")
            return "" if all(word in text for word in words) else f"nothing in {log} says {words} after {how}"

        return outcome

    match how:
        case "snapshot":
            command = [sys.executable, "-P", "-m", "barnraise.coordinator.snapshot_child", str(home)]
            subprocess.run(command, check=False, capture_output=True, timeout=120)
            path = max((home / "snapshots").glob("*.bin"), default=None)
            return flip(path, random) and tells(path.name, "the journal is replayed instead")  # type: ignore[union-attr]
        case "tile":
            files = [p for p in (home / "log" / "tile").rglob("*") if p.is_file()]
            # Of a tile that is not full, shorter ones lie beside it for a while: no checkpoint needs them.
            newest = {p.parent: max(q.name.zfill(4) for q in files if q.parent == p.parent) for p in files}
            tiles = sorted(p for p in files if p.parent.suffix != ".p" or p.name.zfill(4) == newest[p.parent])
            path = random.choice(tiles) if tiles else None
            return flip(path, random) and tells("damaged or missing files were written again")
        case "shard":
            return _shard(home, random)
        case "version" | "version while it lives":
            path = max(home.glob(f"runs/*/versions/v*/{WEIGHTS_FILE}"), default=None)
            return flip(path, random) and (lambda: unsound(home))
        case "lease":
            run = next(home.glob("runs/*/receipts.bin"), None)
            if run is None:
                return None
            run.with_name("lease.bin").write_bytes(random.randbytes(300))
            return tells("lease.bin")
        case "known":
            return flip(home / "known.json", random, b"\0") and tells(
                "cannot read", "known.json", "delete it"
            )
        case "receipts":
            path = next(home.glob("runs/*/receipts.bin"), None)
            return flip(path, random) and tells("receipts.bin was damaged")
    raise ValueError(how)


def flip(path: Path | None, random: Random, to: bytes = b"") -> bool:
    """Change one byte somewhere (the first, to ``to``, if given); false: there is none."""
    if path is None or not path.is_file() or not (data := bytearray(path.read_bytes())):
        return False
    if to:
        data[0] = to[0]
    else:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    with path.open("r+b") as file:  # in place: as the disk would, and as hard links see it
        file.write(data)
    return True


def _shard(home: Path, random: Random) -> Outcome | None:
    """A shard in the store: one that is there, else one of the newest version, planted wrong."""
    found = sorted(p for p in (home / "store").rglob("*") if p.is_file() and len(p.name) == 64)
    if found:
        flip(random.choice(found), random)
    else:
        newest = max(home.glob("runs/*/versions/*.manifest"), default=None)
        if newest is None:
            return None
        shard = decode(decode(newest.read_bytes(), Signed).payload, Manifest).files[0].shards[0]
        path = home / "store" / shard.hex()[:2] / shard.hex()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.randbytes(1000))
    return lambda: unsound(home)


def unsound(home: Path) -> str:
    """Which assembled version or shard at rest is not what its name says; ``""``: none.

    Versions that no unit can ask for any more do not count: a node looks at one when it loads it, and
    of a node that was away for long the last before that stay beside the newest.
    """
    found = [
        (path.with_suffix(""), decode(decode(path.read_bytes(), Signed).payload, Manifest))
        for path in home.glob("runs/*/versions/*.manifest")
    ]
    newest = max((manifest.version for _, manifest in found), default=0)
    for folder, manifest in found:
        if manifest.version < newest - MAX_LAG:
            continue
        if folder.is_dir() and not folder_matches(manifest, folder):
            return f"{folder} is not what its manifest says"
    for path in (home / "store").glob("??/*"):
        if len(path.name) == 64 and not check_shard(path.read_bytes(), bytes.fromhex(path.name)):
            return f"{path} is not the shard that its name says"
    return ""
