"""XLA's side of a custom call: a call frame laid out by hand, with the stream of a pretended GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from cupyflash.jax import structs
from cupyflash.jax.buffers import Buffer

STREAM, CONTEXT = 0x7F00, 0x77
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


class XlaFrame:
    """One execution of a call, whose text is its attribute.

    Attributes:
        errors: what the handler complained of.
    """

    def __init__(self, text: str, inputs: Sequence[Buffer], results: Sequence[Buffer]) -> None:
        self.errors: list[str] = []
        self._kept: list[Any] = []  # what addresses in the frame point to
        span = self._keep(
            structs.Span(ctypes.addressof(self._keep(ctypes.create_string_buffer(text.encode()))), len(text))
        )
        values = self._keep((ctypes.c_void_p * 1)(ctypes.addressof(span)))
        api = self._keep(structs.Api())
        api.Stream_Get, api.Error_Create = map(self._function, (self._give_stream, self._take_error))
        frame = structs.CallFrame(struct_size=ctypes.sizeof(structs.CallFrame), context=CONTEXT, stage=3)
        frame.api = ctypes.pointer(api)
        for part, buffers in ((frame.args, inputs), (frame.rets, results)):
            part.size, part.buffers = len(buffers), self._pointers(buffers)
        frame.attrs.size, frame.attrs.values = 1, values
        self._frame = frame

    def run(self, handler: Any) -> None:
        """Call a handler as XLA does."""
        _FUNCTION(ctypes.cast(handler, ctypes.c_void_p).value)(ctypes.addressof(self._frame))

    def _pointers(self, buffers: Sequence[Buffer]) -> Any:
        found = self._keep((ctypes.POINTER(structs.XlaBuffer) * len(buffers))())
        for i, x in enumerate(buffers):
            dims = self._keep((ctypes.c_int64 * len(x.shape))(*x.shape))
            given = structs.XlaBuffer(data=x.address, dtype=x.dtype, rank=len(x.shape), dims=dims)
            found[i] = ctypes.pointer(self._keep(given))
        return found

    def _give_stream(self, address: int) -> None:
        args = structs.StreamArgs.from_address(address)
        assert (args.struct_size, args.context) == (ctypes.sizeof(args), CONTEXT)
        args.stream = STREAM

    def _take_error(self, address: int) -> int:
        self.errors.append(structs.ErrorArgs.from_address(address).message.decode())
        return 1

    def _function(self, function: Callable[[int], int | None]) -> int | None:
        return ctypes.cast(self._keep(_FUNCTION(function)), ctypes.c_void_p).value

    def _keep(self, x: Any) -> Any:
        self._kept.append(x)
        return x
