"""Finds and rewrites slots of a loaded library's global offset table. Knows nothing of BLAS.

Reads the dynamic section of the library as the loader holds it in memory (64-bit glibc Linux), so
there is no file to parse and no tool to install:

    link_map.l_ld -> DT_JMPREL, DT_RELA  -> relocation (slot offset, symbol index)
                     DT_SYMTAB, DT_STRTAB -> the symbol's name
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from collections.abc import Iterable, Iterator
from ctypes import string_at
from pathlib import Path
from struct import Struct

RTLD_DI_LINKMAP = 2
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 5, 6, 7, 8, 23
# Relocations that hold a function's address: GLOB_DAT and JUMP_SLOT.
SLOT_TYPES = {"x86_64": {6, 7}, "aarch64": {1025, 1026}}

DYNAMIC = Struct("=qQ")  # tag, value
RELOCATION = Struct("=QIIq")  # offset, type, symbol, addend
SYMBOL = Struct("=IBBHQQ")  # name, and what is not read here


def imported_slots(path: Path, names: Iterable[str]) -> dict[str, int]:
    """Address of the slot through which a loaded library calls each of `names` that it imports."""
    slot_types = SLOT_TYPES.get(platform.machine())
    if slot_types is None:
        raise OSError(f"cannot redirect calls on {platform.machine()}")
    wanted = {name.encode() for name in names}
    base, section = _loaded_at(path)
    dynamic = dict(_dynamic_entries(section))
    if dynamic[DT_SYMTAB] < base:
        raise OSError("the loader keeps relative addresses: not a glibc we know")
    slots = {}
    for table, nbytes in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        relocations = string_at(dynamic[table], dynamic[nbytes]) if table in dynamic else b""
        for offset, kind, number, _ in RELOCATION.iter_unpack(relocations):
            if kind not in slot_types:
                continue
            symbol = string_at(dynamic[DT_SYMTAB] + number * SYMBOL.size, SYMBOL.size)
            name = string_at(dynamic[DT_STRTAB] + SYMBOL.unpack(symbol)[0])
            if name in wanted:
                slots[name.decode()] = base + offset
    return slots


def load_address(library: ctypes.CDLL, name: str) -> int:
    address = ctypes.cast(library[name], ctypes.c_void_p).value
    assert address is not None
    return address


def write_slot(slot: int, address: int) -> None:
    """Point a slot elsewhere. Its page may be read-only after relocation: unlock it first."""
    page = slot & ~(mmap.PAGESIZE - 1)
    libc = ctypes.CDLL(None, use_errno=True)
    mprotect = libc.mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if mprotect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mprotect: {os.strerror(code)}")
    ctypes.c_uint64.from_address(slot).value = address


def _loaded_at(path: Path) -> tuple[int, int]:
    """Of a library that is already loaded, the first address and that of its dynamic section: the
    loader's record (`link_map`) begins with l_addr, l_name, l_ld."""
    handle = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    found = ctypes.POINTER(ctypes.c_uint64)()
    dlinfo = ctypes.CDLL(None).dlinfo
    dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    if dlinfo(handle._handle, RTLD_DI_LINKMAP, ctypes.byref(found)) != 0:
        raise OSError(f"the dynamic linker does not know {path}")
    return found[0], found[2]


def _dynamic_entries(address: int) -> Iterator[tuple[int, int]]:
    while (entry := DYNAMIC.unpack(string_at(address, DYNAMIC.size)))[0] != 0:
        yield entry
        address += DYNAMIC.size
