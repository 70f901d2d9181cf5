"""`ttv-train export`: a checkpoint as a diffusers folder, which `from_pretrained` loads without this project."""

from pathlib import Path

import torch

from ttv_train.checkpoint.export import export
from ttv_train.checkpoint.load import latest_verified, load_weights
from ttv_train.checkpoint.verify import refuse_damaged
from ttv_train.config import ParallelConfig, RunConfig
from ttv_train.data.mixing import open_latents
from ttv_train.devices import get_backend
from ttv_train.encoders.text import build_text_encoder
from ttv_train.encoders.vae import build_vae
from ttv_train.errors import UserError
from ttv_train.models.build import build_model
from ttv_train.parallel.agreement import on_every_rank
from ttv_train.parallel.mesh import build_mesh, distributed


def run(config: RunConfig, *, checkpoint: Path | None, output: Path, use_ema: bool) -> Path:
    """Writes the weights of a checkpoint to the new folder `output`, sharded over however many processes run this.

    Args:
        checkpoint: a checkpoint folder; by default the newest of the run that verifies.
        use_ema: whether to write the average of the weights, where the checkpoint has one.

    Raises:
        UserError: there is no intact checkpoint, it does not fit the config, or `output` exists.
    """
    backend = get_backend(config.device.backend)
    parallel = ParallelConfig(timeout_seconds=config.parallel.timeout_seconds)
    with distributed(backend, parallel.timeout_seconds) as device:
        if checkpoint is None:
            checkpoint = latest_verified(Path(config.output_dir) / "checkpoints")
        else:
            refuse_damaged(checkpoint)
        if checkpoint is None:
            raise UserError(f"output_dir {config.output_dir} has no checkpoint; train first, or name one")
        latent_channels, text_hidden_size = on_every_rank(lambda: widths(config, device))
        model, _ = build_model(
            config.model_copy(update={"parallel": parallel}),
            build_mesh(parallel, device),
            latent_channels=latent_channels,
            text_hidden_size=text_hidden_size,
            compute_dtype=torch.float32,
        )
        load_weights(checkpoint, model, use_ema)
        return export(model, output)


def widths(config: RunConfig, device: torch.device) -> tuple[int, int]:
    """Latent channels and width of the text embeddings that a run trains on. UserError if its latents are not there."""
    if config.latents.online:
        vae, text_encoder = build_vae(config.vae, device), build_text_encoder(config.text_encoder, device)
        return vae.latent_channels, text_encoder.hidden_size
    store = open_latents(config.latents, config.storage)
    return store.entries[0].latent_shape[0], store.null_prompt()[0].shape[-1]
