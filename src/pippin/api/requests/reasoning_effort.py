"""How much a model is to reason, in the words of its own chat template. Knows no replies."""

from __future__ import annotations

import re
from typing import Any

from pippin.errors import UnsupportedField

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
DEFAULT = "medium"  # what clients send that want nothing in particular
# Variables of templates that switch it on and off, and how they are used where they are variables.
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
        # Templates that know the word know three levels of it, and no way to have none.
        levels = {"minimal": "low", "xhigh": "high"}
        if effort != "none":
            variables["reasoning_effort"] = levels.get(effort, effort)
        elif not variables:
            raise UnsupportedField(
                f"{param} is none, and this model's reasoning cannot be switched off: "
                "low is the least",
                param=param,
            )
    if variables or effort == DEFAULT or (effort == "none" and not reasons):
        return variables
    raise UnsupportedField(
        f"{param} is {effort}, and this model's chat template has no switch for reasoning",
        param=param,
    )
