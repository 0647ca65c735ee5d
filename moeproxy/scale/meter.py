"""A meter of live tensor bytes: every storage from birth to death, by what it is for.

It sees what torch's dispatcher allocates, real or fake; what kernels and communication backends take for themselves
it cannot see. The idea is that of torch's own `MemTracker`; this one keeps the whole course of a step, allows several
forward passes in it, and says where the peak arises.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed._tools.mod_tracker import ModTracker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moeproxy.scale.collectives import COMMUNICATES, Collective, seen
from moeproxy.scale.flops import flops

# Places in `emulation.CATEGORIES`.
_PARAMETERS, _GATHERED, _GRADIENTS, _OPTIMIZER, _ACTIVATIONS, _COMMUNICATION = range(6)


@dataclass
class Course:
    """What a meter saw: changes in order, each of a storage.

    Attributes:
        delta, owner, phase: bytes gained or lost, number of the storage, number of the phase, of every change.
        kind: category of every storage.
        phases: names in order of appearance; the first is the state before the step.
        where: for every storage, the module in which it was born.
        peak: bytes at the peak.
        peak_at: number of the change that made it.
        peak_module: innermost module then.
        collectives: every one, in order.
        flops: floating-point operations by phase.
    """

    delta: list[int]
    owner: list[int]
    phase: list[int]
    kind: list[int]
    where: list[str]
    phases: list[str]
    peak: int
    peak_at: int
    peak_module: str
    collectives: list[Collective]
    flops: dict[str, int]


class _Modules(ModTracker):
    """Follows modules, but leaves tensors alone where no gradients are made.

    Without gradients a tensor can still ask for one: transformers marks the embedding's output so when activations are
    recomputed. A hook on such a tensor and the tensor's accumulator hold each other, through C++, where no garbage
    collector looks: the meter itself would keep one tensor alive for every forward pass.
    """

    @property
    def is_bw(self) -> bool:
        return super().is_bw or not torch.is_grad_enabled()


class Meter(TorchDispatchMode):
    """Count live bytes while active.

    Args:
        parameters: the model's own; their gradients are recognised when the optimizer's phase begins.
        buffers, optimizer, inputs: further tensors that live already.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        buffers: Iterable[torch.Tensor] = (),
        optimizer: Iterable[torch.Tensor] = (),
        inputs: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()
        self._parameters = list(parameters)
        self._live: dict[int, tuple[int, weakref.ref]] = {}
        self._size: list[int] = []
        self._total = 0
        self._stack: list[str] = []
        self._modules = _Modules()
        self._fake = active_fake_mode()
        self.course = Course([], [], [], [], [], ["before"], 0, -1, "", [], {})
        for kind, tensors in (
            (_PARAMETERS, [*self._parameters, *buffers]),
            (_OPTIMIZER, optimizer),
            (_ACTIVATIONS, inputs),
        ):
            for tensor in tensors:
                self._see(tensor, kind)

    def mark(self, phase: str) -> None:
        """Say that a phase begins."""
        if phase == "optimizer":
            for parameter in self._parameters:
                if parameter.grad is not None:
                    self._name(parameter.grad, _GRADIENTS)
        self.course.phases.append(phase)
        self._stack.clear()

    def __enter__(self) -> Meter:
        self._modules.register_user_hooks(self._enter, self._leave, self._enter_backward, self._leave_backward)
        self._modules.__enter__()
        self._resize = torch.UntypedStorage.resize_
        meter = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = meter._resize(storage, size)
            meter._see_storage(storage, _GATHERED)  # only FSDP resizes storages: the whole weights it gathers
            return result

        torch.UntypedStorage.resize_ = resize  # pyright: ignore[reportAttributeAccessIssue]
        self._random_state = torch.get_rng_state

        def random_state() -> torch.Tensor:
            state = meter._random_state()  # made past the dispatcher; recomputing keeps one for each layer
            meter._see(state, _ACTIVATIONS)
            return state

        torch.get_rng_state = random_state
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        super().__exit__(*problem)
        torch.UntypedStorage.resize_ = self._resize
        torch.get_rng_state = self._random_state
        self._modules.clear_user_hooks()
        self._modules.__exit__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # let it fall apart into operations on local tensors first
        kwargs = kwargs or {}
        if func is torch.ops._c10d_functional.wait_tensor.default and active_fake_mode():
            result = args[0]  # its fake form makes a new tensor, the real one does not
        else:
            result = func(*args, **kwargs)
        # DTensor works out shapes in a fake mode of its own: nothing of that is memory.
        if active_fake_mode() is self._fake:
            self._after(func, args, kwargs, result)
        return result

    def _after(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func is torch.ops.aten.split.Tensor and self._is_scratch(args[0]):
            return
        known = len(self.course.collectives)
        born = _OPTIMIZER if self.course.phases[-1] == "optimizer" else _ACTIVATIONS
        if func.namespace in COMMUNICATES:
            born = _COMMUNICATION
            self._communicate(func, args, kwargs, result)
        elif count := flops(func, args, kwargs, result):
            phase = self.course.phases[-1]
            self.course.flops[phase] = self.course.flops.get(phase, 0) + count
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf, born)
        for place in range(known, len(self.course.collectives)):  # only now all that it returns is counted
            self.course.collectives[place] = replace(self.course.collectives[place], live=self._total)

    def _is_scratch(self, tensor: torch.Tensor) -> bool:
        """Whether this is gloo's own copy of the buffer that it has just reduced.

        gloo makes it in a thread of its own but cuts it up in this one. It is scratch of a backend, which other
        backends do not take: not counted here, only by the allocator's events.
        """
        last = self.course.collectives[-1] if self.course.collectives else None
        unknown = all(storage._cdata not in self._live for storage in get_untyped_storages(tensor))
        return unknown and last is not None and (last.op, last.nbytes) == ("reduce_scatter", tensor.nbytes)

    def _communicate(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note a collective, and what its tensors are."""
        name = func._schema.name.split("::")[1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name == "split_with_sizes_copy":  # FSDP: from the gathered buffer into whole weights
            for tensor in tree_leaves(kwargs.get("out")):
                self._name(tensor, _GATHERED)
        elif name == "chunk_cat":  # FSDP: from whole gradients into the buffer to reduce
            for tensor in tree_leaves(args):
                self._name(tensor, _GRADIENTS, only=_ACTIVATIONS)
            self._name(kwargs.get("out"), _COMMUNICATION)
        elif collective := seen(name, func.namespace, args, result, self.course.phases[-1], self._innermost()):
            self.course.collectives.append(collective)
            for tensor in tensors:
                self._name(tensor, _COMMUNICATION, only=_ACTIVATIONS)
            if collective.op == "reduce_scatter":
                self._name(tensors[0], _GRADIENTS)

    def _see(self, tensor: torch.Tensor, kind: int) -> None:
        for storage in get_untyped_storages(tensor):
            self._see_storage(storage, kind)

    def _see_storage(self, storage: Any, kind: int) -> None:
        key, size = storage._cdata, storage.nbytes()
        if known := self._live.get(key):
            number = known[0]
            if size != self._size[number]:
                self._change(number, size - self._size[number])
                self._size[number] = size
            return
        number = len(self._size)
        self._size.append(size)
        self.course.kind.append(kind)
        self.course.where.append(self._innermost())
        self._live[key] = (number, weakref.ref(storage, partial(self._gone, key, number)))
        self._change(number, size)

    def _gone(self, key: int, number: int, _reference: Any) -> None:
        self._live.pop(key, None)
        self._change(number, -self._size[number])

    def _change(self, number: int, delta: int) -> None:
        if not delta:
            return
        course = self.course
        course.delta.append(delta)
        course.owner.append(number)
        course.phase.append(len(course.phases) - 1)
        self._total += delta
        if self._total > course.peak:
            course.peak, course.peak_at, course.peak_module = self._total, len(course.delta) - 1, self._innermost()

    def _name(self, tensor: Any, kind: int, only: int | None = None) -> None:
        """Correct the category of a known tensor (where it is `only`, if that is given)."""
        if not isinstance(tensor, torch.Tensor):
            return
        for storage in get_untyped_storages(tensor):
            known = self._live.get(storage._cdata)
            if known and only in (None, self.course.kind[known[0]]):
                self.course.kind[known[0]] = kind

    def _innermost(self) -> str:
        return self._stack[-1] if self._stack else ""

    def _enter(self, module: nn.Module, _inputs: Any) -> None:
        self._stack.append(self._modules.get_known_fqn(module) or "")

    def _leave(self, _module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        if self._stack:
            self._stack.pop()

    def _enter_backward(self, module: nn.Module | None, _gradients: Any) -> None:
        if module is not None:
            self._stack.append(self._modules.get_known_fqn(module) or "")

    def _leave_backward(self, module: nn.Module | None, _gradients: Any) -> None:
        name = module is not None and self._modules.get_known_fqn(module)
        if name and name in self._stack:
            self._stack.remove(name)
