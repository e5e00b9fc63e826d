"""What a volunteer chose, and where a node keeps its things.

The key lives in the user's configuration folder, outside of the program and of
the data folder: deleting the downloaded weights never costs anybody their credit (R8).

    <config>/barnraise/node.key       the identity, mode 0600
    <config>/barnraise/node.key.name  what it is called (barnraise.node.key_name)
    <data>/barnraise/                 NodeConfig.data
        lock                          held while a daemon runs; two daemons need two folders
        node.log                      everything that is printed, errors included (R24)
        control.sock                  the state tree, and commands
        traffic.json                  bytes up and down by month (the quota)
        limits.json                   limits and rules set while the node ran (barnraise limits set)
        mode.json                     a pause or finish that a crash must not undo
        supervisor.lock               held by whoever starts a crashed background node again, with its state
        node.err                      what a background node wrote to stderr
        invite                        the word that was given, for a node in the background or a service
        known.json                    whom each address led to, with which key and run; runs approved
        store/                        shards by content
        runs/<run id>/versions/       assembled policy versions
        runs/<run id>/receipts.bin    signed verdicts (R16)
        runs/<run id>/pending/        signed submissions that are not acknowledged yet (R17)
        runs/<run id>/kept/           the last that were rejected, for an appeal
        runs/<run id>/lease.bin       the lease at work: returned after a crash, or gone on with
        runs/<run id>/units/          block units at work or without a verdict (barnraise.node.units)
        runs/<run id>/residuals/      what rounding lost of block units' differences
        runs/<run id>/run.bin         the signed spec, and
        runs/<run id>/witness/        the newest head of the ledger that was seen, and proof against it
        runs/<run id>/overlay.json    nodes met lately: what finds them while the coordinator is away
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import platformdirs

from barnraise.protocol.messages import Hello
from barnraise.protocol.pseudonym import pseudonym

DEFAULT_DISK_BYTES = 20 * 10**9


def default_data_path() -> Path:
    """The per-user data folder, such as ``~/.local/share/barnraise``."""
    return Path(platformdirs.user_data_dir("barnraise", appauthor=False))


def default_key_path() -> Path:
    """The per-user key file, such as ``~/.config/barnraise/node.key``."""
    return Path(platformdirs.user_config_dir("barnraise", appauthor=False)) / "node.key"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Everything a person may set about one node.

    Attributes:
        address: the coordinator's full multiaddr, ending in ``/p2p/<peer id>``.
        more_addresses: others that lead to the same coordinator, tried in order after it (R2).
        name: what others see beside the credit; None: one made of the node's peer id. Never the host's,
            which may say who somebody is, and where.
        listen: multiaddrs to listen on for peers that fetch shards.
        engine: what draws rollouts: ``auto``, ``torch`` or ``vllm`` (``barnraise.node.engine_choice``).
        threads: the engine's while nobody uses the machine; 0: as set with ``barnraise limits set``
            (``limits_path``), else half of the cores.
        disk_bytes: most disk to use for shards, bytes; 0: as set, else ``DEFAULT_DISK_BYTES``.
        up_bytes_s, down_bytes_s: caps on everything sent and received, bytes/s; None: as set
            while the node ran before (``limits_path``), else no cap.
        monthly_bytes: most bytes up and down together in a calendar month; None: likewise.
        invite: a word from the run's operator that lets this key in, where a run takes not everybody.
        assume_yes: do not ask before joining an unknown run.
        exit_when_complete: end with exit code 0 once the run has published its last version.
        json_lines: print one JSON object per line instead of plain text.
        background: print nothing; a person is asked through the control socket alone.
        after_crash: what to tell about the crash that this start follows.
        heartbeat_s: seconds between heartbeats.
        gossip_s: seconds between shuffles of the broadcast tree's views, while they change.
        witness_s: seconds, about, between looks at the ledger's newest head.
        look_s: seconds between looks at what nothing tells of (room on the disk, a machine that slept).
        tree: whether to take part in the broadcast tree; without it weights come from peers one by one.
        hello: the protocol version to speak; None: this installation's own.
    """

    address: str
    data: Path
    key: Path
    more_addresses: tuple[str, ...] = ()
    name: str | None = None
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    engine: str = "auto"
    threads: int = 0
    disk_bytes: int = 0
    up_bytes_s: float | None = None
    down_bytes_s: float | None = None
    monthly_bytes: int | None = None
    invite: str = ""
    assume_yes: bool = False
    exit_when_complete: bool = False
    json_lines: bool = False
    background: bool = False
    after_crash: str = ""
    heartbeat_s: float = 5.0
    gossip_s: float = 10.0
    witness_s: float = 60.0
    look_s: float = 5.0
    tree: bool = True
    hello: Hello | None = None

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address that leads to the coordinator, in the order to try."""
        return (self.address, *self.more_addresses)

    def called(self, peer_id: str) -> str:
        """The name sent to the coordinator, which lies in the public ledger for ever."""
        return pseudonym(self.name or "", peer_id)

    @property
    def store_path(self) -> Path:
        return self.data / "store"

    @property
    def log_path(self) -> Path:
        return self.data / "node.log"

    @property
    def lock_path(self) -> Path:
        return self.data / "lock"

    @property
    def known_path(self) -> Path:
        return self.data / "known.json"

    @property
    def traffic_path(self) -> Path:
        return self.data / "traffic.json"

    @property
    def limits_path(self) -> Path:
        return self.data / "limits.json"

    @property
    def control_path(self) -> Path:
        """Where viewers find the daemon (``barnraise.protocol.control_place`` copes with long paths)."""
        return self.data / "control.sock"

    @property
    def wish_path(self) -> Path:
        """What was wished last, for a start after a crash (``barnraise.node.mode``)."""
        return self.data / "mode.json"

    @property
    def runs_path(self) -> Path:
        return self.data / "runs"

    def run_path(self, run_id: bytes) -> Path:
        """The folder of one run; 16 hex digits name it, which is enough to keep runs apart."""
        return self.runs_path / run_id.hex()[:16]
