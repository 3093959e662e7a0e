"""The structs of XLA's foreign function interface, in ctypes, and what reads one at once.

They are those of xla/ffi/api/c_api.h, which promises not to reorder them; `tests/python/test_jax.py` compares them
with the header that jaxlib brings.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable
from typing import Any

Pointer = ctypes.c_void_p
Size = ctypes.c_size_t
HEAD: list[tuple[str, Any]] = [("struct_size", Size), ("extension", Pointer)]  # of every struct


class Extension(ctypes.Structure):
    _fields_ = [("struct_size", Size), ("type", ctypes.c_int), ("next", Pointer)]


class Version(ctypes.Structure):
    _fields_ = [*HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int)]


class Metadata(ctypes.Structure):
    _fields_ = [("struct_size", Size), ("version", Version), ("traits", ctypes.c_uint32)]


class MetadataExtension(ctypes.Structure):
    _fields_ = [("base", Extension), ("metadata", ctypes.POINTER(Metadata))]


class XlaBuffer(ctypes.Structure):
    _fields_ = [
        *HEAD, ("dtype", ctypes.c_int), ("data", Pointer), ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]  # fmt: skip


class Buffers(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = [
        *HEAD, ("size", ctypes.c_int64), ("types", Pointer), ("buffers", ctypes.POINTER(ctypes.POINTER(XlaBuffer))),
    ]  # fmt: skip


class Span(ctypes.Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = [("data", Pointer), ("size", Size)]


class Attributes(ctypes.Structure):
    _fields_ = [
        *HEAD,
        ("size", ctypes.c_int64),
        ("types", Pointer),
        ("names", Pointer),
        ("values", ctypes.POINTER(Pointer)),
    ]


class Api(ctypes.Structure):
    """XLA_FFI_Api, as far as it is used; functions are added at its end alone."""

    _fields_ = [
        *HEAD, ("version", Version), ("internal", Pointer), ("Error_Create", Pointer), ("Error_GetMessage", Pointer),
        ("Error_Destroy", Pointer), ("Handler_Register", Pointer), ("Stream_Get", Pointer),
    ]  # fmt: skip


class CallFrame(ctypes.Structure):
    _fields_ = [
        *HEAD, ("api", ctypes.POINTER(Api)), ("context", Pointer), ("stage", ctypes.c_int), ("args", Buffers),
        ("rets", Buffers), ("attrs", Attributes), ("future", Pointer),
    ]  # fmt: skip


class StreamArgs(ctypes.Structure):
    _fields_ = [*HEAD, ("context", Pointer), ("stream", Pointer)]


class ErrorArgs(ctypes.Structure):
    _fields_ = [*HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


def format_of(kind: Any) -> str:
    """A type's fields one after the other, as `struct` names them: all at once they cost less than each by itself."""
    if not issubclass(kind, ctypes.Structure):
        return FORMATS.get(kind, "P")
    return "".join(format_of(field[1]) for field in kind._fields_)


FORMATS = {ctypes.c_size_t: "N", ctypes.c_int: "i", ctypes.c_int64: "q", ctypes.c_uint32: "I"}

MEMORY = (ctypes.c_char * sys.maxsize).from_address(0)  # all of it: what lies at an address has it as its index


def reader(kind: Any, count: int = 1) -> Callable[[int], tuple[Any, ...]]:
    """What lies at an address: a struct's fields, those of structs in it among them; or numbers of one kind."""
    return functools.partial(struct.Struct("@" + format_of(kind) * count).unpack_from, MEMORY)
