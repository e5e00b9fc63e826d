"""The run file: every key documented, mistakes named, the same run again from what was written."""

import json
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from barnraise.coordinator import presets
from barnraise.coordinator.checkpoints import Record, write_record
from barnraise.coordinator.folder import read_spec
from barnraise.coordinator.pretrain_presets import Choices
from barnraise.coordinator.publisher import slim
from barnraise.coordinator.retention import kept_whole
from barnraise.coordinator.run_bounds import LEAST, OR_ZERO, too_small
from barnraise.coordinator.run_estimate import Swarm, estimate
from barnraise.coordinator.run_file import (
    OWN,
    SIGNED,
    Keep,
    RunFile,
    RunFileError,
    RunSection,
    floor_of,
    operating,
    read_run_file,
    settings_of,
)
from barnraise.coordinator.run_keys import SECTIONS, TEXTS, allowed, keys, reference, write_run_file
from barnraise.coordinator.workers import Trained, checkpoint_folder
from barnraise.protocol.errors import BarnraiseError
from barnraise.protocol.hello import Floor
from barnraise.tui.main import app

DOCUMENT = Path(__file__).parent.parent / "docs" / "run-file.md"
PRESETS = {"demo": presets.demo, "smollm2": presets.smollm2, "./mine": presets.generic}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_every_key_has_a_meaning_and_a_range_and_the_page_is_what_the_code_says():
    assert {f"{section}.{key}" for section, key, _ in keys()} == set(TEXTS)
    assert {section for section, _, _ in keys()} == set(SECTIONS)
    assert all(allowed(hint) for _, _, hint in keys())
    assert DOCUMENT.read_text(encoding="utf-8") == reference()


@pytest.mark.parametrize("model", PRESETS)
@pytest.mark.parametrize("phase", ["posttrain", "pretrain"])
def test_a_template_that_nobody_touched_is_the_preset(tmp_path, model, phase):
    file = RunFile(run=RunSection(model=model, phase=phase))
    found = read_run_file(written(tmp_path, write_run_file(file, PRESETS[model]())))
    assert settings_of(found, PRESETS[model]()) == PRESETS[model]()
    assert (found.run, found.serve, found.keep, found.guards) == (
        file.run,
        file.serve,
        file.keep,
        file.guards,
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[grpo]\nlearning_rat = 1.0", "learning_rat.*did you mean learning_rate"),
        ("[grp]\nx = 1", "no section .grp.*did you mean grpo"),
        ("[grpo]\nlearning_rate = 'fast'", "learning_rate.*Expected `float`"),
        ("[grpo]\nlearning_rate = -1", "learning_rate.*> 0"),
        ("[rollout]\nversions = 1.5", "versions.*Expected `int`"),
        ("[keep]\nevery = true", "every.*Expected `int`"),
        ("[serve]\nlisten = []", "listen"),
        ("[run]\nadmission = 'nobody'", "admission.*nobody"),
        ("[guards]\nkl = 0", "kl"),
        ("[pretrain]\nblocks = 4", "phase"),
        ("versions = 4", "outside of a section"),
        ("[run", "no TOML"),
        ("\x00", "no TOML"),
        ("#" * 300_000, "larger than"),
    ],
)
def test_what_is_wrong_is_named_with_file_section_and_key(tmp_path, text, why):
    with pytest.raises(RunFileError, match=rf"(?s)run\.toml.*{why}"):
        read_run_file(written(tmp_path, text))


@pytest.mark.parametrize(
    "text",
    [
        "[rollout]\ngroups_per_version = 65536",
        "[rollout]\ndeadline_s = 1",
        "[environment]\nsettings = 'letters=5'",
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path, text):
    with pytest.raises(RunFileError):
        settings_of(read_run_file(written(tmp_path, text)), presets.demo())


def test_whole_numbers_do_for_floats_and_what_is_left_out_stays(tmp_path):
    file = read_run_file(written(tmp_path, "[grpo]\nlearning_rate = 1\n[keep]\ndisk_gb = 3\n"))
    settings = settings_of(file, presets.demo())
    assert settings.grpo == msgspec.structs.replace(presets.demo().grpo, learning_rate=1.0)
    assert file.keep == Keep(disk_gb=3.0)


def test_a_run_made_from_a_file_is_what_the_file_says_and_keeps_it(tmp_path):
    text = (
        '[run]\nname = "mine"\nadmission = "invite"\n[rollout]\nversions = 7\n'
        "[sampling]\nmax_new_tokens = 6\n"
        '[serve]\nverifiers = "auto"\nno_http = true\n[guards]\nkl = 0.25\n'
    )
    path, folder = written(tmp_path, text), tmp_path / "run"
    command = ["run", "init", str(folder), "--file", str(path), "--versions", "9", "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    spec = read_spec(folder)[0]
    assert (spec.name, spec.admission, spec.rollout.versions) == ("mine", "invite", 9)  # options come first
    assert spec.sampling.max_new_tokens == 6
    kept = operating(folder)
    assert (kept.serve.verifiers, kept.serve.no_http, kept.guards.kl) == ("auto", True, 0.25)
    assert settings_of(kept, presets.demo()).rollout == spec.rollout
    shown = CliRunner().invoke(app, ["run", "check", str(folder), "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output)["versions"] == 9


def test_a_folder_from_before_run_files_is_served_by_defaults(tmp_path):
    assert operating(tmp_path) == RunFile()


def test_a_damaged_file_stops_the_start_and_says_where(tmp_path):
    written(tmp_path, "[serve]\nthreads = 0")
    with pytest.raises(RunFileError, match="threads"):
        operating(tmp_path)


def test_check_says_what_will_not_do(tmp_path):
    path = written(tmp_path, '[run]\nmodel = "./absent"\n[rollout]\ntimeout_s = 1\n')
    result = CliRunner().invoke(app, ["run", "check", str(path)])
    assert result.exit_code == 1
    result = CliRunner().invoke(app, ["run", "check", str(path), "--parameters", "7e9", "--nodes", "4"])
    assert result.exit_code == 1
    assert "timeout_s" in result.output


HARMLESS = {
    "grpo.beta1": "no moving average",
    "grpo.beta2": "no moving average",
    "grpo.weight_decay": "none",
    "grpo.kl_coefficient": "none",
    "grpo.entropy_coefficient": "none",
    "pretrain.outer_momentum": "none",
    "pretrain.trim": "none",
    "guards.reward_share": "never",
    "guards.accuracy_share": "never",
    "guards.entropy_low": "never",
    "guards.clip_share": "as soon as a token is clipped",
    "guards.usable_share": "never but without any",
    "guards.stale_share": "as soon as work is stale",
    "guards.volunteers_share": "never but without any",
}
"""Numbers that may be as small as 0, and what as good as 0 then means."""


def number_keys(kind: type) -> list[tuple[str, str]]:
    """Every key that is a number, of a kind."""
    return [
        (section, key)
        for section, key, hint in keys()
        if kind
        in (plain := [hint, *get_args(hint), *(more for part in get_args(hint) for more in get_args(part))])
        and bool not in plain
    ]


@pytest.mark.parametrize(("section", "key"), number_keys(float))
@pytest.mark.parametrize("value", ["5e-324", "1e-300", "1e-30"])
def test_a_positive_number_that_is_absurdly_small_is_refused_with_the_cure(tmp_path, section, key, value):
    text = f"[{section}]\n{key} = {value}\n"
    if section == "pretrain":
        text += '[run]\nphase = "pretrain"\n'
    path = written(tmp_path, text)
    if f"{section}.{key}" in HARMLESS:
        read_run_file(path)
        return
    with pytest.raises(
        RunFileError, match=rf"run\.toml: {section}\.{key} is .* makes sense: write .* or more"
    ):
        read_run_file(path)
    if section in OWN:
        with pytest.raises(RunFileError):
            operating(tmp_path)
    else:  # signed long ago, when nobody refused it
        assert operating(tmp_path)


@pytest.mark.parametrize(("section", "key"), number_keys(int))
def test_no_count_may_be_negative(tmp_path, section, key):
    text = f"[{section}]\n{key} = -2\n" + ('[run]\nphase = "pretrain"\n' if section == "pretrain" else "")
    with pytest.raises(RunFileError, match=f"{key}"):
        read_run_file(written(tmp_path, text))


def test_bounds_are_of_keys_that_there_are_and_every_preset_keeps_them():
    known = {f"{section}.{key}" for section, key, _ in keys()}
    assert set(LEAST) | set(HARMLESS) <= known
    assert set(LEAST) >= OR_ZERO
    for preset in PRESETS.values():
        for section in ("sampling", "rollout", "grpo"):
            values = msgspec.to_builtins(getattr(preset(), section))
            assert not too_small({f"{section}.{key}": value for key, value in values.items()})


ABSURD = (
    *("0", "1", "-1", "1.5", "1e308", "1e-320", "inf", "nan", "9223372036854775807", "65536", "true", "[]"),
    *("{}", "[[]]", "1979-05-27", '""', '"x"', '"\\u0000"', '"auto"', '"0001-01-01T00:00:00+14:00"', '"{}"'),
    *("'" + "[" * 3000 + "'", '"length"', """'{"parts": [{"name": "reverse", "weight": NaN}]}'"""),
)
KEYS = [
    (section, key)
    for section, kind in {"run": RunSection, "pretrain": Choices, **SIGNED, **OWN}.items()
    for key in get_type_hints(kind)
]


@given(st.sampled_from(KEYS), st.sampled_from(ABSURD), st.sampled_from(ABSURD))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_check_takes_any_value_or_says_what_is_wrong(tmp_path, place, value, name):
    section, key = place
    text = f"[{section}]\n{key} = {value}\n"
    if section == "pretrain":
        text += '[run]\nphase = "pretrain"\n'
    elif section == "environment" and key == "settings":
        text += f"name = {name}\n"
    result = CliRunner().invoke(app, ["run", "check", str(written(tmp_path, text)), "--json"])
    assert result.exception is None or isinstance(result.exception, BarnraiseError | SystemExit), text
    if result.exit_code == 0:
        assert json.loads(result.output, parse_constant=pytest.fail)["fits"]


@pytest.mark.parametrize("value", ["inf", "1e999", "0.5"])
def test_check_reckons_with_numbers_alone(value):
    result = CliRunner().invoke(app, ["run", "check", "absent.toml", "--parameters", value])
    assert isinstance(result.exception, BarnraiseError)
    assert "numbers" in str(result.exception)


def test_estimates_grow_with_the_model_and_shrink_with_the_swarm():
    def of(parameters: int, nodes: int, keep: Keep = Keep()):
        return estimate(
            parameters=parameters,
            published_bytes=2,
            compute_bytes=2,
            rollout=presets.generic().rollout,
            max_new_tokens=256,
            keep=keep,
            swarm=Swarm(nodes=nodes),
        )

    small, large, many = of(10**8, 10), of(10**9, 10), of(10**8, 100)
    assert large.disk_bytes > 9 * small.disk_bytes
    assert large.version_bytes == 2 * 10**9
    assert many.rollouts_s == pytest.approx(small.rollouts_s / 10)
    assert many.patch_s < 10 * small.patch_s  # nodes lend their upload, too
    rollouts = [of(10**8, 10, Keep(rollouts="all", rollouts_gb=most)).disk_bytes for most in (0.01, 0.0)]
    assert rollouts[0] == small.disk_bytes + 10**7 < rollouts[1]


def checkpoints_of(folder: Path, versions: range, size: int = 1000) -> None:
    for version in versions:
        place = checkpoint_folder(folder, version)
        place.mkdir(parents=True)
        for name in ("model.safetensors", "optimizer.safetensors"):
            (place / name).write_bytes(bytes(size))
        trained = Trained(version=version, weights="model.safetensors", stats=None, accuracy=-1.0)
        write_record(place, Record(version=version, step=version, trained=trained))


def test_every_so_manieth_version_stays_whole_the_newest_of_them(tmp_path):
    checkpoints_of(tmp_path, range(31))
    spared = kept_whole(tmp_path, 30, Keep(every=5, most=3), 27)
    assert spared == {20, 25, 30}
    slim(tmp_path, 30, spared)
    whole = {
        version
        for version in range(31)
        if (checkpoint_folder(tmp_path, version) / "optimizer.safetensors").exists()
    }
    assert whole == {0, 20, 25, 29, 30}
    assert kept_whole(tmp_path, 30, Keep(every=0), 27) == set()


def test_the_oldest_go_where_the_disk_is_full(tmp_path):
    checkpoints_of(tmp_path, range(31), size=10**6)
    two_more = Keep(every=5, most=5, disk_gb=(5 + 2) * 2.001e6 / 1e9)
    assert kept_whole(tmp_path, 30, two_more, 27) == {20, 25, 30}
    assert kept_whole(tmp_path, 30, Keep(every=5, most=5, disk_gb=0.001), 27) == {30}


def test_a_floor_is_a_minor_and_a_date_and_never_above_our_own(tmp_path):
    def floor(text: str):
        return floor_of(read_run_file(written(tmp_path, "[serve]\n" + text)).serve)

    assert floor("") is None
    assert floor("floor_minor = 0") == Floor(0, 0)
    assert floor('floor_minor = 0\nfloor_from = "2027-01-01"') == Floor(0, 1_798_761_600_000)
    for text, why in (
        ("floor_minor = 60000", "nobody could join"),
        ('floor_from = "2027-01-01"', "say from which minor"),
        ('floor_minor = 0\nfloor_from = "soon"', "is no date"),
    ):
        with pytest.raises(RunFileError, match=why):
            floor(text)
