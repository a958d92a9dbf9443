"""What a 64-bit little-endian ELF file asks for and offers, without binutils."""

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_DYNAMIC, _DYNSYM = 6, 11  # section types
_NEEDED, _SONAME = 1, 14  # tags of a dynamic entry
_WEAK = 2


@dataclass
class Library:
    """undefined: symbols that the loader must find elsewhere, or refuses the library. Weak ones are not among them."""

    path: Path
    soname: str
    needed: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


def read(path: Path) -> Library | None:
    """None for a file that is something else, such as a linker script."""
    with open(path, "rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, data)


def texts(path: Path, prefixes: tuple[str, ...], pattern: re.Pattern[str]) -> set[str]:
    """The strings of a file that match as a whole: names that it looks up at run time are such.

    Each starts with one of the prefixes, as a search for these is ten times faster than one for the pattern.
    """
    found = set()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for prefix in prefixes:
            start = b"\0" + prefix.encode()
            at = data.find(start)
            while at >= 0:
                text = data[at + 1 : data.find(b"\0", at + 1)].decode(errors="replace")
                if pattern.fullmatch(text):
                    found.add(text)
                at = data.find(start, at + 1)
    return found


def _read(path: Path, data: mmap.mmap) -> Library:
    library = Library(path, path.name)
    sections = list(_sections(data))
    for section in sections:
        names = sections[section.link].offset if section.link < len(sections) else 0
        if section.kind == _DYNAMIC:
            _read_dynamic(library, data, section, names)
        elif section.kind == _DYNSYM:
            _read_symbols(library, data, section, names)
    return library


def _sections(data: mmap.mmap) -> Iterator[_Section]:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    for index in range(count):
        fields = struct.unpack_from("<IIQQQQIIQQ", data, table + index * size)
        yield _Section(kind=fields[1], offset=fields[4], size=fields[5], link=fields[6])


def _read_dynamic(library: Library, data: mmap.mmap, section: _Section, names: int) -> None:
    for at in range(section.offset, section.offset + section.size, 16):
        tag, value = struct.unpack_from("<qQ", data, at)
        if tag == _NEEDED:
            library.needed.add(_string(data, names + value))
        elif tag == _SONAME:
            library.soname = _string(data, names + value)


def _read_symbols(library: Library, data: mmap.mmap, section: _Section, names: int) -> None:
    for at in range(section.offset, section.offset + section.size, 24):
        name, info, _, home = struct.unpack_from("<IBBH", data, at)
        if not name:
            continue
        if home:
            library.defined.add(_string(data, names + name))
        elif info >> 4 != _WEAK:
            library.undefined.add(_string(data, names + name))


def _string(data: mmap.mmap, at: int) -> str:
    return data[at : data.find(b"\0", at)].decode()
