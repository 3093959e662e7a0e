"""Copies of arrays from host memory to a GPU and back, through a ring of slots of pinned memory.

The bus runs at its full speed only between a GPU and memory that is pinned, which arrays are not. So each piece of an
array goes by way of a slot: a thread writes a free slot (what is strided is gathered on the way, without a copy in
between) and queues its copy to the GPU, while other slots are on the bus. Results come back the other way round. Each
slot has an event behind its last copy, for which whoever takes it next waits.

A thread writes slots more slowly than the bus empties them (8.5 against 55 GB/s, PCIe 5), so the ring takes several.
CUDA's own copy stages with one thread, too, and does not wait for Python: contiguous arrays that are not worth all
threads go that way, and so do results. What is strided and small shares one slot, which the caller's thread writes.

Copies run on a stream of the ring's own: threads share it, which they could not do with the default stream of a thread.
On the way in the caller's stream waits for them, and they for what is queued there, on the GPU. A kernel of one caller
may run while the next one's arrays are copied; within a call copies and kernels take turns.

On an H200's host the ring has 21 to 23 GB/s to the GPU with four threads and slots of 8 MiB, CUDA's own copy 16 up to
64 MiB and 9 at 256 MiB, a copy to one pinned array and then to the GPU 7 to 9 (docs/performance.md).
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cpu import workers
from .pieces import Piece, batches, rounded

Array = NDArray[Any]

# Measured on an H200's host with 16 cores.
CHUNK_BYTES = 8 << 20  # of a slot, in 4 pieces
THREADS = 4  # that write or read slots; two slots each
THREAD_BYTES = 8 << 20  # that make a thread worth its start


class _Slot:
    """Pinned memory and the event behind the last copy from or to it."""

    def __init__(self, size: int) -> None:
        import cupy

        self.event = cupy.cuda.Event(disable_timing=True)
        try:
            self.memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)
        except cupy.cuda.runtime.CUDARuntimeError:  # too much is pinned already: CUDA copies from any memory, slowly
            self.memory = np.empty(size, np.uint8)
        self.address = int(self.memory.ctypes.data)

    def places(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int, Array]]:
        """Each piece with its address in the slot and the slot's elements there, in its shape."""
        at = 0
        for piece in pieces:
            size = piece.host.nbytes
            there = self.memory[at : at + size].view(piece.host.dtype).reshape(piece.host.shape)
            yield piece, self.address + at, there
            at += rounded(size)


class _Slots:
    """The slots of a ring, made when they are first needed; threads share them."""

    def __init__(self, most: int, size: int) -> None:
        self._most, self._size, self._made = most, size, 0
        self._free: deque[_Slot] = deque()  # that free longest first
        self._lock = threading.Lock()

    def take(self) -> _Slot | None:
        """One that no thread has: not on the bus any more, or new, or else on the bus longest."""
        with self._lock:
            if self._free and self._free[0].event.done:
                return self._free.popleft()
            if self._made < self._most:
                slot = _Slot(self._size)
                self._made += 1
                return slot
            return self._free.popleft() if self._free else None

    def give(self, slot: _Slot) -> None:
        self._free.append(slot)


class Ring:
    """The slots and the stream of one GPU. One call at a time copies through it."""

    def __init__(self, ordinal: int, chunk_bytes: int = CHUNK_BYTES, threads: int = THREADS) -> None:
        """The GPU must be current here, and wherever copies are asked for."""
        import cupy

        self._cuda, self._ordinal, self._chunk_bytes, self._threads = cupy.cuda, ordinal, chunk_bytes, threads
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._event = cupy.cuda.Event(disable_timing=True)
        self._slots = self._new_slots()
        self._lock = threading.Lock()

    def _new_slots(self) -> _Slots:
        """Two a thread: one that it writes or reads while the other is on the bus."""
        return _Slots(2 * self._threads, self._chunk_bytes)

    def copy_in(self, arrays: Sequence[tuple[Array, int]]) -> None:
        """Copy arrays to addresses on the GPU, where they are contiguous.

        Then the arrays may be written again, and the current stream waits for the copies.
        """
        count = self._worth(arrays)
        if count < self._threads:
            self._copy_by_cuda(
                [(x, at) for x, at in arrays if x.flags.c_contiguous], self._cuda.runtime.memcpyHostToDevice
            )
            arrays = [(x, at) for x, at in arrays if not x.flags.c_contiguous]
            if not arrays:
                return
        tasks = (partial(self._fill, pieces) for pieces in batches(arrays, self._chunk_bytes))
        with self._lock, self._clean():
            self._event.record(self._cuda.get_current_stream())
            self._stream.wait_event(self._event)
            workers.run(tasks, count)
            self._event.record(self._stream)
            self._cuda.get_current_stream().wait_event(self._event)

    def copy_out(self, arrays: Sequence[tuple[Array, int]]) -> None:
        """Copy to contiguous arrays from addresses on the GPU, behind the current stream, and wait for it.

        The kernels of one caller are over before the ring is taken, which others need meanwhile.
        """
        stream = self._cuda.get_current_stream()
        if self._worth(arrays) < self._threads:
            self._copy_by_cuda(arrays, self._cuda.runtime.memcpyDeviceToHost)
            return stream.synchronize()
        stream.synchronize()
        with self._lock, self._clean():
            workers.run(self._drained(deque(batches(arrays, self._chunk_bytes))), self._threads)

    def _worth(self, arrays: Sequence[tuple[Array, int]]) -> int:
        """As many threads as arrays are worth, and there are cores for."""
        return max(1, min(self._threads, workers.cores(), sum(x.nbytes for x, _ in arrays) // THREAD_BYTES))

    def _copy_by_cuda(self, arrays: Sequence[tuple[Array, int]], kind: int) -> None:
        """Straight from or to memory that is not pinned, on the current stream; CUDA has read it when this returns."""
        runtime, stream = self._cuda.runtime, self._cuda.get_current_stream().ptr
        for x, address in arrays:
            if x.size:
                host = int(x.ctypes.data)
                ends = (address, host) if kind == runtime.memcpyHostToDevice else (host, address)
                runtime.memcpyAsync(*ends, x.nbytes, kind, stream)

    @contextlib.contextmanager
    def _clean(self) -> Iterator[None]:
        """After an error no copy is left that runs, and no slot is kept."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(self._cuda.runtime.CUDARuntimeError):
                self._stream.synchronize()
            self._slots = self._new_slots()
            raise

    def _fill(self, pieces: Sequence[Piece]) -> None:
        """Write a slot, and queue the copy of each piece to the GPU as soon as it is there."""
        self._use_gpu()
        slot, runtime = self._slots.take(), self._cuda.runtime
        assert slot is not None, "there are more slots than threads"
        slot.event.synchronize()
        for piece, at, there in slot.places(pieces):
            np.copyto(there, piece.host)
            runtime.memcpyAsync(piece.address, at, there.nbytes, runtime.memcpyHostToDevice, self._stream.ptr)
        slot.event.record(self._stream)
        self._slots.give(slot)

    def _drained(self, ahead: deque[list[Piece]]) -> Iterator[workers.Task]:
        """For each batch what waits for its copy and reads the slot; the copies to all free slots are queued before.

        Whoever asks for the next one has read a slot: there is always one whose copy is queued.
        """
        runtime, queued = self._cuda.runtime, deque[tuple[_Slot, list[Piece]]]()
        while ahead or queued:
            self._use_gpu()
            while ahead and (slot := self._slots.take()):
                pieces = ahead.popleft()
                for piece, at, there in slot.places(pieces):
                    runtime.memcpyAsync(at, piece.address, there.nbytes, runtime.memcpyDeviceToHost, self._stream.ptr)
                slot.event.record(self._stream)
                queued.append((slot, pieces))
            yield partial(self._drain, *queued.popleft())

    def _drain(self, slot: _Slot, pieces: Sequence[Piece]) -> None:
        """Wait for a slot's copies and read it."""
        self._use_gpu()
        slot.event.synchronize()
        for piece, _, there in slot.places(pieces):
            np.copyto(piece.host, there)
        self._slots.give(slot)

    def _use_gpu(self) -> None:
        """Whatever thread this is: new ones begin with GPU 0."""
        self._cuda.runtime.setDevice(self._ordinal)


_rings: dict[int, Ring] = {}
_making = threading.Lock()


def ring() -> Ring:
    """That of the current GPU."""
    import cupy

    ordinal = cupy.cuda.runtime.getDevice()
    found = _rings.get(ordinal)
    if found is None:
        with _making:
            found = _rings.get(ordinal) or _rings.setdefault(ordinal, Ring(ordinal))
    return found


def to_gpu(arrays: Sequence[Array]) -> list[Any]:
    """CuPy arrays with the same elements on the current GPU, contiguous, for the current stream."""
    import cupy

    made = [cupy.empty(x.shape, x.dtype) for x in arrays]
    ring().copy_in([(x, int(copy.data.ptr)) for x, copy in zip(arrays, made, strict=True)])
    return made


def to_host(arrays: Sequence[Any]) -> list[Array]:
    """NumPy arrays with the elements of contiguous CuPy arrays on the current GPU, which are waited for."""
    made = [np.empty(x.shape, x.dtype) for x in arrays]
    ring().copy_out([(copy, int(x.data.ptr)) for x, copy in zip(arrays, made, strict=True)])
    return made
