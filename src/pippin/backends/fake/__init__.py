"""A deterministic toy model behind the real contract, for tests of the scheduler and the cache.

It knows no arrays, and is as cruel as a real device: work runs late, bytes are counted, and reading
what has not been written yet, or was given back, raises.
"""

from pippin.backends.fake.backend import BYTES_PER_TOKEN, FakeBackend
from pippin.backends.fake.device import FakeDevice, FutureMap
from pippin.backends.fake.payloads import FakePayload, Ledger
from pippin.backends.fake.pending import FakePending
from pippin.backends.fake.toy import MASK, ToyRow, mix, placed

__all__ = [
    "BYTES_PER_TOKEN",
    "MASK",
    "FakeBackend",
    "FakeDevice",
    "FakePayload",
    "FakePending",
    "FutureMap",
    "Ledger",
    "ToyRow",
    "mix",
    "placed",
]
