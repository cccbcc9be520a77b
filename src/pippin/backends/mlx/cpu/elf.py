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
from pathlib import Path

RTLD_DI_LINKMAP = 2
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 5, 6, 7, 8, 23
# Relocations that hold a function's address: GLOB_DAT and JUMP_SLOT.
SLOT_TYPES = {"x86_64": {6, 7}, "aarch64": {1025, 1026}}


class LinkMap(ctypes.Structure):
    _fields_ = (
        ("l_addr", ctypes.c_uint64),
        ("l_name", ctypes.c_char_p),
        ("l_ld", ctypes.c_uint64),
    )


class Dynamic(ctypes.Structure):
    _fields_ = (("d_tag", ctypes.c_int64), ("d_val", ctypes.c_uint64))


class Relocation(ctypes.Structure):
    _fields_ = (
        ("r_offset", ctypes.c_uint64),
        ("r_type", ctypes.c_uint32),
        ("r_symbol", ctypes.c_uint32),
        ("r_addend", ctypes.c_int64),
    )


class Symbol(ctypes.Structure):
    _fields_ = (
        ("st_name", ctypes.c_uint32),
        ("st_info", ctypes.c_uint8),
        ("st_other", ctypes.c_uint8),
        ("st_shndx", ctypes.c_uint16),
        ("st_value", ctypes.c_uint64),
        ("st_size", ctypes.c_uint64),
    )


def imported_slots(path: Path, names: Iterable[str]) -> dict[str, int]:
    """Address of the slot through which a loaded library calls each of `names` that it imports."""
    slot_types = SLOT_TYPES.get(platform.machine())
    if slot_types is None:
        raise OSError(f"cannot redirect calls on {platform.machine()}")
    wanted = {name.encode() for name in names}
    link_map = _link_map(path)
    dynamic = {entry.d_tag: entry.d_val for entry in _dynamic_section(link_map.l_ld)}
    if dynamic[DT_SYMTAB] < link_map.l_addr:
        raise OSError("the loader keeps relative addresses: not a glibc we know")
    slots = {}
    for table, nbytes in ((DT_JMPREL, DT_PLTRELSZ), (DT_RELA, DT_RELASZ)):
        for reloc in _relocations(dynamic.get(table, 0), dynamic.get(nbytes, 0)):
            if reloc.r_type not in slot_types:
                continue
            offset = dynamic[DT_SYMTAB] + reloc.r_symbol * ctypes.sizeof(Symbol)
            symbol = Symbol.from_address(offset)
            name = ctypes.string_at(dynamic[DT_STRTAB] + symbol.st_name)
            if name in wanted:
                slots[name.decode()] = link_map.l_addr + reloc.r_offset
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


def _link_map(path: Path) -> LinkMap:
    """The loader's record of a library that is already loaded; does not load it."""
    handle = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    libdl = ctypes.CDLL(None)
    found = ctypes.POINTER(LinkMap)()
    dlinfo = libdl.dlinfo
    dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    if dlinfo(handle._handle, RTLD_DI_LINKMAP, ctypes.byref(found)) != 0:
        raise OSError(f"the dynamic linker does not know {path}")
    return found.contents


def _dynamic_section(address: int) -> Iterator[Dynamic]:
    while (entry := Dynamic.from_address(address)).d_tag != 0:
        yield entry
        address += ctypes.sizeof(Dynamic)


def _relocations(address: int, nbytes: int) -> Iterator[Relocation]:
    size = ctypes.sizeof(Relocation)
    for at in range(address, address + nbytes, size):
        yield Relocation.from_address(at)
