"""What options of benchmarks have in common: lists, and files to write. Knows no benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, get_args

from cyclopts import CoercionError, Group, Parameter, Token, validators

from pippin.bench.results.report import Outputs


def split_list(hint: Any, tokens: Sequence[Token]) -> list[Any]:
    """`--batch 1,4,16` as well as `--batch 1 4 16`."""
    (kind,) = get_args(hint)
    texts = [text for token in tokens for text in token.value.split(",") if text]
    try:
        return [kind(text) for text in texts]
    except ValueError as error:
        raise CoercionError(token=tokens[0], target_type=kind) from error


Files = Annotated[Outputs, Parameter(name="*", group=Group("Output", sort_key=1))]
POSITIVE = Parameter(validator=validators.Number(gt=0))
Count = Annotated[int, POSITIVE]
Positive = Annotated[float, POSITIVE]
LIST = Parameter(converter=split_list, consume_multiple=True, negative="")
Names = Annotated[list[str] | None, LIST]
Numbers = Annotated[list[int] | None, LIST, POSITIVE]
Rates = Annotated[list[float] | None, LIST, POSITIVE]
