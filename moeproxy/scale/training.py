"""The program itself: plain SPMD code on transformers' own FSDP2 and expert parallelism.

Nothing here knows whether its process group is real, virtual or a recording: the same lines run in every case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from trl.trainer.utils import selective_log_softmax

from moeproxy.errors import ScaleError
from moeproxy.proxy.shape import check_sizes, no_expert_layer
from moeproxy.scale import attention
from moeproxy.scale.layout import Layout
from moeproxy.scale.program import GRPOProgram

Mark = Callable[[str], None]


@dataclass(frozen=True)
class MicroBatch:
    """Token ids (B, T) and the advantage of each sequence (B,)."""

    ids_BT: torch.Tensor
    advantages_B: torch.Tensor


class Training:
    """Model, optimizer and micro-batches of one rank.

    Args:
        program: what is trained.
        layout: world, expert parallelism and rank; the process group must exist.
        plan: what `distributed_plan` returned (it makes device meshes, which FakeTensorMode cannot).
    """

    def __init__(self, program: GRPOProgram, layout: Layout, plan: tuple[DistributedConfig, Any]) -> None:
        self.program = program
        torch.manual_seed(program.seed)
        config = model_config(program)
        built = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
        _check_experts(built, program)
        built.set_experts_implementation("grouped_mm")
        _share_tied_weights_in_the_root(built)
        self.model: PreTrainedModel = type(built).maybe_distribute_model(built, *plan)
        if program.checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=program.learning_rate, foreach=False)
        torch.manual_seed(program.seed + 1 + layout.rank)  # each rank has tokens of its own
        self.batches = [self._micro_batch(config.vocab_size) for _ in range(program.micro_batches)]

    def _micro_batch(self, vocabulary: int) -> MicroBatch:
        size = (self.program.sequences, self.program.tokens)
        return MicroBatch(torch.randint(vocabulary, size), torch.randn(self.program.sequences))

    def step(self, mark: Mark = lambda phase: None) -> torch.Tensor:
        """Make one update; `mark` is told each phase as it begins.

        Returns:
            The loss and the mean log-prob of the completions (2,). On-policy the loss itself is the mean advantage
            with its sign changed, whatever the weights; the log-prob tells whether two runs are the same.
        """
        mark("old log-probs")
        with torch.no_grad():
            old = [self._logprobs(batch) for batch in self.batches]
        total_2 = torch.zeros(2)
        for batch, old_BC in zip(self.batches, old, strict=True):
            mark("forward")
            new_BC = self._logprobs(batch)
            mark("loss")
            loss = self._loss(new_BC, old_BC, batch.advantages_B) / len(self.batches)
            mark("backward")
            loss.backward()
            total_2 += torch.stack([loss.detach(), new_BC.detach().float().mean() / len(self.batches)])
            del loss, new_BC
        mark("optimizer")
        clip_gradients(self.parameters, self.program.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total_2

    def _logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Log-probs (B, C) of the completions, with TRL's own memory-saving function."""
        length = self.program.completion
        out = self.model(input_ids=batch.ids_BT, use_cache=False, logits_to_keep=length + 1)
        logits_BCV = out.logits[:, :-1] / self.program.temperature
        return selective_log_softmax(logits_BCV, batch.ids_BT[:, -length:])

    def _loss(self, new_BC: torch.Tensor, old_BC: torch.Tensor, advantages_B: torch.Tensor) -> torch.Tensor:
        """GRPO's clipped policy loss (arXiv 2402.03300), averaged over tokens."""
        ratio_BC = torch.exp(new_BC - old_BC)
        clipped_BC = ratio_BC.clamp(1 - self.program.clip, 1 + self.program.clip)
        advantages_B1 = advantages_B[:, None]
        return -torch.minimum(ratio_BC * advantages_B1, clipped_BC * advantages_B1).mean()

    def freeze(self) -> None:
        """Let further steps change no weight, so that each routes its tokens alike."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            group["weight_decay"] = 0.0

    def state(self) -> list[torch.Tensor]:
        """Return the optimizer's tensors."""
        return [t for one in self.optimizer.state.values() for t in one.values() if isinstance(t, torch.Tensor)]


def _check_experts(built: PreTrainedModel, program: GRPOProgram) -> None:
    names, family = {name for name, _ in built.named_parameters()}, program.family
    blocks = map(family.block_in_memory, range(program.n_layers))
    if not any(f"{block}.{part.name}" in names for block in blocks for part in family.in_memory):
        raise no_expert_layer(family.model_type)


def _share_tied_weights_in_the_root(model: PreTrainedModel) -> None:
    """Leave embedding and head to the model's own FSDP group, where they are one weight.

    transformers 5.24 shards the embedding apart and leaves the head to the root; FSDP2 of torch 2.13 refuses a weight
    in two groups. In the root it is gathered once and stays whole until its gradient is summed.
    """
    if not getattr(model, "all_tied_weights_keys", None):
        return
    resolve: Any = model._resolve_parallel_plans
    tied = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name for name, module in model.named_modules() if any(module is one for one in tied)]

    def resolved(wanted: DistributedConfig) -> tuple[Any, Any, dict[str, str]]:
        tensor, expert, sharded = resolve(wanted)
        return tensor, expert, {name: style for name, style in sharded.items() if name not in names}

    model._resolve_parallel_plans = resolved  # pyright: ignore[reportAttributeAccessIssue]


def model_config(program: GRPOProgram) -> Any:
    """Return the transformers config of the program's model."""
    settings = {k: v for k, v in program.config.items() if k not in ("model_type", "quantization_config", "auto_map")}
    config = AutoConfig.for_model(program.family.model_type, **settings)
    check_sizes(program.config, config)
    config.use_cache = False
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    return config


def distributed_plan(program: GRPOProgram, layout: Layout, implementation: str) -> tuple[DistributedConfig, Any]:
    """Make the device meshes and return (config, meshes) for `Training`.

    Args:
        program: what is trained.
        layout: world and expert parallelism.
        implementation: name of the way in which tokens reach their experts, where `layout.ep` is above 1.

    Raises:
        ScaleError: the experts cannot be spread so.
    """
    layout.check_experts(program.n_experts)
    wanted = DistributedConfig(
        fsdp_size=layout.world,
        ep_size=layout.ep,
        ep_implementation=implementation if layout.ep > 1 else "auto",
        fsdp_mixed_precision=True,
    )
    config, _, meshes = PreTrainedModel.prepare_distribute_model(wanted)
    if config is None or meshes is None:
        raise ScaleError(f"transformers made no device mesh for {layout}")
    return config, meshes


def clip_gradients(parameters: list[nn.Parameter], largest: float) -> None:
    """Scale the gradients so that their common norm is at most `largest`.

    `torch.nn.utils.clip_grad_norm_` cannot mix the meshes of dense and expert weights, so each mesh sums its own.
    """
    by_mesh: dict[Any, list[DTensor]] = defaultdict(list)
    for parameter in parameters:
        gradient: Any = parameter.grad
        if gradient is not None:
            by_mesh[gradient.device_mesh].append(gradient)
    norms: list[Any] = [nn.utils.get_total_norm(gradients) for gradients in by_mesh.values()]
    total = torch.stack([norm.full_tensor() for norm in norms]).norm()
    scale = (largest / (total + 1e-6)).clamp(max=1.0)
    for gradients in by_mesh.values():
        for gradient in gradients:
            gradient.to_local().mul_(scale)
