"""A witness's memory on the disk: the last head of each log, and evidence against logs that lied."""

from __future__ import annotations

import hashlib
from pathlib import Path

from barnraise.protocol.durable import write_durably
from barnraise.protocol.errors import BarnraiseError, MalformedError, SignatureError, StorageError
from barnraise.protocol.evidence import MAX_EVIDENCE_FILE, check_evidence, encode_evidence
from barnraise.protocol.messages import Signed
from barnraise.protocol.notes import MAX_NOTE, Ed25519Key
from barnraise.protocol.tlog_checkpoint import Head, open_checkpoint
from barnraise.protocol.witness import Conflict, Unproven


class WitnessStore:
    """``FOLDER/<16 hex digits>.checkpoint`` for each log, and ``FOLDER/evidence-*.json``. Blocking.

    The folder is the witness: whoever deletes it while keeping the key makes a witness that
    may contradict itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def last(self, key: Ed25519Key) -> Head | None:
        """The head that was kept last for this log, its signature checked again; None: none ever was.

        Raises:
            StorageError: it cannot be read, or is damaged: this witness must not go on as if new.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_NOTE + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError(f"cannot read {path} ({error.strerror})") from None
        try:
            return open_checkpoint(data, key)
        except (MalformedError, SignatureError) as error:
            raise StorageError(
                f"{path} is damaged ({error}): restore it from a backup; until then this witness says nothing"
            ) from None

    def keep(self, key: Ed25519Key, head: Head) -> None:
        """Make a head the last of its log, durably: afterwards it may be cosigned.

        Raises:
            StorageError: the disk refused; the one before is still the last.
        """
        write_durably(self._path(key), head.note)

    def keep_evidence(
        self, key: Ed25519Key, trouble: Conflict | Unproven, run_spec: Signed | None = None
    ) -> Path:
        """Write what convicts a log, and return where. The same trouble is written to the same file.

        Raises:
            StorageError: the disk refused.
        """
        path = self.evidence_path(key, trouble, run_spec)
        if not path.exists():
            write_durably(path, encode_evidence(key, trouble, run_spec))
        return path

    def evidence_path(
        self, key: Ed25519Key, trouble: Conflict | Unproven, run_spec: Signed | None = None
    ) -> Path:
        """Where ``keep_evidence`` writes it."""
        digest = hashlib.sha256(encode_evidence(key, trouble, run_spec)).hexdigest()
        kind = "split-view" if isinstance(trouble, Conflict) else "unproven"
        return self.folder / f"evidence-{kind}-{digest[:16]}.json"

    def conviction(self, key: Ed25519Key) -> tuple[Path | None, Conflict | None]:
        """Where the first proof against a log is, and the proof.

        Where a file is damaged, without the proof: a log that was caught stays so, whatever the disk lost.
        """
        found = sorted(self.folder.glob("evidence-split-view-*.json"))
        for path in found:
            try:
                with path.open("rb") as file:
                    evidence = check_evidence(file.read(MAX_EVIDENCE_FILE + 1))
            except (OSError, BarnraiseError):
                continue
            if evidence.key == key and isinstance(evidence.trouble, Conflict):
                return path, evidence.trouble
        return (found[0] if found else None), None

    def _path(self, key: Ed25519Key) -> Path:
        return self.folder / f"{hashlib.sha256(key.name.encode()).hexdigest()[:16]}.checkpoint"
