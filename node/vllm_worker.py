"""What our engine adds to vLLM's worker: final hidden states, proofs, and other weights in place.

vLLM mixes ``ProvingWorker`` into its own worker class (``worker_extension_cls``); the engine
calls its methods by name (``collective_rpc``). They run where the model is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from barnraise.kernels.model_files import weight_files
from barnraise.kernels.models import ModelError
from barnraise.node.vllm_rows import DESK, Proven, Record


class ProvingWorker:
    """Methods for vLLM's worker; ``model_runner`` is vLLM's."""

    model_runner: Any

    def barnraise_watch(self) -> None:
        """Show the desk the post-norm hidden states of the rows that logits are computed of.

        That is what ``compute_logits`` is called with: exactly the sampled rows, without the
        padding of CUDA graphs. A soft cap on logits moves to the draw, in float32: vLLM's is in the
        model's own type.
        """
        model = self.model_runner.get_model()
        compute = model.compute_logits

        def watched(hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor | None:
            DESK.see(hidden_states)
            logits: Tensor | None = compute(hidden_states, *arguments, **named)
            return logits

        model.compute_logits = watched
        head: Any = getattr(model, "logits_processor", None)
        cap = getattr(head, "soft_cap", None)
        if cap is not None:
            DESK.softcap, head.soft_cap = float(cap), None

    def barnraise_begin(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        proof_top_k: int,
        proof_chunk: int,
        proofs: bool = True,
    ) -> None:
        """A unit begins."""
        DESK.begin(Record(proof_top_k, proof_chunk, proofs=proofs), temperature, top_k, top_p)

    def barnraise_open(self, keys: Sequence[int]) -> None:
        """Expect these sequences."""
        assert DESK.record is not None
        for key in keys:
            DESK.record.open(key)

    def barnraise_take(self, finished: Sequence[tuple[int, Sequence[int]]]) -> list[Proven]:
        """See ``Record.take``."""
        assert DESK.record is not None
        return DESK.record.take(finished)

    def barnraise_end(self) -> None:
        """The unit is over, or given up."""
        if DESK.record is not None:
            DESK.record.clear()
        DESK.end()

    @torch.no_grad()
    def barnraise_reload(self, folder: str) -> int:
        """Put the weights of the version in ``folder`` in the place of those that are loaded.

        Tensor by tensor from the file, so that memory holds one layer twice, never the model.

        Returns:
            How many tensors were read.

        Raises:
            ModelError: the files are damaged, or do not fill the model; it is half changed then.
        """
        model = self.model_runner.get_model()
        tensors = _Tensors(Path(folder))
        self.model_runner.reload_weights(weights_iterator=iter(tensors))
        _repack_tied(model)
        return tensors.count


class _Tensors:
    def __init__(self, folder: Path) -> None:
        self._files = weight_files(folder)
        self.count = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for path in self._files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a dict)
                        self.count += 1
                        yield name, file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} is not a readable safetensors file: {error}") from error


def _repack_tied(model: nn.Module) -> None:
    """On a CPU layers hold packed copies of weights; that of a tied head is not renewed by itself."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.numel() and hasattr(module, "cpu_linear"):
            owners.setdefault(weight.data_ptr(), []).append(module)
    for modules in owners.values():
        if len(modules) > 1:
            for module in modules:
                module.quant_method.process_weights_after_loading(module)  # type: ignore[operator, union-attr]
