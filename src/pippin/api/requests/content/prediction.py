"""The reply that a client expects, as OpenAI's predicted outputs have it. Knows no tokens."""

from __future__ import annotations

from pippin.api.model_info import RequestRules
from pippin.api.requests.body import Body
from pippin.api.requests.content.text_parts import texts_of


def read_prediction(body: Body, rules: RequestRules) -> str:
    """Of a checked request; empty if it has none, or if nothing is done with it here."""
    given = body.object("prediction")
    if given is None:
        return ""
    text = "".join(texts_of(given, "content"))
    if not rules.model.takes_predictions:
        body.ignore("prediction", "this server has no drafts from texts (--speculate suffix)")
        return ""
    return text
