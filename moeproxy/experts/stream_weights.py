"""A model whose decoder layers hold weights only while they are used, read straight from the shards.

Which stored tensor goes where is asked of transformers' own tables (`conversion_mapping`). The common conversion, one
tensor an expert into a fused one, is done here, each expert read into its place, so that loading a layer needs little
more memory than the layer. Every other conversion is left to transformers, with the layer's tensors alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moeproxy.errors import CheckpointError, ProfileError
from moeproxy.experts.batches import layers_path, router_rows, without_head
from moeproxy.experts.checkpoint import Checkpoint
from moeproxy.experts.load import missing, quiet, unloadable
from moeproxy.experts.stream_memory import is_quantised
from moeproxy.experts.stream_read import TensorReader
from moeproxy.experts.stream_targets import Target, missing_names, targets_of

OUTSIDE = -1  # number of the part that is no decoder layer: embeddings, norms, rotary tables


@dataclass
class StreamedModel:
    """A model on the meta device, but for what lies outside its decoder layers.

    Attributes:
        checkpoint: where the weights are.
        model: the causal language model; its head stays without weights.
        layers: the decoder layers in order.
        device: where a layer's weights go; everything else stays on the CPU.
        routers: rows of each MoE layer's router (E, R), float32, once the layer was loaded.
    """

    checkpoint: Checkpoint
    model: Any
    layers: list[nn.Module]
    device: str
    routers: dict[int, Tensor] = field(default_factory=dict)
    _reader: TensorReader = field(init=False, repr=False)
    _parts: dict[int, list[Target]] = field(default_factory=dict, repr=False)
    _spare: dict[Any, list[Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    @contextmanager
    def open(cls, checkpoint: Checkpoint, *, dtype: str = "float32", device: str = "cpu") -> Iterator[StreamedModel]:
        """Build the model and load what lies outside the decoder layers; files are closed at the end.

        Raises:
            CheckpointError: transformers cannot build the model, or weights are missing, NaN or infinite.
            ProfileError: the checkpoint is quantised.
        """
        _check_not_quantised(checkpoint)
        model = _empty_model(checkpoint, dtype)
        path = layers_path(checkpoint)
        streamed = cls(checkpoint, model, list(model.get_submodule(path).children()), device)
        with TensorReader(checkpoint) as streamed._reader:
            streamed._find_parts(path)
            streamed._reader.check(streamed._unused_head())
            streamed._load(OUTSIDE, "cpu")
            yield streamed

    def __repr__(self) -> str:
        return f"StreamedModel({self.checkpoint.path.name}, {len(self.layers)} layers, on {self.device})"

    @property
    def base(self) -> nn.Module:
        """The model without its head."""
        return without_head(self.model, self.checkpoint)

    def outside_modules(self) -> list[nn.Module]:
        """Modules that are not in a decoder layer."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        return [module for module in self.base.modules() if id(module) not in inside]

    @contextmanager
    def loaded(self, layer: nn.Module | None) -> Iterator[None]:
        """Read a decoder layer's weights, and drop them at the end."""
        number = next(n for n, one in enumerate(self.layers) if one is layer)
        empty = [(module, dict(module._parameters)) for module in self.layers[number].modules()]
        try:
            self._load(number, self.device)
            if number in self.checkpoint.moe_layers:
                # A copy: the layer's memory is used again for the next.
                self.routers[number] = router_rows(self.model, self.checkpoint, number).clone()
            yield
        finally:
            for module, parameters in empty:
                for name, value in parameters.items():
                    self._give_back(module._parameters[name])
                    module._parameters[name] = value

    def _find_parts(self, path: str) -> None:
        targets = targets_of(self.model, self.checkpoint)
        if names := missing_names(self.model, targets):
            raise missing(names, self.checkpoint)
        pattern = re.compile(re.escape(path) + r"\.(\d+)\.")
        head = tuple(f"{name}." for name in self._head_names())
        for target in targets:
            found = pattern.match(target.name)
            if not target.name.startswith(head):
                self._parts.setdefault(int(found[1]) if found else OUTSIDE, []).append(target)

    def _head_names(self) -> list[str]:
        head = self.model.get_output_embeddings()
        return [name for name, module in self.model.named_modules() if module is head]

    def _unused_head(self) -> list[str]:
        """Stored tensors of the head: not needed, but to be finite, as in an ordinary pass."""
        head = tuple(f"{name}." for name in self._head_names())
        return [name for name in self.checkpoint.tensors if head and name.startswith(head)]

    def _load(self, part: int, device: str) -> None:
        targets = self._parts.get(part, [])
        for target in targets:
            if target.is_plain or target.is_fused:
                _put(self.model, target.name, self._read(target, device))
        if others := [target for target in targets if not target.is_plain and not target.is_fused]:
            self._convert(others, device)
        if part != OUTSIDE:
            _move_buffers(self.layers[part], device)
        self._spare.clear()

    def _read(self, target: Target, device: str) -> Tensor:
        """A weight that is stored as it is, or one tensor an expert."""
        value = self._empty(target, device)
        for name, place in target.places(value):
            if tuple(self.checkpoint.tensors[name].shape) != tuple(place.shape):
                raise _wrong_shape(self.checkpoint, name, list(place.shape))
            self._reader.read_into(name, place)
        return value

    def _convert(self, targets: list[Target], device: str) -> None:
        """Weights that transformers converts in some other way."""
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        stored = {name: self._reader.read(name) for target in targets for _, name in target.sources}
        config = LoadStateDictConfig(
            device_map={"": device},
            dtype=targets[0].dtype,
            dtype_plan=self.model._get_dtype_plan(self.model.config.dtype),
            weight_mapping=targets[0].mapping,
        )
        with quiet():
            info, _ = convert_and_load_state_dict_in_model(self.model, stored, config)
        if info.conversion_errors or info.mismatched_keys:
            problem = RuntimeError(str(info.conversion_errors or info.mismatched_keys))
            raise unloadable(problem, self.checkpoint)

    def _empty(self, target: Target, device: str) -> Tensor:
        """Memory for a weight: that of the layer before where it had one like it, so its pages are there already."""
        if spare := self._spare.get((target.shape, target.dtype, torch.device(device))):
            return spare.pop()
        return torch.empty(target.shape, dtype=target.dtype, device=device)

    def _give_back(self, value: Tensor | None) -> None:
        if value is not None and not value.is_meta:
            self._spare.setdefault((tuple(value.shape), value.dtype, value.device), []).append(value.detach())


def _check_not_quantised(checkpoint: Checkpoint) -> None:
    if is_quantised(checkpoint):
        raise ProfileError(
            "a quantised checkpoint cannot be streamed",
            expected="weights in floating point",
            remedy="profile it with stream=False, or convert it to bfloat16 first",
            where=checkpoint.path,
        )


def _empty_model(checkpoint: Checkpoint, dtype: str) -> Any:
    """The model with every parameter on the meta device and its buffers computed."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    fast = {"experts_implementation": "grouped_mm"} if checkpoint.family.grouped_mm else {}
    try:
        with quiet(), init_empty_weights(include_buffers=False), no_init_weights():
            config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
            kind = _stored_dtype(config, checkpoint) if dtype == "auto" else getattr(torch, dtype)
            model: Any = AutoModelForCausalLM.from_config(config, dtype=kind, **fast)
        # As loading does it: buffers that are not stored are computed in float32, then rounded (MiniMax's decays).
        model.initialize_weights()
        return model.eval()
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise unloadable(error, checkpoint) from error


def _stored_dtype(config: Any, checkpoint: Checkpoint) -> torch.dtype:
    """The dtype that the config names, or that of the first stored tensor of floating point."""
    if config.dtype is not None:
        return config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, config.dtype)
    kinds = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    found = (kinds[info.dtype] for info in checkpoint.tensors.values() if info.dtype in kinds)
    return next(found, torch.float32)


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    """Give a module its weight or persistent buffer."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    if leaf in module._buffers:
        module._buffers[leaf] = value
    else:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _move_buffers(layer: nn.Module, device: str) -> None:
    for module in layer.modules():
        for name, value in module._buffers.items():
            if value is not None:
                module._buffers[name] = value.to(device)


def _wrong_shape(checkpoint: Checkpoint, name: str, shape: list[int]) -> CheckpointError:
    info = checkpoint.tensors[name]
    return CheckpointError(
        f"tensor '{name}' is {list(info.shape)}, but the model's is {shape}",
        expected="weights that belong to this config.json",
        remedy="restore the matching config.json or weights",
        where=checkpoint.path / info.file,
    )
