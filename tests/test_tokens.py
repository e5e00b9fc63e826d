"""Prompts to tokens and completions to text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from barnraise.kernels.chat_template import ChatTemplate
from barnraise.kernels.models import ModelError
from barnraise.kernels.tokens import Codec
from barnraise.protocol.spec import EnvironmentSpec

WORDS = ["<s>", "</s>", "<unk>", "two", "plus", "is", "<|user|>", "<|answer|>", "<|system|>", "short"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)


def environment(prompt_format: str = "plain", system_prompt: str = "") -> EnvironmentSpec:
    return EnvironmentSpec(name="x", settings="", prompt_format=prompt_format, system_prompt=system_prompt)


def write(folder: Path, **settings: object) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>", "<|answer|>", "<|system|>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_plain_prompts_get_no_special_tokens_no_padding_and_no_truncation(tmp_path: Path) -> None:
    codec = Codec(write(tmp_path), environment())
    assert codec.encode_prompt("two plus two is") == [3, 4, 3, 5]
    assert codec.eos_token == 1
    assert codec.vocabulary == len(WORDS)


def test_chat_prompts_follow_the_models_own_template(tmp_path: Path) -> None:
    write(tmp_path, chat_template=TEMPLATE)
    assert Codec(tmp_path, environment("chat")).encode_prompt("two plus two") == [6, 3, 4, 3, 7]
    with_system = Codec(tmp_path, environment("chat", "short"))
    assert with_system.encode_prompt("two") == [8, 9, 6, 3, 7]


def test_a_plain_prompt_begins_as_the_tokenizers_own_rules_say(tmp_path: Path) -> None:
    codec = Codec(write(tmp_path, bos_token="<s>"), environment())
    assert codec.encode_prompt("two plus") == [0, 3, 4]
    assert Codec(write(tmp_path, bos_token="</s>"), environment()).encode_prompt("two") == [3]


def test_a_template_that_asks_for_the_date_is_told_the_same_everywhere(tmp_path: Path) -> None:
    write(tmp_path, chat_template="{{ 'two' if strftime_now('%d %b %Y') == '26 Jul 2024' else 'plus' }}")
    assert Codec(tmp_path, environment("chat")).encode_prompt("is") == [3]


PARTS = """{%- if messages[0]['role'] == 'system' %}{%- set lead = messages[0]['content'] | trim %}
{%- set rest = messages[1:] %}
{%- else %}{%- set lead = '' %}
    {%- set rest = messages %}
{%- endif %}
{{ bos_token }}{% set ns = namespace(seen=0) %}
{%- for m in rest %}{%- if loop.index > 3 %}{%- break %}{%- endif %}{%- set ns.seen = ns.seen + 1 %}
{% generation %}<|{{ m.role }}|>{{ lead ~ m['content'] | tojson }}{{ ns.seen }}{% endgeneration %}
{%- endfor %}{%- if tools is not none %}no{%- endif %}{{ eos_token if add_generation_prompt }}
"""


def test_templates_render_as_transformers_renders_them(tmp_path: Path) -> None:
    write(tmp_path, chat_template=[{"name": "default", "template": PARTS}], bos_token="<s>")
    theirs = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    for messages in (
        [{"role": "user", "content": 'two "<plus>" ü'}],
        [{"role": "system", "content": " short "}, {"role": "user", "content": "two"}],
    ):
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ChatTemplate(tmp_path).render(messages) == wanted


@pytest.mark.parametrize("template", ["{{ [1, 2] | random }}", "{{ lipsum() }}", "{% for %}"])
def test_a_template_has_no_dice_and_must_be_one(tmp_path: Path, template: str) -> None:
    write(tmp_path, chat_template=template)
    with pytest.raises(ModelError, match="chat template"):
        Codec(tmp_path, environment("chat")).encode_prompt("two")


def test_a_template_in_its_own_file_is_found(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert Codec(tmp_path, environment("chat")).encode_prompt("two") == [6, 3, 7]


def test_decoding_leaves_out_special_and_unknown_ids(tmp_path: Path) -> None:
    codec = Codec(write(tmp_path), environment())
    assert codec.decode([0, 3, 4, 3, 1]) == "two plus two"
    assert codec.decode([3, 4_000_000_000]) == "two"
    assert codec.decode([]) == ""


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_the_end_token_may_come_from_the_models_config(tmp_path: Path, name: str) -> None:
    write(tmp_path, eos_token=None)
    (tmp_path / name).write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert Codec(tmp_path, environment()).eos_token == 7


def test_the_end_token_may_be_written_as_an_object(tmp_path: Path) -> None:
    write(tmp_path, eos_token={"content": "</s>", "special": True})
    assert Codec(tmp_path, environment()).eos_token == 1


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        Codec(tmp_path, environment())
    write(tmp_path, eos_token=None)
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        Codec(tmp_path, environment())
    write(tmp_path)
    with pytest.raises(ModelError, match="no chat template"):
        Codec(tmp_path, environment("chat"))
    with pytest.raises(ModelError, match="no tokens at all"):
        Codec(tmp_path, environment()).encode_prompt("")
    (tmp_path / "tokenizer.json").write_text('{"version": 3}')
    with pytest.raises(ModelError, match="is not a tokenizer"):
        Codec(tmp_path, environment())


def test_a_template_that_raises_is_a_clear_error(tmp_path: Path) -> None:
    write(tmp_path, chat_template="{{ raise_exception('no system role') }}")
    with pytest.raises(ModelError, match=r"template fails on 'two'.*no system role"):
        Codec(tmp_path, environment("chat")).encode_prompt("two")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            f"{{% for a in range(90000) %}}{'{% for b in range(90000) %}{% endfor %}'}{{% endfor %}}",
            "longer than",
        ),
        ("{{ 'a' * 10**11 }}", "more memory|GB of memory|longer than"),
        ("{{ 'a' * 10**7 }}", "10000000 characters"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|template fails"),
        ("{% include '/etc/passwd' %}", "template fails"),
        ("{{ cycler.__init__.__globals__.os.system('false') }}", "unsafe|template fails"),
    ],
)
def test_a_hostile_template_ends_in_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, message: str
) -> None:
    monkeypatch.setattr("barnraise.kernels.tokens.TEMPLATE_SECONDS", 3.0)
    write(tmp_path, chat_template=template)
    with pytest.raises(ModelError, match=message):
        Codec(tmp_path, environment("chat")).encode_prompt("two")


@pytest.mark.parametrize(
    "text",
    ["[" * 200_000, '{"model": ' * 5_000, "\0" * 1000, '{"added_tokens": [{"id": 99999999999}]}', "null"],
)
def test_a_hostile_tokenizer_file_ends_in_a_clear_error(tmp_path: Path, text: str) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="is not a tokenizer"):
        Codec(tmp_path, environment())
