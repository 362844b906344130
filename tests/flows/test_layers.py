"""The control plane never loads the data plane's libraries."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import importlib, sys
from pathlib import Path
for folder in ("flows", "tasks", "infra"):
    for path in Path(folder).rglob("*.py"):
        if path.name != "supervisor.py":
            importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
heavy = {"torch", "lightning", "transformers", "safetensors", "sglang"} & set(sys.modules)
assert "prefect" in sys.modules and not heavy, heavy
"""


def test_flows_tasks_and_infra_import_no_tensors() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, timeout=400, check=True)


def test_the_supervisor_needs_the_standard_library_alone() -> None:
    command = [
        sys.executable,
        "-I",
        "-S",
        str(ROOT / "infra" / "processes" / "supervisor.py"),
        "--grace",
        "1",
        "--",
        "true",
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd="/") as supervisor:
        assert supervisor.wait(300) == 0
