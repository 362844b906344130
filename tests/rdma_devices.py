"""RDMA devices as /sys and /dev show them, on machines made of folders."""

from pathlib import Path


def put_rdma_device(root: Path, name: str, state: str = "4: ACTIVE", layer: str = "Ethernet") -> Path:
    """A device with one port and a file in /dev, whose path is returned: without it programs cannot open the device."""
    port = root / "sys/class/infiniband" / name / "ports/1"
    port.mkdir(parents=True, exist_ok=True)
    for entry, text in {"state": state, "link_layer": layer, "rate": "400 Gb/sec (4X NDR)"}.items():
        (port / entry).write_text(f"{text}\n")
    verbs = root / "sys/class/infiniband_verbs" / f"uverbs{name.rpartition('_')[2]}"
    verbs.mkdir(parents=True, exist_ok=True)
    (verbs / "ibdev").write_text(f"{name}\n")
    file = root / "dev/infiniband" / verbs.name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file
