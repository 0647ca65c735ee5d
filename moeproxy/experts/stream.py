"""A calibration pass for models larger than memory: all batches pass one decoder layer before the next is read.

Every batch runs the model's own forward pass in a thread of its own and stops at each decoder layer. When all have
arrived, the layer's weights are read, the layer is computed for one batch after the other in the caller's thread, and
its outputs wait in mapped files. So whatever a family does between its layers is done by its own code, and only one
thread works at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moeproxy.experts.batches import Piece, Totals, n_folds_of, pieces, watched
from moeproxy.experts.observe import Batch
from moeproxy.experts.stream_memory import each_tensor, mapped
from moeproxy.experts.stream_weights import StreamedModel

_STACK = 1 << 20  # bytes; the threads only call modules, the work of the layers is done elsewhere


def run_streamed(
    streamed: StreamedModel,
    totals: Totals,
    texts: list[list[int]],
    batch_size: int,
    scratch: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Pass lists of token ids through a streamed model and add what its experts do to `totals` (by layer).

    A model that calls its layers several times in a forward pass has them read once for every call.

    Raises:
        CheckpointError: a layer's weights are missing, of another shape, NaN or infinite.
        ProfileError: no room for the hidden states.
    """
    batch, end = Batch(), len(streamed.layers) * len(texts)
    keep = partial(each_tensor, change=partial(mapped, scratch=scratch))
    work = [_Walker(piece, streamed.base) for piece in pieces(texts, batch_size, n_folds_of(totals))]
    done = 0
    with ExitStack() as stack:
        stack.enter_context(watched(streamed.model, streamed.checkpoint, totals, batch))
        stack.enter_context(_stops(streamed.layers))
        stack.enter_context(_mapped_outputs(streamed, scratch))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(_walking(work))
        while group := _next_group(work):
            with streamed.loaded(group[0].at):
                for walker in group:
                    batch.show(walker.piece.mask_BT, walker.piece.fold_B)
                    walker.advance(keep(walker.compute(streamed.device)))
                    done += len(walker.piece.ids_BT)
                    if progress:
                        progress(min(done, end), end)


@dataclass(frozen=True)
class _Call:
    """A call of a decoder layer that waits for its weights."""

    layer: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Stopped(BaseException):
    """Ends a thread that waits at a layer."""


class _Walker(threading.Thread):
    """One batch on its way through the model. It runs only between `advance` (or `begin`) and its next stop."""

    def __init__(self, piece: Piece, base: nn.Module) -> None:
        super().__init__(daemon=True, name=f"calibration up to text {piece.stop}")
        self.piece = piece
        self._base = base
        self._call: _Call | None = None
        self._answer: Any = None
        self._error: BaseException | None = None
        self._stopped = False
        self._go, self._waits = threading.Semaphore(0), threading.Semaphore(0)

    # In this thread.

    def run(self) -> None:
        """Run the forward pass; an error is kept for the driver."""
        try:
            with torch.inference_mode():
                self._base(**self.piece.arguments("cpu"))
        except _Stopped:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._waits.release()

    def stop_at(self, call: _Call) -> Any:
        """Wait until the driver has computed the layer; return its output."""
        self._call = call
        self._waits.release()
        self._go.acquire()
        if self._stopped:
            raise _Stopped
        answer, self._answer = self._answer, None
        return answer

    # In the driver's thread.

    @property
    def at(self) -> nn.Module | None:
        """The layer at which this batch waits, None if it is through."""
        return self._call.layer if self._call else None

    def begin(self) -> None:
        """Start, and run to the first layer."""
        self.start()
        self._wait()

    def compute(self, device: str) -> Any:
        """Compute the layer at which this batch waits, on a device."""
        call, self._call = self._call, None
        if call is None:  # cannot happen: only waiting batches are in a group
            raise RuntimeError("this batch waits at no layer")
        move = partial(each_tensor, change=lambda tensor: tensor.to(device))
        return call.forward(*move(call.args), **move(call.kwargs))

    def advance(self, answer: Any) -> None:
        """Hand over the layer's output and run to the next layer."""
        self._answer = answer
        del answer
        self._go.release()
        self._wait()

    def end(self) -> None:
        """End the thread wherever it waits."""
        self._stopped = True
        self._call = self._answer = None
        self._go.release()
        with suppress(RuntimeError):  # never started
            self.join()

    def _wait(self) -> None:
        self._waits.acquire()
        if self._error is not None:
            raise self._error


def _next_group(work: list[_Walker]) -> list[_Walker]:
    """The batches that wait at the same layer as the first that waits."""
    waiting = [walker for walker in work if walker.at is not None]
    return [walker for walker in waiting if walker.at is waiting[0].at]


@contextmanager
def _walking(work: list[_Walker]) -> Iterator[None]:
    """Start all batches one after the other; at the end, also after an error, none of their threads is left."""
    old_stack, n_threads = threading.stack_size(_STACK), torch.get_num_threads()
    try:
        # Each thread that computes in parallel would get its own team of workers. The little these compute needs none.
        torch.set_num_threads(1)
        try:
            for walker in work:
                walker.begin()
        finally:
            threading.stack_size(old_stack)
            torch.set_num_threads(n_threads)
        yield
    finally:
        for walker in work:
            walker.end()


@contextmanager
def _stops(layers: list[nn.Module]) -> Iterator[None]:
    """Let calls of the layers from batches' threads wait for the driver."""
    for layer in layers:
        # In the instance's dictionary it hides the class's method, and can be taken away again.
        layer.__dict__["forward"] = partial(_stop, layer, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def _stop(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    thread = threading.current_thread()
    if isinstance(thread, _Walker):
        return thread.stop_at(_Call(layer, forward, args, kwargs))
    return forward(*args, **kwargs)


@contextmanager
def _mapped_outputs(streamed: StreamedModel, scratch: str | Path | None) -> Iterator[None]:
    """Map what the embeddings return too: the forward pass holds it to the end."""
    handles = [
        module.register_forward_hook(partial(_map_output, scratch))
        for module in streamed.outside_modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _map_output(scratch: str | Path | None, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return mapped(output, scratch)
