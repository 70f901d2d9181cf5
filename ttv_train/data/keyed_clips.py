"""The clips of a dataset under the keys of what they are encoded to, the same ahead of training as during it."""

from pathlib import Path

from ttv_train.config import DatasetConfig
from ttv_train.data.clips import list_clips
from ttv_train.data.cut import Clip
from ttv_train.data.manifest import LatentEntry
from ttv_train.data.quarantine import QuarantineRow
from ttv_train.data.shards import LatentSample
from ttv_train.data.units import clip_key
from ttv_train.encoders.clip_encoder import ClipEncoder, EncodedClip


def list_keyed_clips(
    config: DatasetConfig, encoder: ClipEncoder, manifest: Path | None
) -> tuple[dict[str, Clip], list[QuarantineRow]]:
    """The clips by key, in the order of the dataset, and what was left out: files without a clip, and clips of the same
    content and caption as one before.

    Args:
        manifest: of the dataset, which is brought up to date; None to write none.

    Raises:
        UserError: the dataset cannot be read.
    """
    clips, rejected = list_clips(config, encoder.vae.valid_num_frames, manifest=manifest)
    keyed: dict[str, Clip] = {}
    for clip in clips:
        key = clip_key(
            clip,
            decoder=config.decoder,
            vae_fingerprint=encoder.visual_fingerprint,
            text_encoder_fingerprint=encoder.text_encoder.fingerprint,
        )
        if key in keyed:
            reason = f"same content and caption as {keyed[key].source.name}"
            rejected.append(QuarantineRow(name=clip.source.name, reason=reason, stage="encode"))
        else:
            keyed[key] = clip
    return keyed, rejected


def entry_of(key: str, clip: Clip, encoder: ClipEncoder) -> LatentEntry:
    """What is known of a clip before it is encoded. It lies in no shard, so its video takes the place of one."""
    return LatentEntry(
        key=key,
        shard=clip.source.name,
        offset=0,
        length=0,
        sha256="",
        xxh3="",
        source_name=clip.source.name,
        source_sha256=clip.source_sha256,
        clip_index=clip.index,
        is_last_clip=clip.is_last,
        caption=clip.source.caption,
        bucket=clip.bucket,
        fps=clip.fps,
        latent_shape=encoder.vae.latent_shape(*clip.bucket),
        num_text_tokens=encoder.text_encoder.max_length,
        start_seconds=clip.start_seconds,
    )


def sample_of(entry: LatentEntry, encoded: EncodedClip) -> LatentSample:
    """An encoded clip under its entry."""
    return LatentSample(
        entry, encoded.mean, encoded.logvar, encoded.prompt_embeds, encoded.prompt_mask, encoded.first_frame
    )
