"""The learner's model over several processes: FSDP2, and checkpoints whose shards any number can read.

Every process holds its part of each parameter, gradient and moment (``fully_shard``: Zhao et al.,
"PyTorch FSDP", arXiv 2304.11277; one group per decoder layer, one for embedding, last norm and
head). A layer's weights are gathered for its forward and backward pass only. Master weights and
reductions are float32; a bfloat16 run computes in bfloat16 by autocast, as one process does.

Shards are written by ``torch.distributed.checkpoint`` as safetensors, never as pickles, by a thread
of each process while the version's weights are gathered, written and evaluated.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from barnraise.coordinator.learner_step import Scores, Share, decoder_layers, trainable_parameters
from barnraise.kernels.grpo import LossStats
from barnraise.kernels.models import DTYPES, Policy
from barnraise.protocol.errors import RunFolderError, StorageError

log = logging.getLogger(__name__)

PATIENCE = datetime.timedelta(days=3650)
"""A process that ends closes its connections, and that is noticed at once; slowness is no error."""


@dataclass(frozen=True)
class Processes:
    """This process's place among those of the learner, and the connections between them.

    ``control`` carries requests and verdicts, ``writing`` the plans of the writing threads: each
    has one user at a time, so that no collective meets another's.
    """

    rank: int
    count: int
    device: torch.device
    mesh: Any
    control: Any
    writing: Any

    @property
    def share(self) -> Share:
        """For ``learner_step.gradients``."""
        return Share(self.rank, self.count, self._sum_up)

    def _sum_up(self, stats: LossStats, loss: float) -> tuple[LossStats, float]:
        mine = torch.tensor(
            [stats.tokens, stats.clipped, stats.ratio_max, stats.entropy, stats.kl, loss], dtype=torch.float64
        )
        every = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(every, mine, group=self.control)
        table = torch.stack(every)
        tokens, clipped, _, entropy, kl, total = table.sum(dim=0).tolist()
        together = LossStats(
            tokens=int(tokens),
            clipped=int(clipped),
            ratio_max=float(table[:, 2].max()),
            entropy=entropy,
            kl=kl,
        )
        return together, total

    def agree(self, problem: str = "") -> None:
        """Wait for all; go on together, or fail together.

        Raises:
            StorageError: some process told a ``problem``; the text is the first one's.
        """
        mine = torch.zeros(1024, dtype=torch.uint8)
        data = problem.encode()[:1024]
        mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(every, mine, group=self.control)
        for number, text in enumerate(every):
            said = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
            if said:
                raise StorageError(said if number == self.rank else f"process {number}: {said}")


def connect(store: Any, rank: int, count: int, device: torch.device) -> Processes:
    """Join the learner's processes; waits until all are there."""
    from torch.distributed.device_mesh import init_device_mesh

    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)
    control, writing = (dist.new_group(backend="gloo", timeout=PATIENCE) for _ in range(2))
    mesh = init_device_mesh(device.type, (count,))
    dist.barrier(group=control)  # nobody needs the store any more, which whoever made it may now remove
    return Processes(rank=rank, count=count, device=device, mesh=mesh, control=control, writing=writing)


def shard(scores: Scores, processes: Processes, *, train: bool) -> None:
    """Leave this process its part of every parameter of ``scores``, on its device."""
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # Weights are gathered in float32 and cast by autocast, as one process does: the same numbers for twice
    # the traffic of gathering bfloat16, which would keep norms and the residual stream in it as well.
    precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layer in decoder_layers(scores.policy):
        fully_shard(layer, mesh=processes.mesh, mp_policy=precision)
    fully_shard(scores, mesh=processes.mesh, mp_policy=precision, reshard_after_forward=not train)
    for module in scores.modules():
        if isinstance(module, FSDPModule):
            # Losses are weighted over the whole minibatch, so gradients are summed, not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    scores.policy.device = processes.device


def clip_gradients(policy: Policy, most: float) -> float:
    """Scale all gradients down to a norm of ``most``; the norm before, over all processes."""
    parameters = list(trainable_parameters(policy).values())
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    norm = _whole(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return float(norm)


def gathered(policy: Policy, dtype: str, keep: bool) -> dict[str, Tensor]:
    """The model's weights and persistent buffers, whole, on the CPU in ``dtype``; tied ones once.

    All processes call this together; those that do not ``keep`` get nothing.
    """
    target = DTYPES[dtype]
    found = {}
    for name, tensor in _own(policy.model):
        whole = _whole(tensor.detach())
        if keep:
            kind = target if whole.is_floating_point() else whole.dtype
            found[name] = whole.to("cpu", kind).contiguous()
    return found


def start_writing(
    policy: Policy, optimizer: torch.optim.Optimizer, folder: Path, processes: Processes
) -> Future[Any]:
    """Copy this process's shards aside and have a thread write them to ``folder``; done with the future."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save

    tensors: dict[str, Any] = {f"weight/{name}": tensor.detach() for name, tensor in _own(policy.model)}
    for name, parameter in trainable_parameters(policy).items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{kind}/{name}"] = (
                value.detach().reshape(1).clone() if kind == "step" else value.detach()
            )
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    future: Any = async_save(tensors, storage_writer=writer, process_group=processes.writing)
    written: Future[Any] = future
    return written


def read_shards(policy: Policy, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Fill weights and the optimiser's state, sharded over any number of processes or whole, from ``folder``.

    Raises:
        RunFolderError: files are missing, damaged or another run's.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    own, trained = dict(_own(policy.model)), trainable_parameters(policy)
    try:
        reader = HuggingFaceStorageReader(str(folder))
        known = reader.read_metadata().state_dict_metadata
        targets: dict[str, Any] = {}
        for key in known:
            kind, _, name = key.partition("/")
            if name not in (own if kind == "weight" else trained):
                raise RunFolderError(f"{folder} does not fit the model ({key}): it is another run's")
            if kind == "weight":
                targets[key] = own[name].detach()
            elif kind == "step":
                targets[key] = torch.zeros(1)
            else:
                targets[key] = torch.zeros_like(trained[name].detach())
        missing = [name for name in own if f"weight/{name}" not in targets]
        if missing:
            raise RunFolderError(
                f"{folder} lacks {missing[0]}: files are missing; restore or remove the folder"
            )
        load(targets, storage_reader=reader, no_dist=not dist.is_initialized())
    except RunFolderError:
        raise
    except Exception as error:  # SafetensorError, OSError, and the planner's own
        raise RunFolderError(
            f"{folder} is damaged ({str(error)[:200]}): remove the version's folder to have it trained again"
        ) from error
    for key, value in targets.items():
        kind, _, name = key.partition("/")
        if kind != "weight":
            optimizer.state[trained[name]][kind] = value.reshape(()) if kind == "step" else value


def read_whole(tensors: Sequence[tuple[str, Tensor]], path: Path, prefix: str = "") -> None:
    """Copy this process's part of every named tensor from one safetensors file.

    Raises:
        RunFolderError: the file is damaged or another run's.
    """
    try:
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for name, tensor in tensors:
                source = file.get_slice(prefix + name)
                if list(source.get_shape()) != list(tensor.shape):
                    raise RunFolderError(f"{path} does not fit the model ({name}): it is another run's")
                _part(tensor).copy_(source[_rows(tensor)] if tensor.ndim else file.get_tensor(prefix + name))
    except RunFolderError:
        raise
    except Exception as error:  # SafetensorError, OSError
        raise RunFolderError(
            f"{path} is damaged ({error}): remove its folder to have it trained again"
        ) from error


def is_sharded(tensor: Any) -> TypeGuard[Any]:
    """Whether it is a ``DTensor``, without the second that importing that class takes."""
    return hasattr(tensor, "device_mesh")


def _whole(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if is_sharded(tensor) else tensor
    return whole


def _part(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local.detach()


def _rows(tensor: Tensor) -> slice:
    """Which rows this process holds: ``torch.chunk``'s, as FSDP2 cuts."""
    if not is_sharded(tensor):
        return slice(None)
    mesh = tensor.device_mesh
    each = -(-tensor.shape[0] // mesh.size())
    start = min(mesh.get_local_rank() * each, tensor.shape[0])
    return slice(start, min(start + each, tensor.shape[0]))


def _own(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters (tied ones once) and persistent buffers, by name."""
    parameters = dict(model.named_parameters())
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    yield from parameters.items()
    for name, tensor in model.named_buffers():
        owner, _, last = name.rpartition(".")
        if name not in aliases and last not in model.get_submodule(owner)._non_persistent_buffers_set:
            yield name, tensor
