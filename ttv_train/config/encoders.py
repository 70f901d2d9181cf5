"""The frozen encoders: VAE, text encoder, first frames."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ttv_train.config.section import Dtype, Section


class VaeParallelConfig(Section):
    """How several ranks encode one clip together, or one rank in little memory."""

    mode: Literal["none", "time", "space", "serial_chunks", "tiled"] = "none"
    """`time` splits a clip's frames over ranks, `space` its rows; `serial_chunks` encodes chunk by chunk in time with
    carried state. These give the latents of the whole clip, and leave what is already encoded fresh. `tiled` is the
    VAE's own blend of overlapping tiles: cheap, not exact, and other latents."""
    degree: int = Field(1, ge=1)
    """Consecutive ranks that share each clip in the modes `time` and `space`. Groups of so many ranks of `ttv-train
    encode` take clips of their own. With `latents.online`, it must divide `parallel.sequence.degree`, or
    `latents.encoder_ranks` where there are any."""
    chunk_latent_frames: int | None = Field(None, ge=1)
    """In the modes `time` and `serial_chunks`, latent frames that a rank works on at a time; fewer take less memory and
    more messages. `null` is a rank's whole share of the clip in mode `time` and 1 in mode `serial_chunks`. HunyuanVideo
    and CogVideoX take no less than one of their own frame batches over all ranks."""

    @model_validator(mode="after")
    def _fits_mode(self) -> "VaeParallelConfig":
        if self.degree > 1 and self.mode not in ("time", "space"):
            raise ValueError(f"degree {self.degree}: mode {self.mode} is of one rank; choose mode time or space")
        if self.chunk_latent_frames is not None and self.mode not in ("time", "serial_chunks"):
            raise ValueError(f"chunk_latent_frames: mode {self.mode} has no chunks; remove it")
        return self


class WaveletVaeConfig(Section):
    """Orthonormal 3-D Haar transform: needs no weights; for the demo and for tests, not for quality."""

    kind: Literal["wavelet"]
    """Chooses this autoencoder."""
    spatial_levels: int = Field(3, ge=1, le=5)
    """Height and width shrink by 2 to this power."""
    temporal_levels: int = Field(1, ge=0, le=4)
    """The number of frames shrinks by 2 to this power."""
    channels: int | None = Field(None, ge=1)
    """Latent channels kept, lowest bands first. `null` keeps every band, which makes the transform invertible."""
    dtype: Dtype = "float32"
    """Type in which latents are stored."""
    parallel: VaeParallelConfig = VaeParallelConfig()
    """How ranks share the encoding of a clip."""

    @field_validator("parallel")
    @classmethod
    def _has_no_tiles(cls, value: VaeParallelConfig) -> VaeParallelConfig:
        if value.mode == "tiled":
            raise ValueError("mode tiled: the wavelet has no overlapping tiles; choose another mode")
        return value


class DiffusersVaeConfig(Section):
    """A video VAE of diffusers, such as AutoencoderKLCogVideoX."""

    kind: Literal["diffusers"]
    """Chooses this kind of autoencoder."""
    path: str
    """Local folder or hub id with `config.json` and safetensors weights; a pipeline folder may be given as
    `FOLDER/vae`."""
    dtype: Dtype = "bfloat16"
    """Type in which the VAE computes and latents are stored."""
    parallel: VaeParallelConfig = VaeParallelConfig()
    """How ranks share the encoding of a clip."""


class HashTextEncoderConfig(Section):
    """Deterministic hash of each token: needs no weights; it tells captions apart and knows nothing of meaning."""

    kind: Literal["hash"]
    """Chooses this text encoder."""
    hidden_size: int = Field(64, ge=1)
    """Width of a token embedding."""
    max_length: int = Field(32, ge=1)
    """Tokens per caption; longer captions are cut, shorter ones padded."""
    dtype: Dtype = "float32"
    """Type in which embeddings are stored."""


class TransformersTextEncoderConfig(Section):
    """A text encoder of transformers, such as T5EncoderModel."""

    kind: Literal["transformers"]
    """Chooses this kind of text encoder."""
    path: str
    """Local folder or hub id with safetensors weights; or a pipeline of diffusers, whose text_encoder and tokenizer are
    taken, and text_encoder_2 and tokenizer_2 where the recipe has two."""
    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer; `null` means `path`, or the pipeline's."""
    recipe: Literal["cogvideox", "stdit3", "wan", "hunyuan_video", "ltx_video"] | None = None
    """Embed captions exactly as the pipeline of this model family does: cleaning, prompt template, length, padding and
    layer. `null` takes the encoder's plain output, for models that are trained from nothing."""
    max_length: int | None = Field(None, ge=1)
    """Tokens per caption; longer captions are cut, shorter ones padded. `null` takes the recipe's, and 226 without
    one."""
    dtype: Dtype = "bfloat16"
    """Type in which the encoder computes and embeddings are stored."""


class FirstFrameConfig(Section):
    """What image-to-video models are given besides the prompt: the first frame of each clip."""

    enabled: bool = False
    """Encode first frames along with the clips. They take as much room as the clips' latents."""
    image_encoder_path: str | None = None
    """Pipeline of diffusers whose image_encoder and image_processor embed the frame, for Wan 2.1; `null` for models
    that take its latents only, as Wan 2.2 does."""
    dtype: Dtype = "float32"
    """Type in which the image encoder computes and its embeddings are stored."""

    @model_validator(mode="after")
    def _encoder_is_used(self) -> "FirstFrameConfig":
        if self.image_encoder_path is not None and not self.enabled:
            raise ValueError(f"image_encoder_path {self.image_encoder_path} needs enabled: true; or leave it out")
        return self


VaeConfig = Annotated[WaveletVaeConfig | DiffusersVaeConfig, Field(discriminator="kind")]

TextEncoderConfig = Annotated[HashTextEncoderConfig | TransformersTextEncoderConfig, Field(discriminator="kind")]
