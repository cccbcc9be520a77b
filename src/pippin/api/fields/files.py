"""The fields of files and batches (OpenAI's). Knows no file."""

from __future__ import annotations

from pippin.api.batches.batch import ENDPOINTS, WINDOWS_S
from pippin.api.fields import value_kinds as kinds
from pippin.api.fields.table import FieldTable, Members

MAX_LISTED_FILES, MAX_LISTED_BATCHES = 10_000, 100
PURPOSES = ("batch", "batch_output")
_EXPIRY = Members(
    "an object with an anchor of created_at, and seconds",
    table=FieldTable(
        {"anchor": kinds.one_of("created_at"), "seconds": kinds.integer_from(3_600, 2_592_000)},
        required=("anchor", "seconds"),
    ),
)
UPLOAD = FieldTable(  # beside the file
    {"purpose": kinds.one_of("batch"), "expires_after": _EXPIRY}, required=("purpose",)
)
BATCH = FieldTable(
    {
        "input_file_id": kinds.LABEL,
        "endpoint": kinds.one_of(*ENDPOINTS),
        "completion_window": kinds.one_of(*WINDOWS_S),
        "metadata": kinds.Labels(),
        "output_expires_after": _EXPIRY,
    },
    required=("input_file_id", "endpoint", "completion_window"),
)
FILE_LIST = FieldTable(  # of a query
    {
        "purpose": kinds.one_of(*PURPOSES),
        "limit": kinds.integer_from(1, MAX_LISTED_FILES),
        "order": kinds.one_of("asc", "desc"),
        "after": kinds.STRING,
    }
)
BATCH_LIST = FieldTable({"limit": kinds.integer_from(1, MAX_LISTED_BATCHES), "after": kinds.STRING})
NO_FIELDS = FieldTable({})
