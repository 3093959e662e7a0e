"""XLA's foreign function interface, in ctypes: a handler that runs a call where XLA has put its buffers.

A handler is called for what it is first (its metadata), then for every execution, on any thread. It must not wait,
allocate, or raise.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ..arrays.adapters import CPU
from .buffers import Buffer
from .structs import (
    MEMORY,
    Api,
    CallFrame,
    ErrorArgs,
    MetadataExtension,
    Pointer,
    Span,
    StreamArgs,
    XlaBuffer,
    reader,
)

_METADATA, _EXECUTE = 1, 3  # XLA_FFI_Extension_Type, XLA_FFI_ExecutionStage
_API_VERSION = 0, 1  # the oldest that XLA accepts: what is used here has been there since
_COMMAND_BUFFER_COMPATIBLE = 1
_INTERNAL = 13  # XLA_FFI_Error_Code

_CALL = ctypes.PYFUNCTYPE(Pointer, Pointer)  # of the interface's functions, which are quick: arguments -> error
_HANDLER = ctypes.CFUNCTYPE(Pointer, Pointer)
_function = functools.lru_cache(maxsize=64)(_CALL)
_MOST = 64  # more arrays than a call has, more dimensions than an array
_read_frame, _read_buffer, _read_span, _read_pointer = map(reader, (CallFrame, XlaBuffer, Span, Pointer))
_read_pointers = [reader(Pointer, n) for n in range(_MOST)]
_read_dims = [reader(ctypes.c_int64, n) for n in range(_MOST)]
Kind = tuple[tuple[int, ...], int]  # shape and XLA's dtype


class Frame:
    """One execution: the call's text, its inputs and results, and the stream on a GPU.

    Attributes:
        addresses: of the inputs.
        device: the ordinal of the GPU, or -1.
    """

    __slots__ = ("_inputs", "_results", "addresses", "device", "stream", "text")

    def __init__(self, text: bytes, inputs: Sequence[int], results: Sequence[int], device: int, stream: int) -> None:
        self.text, self._inputs, self._results, self.device, self.stream = text, inputs, results, device, stream
        self.addresses = _addresses(inputs)

    @property
    def kinds(self) -> list[Kind]:
        """Of the inputs. To read them takes a tenth of an execution, and the text says the same."""
        return _buffers(self._inputs)[0]

    def drop(self, count: int) -> None:
        """Leave out so many of the last inputs."""
        self._inputs, self.addresses = self._inputs[:-count], self.addresses[:-count]

    def inputs(self) -> list[Buffer]:
        """As arrays."""
        return self._with_addresses(self.kinds, self.addresses)

    def result_addresses(self) -> list[int]:
        """All that a launch needs of them."""
        return _addresses(self._results)

    def results(self) -> list[Buffer]:
        return self._with_addresses(*_buffers(self._results))

    def _with_addresses(self, kinds: Sequence[Kind], addresses: Sequence[int]) -> list[Buffer]:
        together = zip(addresses, kinds, strict=True)
        return [Buffer(address, shape, dtype, self.device) for address, (shape, dtype) in together]


def _addresses(pointers: Sequence[int]) -> list[int]:
    return [_read_pointer(pointer + _DATA)[0] for pointer in pointers]


def _buffers(pointers: Sequence[int]) -> tuple[list[Kind], list[int]]:
    """What XLA's buffers hold, and where."""
    kinds: list[Kind] = []
    addresses = []
    for pointer in pointers:
        _, _, dtype, data, rank, dims = _read_buffer(pointer)
        kinds.append((_read_dims[rank](dims) if rank else (), dtype))
        addresses.append(data)
    return kinds, addresses


_DATA, _STREAM_GET = XlaBuffer.data.offset, Api.Stream_Get.offset
_free: list[tuple[StreamArgs, int]] = []  # of arguments, and their addresses: threads never share one


def _stream(api: int, context: int) -> int:
    try:
        args, address = _free.pop()
    except IndexError:
        args = StreamArgs(ctypes.sizeof(StreamArgs))
        address = ctypes.addressof(args)
    args.context = context
    if _function(_read_pointer(api + _STREAM_GET)[0])(address):
        raise RuntimeError("XLA gives no stream")
    found = args.stream or 0
    _free.append((args, address))
    return found


def _failed(api: int, error: BaseException) -> Any:
    """XLA's error of an exception."""
    message = f"{type(error).__name__}: {error}".encode()
    args = ErrorArgs(ctypes.sizeof(ErrorArgs), None, message, _INTERNAL)
    return _function(Api.from_address(api).Error_Create)(ctypes.addressof(args))


def _tell(extension: int, is_on_gpu: bool) -> bool:
    """Whether XLA asks what the handler is; then it is told."""
    found = MetadataExtension.from_address(extension)
    if found.base.type != _METADATA:
        return False
    metadata = found.metadata.contents
    metadata.version.major, metadata.version.minor = _API_VERSION
    metadata.traits = _COMMAND_BUFFER_COMPATIBLE if is_on_gpu else 0
    return True


def _handler(run: Callable[[Frame], None] | None, device: Callable[[], int] | None) -> Any:
    """What XLA calls. device: the ordinal of the GPU that is current; None: the buffers are in host memory."""

    def handle(pointer: int) -> Any:
        # The heads of the frame, its arguments, results and attributes, and between them what is used.
        (_, extension, api, context, stage, _, _, given, _, to_given, _, _, made, _, to_made, _, _, _, _, _, to_values,
         _) = _read_frame(pointer)  # fmt: skip
        try:
            if extension and _tell(extension, device is not None):
                return None
            if stage != _EXECUTE or run is None:
                return None
            data, size = _read_span(_read_pointer(to_values)[0])
            inputs = _read_pointers[given](to_given) if given else ()
            results = _read_pointers[made](to_made) if made else ()
            where, stream = (device(), _stream(api, context)) if device else (CPU, 0)
            text: Any = MEMORY[data : data + size]
            run(Frame(text, inputs, results, where, stream))
        except BaseException as e:  # what leaves a callback of ctypes is printed and lost
            return _failed(api, e)
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
    capsule = jax.ffi.pycapsule(ctypes.cast(handler, Pointer).value)
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
