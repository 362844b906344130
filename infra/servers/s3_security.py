"""Keeps other users of this machine away from the parts of SeaweedFS that its S3 server uses.

The parts talk by gRPC over mutual TLS, with one certificate that is its own authority. Its key, in a folder that the
stack's user alone may enter, is what tells the stack from anybody else with SeaweedFS's tools. Files in the volumes
are read and written with tokens that the master signs.
"""

import json
import secrets
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from infra.files.atomic import write_atomically

CERTIFICATE, KEY = "certificate.pem", "key.pem"
NEVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""Stands for no expiration (RFC 5280, 4.1.2.5): a new certificate is made at each start anyway."""
PARTS = ("master", "volume", "filer", "s3")
"""SeaweedFS is four servers in one process, each with a port for HTTP and one for gRPC."""


def write_security(folder: Path) -> None:
    """Write a new certificate with its key, and `security.toml` that names them, each readable by its owner alone."""
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
