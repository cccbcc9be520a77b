"""Reasoning effort as variables of the model's chat template. Knows no replies."""

from __future__ import annotations

import re
from typing import Any

from pippin.api.requests.leniency import Leniency

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
DEFAULT = "medium"  # what clients send by default
# Variables that switch it on and off in templates, and how their use is recognised.
_SWITCHES = {
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(r"\b(?:if|not|and|or)\s+thinking\b(?!\.)"),
}


def reasoning_variables(
    effort: str | None, template: str, *, reasons: bool, param: str, leniency: Leniency
) -> dict[str, Any]:
    """Variables for the template; `reasons`: replies of this model may hold reasoning."""
    if effort is None:
        return {}
    variables: dict[str, Any] = {
        name: effort != "none" for name, use in _SWITCHES.items() if use.search(template)
    }
    if re.search(r"\breasoning_effort\b", template):
        # Templates with this variable have three levels of it, and none without reasoning.
        levels = {"minimal": "low", "xhigh": "high"}
        if effort != "none":
            variables["reasoning_effort"] = levels.get(effort, effort)
        elif not variables:
            leniency.ignore(param, "this model always reasons, and the lowest is low", effort)
            variables["reasoning_effort"] = "low"
    if not variables and effort != DEFAULT and (effort != "none" or reasons):
        leniency.ignore(param, "this model's template has no switch for reasoning", effort)
    return variables
