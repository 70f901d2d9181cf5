import typing
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ttv_train.config import (
    DiffusersVaeConfig,
    RunConfig,
    Section,
    WaveletVaeConfig,
    parse_bucket,
)
from ttv_train.config_file import apply_overrides, load_config, parse_config, save_config
from ttv_train.errors import UserError

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def load(tmp_path):
    """Loads YAML text with overrides."""

    def load(text: str, *overrides: str) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_config(path, list(overrides))

    return load


def all_sections(base: type = Section) -> list[type[Section]]:
    return [section for child in base.__subclasses__() for section in (child, *all_sections(child))]


@pytest.mark.parametrize("section", all_sections(), ids=lambda section: section.__name__)
def test_every_section_and_field_is_documented(section):
    assert section.__doc__
    for name, field in section.model_fields.items():
        kinds = typing.get_args(field.annotation) or (field.annotation,)
        is_section = all(isinstance(kind, type) and issubclass(kind, Section) for kind in kinds)
        assert is_section or field.description, f"{section.__name__}.{name}"


def test_an_empty_file_is_the_default_run(load):
    assert load("") == RunConfig()
    assert load("# nothing but comments\n") == RunConfig()


def test_a_section_with_every_line_commented_out_holds_its_defaults(load):
    assert load("optimizer:\n#  learning_rate: 1e-3\n") == RunConfig()
    assert load("optimizer:\n", "--optimizer.eps", "1e-6").optimizer.eps == 1e-6


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("5E-5", 5e-5), ("1.5e-4", 1.5e-4), (".5e-3", 5e-4), ("1e+1", 10.0), ("+2e0", 2.0), ("3", 3.0)],
)
def test_exponents_without_a_point_are_numbers(load, text, value):
    assert load(f"optimizer: {{learning_rate: {text}}}").optimizer.learning_rate == value
    assert load("", "--optimizer.learning_rate", text).optimizer.learning_rate == value
    assert load(f"model: {{config: {{scale: {text}}}}}").model.config["scale"] == value


@pytest.mark.parametrize("text", ["e5", "1e", "1e-4x", "0x1e-4", "'1e-4'"])
def test_other_text_with_an_e_stays_text(load, text):
    assert isinstance(load(f"model: {{config: {{scale: {text}}}}}").model.config["scale"], str)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainnig: {steps: 3}", r"unknown key trainnig; did you mean training\?"),
        ("optimizer: {learning_rte: 1}", r"unknown key optimizer.learning_rte; did you mean optimizer.learning_rate\?"),
        (
            "parallel: {sequence: {degre: 1}}",
            r"unknown key parallel.sequence.degre; did you mean parallel.sequence.degree",
        ),
        ("vae: {kind: wavelet, chanels: 3}", r"unknown key vae.chanels; did you mean vae.channels\?"),
        ("ema: {xyz: 1}", r"unknown key ema.xyz; allowed: enabled, decay"),
        ("7: 1", "unknown key 7; allowed: output_dir, "),
        ("seed: 1\nseed: 2", "key 'seed' is given twice"),
        ("optimizer: {eps: 1, betas: [0, 0], eps: 2}", "key 'eps' is given twice"),
        ("model: {config: {a: {b: 1, b: 2}}}", "key 'b' is given twice"),
        ("a: b: c", "not valid YAML"),
        ("{[1]: 2}", "not valid YAML"),
        ("output_dir: 2024-13-01", "not valid YAML"),
        ("!!python/object/apply:os.getcwd []", "not valid YAML"),
        ("- 1", "a config is a mapping of sections"),
        ("optimizer: {learning_rate: fast}", r"optimizer.learning_rate: .*\(got 'fast'\)"),
        ("optimizer: {learning_rate: 1e999}", "optimizer.learning_rate: .*finite"),
        ("optimizer: {learning_rate: .nan}", "optimizer.learning_rate: .*finite"),
        ("optimizer: {betas: [0.9, 1.0]}", "optimizer.betas.1: .*less than 1"),
        ("optimizer: 5", "optimizer: .*got 5"),
        ("training: {steps: 0}", r"training.steps: .*greater than or equal to 1 \(got 0\)"),
        ("training: {steps: 1.5}", "training.steps: .*fractional"),
        ("training: {steps: on}", "training.steps cannot be true or false"),
        ("optimizer: {learning_rate: yes}", "optimizer.learning_rate cannot be true or false"),
        ("device: {backend: gpu}", "device.backend: .*'cuda'.*got 'gpu'"),
        ("validation: {noise_levels: [0.5, 1.5]}", "validation.noise_levels.1: .*less than 1"),
        ("dataset: {buckets: [1x2x3, 49x480]}", "dataset.buckets: bucket '49x480' is not FRAMESxHEIGHTxWIDTH"),
        ("dataset: {buckets: [0x2x3]}", "dataset.buckets: bucket '0x2x3'"),
        ("dataset: {buckets: []}", "dataset.buckets: "),
        ("output_dir: ''", "output_dir: "),
        ("seed: 9223372036854775808", "seed: "),
        ("vae: {channels: 3}", "vae.kind is missing; give one of wavelet, diffusers"),
        ("vae: {kind: wavlet}", "vae.kind is 'wavlet'; give one of wavelet, diffusers"),
        ("vae: {kind: [wavelet]}", "vae.kind is .*; give one of wavelet, diffusers"),
        ("vae: {kind: diffusers}", "vae.path: Field required"),
        ("vae: {kind: diffusers, path: x, channels: 3}", "unknown key vae.channels; allowed: kind, path, dtype"),
        ("text_encoder: {kind: hash, hidden_size: 0}", "text_encoder.hidden_size: "),
        ("parallel: {sequence: {degree: 2}}", "parallel.sequence: degree 2 needs a scheme"),
        ("model: {path: x, config: {a: 1}}", "model: give either path .* or config"),
    ],
)
def test_mistakes_are_one_line_that_names_the_key(load, tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load(text)
    assert str(caught.value).startswith(str(tmp_path / "run.yaml"))
    assert "\n" not in str(caught.value)


def test_a_merge_key_may_be_replaced(load):
    config = load("model: {config: &base {a: 1, b: 2}}\nvae:\n  <<: {kind: wavelet, channels: 3}\n  channels: 4\n")
    assert config.vae == WaveletVaeConfig(kind="wavelet", channels=4)


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, lambda path: path.write_bytes(b"\xff\xfe\xff")])
def test_a_file_that_cannot_be_read(tmp_path, make):
    path = tmp_path / "run.yaml"
    make(path)
    with pytest.raises(UserError, match=r"--config .*run\.yaml: (no such file|cannot be read)"):
        load_config(path)


def test_overrides_reach_every_depth(load):
    config = load(
        "optimizer: {learning_rate: 1e-3, eps: 1e-6}\nmodel: {config: {num_layers: 2}}\n",
        "--optimizer.learning_rate",
        "5e-5",
        "--parallel.sequence.scheme=ulysses",
        "--parallel.sequence.degree",
        "2",
        "--seed=7",
        "--dataset.buckets",
        "[1x2x3, 4x5x6]",
        "--model.config.num_layers",
        "3",
        "--model.config.inner.width=[1, 2]",
        "--ema.enabled",
        "false",
        "--latents.path",
        "s3://bucket/latents?a=b",
        "--seed",
        "8",
    )
    assert (config.optimizer.learning_rate, config.optimizer.eps) == (5e-5, 1e-6)
    assert (config.parallel.sequence.scheme, config.parallel.sequence.degree) == ("ulysses", 2)
    assert config.seed == 8
    assert config.dataset.buckets == ["1x2x3", "4x5x6"]
    assert config.model.config == {"num_layers": 3, "inner": {"width": [1, 2]}}
    assert config.ema.enabled is False
    assert config.latents.path == "s3://bucket/latents?a=b"


def test_overrides_of_sections_with_several_kinds(load):
    assert load("vae: {kind: wavelet}", "--vae.channels", "4").vae == WaveletVaeConfig(kind="wavelet", channels=4)
    assert load("", "--vae.kind", "diffusers", "--vae.path=x").vae == DiffusersVaeConfig(kind="diffusers", path="x")
    assert load("", "--vae", "{kind: wavelet, channels: null}").vae == WaveletVaeConfig(kind="wavelet")
    with pytest.raises(UserError, match=r"unknown key vae\.channels"):
        load("vae: {kind: wavelet, channels: 3}", "--vae.kind", "diffusers")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train"], "unexpected argument 'train'"),
        (["--"], "unexpected argument '--'"),
        (["-seed", "3"], "unexpected argument '-seed'"),
        (["--seed"], "--seed has no value"),
        (["--output_dir", "--seed", "3"], "--output_dir has no value"),
        (["--seed=1", "2"], "unexpected argument '2'"),
        (["--output_dir.name", "x"], "output_dir is a value, not a section"),
        (["--optimizer.learning-rate", "1"], "did you mean optimizer.learning_rate"),
        (["--seed", "{"], "override --seed is not valid YAML"),
        (["--training.steps", "-1"], r"training.steps: .*\(got -1\)"),
    ],
)
def test_mistakes_in_overrides(load, overrides, message):
    with pytest.raises(UserError, match=message) as caught:
        load("output_dir: runs/x", *overrides)
    assert "\n" not in str(caught.value)


# Text that a reader of YAML might take for something else is frequent in it.
texts = (
    st.text(max_size=12)
    | st.text(alphabet="0123456789eE+-._:~#", max_size=6)
    | st.sampled_from(
        ["1e5", "1e-4", "no", "null", "~", "2024-01-01", "1:30", "010", "<<", "=", "- a", "a: b", "# a", "'", '"']
    )
)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
fractions = st.floats(0, 1, exclude_max=True)
runs = st.fixed_dictionaries(
    {},
    optional={
        "output_dir": texts.filter(bool),
        "seed": st.integers(0, 2**63 - 1),
        "dataset": st.fixed_dictionaries({"path": texts, "fps": st.floats(1e-300, 1e300)}),
        "vae": st.fixed_dictionaries({"kind": st.just("diffusers"), "path": texts})
        | st.fixed_dictionaries({"kind": st.just("wavelet"), "channels": st.none() | st.integers(1, 2**40)}),
        "model": st.fixed_dictionaries({"config": st.dictionaries(texts, values, max_size=3)}),
        "optimizer": st.fixed_dictionaries(
            {"betas": st.tuples(fractions, fractions), "weight_decay": st.floats(0, 1e9)}
        ),
        "validation": st.fixed_dictionaries({"noise_levels": st.lists(fractions, min_size=1, max_size=3)}),
    },
)


@settings(max_examples=300, deadline=None)
@given(data=runs)
def test_a_saved_config_is_loaded_as_it_was(data, tmp_path_factory):
    config = parse_config(data)
    path = tmp_path_factory.getbasetemp() / "saved.yaml"
    save_config(config, path)
    assert load_config(path) == config


def test_a_saved_config_holds_every_field(tmp_path):
    save_config(RunConfig(), tmp_path / "saved.yaml")
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text()) == RunConfig().model_dump(mode="json")


@given(st.tuples(*[st.integers(1, 10**6)] * 3))
def test_buckets_are_frames_height_width(bucket):
    text = "x".join(map(str, bucket))
    assert parse_config({"dataset": {"buckets": [text]}}).dataset.buckets == [text]
    assert parse_bucket(text) == bucket


@settings(max_examples=500, deadline=None)
@given(st.text(alphabet="0123456789eE+-.:_ []{},#&*!|>'\"%@`~<=atrue\n\t", max_size=20))
def test_no_text_crashes_the_reader(text):
    for overrides in (["--model.config.a", text], [f"--model={text}"]):
        data: dict = {}
        try:
            apply_overrides(data, overrides)
            parse_config(data)
        except UserError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("configs/*/*.yaml")), ids=lambda path: path.stem)
def test_shipped_run_configs_are_valid(path):
    if path.parent.name != "accelerate":
        assert load_config(path).output_dir


def test_a_bucket_grid_adds_buckets_of_one_size(tmp_path):
    grid = {"size": "480x720", "frames": [1, 49], "aspect_ratios": ["16:9", "1:1", "9:16"]}
    config = parse_config({"dataset": {"bucket_grid": [grid]}})
    shapes = ("448x784", "592x592", "784x448")
    assert config.dataset.buckets == [f"{frames}x{shape}" for frames in (1, 49) for shape in shapes]
    both = parse_config({"dataset": {"buckets": ["8x96x160", "1x592x592"], "bucket_grid": [grid]}})
    assert both.dataset.buckets[:2] == ["8x96x160", "1x592x592"]
    assert len(both.dataset.buckets) == 7
    save_config(both, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == both


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"bucket_grid": [{"size": "480", "frames": [1]}]}, "size"),
        ({"bucket_grid": [{"size": "480x720", "frames": []}]}, "frames"),
        ({"bucket_grid": [{"size": "480x720", "frames": [1], "aspect_ratios": ["16/9"]}]}, "aspect_ratios"),
        ({"keep_probability": {"480x720": 0.5}}, "keep_probability names '480x720', which is none of the buckets"),
        ({"keep_probability": {"9x480x720": 1.5}}, "keep_probability"),
    ],
)
def test_a_malformed_grid_or_probability_is_named(dataset, message):
    with pytest.raises(UserError, match=message):
        parse_config({"dataset": dataset})


def test_a_malformed_bucket_batch_size_is_named():
    with pytest.raises(UserError, match="bucket_batch_sizes"):
        parse_config({"training": {"bucket_batch_sizes": {"9x480x720": 0}}})


def test_latents_come_from_one_place():
    with pytest.raises(UserError, match="give either sources"):
        parse_config({"latents": {"online": True, "sources": [{"path": "latents"}]}})
