"""A deterministic toy model behind the real contract, for tests of the scheduler and the cache.

It knows no arrays, and is as strict as a real device: work runs late, bytes are counted, and
reading what has not been written yet, or was released, raises.
"""

from pippin.backends.fake.backend import BYTES_PER_TOKEN, FakeBackend, fake_device
from pippin.backends.fake.payloads import FakePayload
from pippin.backends.fake.pending import FakePending
from pippin.backends.fake.toy import mix, placed

__all__ = [
    "BYTES_PER_TOKEN",
    "FakeBackend",
    "FakePayload",
    "FakePending",
    "fake_device",
    "mix",
    "placed",
]
