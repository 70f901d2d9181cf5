"""Reading and writing a run's YAML.

The file, then dotted command-line overrides (``--optimizer.learning_rate 5e-5``), then validation. Unknown keys are
errors. The resolved config is saved in the run folder, and the same file drives ``encode``, ``train`` and ``sample``.
"""

import difflib
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ValidationError

from ttv_train.config import RunConfig, Section
from ttv_train.errors import UserError


class _Yaml12Loader(yaml.SafeLoader):
    """SafeLoader in which `1e-4` is a number (YAML 1.2) and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        # A merge key (<<) brings in keys that the mapping's own may replace.
        own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        keys = [self.construct_object(key, deep=True) for key in own]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"key {key!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _Yaml12Dumper(yaml.SafeDumper):
    """SafeDumper that quotes the strings which `_Yaml12Loader` would take for numbers."""


for _class in (_Yaml12Loader, _Yaml12Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def _parse_yaml(text: str, origin: str) -> Any:
    try:
        return yaml.load(text, _Yaml12Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2024-13-01
        raise UserError(f"{origin} is not valid YAML: {' '.join(str(error).split())}") from None


def _section_models(annotation: Any) -> list[type[Section]]:
    """The section classes that an annotation admits: one, several for a union, none for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, Annotated):
        return [model for argument in typing.get_args(annotation) for model in _section_models(argument)]
    return []


def _model_of(models: list[type[Section]], data: dict[str, Any], path: str, origin: str) -> type[Section]:
    """The class that `data` is meant for: the only one, or the union member whose `kind` it names."""
    if len(models) == 1:
        return models[0]
    kinds = {typing.get_args(model.model_fields["kind"].annotation)[0]: model for model in models}
    kind = data.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        problem = f"{path}.kind is {kind!r}" if "kind" in data else f"{path}.kind is missing"
        raise UserError(f"{origin}: {problem}; give one of {', '.join(kinds)}")
    return kinds[kind]


def _check_keys(model: type[Section], data: dict[str, Any], prefix: str, origin: str) -> None:
    """Raises UserError for unknown keys, and for true or false where no truth value is meant: YAML reads `on` and `yes`
    as true, which would pass for the number 1."""
    for key, value in data.items():
        if key not in model.model_fields:
            close = difflib.get_close_matches(str(key), model.model_fields, n=1)
            mend = f"did you mean {prefix}{close[0]}?" if close else f"allowed: {', '.join(model.model_fields)}"
            raise UserError(f"{origin}: unknown key {prefix}{key}; {mend}")
        annotation = model.model_fields[key].annotation
        if isinstance(value, bool) and annotation is not bool:
            raise UserError(f"{origin}: {prefix}{key} cannot be true or false")
        models = _section_models(annotation)
        if models and isinstance(value, dict):
            _check_keys(_model_of(models, value, f"{prefix}{key}", origin), value, f"{prefix}{key}.", origin)


def apply_overrides(data: dict[str, Any], overrides: list[str]) -> None:
    """Sets ``--section.key VALUE`` and ``--section.key=VALUE`` pairs in `data`; values are parsed as YAML."""
    remaining = list(overrides)
    while remaining:
        flag = remaining.pop(0)
        if not flag.startswith("--") or len(flag) < 3:
            raise UserError(f"unexpected argument {flag!r}; overrides look like --optimizer.learning_rate 5e-5")
        path, separator, text = flag[2:].partition("=")
        if not separator:
            if not remaining or remaining[0].startswith("--"):
                raise UserError(f"override --{path} has no value; write --{path} VALUE")
            text = remaining.pop(0)
        target = data
        *parents, leaf = path.split(".")
        for parent in parents:
            if target.get(parent) is None:
                target[parent] = {}
            target = target[parent]
            if not isinstance(target, dict):
                raise UserError(f"override --{path}: {parent} is a value, not a section")
        target[leaf] = _parse_yaml(text, f"override --{path}")


def _key_of(location: tuple[int | str, ...]) -> str:
    """The user's key for pydantic's location, which also names the member of a union (vae.wavelet.channels)."""
    key: list[str] = []
    models: list[type[Section]] = [RunConfig]
    for part in map(str, location):
        fields = {name: field for model in models for name, field in model.model_fields.items()}
        if part not in fields and len(models) > 1:
            continue  # the `kind` of a union member
        models = _section_models(fields[part].annotation) if part in fields else []
        key.append(part)
    return ".".join(key)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    location = _key_of(problem["loc"])
    given = problem["input"]
    shown = f" (got {given!r})" if isinstance(given, str | int | float | bool | None) else ""
    return f"{location}: {problem['msg'].removeprefix('Value error, ')}{shown}"


def load_config(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Reads a run's YAML file, applies dotted overrides and validates the result.

    Raises:
        UserError: the file is missing or malformed, a key is unknown, or a value is not allowed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: cannot be read: {error}") from None
    data = _parse_yaml(text, str(path)) or {}
    if not isinstance(data, dict):
        raise UserError(f"{path}: a config is a mapping of sections, not a {type(data).__name__}")
    apply_overrides(data, overrides or [])
    return parse_config(data, str(path))


def parse_config(data: dict[str, Any], origin: str = "config") -> RunConfig:
    """Validates an in-memory config; `origin` names it in errors. Raises UserError as `load_config` does."""
    _check_keys(RunConfig, data, "", origin)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{origin}: {_first_problem(error)}") from None


def save_config(config: RunConfig, path: Path) -> None:
    """Writes the resolved config as YAML that `load_config` reads back to an equal object."""
    path.write_text(yaml.dump(config.model_dump(mode="json"), Dumper=_Yaml12Dumper, sort_keys=False), encoding="utf-8")
