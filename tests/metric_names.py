"""Names of metrics: as a server exports them, as the documents and the dashboard use them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

DOCS = Path(__file__).parent.parent / "docs" / "operations"
CURRENT = (DOCS / "metrics.md").read_text(encoding="utf-8")


def families(text: str) -> dict[str, Metric]:
    """By the name that a query uses; without the times at which counters were created."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    }


def documented() -> set[str]:
    cells = re.findall(r"^\| (`pippin_.*?) \|", CURRENT, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(pippin_\w+)", cell)}


def documented_status_fields() -> set[str]:
    chapter = CURRENT.split("## Fields of `/status`")[1]
    cells = re.findall(r"^\| (`.*?) \|", chapter, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)}


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text(encoding="utf-8"))
    return read


def names_in_dashboard() -> set[str]:
    """Of samples: those of a histogram end in `_bucket`."""
    return set(re.findall(r"\bpippin_\w+", json.dumps(dashboard())))
