"""The dataset that a run trains on, and what stands for a dropped caption."""

import signal
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ttv_train.config import RunConfig
from ttv_train.data.changed_sources import DATASET_MANIFEST, changed_sources
from ttv_train.data.clip_reader import ClipReader
from ttv_train.data.dataset import LatentDataset
from ttv_train.data.encoder_service import serve
from ttv_train.data.mixing import MixedDataset, open_latents
from ttv_train.data.online import open_online, open_remote
from ttv_train.data.shards import LatentStore
from ttv_train.data.synthetic import SyntheticStore
from ttv_train.encoders import encoder_fingerprint, encoder_fingerprints
from ttv_train.encoders.followers import encoding_group
from ttv_train.encoders.text import build_text_encoder
from ttv_train.encoders.vae import build_vae
from ttv_train.errors import UserError
from ttv_train.models.base import ModelFamily
from ttv_train.parallel.agreement import on_every_rank, on_main_rank
from ttv_train.parallel.encoder_ranks import JobPart


def encode_for_trainers(config: RunConfig, part: JobPart) -> None:
    """The whole work of a rank that does not train: it encodes until those that do need no more.

    A SIGTERM goes to all ranks of a job. This one works on meanwhile, and ends when the others have.

    Raises:
        UserError: a rank that trains is gone.
    """
    signal.signal(signal.SIGTERM, lambda *_: None)
    group = encoding_group(config.vae.parallel.degree)
    reader = ClipReader(config, part.device, group)
    if group is not None and group.is_follower:
        reader.follow()
        return
    try:
        serve(reader, part.links)
    except RuntimeError as error:
        raise UserError(
            f"latents.encoder_ranks: a rank that trains is gone; its own output says why ({error})"
        ) from None
    finally:
        reader.close()


def open_dataset(
    config: RunConfig, device: torch.device, allow_synthetic: bool, links: Sequence[dist.ProcessGroup] = ()
) -> LatentDataset:
    """The clips of a run, on all ranks together: encoded, mixed, or encoded as they are needed.

    Args:
        device: of encoders.
        allow_synthetic: random latents will do where nothing has been encoded yet; nothing is written then.
        links: to encoder ranks, if there are any; see `JobPart.links`.

    Raises:
        UserError: on every rank, when there is no dataset or it was encoded with other settings than `config` has.
    """
    if config.latents.encoder_ranks:
        return open_remote(config, links, writes=not allow_synthetic)
    if config.latents.online:
        return open_online(config, device, writes=not allow_synthetic)
    if config.latents.sources:
        return open_mixed(config)
    path = config.latents.path
    if allow_synthetic and not on_main_rank(lambda: LatentStore.exists(path, config.storage)):
        vae = build_vae(config.vae, torch.device("cpu"))
        text_encoder = build_text_encoder(config.text_encoder, torch.device("cpu"))
        return SyntheticStore(config, vae, text_encoder)
    store = on_every_rank(lambda: LatentStore.open(path, config.storage))
    if store.fingerprint != on_main_rank(lambda: encoder_fingerprint(config)):
        raise UserError(
            f"latents.path {path}: encoded with other vae, text_encoder or dataset settings than this config has; run "
            "`ttv-train encode` with this config, which renews what is stale"
        )
    on_main_rank(lambda: refuse_changed_sources(config, store))
    return store


def refuse_changed_sources(config: RunConfig, store: LatentStore) -> None:
    """Raises UserError if videos at hand are no longer those that were encoded."""
    manifest, folder = Path(config.output_dir) / DATASET_MANIFEST, Path(config.dataset.path)
    if not (manifest.is_file() and folder.is_dir()):
        return
    encoded = {entry.source_name: entry.source_sha256 for entry in store.entries}
    stale = sorted(changed_sources(manifest, folder, encoded))
    if stale:
        others = f" and {len(stale) - 1} other videos have" if len(stale) > 1 else " has"
        raise UserError(
            f"dataset.path {config.dataset.path}: {stale[0]}{others} changed since the latents at latents.path "
            f"{config.latents.path} were encoded; run `ttv-train encode` with this config, which renews what is stale"
        )


def open_mixed(config: RunConfig) -> MixedDataset:
    """The datasets of `latents.sources` as one, on all ranks; refused unless this config's encoders made them."""
    mixed = on_every_rank(lambda: open_latents(config.latents, config.storage))
    assert isinstance(mixed, MixedDataset)
    if mixed.encoders != on_main_rank(lambda: encoder_fingerprints(config)):
        raise UserError(
            f"latents.sources {mixed.path}: encoded with other vae or text_encoder settings than this config has; "
            "encode them again, or take the settings that they were encoded with"
        )
    return mixed


def null_prompt(
    family: ModelFamily, model: nn.Module, store: LatentDataset, max_text_tokens: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a dropped caption becomes: the model's own embedding, or else the text encoder's of the empty prompt."""
    embeds = family.null_prompt_of_length(model, max_text_tokens)
    return store.null_prompt() if embeds is None else (embeds.detach().cpu(), None)
