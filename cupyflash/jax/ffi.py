"""XLA's foreign function interface, in ctypes: a handler that runs a call where XLA has put its buffers.

The structs are those of xla/ffi/api/c_api.h, which promises not to reorder them; `tests/python/test_jax.py` compares
them with the header that jaxlib brings. A handler is called for what it is first (its metadata), then for every
execution, on any thread. It must not wait, allocate, or raise.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ..arrays.adapters import CPU
from .buffers import Buffer

_P = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_HEAD: list[tuple[str, Any]] = [("struct_size", _SIZE), ("extension", _P)]  # of every struct
_METADATA, _EXECUTE = 1, 3  # XLA_FFI_Extension_Type, XLA_FFI_ExecutionStage
_API_VERSION = 0, 1  # the oldest that XLA accepts: what is used here has been there since
_COMMAND_BUFFER_COMPATIBLE = 1
_INTERNAL = 13  # XLA_FFI_Error_Code


class Extension(ctypes.Structure):
    _fields_ = [("struct_size", _SIZE), ("type", ctypes.c_int), ("next", _P)]


class Version(ctypes.Structure):
    _fields_ = [*_HEAD, ("major", ctypes.c_int), ("minor", ctypes.c_int)]


class Metadata(ctypes.Structure):
    _fields_ = [("struct_size", _SIZE), ("version", Version), ("traits", ctypes.c_uint32)]


class MetadataExtension(ctypes.Structure):
    _fields_ = [("base", Extension), ("metadata", ctypes.POINTER(Metadata))]


class XlaBuffer(ctypes.Structure):
    _fields_ = [
        *_HEAD, ("dtype", ctypes.c_int), ("data", _P), ("rank", ctypes.c_int64),
        ("dims", ctypes.POINTER(ctypes.c_int64)),
    ]  # fmt: skip


class Buffers(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = [
        *_HEAD, ("size", ctypes.c_int64), ("types", _P), ("buffers", ctypes.POINTER(ctypes.POINTER(XlaBuffer))),
    ]  # fmt: skip


class Span(ctypes.Structure):
    """XLA_FFI_ByteSpan."""

    _fields_ = [("data", _P), ("size", _SIZE)]


class Attributes(ctypes.Structure):
    _fields_ = [*_HEAD, ("size", ctypes.c_int64), ("types", _P), ("names", _P), ("values", ctypes.POINTER(_P))]


class Api(ctypes.Structure):
    """XLA_FFI_Api, as far as it is used; functions are added at its end alone."""

    _fields_ = [
        *_HEAD, ("version", Version), ("internal", _P), ("Error_Create", _P), ("Error_GetMessage", _P),
        ("Error_Destroy", _P), ("Handler_Register", _P), ("Stream_Get", _P),
    ]  # fmt: skip


class CallFrame(ctypes.Structure):
    _fields_ = [
        *_HEAD, ("api", ctypes.POINTER(Api)), ("context", _P), ("stage", ctypes.c_int), ("args", Buffers),
        ("rets", Buffers), ("attrs", Attributes), ("future", _P),
    ]  # fmt: skip


class StreamArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("context", _P), ("stream", _P)]


class ErrorArgs(ctypes.Structure):
    _fields_ = [*_HEAD, ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


_CALL = ctypes.CFUNCTYPE(_P, _P)  # of the interface's functions: arguments -> error
_HANDLER = ctypes.CFUNCTYPE(_P, ctypes.POINTER(CallFrame))


class Frame(NamedTuple):
    """One execution: the call's text, its buffers, and the stream on a GPU."""

    text: bytes
    inputs: list[Buffer]
    results: list[Buffer]
    stream: int


def _buffers(given: Any, device: int) -> list[Buffer]:
    found = []
    for i in range(given.size):
        x = given.buffers[i].contents
        found.append(Buffer(x.data or 0, tuple(x.dims[: x.rank]), x.dtype, device))
    return found


def _stream(frame: Any) -> int:
    args = StreamArgs(ctypes.sizeof(StreamArgs), None, frame.context, None)
    error = _CALL(frame.api.contents.Stream_Get)(ctypes.addressof(args))
    if error:
        raise RuntimeError("XLA gives no stream")
    return args.stream or 0


def _text(frame: Any) -> bytes:
    span = ctypes.cast(frame.attrs.values[0], ctypes.POINTER(Span)).contents
    return ctypes.string_at(span.data, span.size)


def _failed(frame: Any, error: BaseException) -> Any:
    """XLA's error of an exception."""
    message = f"{type(error).__name__}: {error}".encode()
    args = ErrorArgs(ctypes.sizeof(ErrorArgs), None, message, _INTERNAL)
    return _CALL(frame.api.contents.Error_Create)(ctypes.addressof(args))


def _handler(run: Callable[[Frame], None] | None, device: Callable[[], int] | None) -> Any:
    """What XLA calls. device: the ordinal of the GPU that is current; None: the buffers are in host memory."""

    def handle(pointer: Any) -> Any:
        frame = pointer.contents
        try:
            if frame.extension:
                extension = ctypes.cast(frame.extension, ctypes.POINTER(MetadataExtension)).contents
                if extension.base.type == _METADATA:
                    metadata = extension.metadata.contents
                    metadata.version.major, metadata.version.minor = _API_VERSION
                    metadata.traits = _COMMAND_BUFFER_COMPATIBLE if device else 0
                    return None
            if frame.stage != _EXECUTE or run is None:
                return None
            where = device() if device else CPU
            found = Frame(
                _text(frame), _buffers(frame.args, where), _buffers(frame.rets, where), _stream(frame) if device else 0
            )
            run(found)
        except BaseException as e:  # what leaves a callback of ctypes is printed and lost
            return _failed(frame, e)
        return None

    return _HANDLER(handle)


_kept: list[Any] = []  # XLA has their addresses


@functools.cache
def _finish_before_exit() -> None:
    """What still runs when the interpreter ends would call into it, which ends its thread. Results are waited for. XLA
    itself is not taken down, since it would wait for the threads of results that nobody has any more, for ever."""

    def wait() -> None:
        for x in jax.live_arrays():
            with contextlib.suppress(Exception):
                x.block_until_ready()
        for platform in (None, "cpu"):
            with contextlib.suppress(RuntimeError):  # there is none
                client = jax.local_devices(backend=platform)[0].client
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))

    atexit.register(wait)


def register(name: str, run: Callable[[Frame], None] | None, device: Callable[[], int] | None) -> None:
    """Make `run` XLA's custom call of that name, on GPUs or in host memory; None does nothing, not even look at what it
    is given, and leaves results as they are: what any call costs."""
    _finish_before_exit()
    handler = _handler(run, device)
    _kept.append(handler)
    capsule = jax.ffi.pycapsule(ctypes.cast(handler, _P).value)
    jax.ffi.register_ffi_target(name, capsule, platform="CUDA" if device else "cpu")


def call(
    name: str,
    results: Sequence[jax.ShapeDtypeStruct],
    inputs: Sequence[Any],
    text: str,
    same: Mapping[int, int] | None = None,
) -> list[Any]:
    """The custom call, in JAX; `same`: number of an input -> that of the result that lies where it lies."""
    aliases = None if same is None else dict(same)
    made = jax.ffi.ffi_call(name, tuple(results), has_side_effect=False, input_output_aliases=aliases)
    return list(made(*inputs, call=text))
