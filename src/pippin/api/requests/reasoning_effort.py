"""Reasoning effort as variables of the model's chat template. Knows no replies."""

from __future__ import annotations

import re
from typing import Any

from pippin.errors import UnsupportedField

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
DEFAULT = "medium"  # what clients send by default
# Variables that switch it on and off in templates, and how their use is recognised.
_SWITCHES = {
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(r"\b(?:if|not|and|or)\s+thinking\b(?!\.)"),
}


def reasoning_variables(
    effort: str | None, template: str, *, reasons: bool, param: str
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
            raise UnsupportedField(
                f"{param} is none; this model always reasons, and the lowest is low", param=param
            )
    if variables or effort == DEFAULT or (effort == "none" and not reasons):
        return variables
    raise UnsupportedField(
        f"{param} is {effort}; this model's template has no switch for reasoning: leave it out",
        param=param,
    )
