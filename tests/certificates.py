"""A certificate for localhost that no authority has signed."""

import subprocess
from pathlib import Path


def self_signed(folder: Path) -> tuple[Path, Path]:
    """The certificate alone, as clients trust it, and with its key, as a server needs it."""
    certificate, both = folder / "certificate.pem", folder / "both.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*make.split(), "-keyout", both, "-out", certificate], check=True, capture_output=True)
    with both.open("a") as file:
        file.write(certificate.read_text())
    return certificate, both
