from __future__ import annotations

import copy
import os
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from epl.config import LAUNCHER_VARIABLES, SETTINGS, Config
from epl.config.reference import render
from epl.config.sections import SECTIONS
from epl.errors import ConfigError, NotBuiltError, UsageError

PAGE = Path(__file__).parent.parent / "docs" / "config.md"

# Chapter 6 of the manual, by hand: key -> (type, default). clip_after_allreduce is the one that differs (False there).
MANUAL = {
    "pipeline.num_micro_batch": (int, 1),
    "pipeline.num_stages": (int, None),
    "pipeline.strategy": (str, "PreferBackward"),
    "gradient_checkpoint.type": (str, ""),
    "gradient_checkpoint.end_taskgraph": (int, -1),
    "gradient_checkpoint.check_gradients": (bool, False),
    "zero.level": (str, ""),
    "offload.level": (str, ""),
    "amp.level": (str, ""),
    "amp.debug_log": (bool, False),
    "amp.loss_scale": (str, "dynamic"),
    "optimizer.num_apply_group": (int, 1),
    "cluster.device_place_prefer_intra_node": (bool, True),
    "cluster.run_visible_devices": (str, ""),
    "cluster.colocate_split_and_replicate": (bool, False),
    "communication.num_communicators": (int, 2),
    "communication.sparse_as_dense": (bool, False),
    "communication.max_splits": (int, 5),
    "communication.fp16": (bool, False),
    "communication.fp16_scale": (int, 128),
    "communication.clip_after_allreduce": (bool, True),
    "communication.gradients_reduce_method": (str, "mean"),
    "io.slicing": (bool, False),
    "io.unbalanced_io_slicing": (bool, False),
    "io.drop_last_files": (bool, False),
    "auto.auto_parallel": (bool, False),
}
# Design §6, "Names beyond the manual's 26 keys".
OURS = {
    "pipeline.num_chunks": 1,
    "gradient_checkpoint.memory_limit": "",
    "zero.scope": "all",
    "offload.dir": "",
    "amp.dtype": "float16",
    "cluster.devices_per_node": 0,
    "communication.sync_batch_norm": False,
    "communication.timeout": 600,
    "io.uneven_tail": "weight",
    "split.sequence_parallel": False,
    "split.exact_dropout": False,
}
# Per key: good values with their canonical form, then bad ones. What is good is judged before what is built.
NOT_BOOL = [1, 0, "true", None, 1.0]
NOT_INT = ["4", 4.0, True, None, [4]]
VALUES: dict[str, tuple[list[tuple[object, object]], list[object]]] = {
    "pipeline.num_micro_batch": ([(1, 1), (4, 4)], [0, -1, *NOT_INT]),
    "pipeline.num_stages": ([(None, None), (1, 1), (4, 4)], [0, -1, "4", 4.0, True]),
    "pipeline.strategy": (
        [
            ("preferbackward", "PreferBackward"),
            ("PREFERFORWARD", "PreferForward"),
            ("preferBackwardoptimizer", "PreferBackwardOptimizer"),
            ("interleaved", "Interleaved"),
            ("zerobubble", "ZeroBubble"),
        ],
        ["", "1F1B", " PreferForward", None, 1],
    ),
    "pipeline.num_chunks": ([(2, 2)], [0, *NOT_INT]),
    "gradient_checkpoint.type": (
        [("", ""), ("Auto", "auto"), ("COLLECTION", "collection"), ("Selective", "selective")],
        ["full", None, True],
    ),
    "gradient_checkpoint.end_taskgraph": ([(-1, -1), (0, 0), (3, 3)], [-2, *NOT_INT]),
    "gradient_checkpoint.check_gradients": ([(True, True)], NOT_BOOL),
    "gradient_checkpoint.memory_limit": (
        [("", ""), ("8GiB", "8GiB"), ("8gib", "8GiB"), ("1.5 TIB", "1.5TiB"), ("512MiB", "512MiB"), ("4kib", "4KiB")],
        ["8", "8GB", "GiB", "-8GiB", "0GiB", "8GiB!", 8, None],
    ),
    "zero.level": ([("", ""), ("V1", "v1"), ("v0", "v0"), ("v2", "v2")], ["v3", "1", 1, None]),
    "zero.scope": ([("ALL", "all"), ("Node", "node")], ["", "rack", None]),
    "offload.level": (
        [("", ""), ("V0", "v0"), ("Optimizer", "optimizer"), ("activation", "activation"), ("disk", "disk")],
        ["v1", "cpu", None],
    ),
    "offload.dir": ([("", ""), ("Some/Dir", "Some/Dir")], [None, 1]),
    "amp.level": ([("", ""), ("o1", "O1"), ("O1", "O1")], ["O2", None, 1]),
    "amp.debug_log": ([(True, True)], NOT_BOOL),
    "amp.loss_scale": (
        [("Dynamic", "dynamic"), (128, 128.0), (0.5, 0.5)],
        [0, -1, 0.0, "128", True, None, float("nan"), float("inf"), 10**400],
    ),
    "amp.dtype": ([("BFloat16", "bfloat16"), ("float16", "float16")], ["fp16", "", None]),
    "optimizer.num_apply_group": ([(1, 1), (30, 30)], [0, *NOT_INT]),
    "cluster.device_place_prefer_intra_node": ([(False, False)], NOT_BOOL),
    "cluster.run_visible_devices": (
        [("", ""), ("0", "0"), ("0,1", "0,1"), (" 2 , 0", "2,0")],
        ["0,0", "-1", "a", "0,", ",", "0 1", "1.0", "²", 0, None, [0, 1]],
    ),
    "cluster.colocate_split_and_replicate": ([(True, True)], NOT_BOOL),
    "cluster.devices_per_node": ([(0, 0), (8, 8)], [-1, *NOT_INT]),
    "communication.num_communicators": ([(1, 1), (4, 4)], [0, *NOT_INT]),
    "communication.sparse_as_dense": ([(True, True)], NOT_BOOL),
    "communication.max_splits": ([(1, 1), (9, 9)], [0, *NOT_INT]),
    "communication.fp16": ([(True, True)], NOT_BOOL),
    "communication.fp16_scale": ([(1, 1), (256, 256)], [0, -128, *NOT_INT]),
    "communication.clip_after_allreduce": ([(False, False)], NOT_BOOL),
    "communication.gradients_reduce_method": ([("MEAN", "mean"), ("Sum", "sum")], ["", "max", None]),
    "communication.sync_batch_norm": ([(True, True)], NOT_BOOL),
    "communication.timeout": ([(20, 20.0), (0.5, 0.5)], [0, -1, "20", True, None, float("nan"), float("inf")]),
    "io.slicing": ([(True, True)], NOT_BOOL),
    "io.unbalanced_io_slicing": ([(True, True)], NOT_BOOL),
    "io.drop_last_files": ([(True, True)], NOT_BOOL),
    "io.uneven_tail": ([("Drop", "drop"), ("WEIGHT", "weight")], ["keep", "", None]),
    "auto.auto_parallel": ([(True, True)], NOT_BOOL),
    "split.sequence_parallel": ([(True, True)], NOT_BOOL),
    "split.exact_dropout": ([(True, True)], NOT_BOOL),
}
GOOD = [(key, given, kept) for key, (good, _) in VALUES.items() for given, kept in good]
BAD = [(key, value) for key, (_, bad) in VALUES.items() for value in bad]
UNBUILT = {
    "gradient_checkpoint.type": "auto",
    "gradient_checkpoint.end_taskgraph": 0,
    "gradient_checkpoint.check_gradients": True,
    "gradient_checkpoint.memory_limit": "8GiB",
    "zero.level": "v1",
    "zero.scope": "node",
    "offload.level": "v0",
    "offload.dir": "spill",
    "amp.level": "O1",
    "amp.debug_log": True,
    "amp.loss_scale": 128.0,
    "amp.dtype": "bfloat16",
    "optimizer.num_apply_group": 30,
}


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EPL_")]:
        monkeypatch.delenv(name)


def read(config: Config, key: str) -> object:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def error_of(*args: object, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        Config(*args)  # type: ignore[arg-type]
    assert caught.type is kind
    return str(caught.value)


# --- the keys -------------------------------------------------------------------------------------------------------


def test_the_keys_are_the_manuals_and_the_designs() -> None:
    assert len(MANUAL) == 26
    assert set(SETTINGS) == set(MANUAL) | set(OURS) == set(VALUES)
    assert {key for key, setting in SETTINGS.items() if setting.about.ours} == set(OURS)


@pytest.mark.parametrize(("key", "kind", "default"), [(key, *value) for key, value in MANUAL.items()])
def test_manual_key_has_its_type_and_default(key: str, kind: type, default: object) -> None:
    found = read(Config(), key)
    assert found == default
    assert found is None or type(found) is kind
    assert kind in SETTINGS[key].kinds or (kind is str and SETTINGS[key].words)


@pytest.mark.parametrize(("key", "default"), OURS.items())
def test_our_key_has_the_designs_default(key: str, default: object) -> None:
    assert read(Config(), key) == default


def test_every_default_is_an_acceptable_value() -> None:
    assert Config(Config().to_dict()) == Config()


def test_variables_are_distinct_and_named_after_the_key() -> None:
    assert len({setting.variable for setting in SETTINGS.values()} | LAUNCHER_VARIABLES) == len(SETTINGS) + 2
    assert SETTINGS["gradient_checkpoint.end_taskgraph"].variable == "EPL_GRADIENT_CHECKPOINT_END_TASKGRAPH"


# --- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "given", "kept"), GOOD)
def test_good_value_is_kept_in_its_one_form(key: str, given: object, kept: object) -> None:
    accepted = SETTINGS[key].accept(given)
    assert accepted == kept
    assert type(accepted) is type(kept)
    if SETTINGS[key].about.built:
        assert read(Config({key: given}), key) == kept


@pytest.mark.parametrize(("key", "value"), BAD)
def test_bad_value_is_refused_with_key_expected_and_found(key: str, value: object) -> None:
    message = error_of({key: value})
    assert f"{key!r} must be {SETTINGS[key].expected(as_text=False)}" in message
    assert f"found {value!r} ({type(value).__name__})" in message


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("pipeline.num_micro_batch", "an integer >= 1"),
        ("pipeline.num_stages", "an integer >= 1 or None"),
        ("communication.fp16_scale", "an integer > 0"),
        ("communication.timeout", "a number > 0"),
        ("communication.fp16", "True or False"),
        ("communication.gradients_reduce_method", 'one of "mean", "sum"'),
        ("amp.loss_scale", 'a number > 0 or "dynamic"'),
        ("offload.dir", "a string"),
    ],
)
def test_expected_is_said_in_words(key: str, expected: str) -> None:
    assert SETTINGS[key].expected(as_text=False) == expected


# --- the environment ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("communication.max_splits", "3", 3),
        ("communication.fp16", "true", True),
        ("communication.fp16", "TRUE", True),
        ("communication.clip_after_allreduce", "False", False),
        ("communication.timeout", "20", 20.0),
        ("communication.timeout", "0.5", 0.5),
        ("communication.gradients_reduce_method", "SUM", "sum"),
        ("cluster.run_visible_devices", "0,1", "0,1"),
        ("cluster.run_visible_devices", "", ""),
        ("pipeline.num_stages", "4", 4),
        ("amp.loss_scale", "Dynamic", "dynamic"),
        ("amp.loss_scale", "128", 128.0),
        ("offload.dir", "true", "true"),
    ],
)
def test_variable_is_parsed(monkeypatch: pytest.MonkeyPatch, key: str, text: str, value: object) -> None:
    parsed = SETTINGS[key].parse(text)
    assert parsed == value
    assert type(parsed) is type(value)
    if SETTINGS[key].about.built:
        monkeypatch.setenv(SETTINGS[key].variable, text)
        assert read(Config(), key) == value


@pytest.mark.parametrize(
    ("variable", "text", "expected"),
    [
        ("EPL_IO_SLICING", "1", "true or false"),
        ("EPL_IO_SLICING", "yes", "true or false"),
        ("EPL_IO_SLICING", "", "true or false"),
        ("EPL_COMMUNICATION_MAX_SPLITS", "3.0", "an integer >= 1"),
        ("EPL_COMMUNICATION_MAX_SPLITS", "0", "an integer >= 1"),
        ("EPL_COMMUNICATION_MAX_SPLITS", "true", "an integer >= 1"),
        ("EPL_PIPELINE_NUM_STAGES", "None", "an integer >= 1"),
        ("EPL_COMMUNICATION_TIMEOUT", "nan", "a number > 0"),
        ("EPL_AMP_LOSS_SCALE", "-1", 'a number > 0 or "dynamic"'),
        ("EPL_IO_UNEVEN_TAIL", "keep", 'one of "weight", "drop"'),
    ],
)
def test_bad_variable_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str, text: str, expected: str) -> None:
    monkeypatch.setenv(variable, text)
    assert error_of() == f"epl.Config: the environment variable {variable} must be {expected}, found {text!r}"


def test_dictionary_over_environment_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config().communication.max_splits == 5
    monkeypatch.setenv("EPL_COMMUNICATION_MAX_SPLITS", "3")
    assert Config().communication.max_splits == 3
    assert Config({"communication.max_splits": 8}).communication.max_splits == 8
    assert Config({"communication.max_splits": 5}) == Config({**Config().to_dict(), "communication.max_splits": 5})


def test_launcher_variables_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"EPL_LAUNCH_NUM_WORKERS", "EPL_LAUNCH_GPU_PER_WORKER"} == LAUNCHER_VARIABLES
    for name in LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "2")
    assert Config() == Config({})


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("EPL_PIPELINE_NUM_MICRO_BATCHES", "EPL_PIPELINE_NUM_MICRO_BATCH"),
        ("EPL_NUM_MICRO_BATCH", "EPL_PIPELINE_NUM_MICRO_BATCH"),
        ("EPL_io_slicing", "EPL_IO_SLICING"),
        ("EPL_LAUNCH_NUM_WORKER", ""),
        ("EPL_", ""),
    ],
)
def test_unknown_variable_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, variable: str, nearest: str
) -> None:
    monkeypatch.setenv(variable, "2")
    assert f"{variable} is no setting of epl; the nearest is EPL_{nearest.removeprefix('EPL_')}" in error_of()


# --- keys that cannot be, several problems --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("pipeline.num_micro_batches", "pipeline.num_micro_batch"),
        ("Pipeline.Num_Micro_Batch", "pipeline.num_micro_batch"),
        ("loss_scale", "amp.loss_scale"),
        ("EPL_IO_SLICING", "io.slicing"),
        ("communication.max_split", "communication.max_splits"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest(key: str, nearest: str) -> None:
    assert error_of({key: 1}) == f"epl.Config: {key!r} is no setting of epl; the nearest is {nearest!r}"


@pytest.mark.parametrize("key", ["", "x", "ÄÖÜ"])
def test_a_key_like_nothing_at_all_is_refused_too(key: str) -> None:
    assert f"{key!r} is no setting of epl; the nearest is '" in error_of({key: 1})


def test_a_section_as_key_names_its_keys() -> None:
    message = error_of({"zero": {"level": "v1"}})
    assert message == "epl.Config: 'zero' is a section, not a key; its keys are 'zero.level', 'zero.scope'"


def test_a_key_that_is_no_string() -> None:
    assert "a key must be a string such as 'communication.max_splits', found 3 (int)" in error_of({3: 1})


@pytest.mark.parametrize("given", [["io.slicing"], "job.toml", 3])
def test_an_argument_that_is_no_dictionary(given: object) -> None:
    message = error_of(given, kind=UsageError)
    assert f"found {given!r}" in message
    assert "from_file" in message


def test_all_problems_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPL_IO_SLICE", "true")
    monkeypatch.setenv("EPL_COMMUNICATION_FP16", "1")
    message = error_of({"io.slicin": True, "communication.max_splits": 0, "zero.level": "v1"})
    assert message.splitlines()[0] == "epl.Config: 5 problems"
    for part in ["EPL_IO_SLICE ", "EPL_COMMUNICATION_FP16", "'io.slicin'", "max_splits", "'zero.level' = 'v1' asks"]:
        assert part in message


def test_a_bad_variable_is_a_problem_even_under_a_good_dictionary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPL_COMMUNICATION_MAX_SPLITS", "many")
    assert "EPL_COMMUNICATION_MAX_SPLITS" in error_of({"communication.max_splits": 3})


# --- what is not built ----------------------------------------------------------------------------------------------


def test_the_unbuilt_settings_are_known() -> None:
    assert {key for key, setting in SETTINGS.items() if not setting.about.built} == set(UNBUILT)


@pytest.mark.parametrize(("key", "value"), UNBUILT.items())
def test_unbuilt_is_refused_by_key_value_and_remedy(monkeypatch: pytest.MonkeyPatch, key: str, value: object) -> None:
    setting = SETTINGS[key]
    message = error_of({key: value}, kind=NotBuiltError)
    assert message.startswith(f"epl.Config: {key!r} = {value!r} asks for what this version of epl does not have yet")
    assert f"leave it out or at {setting.default!r}. What works today: {setting.today}" in message

    assert read(Config({key: setting.default}), key) == setting.default

    monkeypatch.setenv(setting.variable, str(value))
    assert f"{key!r} = {value!r} (from {setting.variable})" in error_of(kind=NotBuiltError)
    assert read(Config({key: setting.default}), key) == setting.default  # what counts is the value in force


def test_several_unbuilt_come_at_once() -> None:
    message = error_of(UNBUILT, kind=NotBuiltError)
    assert message.splitlines()[0] == f"epl.Config: {len(UNBUILT)} problems"
    assert all(f"{key!r} = " in message for key in UNBUILT)


@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_says_what_works_today_as_long_as_something_is_missing(name: str) -> None:
    missing = [key for key in UNBUILT if key.startswith(f"{name}.")]
    assert bool(getattr(SECTIONS[name], "today", "")) == bool(missing)


# --- Config as a value ----------------------------------------------------------------------------------------------


def test_config_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(FrozenInstanceError):
        config.io = Config({"io.slicing": True}).io  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        config.io.slicing = True  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        config.new = 1  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        del config.io


def test_later_changes_of_the_dictionary_do_not_count() -> None:
    given: dict[str, object] = {"io.slicing": True}
    config = Config(given)
    given["io.slicing"] = False
    config.to_dict()["io.slicing"] = False
    assert config.io.slicing is True


def test_repr_shows_what_differs_and_reads_back() -> None:
    assert repr(Config()) == "Config()"
    config = Config({"io.uneven_tail": "DROP", "communication.max_splits": 3, "io.slicing": False})
    assert repr(config) == "Config({'communication.max_splits': 3, 'io.uneven_tail': 'drop'})"
    assert eval(repr(config)) == config


def test_equality_and_hash() -> None:
    one, same = Config({"io.uneven_tail": "drop"}), Config({"io.uneven_tail": "DROP"})
    assert one == same
    assert hash(one) == hash(same)
    assert one != Config()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_copies_are_equal_and_do_not_read_the_environment(monkeypatch: pytest.MonkeyPatch, duplicate: object) -> None:
    config = Config({"io.slicing": True})
    monkeypatch.setenv("EPL_COMMUNICATION_MAX_SPLITS", "3")
    monkeypatch.setenv("EPL_NONSENSE", "1")
    assert callable(duplicate)
    assert duplicate(config) == config


# --- files ----------------------------------------------------------------------------------------------------------

FILES = {
    "nested.toml": "[communication]\nmax_splits = 3\n[io]\nuneven_tail = 'DROP'\n",
    "dotted.toml": "communication.max_splits = 3\nio.uneven_tail = 'drop'\n",
    "quoted.toml": '"communication.max_splits" = 3\n"io.uneven_tail" = "drop"\n',
    "nested.yaml": "communication:\n  max_splits: 3\nio:\n  uneven_tail: drop\nzero:\n",
    "flat.yml": "communication.max_splits: 3\nio.uneven_tail: drop\n",
    "mixed.YAML": "communication: {max_splits: 3}\nio.uneven_tail: drop\npipeline: {num_stages: null}\n",
}


@pytest.mark.parametrize("name", FILES)
def test_from_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(FILES[name])
    expected = Config({"communication.max_splits": 3, "io.uneven_tail": "drop"})
    assert Config.from_file(tmp_path / name) == expected
    assert Config.from_file(str(tmp_path / name)) == expected


@pytest.mark.parametrize("name", ["empty.toml", "empty.yaml"])
def test_an_empty_file_is_all_defaults(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    assert Config.from_file(tmp_path / name) == Config()


def test_file_over_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[communication]\nmax_splits = 3\n")
    monkeypatch.setenv("EPL_COMMUNICATION_MAX_SPLITS", "8")
    monkeypatch.setenv("EPL_IO_SLICING", "true")
    config = Config.from_file(path)
    assert (config.communication.max_splits, config.io.slicing) == (3, True)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("job.json", b"{}", "expected a file that ends in .toml, .yaml or .yml, found '.json'"),
        ("job", b"", "found 'no suffix'"),
        ("broken.toml", b"[io\n", "malformed"),
        ("twice.toml", b"[io]\nslicing = true\nslicing = false\n", "malformed"),
        ("broken.yaml", b"io: {slicing: true\n", "malformed"),
        ("twice.yaml", b"io:\n  slicing: true\nzero:\nio:\n  slicing: false\n", "the key 'io' is there twice"),
        ("both.yaml", b"io: {slicing: true}\nio.slicing: false\n", "'io.slicing' is there twice, nested and flat"),
        ("list.yaml", b"- io\n", "expected sections with keys, found ['io'] (list)"),
        ("scalar.yaml", b"io", "expected sections with keys, found 'io' (str)"),
        ("date.yaml", b"io: 2024-13-45\n", "malformed"),
        ("code.yaml", b"io: !!python/object/apply:os.getcwd []\n", "malformed"),
        ("latin.toml", b"# \xe4\n", "UTF-8"),
        ("unknown.toml", b"[io]\nslice = true\n", "the nearest is 'io.slicing'"),
        ("section.toml", b"[ioo]\nslicing = true\n", "'ioo' is no setting of epl"),
        ("value.yaml", b"cluster:\n  run_visible_devices: 0\n", "found 0 (int)"),
        ("scalar_section.yaml", b"io: true\n", "'io' is a section, not a key"),
        ("key.yaml", b"3: true\n", "a key must be a string"),
    ],
)
def test_bad_file_is_refused_by_path(tmp_path: Path, name: str, content: bytes, part: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Config.from_file(path)
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


def test_missing_file_and_directory_are_refused_by_path(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    for path, part in [(tmp_path / "none.toml", "No such file"), (tmp_path / "folder.toml", "Is a directory")]:
        with pytest.raises(ConfigError, match=part) as caught:
            Config.from_file(path)
        assert str(path) in str(caught.value)


def test_unbuilt_in_a_file_names_the_path(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[optimizer]\nnum_apply_group = 4\n")
    with pytest.raises(NotBuiltError) as caught:
        Config.from_file(path)
    assert str(path) in str(caught.value)
    assert "'optimizer.num_apply_group' = 4" in str(caught.value)


# --- the docs page --------------------------------------------------------------------------------------------------


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), (
        "stale: run `make docs`, or python -m epl.config.reference docs/config.md"
    )


@pytest.mark.parametrize("key", SETTINGS)
def test_the_page_has_a_row_for_every_key(key: str) -> None:
    setting = SETTINGS[key]
    rows = [line for line in render().splitlines() if line.startswith(f"| `{key}` | `{setting.variable}` |")]
    assert len(rows) == 1
    cells = rows[0].split(" | ")
    assert len(cells) == 8
    assert cells[-2:] == ["ours" if key in OURS else "manual", "not yet |" if key in UNBUILT else "yes |"]
