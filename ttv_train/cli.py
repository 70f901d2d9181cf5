"""The command line: thin calls. Heavy imports happen inside the commands, after the allocator's environment is set."""

import argparse
import contextlib
import ctypes
import logging
import math
import os
import signal
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

from ttv_train.config import ModelConfig, RunConfig, Section, SequenceParallelConfig, parse_bucket
from ttv_train.config_file import apply_overrides, load_config, parse_config
from ttv_train.devices import prepare_environment
from ttv_train.encoding.stopping import STOPPED_BY_SIGTERM
from ttv_train.errors import UserError
from ttv_train.verify import FAULTS

LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")
PR_SET_PDEATHSIG = 1


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command. Commands with `--config` also take dotted overrides of config keys."""
    parser = argparse.ArgumentParser(
        prog="ttv-train", description="Text-to-video diffusion training.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def with_config(name: str, summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=summary,
            description=f"{summary} Any config key can be overridden: --section.key VALUE.",
            allow_abbrev=False,
        )
        command.add_argument("--config", required=True, help="YAML file of the run")
        return command

    encode = with_config("encode", "Encode clips and captions to latent shards.")
    instead = encode.add_mutually_exclusive_group()
    instead.add_argument("--status", action="store_true", help="only say what is done, stale and missing")
    instead.add_argument("--gc", action="store_true", help="only remove what nothing in latents.path refers to")
    instead.add_argument("--page", action="store_true", help="only write output_dir/encoding.html about the latents")
    instead.add_argument("--export", type=Path, metavar="FOLDER", help="only write the encoded dataset to a new folder")
    encode.add_argument(
        "--layout",
        choices=["webdataset", "fastvideo"],
        default="webdataset",
        help="of --export: tar shards, or Parquet",
    )
    train = with_config("train", "Train; goes on from the newest checkpoint in output_dir.")
    train.add_argument("--dry-run", action="store_true", help="build everything, take one step, write nothing")
    sample = with_config("sample", "Sample videos from a checkpoint.")
    sample.add_argument("--checkpoint", type=Path, help="checkpoint folder; default: the newest in output_dir")
    sample.add_argument("--prompt", action="append", help="a prompt; may be repeated; default: the dataset's captions")
    sample.add_argument(
        "--image",
        action="append",
        type=Path,
        help="first frame of the video of each --prompt, for image-to-video models",
    )
    sample.add_argument("--output", type=Path, help="folder of the videos; default: output_dir/samples/step-N")
    sample.add_argument("--no-ema", action="store_true", help="use the raw weights instead of their average")
    export = with_config("export", "Write a checkpoint as a diffusers folder.")
    export.add_argument("--checkpoint", type=Path, help="checkpoint folder; default: the newest in output_dir")
    export.add_argument("--output", type=Path, required=True, help="folder to write; must not exist")
    export.add_argument("--no-ema", action="store_true", help="export the raw weights instead of their average")
    cache = with_config("cache", "Bring near what a run will read (warm), or show how near it is (status).")
    cache.add_argument("action", choices=["warm", "status"])
    cache.add_argument("--epochs", type=int, default=1, help="how many epochs ahead to warm; default: 1")
    check = commands.add_parser(
        "check-data",
        help="Show what each file of a dataset folder becomes, or why it is dropped.",
        allow_abbrev=False,
    )
    check.add_argument("folder", help="dataset folder")
    check.add_argument("--config", help="take the dataset section of this run; default: the section's defaults")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument("--output", type=Path, help="Parquet file to write, a row per clip and per dropped file")
    check.add_argument("--html", type=Path, help="page to write: buckets, contact sheets, what is dropped")
    add_verify(commands)
    report = commands.add_parser("report", help="Write report.html of a run folder.", allow_abbrev=False)
    report.add_argument("run_folder", type=Path, help="output_dir of the run")
    return parser


def add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The arguments of `verify`."""
    verify = commands.add_parser(
        "verify",
        help="Prove that sequence-parallel training equals one process.",
        description="Starts ranks on this machine and compares the loss and the gradient of every parameter with one "
        "process, for every scheme of sequence parallelism. Exit code 1 if anything differs.",
        allow_abbrev=False,
    )
    subject = verify.add_mutually_exclusive_group()
    subject.add_argument("--config", help="verify the model of this run at the sizes of its buckets")
    subject.add_argument(
        "--encoder", action="store_true", help="verify the shared encoding of a clip, for every video VAE, instead"
    )
    subject.add_argument("--family", nargs="+", choices=options_of(ModelConfig, "family"), help="default: all of them")
    schemes = options_of(SequenceParallelConfig, "scheme")
    verify.add_argument("--scheme", nargs="+", choices=schemes, help="default: all of them")
    verify.add_argument("--degree", nargs="+", type=int, default=[1, 2, 3, 4], help="ranks; default: 1 2 3 4")
    verify.add_argument("--dtype", choices=["float64", "float32"], default="float64", help="default: float64")
    mistakes = "; ".join(f"{name}: {mistake}" for name, mistake in FAULTS.items())
    verify.add_argument("--inject", choices=FAULTS, help=f"make this mistake, which must be found ({mistakes})")
    verify.add_argument("--json", action="store_true", help="print JSON")


def options_of(section: type[Section], key: str) -> tuple[str, ...]:
    """The values that a config key may have."""
    options: tuple[str, ...] = typing.get_args(section.model_fields[key].annotation)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 0, 1 if check-data finds a bucket with nothing to train on or verify
    finds a difference, or 2 for a mistake that the user can mend."""
    rest, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(rest)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stderr)
    die_with_launcher()
    try:
        return run_command(options, overrides)
    except UserError as error:
        print(f"ttv-train: error: {error}", file=sys.stderr)
        return 2


def entry_point() -> None:
    """The console script. It ends the process without an interpreter shutdown: the native threads of a process group
    that has been left may still be ending, and destroying them then aborts the process in some runs of a hundred.
    Everything that must reach a disk is closed by then."""
    code = main()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def run_command(options: argparse.Namespace, overrides: list[str]) -> int:
    """Calls the function of the chosen command. Raises UserError for anything wrong with its input."""
    if options.command == "report":
        refuse_overrides(overrides)
        from ttv_train import report

        print(report.write_report(options.run_folder))
        return 0
    if options.command == "check-data":
        from ttv_train.data import check
        from ttv_train.data.batching import batch_sizes

        sizes = None
        if options.config:
            config = load_config(options.config, overrides)
            sizes = batch_sizes(latent_positions(config), config.training, data_degree=1)
        else:
            config = default_config(overrides)
        try:
            return check.check_data(
                config.dataset.model_copy(update={"path": options.folder}),
                as_json=options.json,
                manifest=options.output,
                html=options.html,
                training=config.training,
                batch_sizes=sizes,
            )
        except BrokenPipeError:
            # The reader of the output, such as `head`, has seen enough.
            return 1

    if options.command == "verify":
        return verify(options, overrides)
    config = load_config(options.config, overrides)
    prepare_environment(config.device.backend)
    if options.command == "encode":
        from ttv_train import encode

        if options.status:
            print(encode.status(config))
        elif options.gc:
            print(encode.remove_garbage(config))
        elif options.page:
            print(encode.write_preview_page(config))
        elif options.export:
            print(encode.export(config, options.export, options.layout))
        else:
            summary = encode.run(config)
            if summary is None:
                return STOPPED_BY_SIGTERM
            print_once(summary)
    elif options.command == "train":
        from ttv_train import train

        train.run(config, dry_run=options.dry_run)
    elif options.command == "sample":
        from ttv_train import sample

        sample.run(
            config,
            checkpoint=options.checkpoint,
            prompts=options.prompt,
            images=options.image,
            use_ema=not options.no_ema,
            output=options.output,
        )
    elif options.command == "cache":
        from ttv_train import cache

        if options.action == "warm":
            print(cache.warm(config, options.epochs))
        else:
            print(*cache.status(config), sep="\n")
    elif options.command == "export":
        from ttv_train import export

        print_once(export.run(config, checkpoint=options.checkpoint, output=options.output, use_ema=not options.no_ema))
    return 0


def verify(options: argparse.Namespace, overrides: list[str]) -> int:
    """The `verify` command: 0, or 1 if a comparison failed."""
    for degree in options.degree:
        if degree < 1:
            raise UserError(f"--degree {degree}: give numbers of ranks, 1 or more")
    config = None
    if options.config:
        config = load_config(options.config, overrides)
        prepare_environment(config.device.backend)
    else:
        refuse_overrides(overrides)
    from ttv_train.verify import command

    if options.encoder:
        return command.run_encoders(options.degree, as_json=options.json)
    return command.run(
        config,
        families=options.family or options_of(ModelConfig, "family"),
        schemes=options.scheme or options_of(SequenceParallelConfig, "scheme"),
        degrees=options.degree,
        dtype=options.dtype,
        fault=options.inject,
        as_json=options.json,
    )


def print_once(result: object) -> None:
    """Prints on the first rank only; all of them have the same to say."""
    if os.environ.get("RANK", "0") == "0":
        print(result)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates `--section.key VALUE` and `--section.key=VALUE`, and the top-level `--output_dir` and `--seed`, from
    the command's own arguments. Both keep their order."""
    top_level = [name for name, field in RunConfig.model_fields.items() if field.annotation in (str, int)]
    rest: list[str] = []
    overrides: list[str] = []
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, has_value, _ = argument.partition("=")
        if name.startswith("--") and ("." in name or name.removeprefix("--") in top_level):
            overrides.append(argument)
            if not has_value and remaining and not remaining[0].startswith("--"):
                overrides.append(remaining.pop(0))
        else:
            rest.append(argument)
    return rest, overrides


def latent_positions(config: RunConfig) -> dict[tuple[int, int, int], int]:
    """Frames x height x width of the latents, by bucket. UserError if the VAE of `config` does not take one of them."""
    import torch

    from ttv_train.encoders.vae import build_vae

    vae = build_vae(config.vae, torch.device("cpu"))
    shapes = {bucket: vae.latent_shape(*bucket) for bucket in map(parse_bucket, config.dataset.buckets)}
    return {bucket: math.prod(shape[1:]) for bucket, shape in shapes.items()}


def default_config(overrides: list[str]) -> RunConfig:
    """The default config with `--section.key VALUE` overrides."""
    data: dict[str, object] = {}
    apply_overrides(data, overrides)
    return parse_config(data, "command line")


def refuse_overrides(overrides: list[str]) -> None:
    """Raises UserError if a command that takes no config was given config keys or anything else."""
    if overrides:
        raise UserError(f"unexpected argument {overrides[0]!r}; see ttv-train --help")


def die_with_launcher() -> None:
    """Has the kernel send SIGTERM to this process when its launcher dies (accelerate's single-process launcher does not
    forward signals, which would leave training running unseen)."""
    if sys.platform == "linux" and any(variable in os.environ for variable in LAUNCHER_VARIABLES):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
