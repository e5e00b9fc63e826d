"""The demo's model: about 0.8 M parameters, Qwen3 architecture, one token per character.

Made on the spot, so that a demo needs no download. It is warmed up, supervised, on an
ambiguous mixture: asked to reverse five letters, half of the answers it is shown are
the letters reversed and half are copied. So it learns the form of an answer and both
skills, not which one is wanted: the most likely answer is seldom right (held-out
accuracy 0.05-0.2), a sampled one now and then. Only rewards settle it, and that takes
a real change of the policy, not a sharpening. Held-out strings are never shown.

Deterministic for a seed: fixed steps, one thread, a stopping rule on fixed tasks.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import string
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from barnraise.kernels.generate import generate, greedy
from barnraise.kernels.models import Policy, load_policy, save_weights
from barnraise.protocol.environments import is_held_out, reverse_prompt
from barnraise.protocol.errors import StorageError
from barnraise.protocol.spec import SamplingSpec

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
VOCABULARY = (
    PAD,
    EOS,
    UNKNOWN,
    "=",
    *string.ascii_lowercase,
    *string.digits,
    " ",
    "+",
    "-",
    "*",
    "?",
    ".",
    ",",
    ":",
)
EOS_ID = VOCABULARY.index(EOS)
_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, besides the seed. Its hash names the cache entry."""

    format: int = 1
    width: int = 128
    layers: int = 4
    heads: int = 4
    key_value_heads: int = 2
    feed_forward: int = 384
    letters: int = 5
    reverse_share: float = 0.42
    steered_share: float = 0.35  # instead, while greedy answers are right more often than steer_above
    steer_above: float = 0.13
    learning_rate: float = 1e-3
    ramp_steps: int = 20
    decay_from: int = 130  # the rate falls linearly to decay_to of it, at decay_until
    decay_until: int = 250
    decay_to: float = 0.15
    batch: int = 64
    max_steps: int = 400
    first_check: int = 150
    check_every: int = 10
    check_tasks: int = 512
    # Stop once sampled answers are right often enough and greedy ones seldom enough.
    sampled_enough: float = 0.11
    greedy_limit: float = 0.16


def create_demo_model(
    folder: Path,
    seed: int,
    progress: Callable[[str, float], None] = lambda text, fraction: None,
    cache: Path | None = None,
    recipe: Recipe | None = None,
) -> None:
    """Write the demo model of ``seed`` into ``folder`` (made if missing) as a Hugging Face model folder.

    The first time for a seed this trains for about half a minute on one core; the
    result is cached.

    Args:
        progress: told what is being done and how far it is, 0.0 to 1.0.
        cache: where finished models are kept; by default the user's cache directory.

    Raises:
        StorageError: the disk refused.
    """
    recipe = recipe or Recipe()
    root = cache or Path(platformdirs.user_cache_dir("barnraise"))
    key = hashlib.sha256(json.dumps([seed, dataclasses.asdict(recipe)]).encode()).hexdigest()[:16]
    entry = root / f"demo-model-{seed}-{key}"
    try:
        if not all((entry / name).is_file() for name in _FILES):
            _fill_cache(entry, seed, recipe, progress)
        progress("demo model ready", 1.0)
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            shutil.copyfile(entry / name, folder / name)
    except OSError as error:
        raise StorageError(f"cannot write the demo model to {folder} (cache: {entry}): {error}") from error


def _fill_cache(entry: Path, seed: int, recipe: Recipe, progress: Callable[[str, float], None]) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        _write_model(temporary, seed, recipe, progress)
        if entry.exists():  # incomplete, or another process was faster: either way ours is whole
            shutil.rmtree(entry, ignore_errors=True)
        try:
            os.replace(temporary, entry)
        except OSError:
            if not all((entry / name).is_file() for name in _FILES):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_model(folder: Path, seed: int, recipe: Recipe, progress: Callable[[str, float], None]) -> None:
    from transformers import AutoModelForCausalLM

    write_tokenizer(folder)
    config = _config(recipe)
    config.architectures = ["Qwen3ForCausalLM"]
    (folder / "config.json").write_text(config.to_json_string())
    with _reproducible(seed):
        fresh: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        save_weights(fresh, folder / "model.safetensors", "float32")
        policy = load_policy(folder)
        _warm_up(policy, seed, recipe, progress)
    save_weights(policy.model, folder / "model.safetensors", "float32")


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """One thread and a seeded generator; both are put back afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _config(recipe: Recipe) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=recipe.width,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.key_value_heads,
        head_dim=recipe.width // recipe.heads,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="float32",
    )


def write_tokenizer(folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json: one token per character."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, UNKNOWN))
    tokenizer.add_special_tokens([PAD, EOS, UNKNOWN])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _warm_up(policy: Policy, seed: int, recipe: Recipe, progress: Callable[[str, float], None]) -> None:
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        policy.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.01
    )
    tasks = [_letters(random.Random(-1 - i), recipe) for i in range(recipe.check_tasks)]
    share = recipe.reverse_share
    for step in range(1, recipe.max_steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * _rate(step, recipe)
        loss = _loss(policy, _examples(rng, recipe, share), recipe)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        progress("warming up the demo model", step / recipe.max_steps)
        if step >= recipe.first_check and step % recipe.check_every == 0:
            sampled, best = _accuracies(policy, tasks)
            if sampled >= recipe.sampled_enough and best <= recipe.greedy_limit:
                return
            share = recipe.steered_share if best > recipe.steer_above else recipe.reverse_share


def _rate(step: int, recipe: Recipe) -> float:
    fallen = (step - recipe.decay_from) / (recipe.decay_until - recipe.decay_from)
    fallen = min(1.0, max(0.0, fallen))
    return min(1.0, step / recipe.ramp_steps) * (1.0 - fallen * (1.0 - recipe.decay_to))


def _letters(rng: random.Random, recipe: Recipe) -> str:
    """Random letters that no held-out task asks about."""
    while True:
        letters = "".join(rng.choice(string.ascii_lowercase) for _ in range(recipe.letters))
        if not is_held_out(letters):
            return letters


def _encode(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def _examples(rng: random.Random, recipe: Recipe, share: float) -> Tensor:
    """Token ids [batch, prompt + answer + EOS]."""
    rows = []
    for _ in range(recipe.batch):
        letters = _letters(rng, recipe)
        answer = letters[::-1] if rng.random() < share else letters
        rows.append([*_encode(reverse_prompt(letters) + answer), EOS_ID])
    return torch.tensor(rows)


def _loss(policy: Policy, rows: Tensor, recipe: Recipe) -> Tensor:
    """Mean cross-entropy of the answers' tokens."""
    answer = recipe.letters + 1
    hidden = policy.hidden(rows[:, :-1], use_cache=False)[:, -answer:]
    return nn.functional.cross_entropy(policy.logits(hidden).flatten(0, 1), rows[:, -answer:].flatten())


def _accuracies(policy: Policy, tasks: list[str]) -> tuple[float, float]:
    """How often reversing succeeds: sampled at temperature 1, and greedily."""
    prompts = [_encode(reverse_prompt(letters)) for letters in tasks]
    wanted = [[*_encode(letters[::-1]), EOS_ID] for letters in tasks]
    sampling = SamplingSpec(temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=len(wanted[0]))
    drawn = generate(policy, prompts, range(len(tasks)), sampling, EOS_ID)
    best = greedy(policy, prompts, len(wanted[0]), EOS_ID)
    return (
        sum(a.tokens == b for a, b in zip(drawn, wanted, strict=True)) / len(tasks),
        sum(a == b for a, b in zip(best, wanted, strict=True)) / len(tasks),
    )
