"""What a run is: one strict pydantic model per section. `config_file` reads them from YAML."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Fraction = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16", "float16"]
BUCKET_PATTERN = re.compile(r"(\d+)x(\d+)x(\d+)")


def check_bucket(bucket: str) -> None:
    """Raises ValueError unless `bucket` is FRAMESxHEIGHTxWIDTH."""
    match = BUCKET_PATTERN.fullmatch(bucket)
    if match is None or min(map(int, match.groups())) < 1:
        raise ValueError(f"bucket {bucket!r} is not FRAMESxHEIGHTxWIDTH, such as 49x480x720")


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty_section(cls, data: Any) -> Any:
        """A section of which every line is commented out holds its defaults."""
        return {} if data is None else data


class DeviceConfig(Section):
    """Which accelerator runs the job."""

    backend: Literal["auto", "cuda", "npu", "cpu"] = "auto"
    """`auto` takes CUDA, then Ascend NPU, then CPU: the first one this machine has."""


class BucketGrid(Section):
    """Buckets of one size in several shapes and lengths."""

    size: str = Field(pattern=r"^[1-9]\d*x[1-9]\d*$")
    """Height x width that gives the number of pixels, such as 480x720; every shape has about as many."""
    frames: list[Annotated[int, Field(ge=1)]] = Field(min_length=1)
    """Lengths of clips."""
    aspect_ratios: list[Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")]] = ["16:9", "4:3", "1:1", "3:4", "9:16"]
    """Shapes, as width:height."""
    multiple: int = Field(16, ge=1)
    """Height and width are rounded to multiples of it."""

    def buckets(self) -> list[str]:
        """The buckets, as frames x height x width."""
        height, width = map(int, self.size.split("x"))
        shapes = []
        for ratio in self.aspect_ratios:
            across, down = map(int, ratio.split(":"))
            sides = (math.sqrt(height * width * down / across), math.sqrt(height * width * across / down))
            shapes.append("x".join(str(max(round(side / self.multiple), 1) * self.multiple) for side in sides))
        return [f"{frames}x{shape}" for frames in self.frames for shape in shapes]


class DatasetConfig(Section):
    """Where clips come from and how they are decoded."""

    path: str = ""
    """Folder of video clips with captions, or its caption file; see data/README.md for the accepted layouts."""
    layout: Literal[
        "auto", "jsonl", "csv", "json", "toml", "line_files", "sidecars", "webdataset", "parquet", "huggingface"
    ] = "auto"
    """Where the captions are. `auto` takes the only layout that fits, and asks for a choice where several do."""
    fps: float = Field(8.0, gt=0)
    """Frames per second at which clips are sampled, by presentation time. A video whose own frame rate is below three
    quarters of it is dropped, since its frames would repeat."""
    buckets: list[str] = Field(["49x480x720"], min_length=1)
    """Allowed clip shapes, as frames x height x width. A video goes to the bucket nearest in aspect ratio among those
    that it is long enough to fill."""
    bucket_grid: list[BucketGrid] = []
    """Further buckets by size, aspect ratio and length; with it, `buckets` may be left out."""
    keep_probability: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}
    """Part of the videos that a bucket takes, such as {49x480x720: 0.5}; the others go to the next smaller bucket of
    their aspect ratio, or are dropped where there is none."""
    split: Literal["length", "shots"] = "length"
    """Where videos are cut: `length` takes clips from the start on, one after another; `shots` takes them from within
    shots, found by PySceneDetect (extra `shots`), so that no clip holds a cut."""
    max_clips_per_video: int = Field(1, ge=1)
    """Consecutive, non-overlapping clips cut from one video, at most."""
    decoder: Literal["pyav", "torchcodec", "decord", "auto"] = "pyav"
    """Library that decodes the videos; `torchcodec` and `decord` are extras. A file that the library is known to show
    wrong frames of is refused. `auto` takes for each file the fastest library that is right on it."""
    decode_timeout_seconds: float = Field(60.0, gt=0)
    """A file whose decoding takes longer is quarantined."""
    max_pixels: int = Field(7680 * 4320, gt=0)
    """A video with more pixels per frame is quarantined before any frame is allocated."""
    max_video_seconds: float = Field(3600.0, gt=0)
    """A longer video is quarantined."""

    @model_validator(mode="before")
    @classmethod
    def _expand_grid(cls, data: Any) -> Any:
        """Adds the buckets of the grid to those that are named."""
        if not isinstance(data, dict) or not isinstance(data.get("bucket_grid"), list):
            return data
        named = data.get("buckets", [])
        grid = [bucket for entry in data["bucket_grid"] for bucket in BucketGrid.model_validate(entry).buckets()]
        return data | {"buckets": list(dict.fromkeys([*named, *grid]))} if isinstance(named, list) and grid else data

    @model_validator(mode="after")
    def _keep_probability_of_buckets(self) -> "DatasetConfig":
        for bucket in self.keep_probability:
            if bucket not in self.buckets:
                raise ValueError(f"keep_probability names {bucket!r}, which is none of the buckets {self.buckets}")
        return self

    @field_validator("buckets")
    @classmethod
    def _buckets(cls, value: list[str]) -> list[str]:
        for bucket in value:
            check_bucket(bucket)
        return value


class VaeParallelConfig(Section):
    """How several ranks encode one clip together, or one rank in little memory."""

    mode: Literal["none", "time", "space", "serial_chunks", "tiled"] = "none"
    """`time` splits a clip's frames over ranks, `space` its rows; `serial_chunks` encodes chunk by chunk in time with
    carried state. These give the latents of the whole clip, and leave what is already encoded fresh. `tiled` is the
    VAE's own blend of overlapping tiles: cheap, not exact, and other latents."""
    degree: int = Field(1, ge=1)
    """Consecutive ranks of `ttv-train encode` that share each clip in the modes `time` and `space`. Groups of so many
    ranks take clips of their own."""
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


class LatentSource(Section):
    """One of several encoded datasets that are mixed in training."""

    path: str = Field(min_length=1)
    """Folder or fsspec URL of its latent shards."""
    weight: float = Field(1.0, gt=0)
    """Its share of the samples, relative to the other sources' weights."""


class LatentsConfig(Section):
    """The encoded dataset: written by `encode`, read by `train`."""

    path: str = ""
    """Folder or fsspec URL of the latent shards."""
    online: bool = False
    """True has `train` decode and encode the clips of `dataset` as it needs them, instead of reading `path`: nothing is
    stored, and every rank holds both encoders and spends their time in each epoch. For trying out a dataset."""
    sources: list[LatentSource] = []
    """Encoded datasets that `train` mixes by weight, instead of reading `path`. Their encoders must be those of this
    config; their buckets and frame rates may differ."""
    shard_mib: int = Field(256, ge=1)
    """Size of one tar shard, at most, as far as it is known before encoding. A shard is the unit that workers claim and
    that a killed one repeats. Object stores and their caches are at their best with 64 to 512."""
    samples_per_shard: int = Field(256, ge=1)
    """Samples in one shard, at most: shards of small clips stay small, so that there is work for many workers."""
    max_bad_fraction: float = Field(0.01, ge=0, lt=1)
    """Training stops when a larger part of the samples fails its checksum; fewer are replaced and reported."""

    @model_validator(mode="after")
    def _one_source(self) -> "LatentsConfig":
        if self.online and self.sources:
            raise ValueError("give either sources (encoded datasets) or online: true (the clips of dataset), not both")
        return self


class EncodingConfig(Section):
    """How `encode` shares and overlaps its work."""

    lease_seconds: float = Field(60.0, gt=0)
    """A worker that shows no sign of life for so long loses its unit to another one. The lease of a process of the same
    machine that has died is free at once."""
    decode_workers: int | None = Field(None, ge=1)
    """Processes that decode clips ahead of the encoder; `null` takes one per core but one, up to 8."""
    garbage_hours: float = Field(24.0, ge=0)
    """`encode --gc` removes only what is older. A training run that began before the last commit still reads the shards
    of its own one: do not collect before it ends."""
    prefetch_batches: int = Field(4, ge=1)
    """Decoded batches that wait for the encoder, at most. A batch is one clip, or several that together have no more
    pixels than 49x480x720."""


class StorageConfig(Section):
    """How encoded data is reached: local folders, mounts, object stores, Alluxio. Credentials are never given here but
    come from the environment or from provider files such as ``~/.aws``."""

    under_stores: dict[str, str] = {}
    """What Alluxio holds, by its path in the under-store: {/mnt/alluxio: s3://bucket}. What Alluxio cannot give is read
    from there, counted and logged. `alluxio://` URLs need it."""
    profiles: dict[str, str] = {}
    """AWS profile (credentials, endpoint) by the start of the URL it serves: {s3://bucket: training}."""
    http_hosts: list[str] = []
    """Hosts from which `http://` and `https://` URLs may be read."""
    cache_dir: str = ""
    """Folder on the node's own disk in which samples that were read are kept for the next epoch, shared by the node's
    processes. Empty: none."""
    cache_gib: float = Field(100.0, gt=0)
    """GiB in `cache_dir`, at most; the longest unused samples go first."""
    timeout_seconds: float = Field(30.0, gt=0)
    """Of one request; a read in an Alluxio mount that takes longer is left behind and tried again."""
    deadline_seconds: float = Field(300.0, gt=0)
    """A read from a mount of Alluxio or a URL is tried again for so long; then the run stops. Local disks are read
    once."""
    fallback_after_seconds: float = Field(10.0, ge=0)
    """Where there is an under-store, Alluxio is tried for so long."""
    max_abandoned_reads: int = Field(16, ge=1)
    """Reads that hang in a mount and are left behind, at most; no further one is begun meanwhile."""
    read_threads: int = Field(8, ge=1)
    """Requests under way at once, per process."""
    coalesce_gap_mib: int = Field(1, ge=0)
    """Parts of one object no further apart (MiB) are read in one request."""
    request_mib: int = Field(16, ge=1)
    """MiB of such a request, at most."""
    prefetch_mib: int = Field(1024, ge=1)
    """MiB of samples that a process reads ahead, at most."""
    alluxio_page_bytes: int = Field(2**20, ge=1)
    """The workers' `alluxio.worker.page.store.page.size`, for `alluxio://`."""
    alluxio_metrics: list[str] = []
    """The workers' metrics pages, such as http://worker-1:30000/metrics/json/. They tell which part of the bytes
    Alluxio had in its cache; without them, all that Alluxio gave counts as a hit."""


class ModelConfig(Section):
    """The video diffusion transformer."""

    family: Literal["cogvideox", "stdit3", "wan", "hunyuan_video", "ltx_video"] = "cogvideox"
    """Model family, which decides the class, the token layout and the sequence plan."""
    path: str | None = None
    """Local folder or hub id to start from, in the layout of diffusers or as the family publishes it; `null` builds a
    new model from `config`."""
    config: dict[str, Any] = {}
    """Constructor arguments of the family's class, for a new model (unknown keys are errors)."""

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if self.path is not None and self.config:
            raise ValueError("give either path (start from weights) or config (a new model), not both")
        return self


class ObjectiveConfig(Section):
    """What the model learns to predict."""

    kind: Literal["velocity", "flow_matching"] = "velocity"
    """`velocity` is v-prediction on a discrete schedule, as CogVideoX trains; `flow_matching` is rectified flow."""
    snr_shift_scale: float = Field(1.0, gt=0)
    """CogVideoX's signal-to-noise shift of the `velocity` schedule: 3.0 for 2B, 1.0 for 5B and 1.5."""
    timestep_shift: float | None = Field(None, gt=0)
    """Shift s of `flow_matching`: sigma = s u / (1 + (s - 1) u). `null` takes the family's own, which for some depends
    on the size and length of the clip."""
    timestep_sampling: Literal["uniform", "logit_normal"] | None = None
    """Distribution of `flow_matching` timesteps in training, before the shift; `null` takes the family's own."""
    sigma_range: tuple[float, float] = (0.0, 1.0)
    """Noise levels that `flow_matching` trains, of 0 to 1. Wan 2.2 14B is two models: [0.875, 1] and [0, 0.875]."""
    caption_dropout: float = Field(0.1, ge=0, le=1)
    """Probability that a caption is replaced by the empty prompt, for classifier-free guidance."""

    @field_validator("sigma_range")
    @classmethod
    def _sigma_range(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 <= value[0] < value[1] <= 1:
            raise ValueError(f"sigma_range {list(value)} must rise within [0, 1]")
        return value


class SequenceParallelConfig(Section):
    """How the tokens of one video are split over ranks."""

    scheme: Literal["none", "ulysses", "ring", "usp", "dsp"] = "none"
    """`ulysses` exchanges tokens for heads around every attention, and sends least; `ring` passes keys and values
    around, for more ranks than heads; `usp` is ulysses within groups of ranks and ring between them; `dsp` is for
    families that attend to space and time in turn."""
    degree: int = Field(1, ge=1)
    """Ranks that share one sequence; it must divide the number of ranks."""
    ulysses_degree: int | None = Field(None, ge=1)
    """Ranks of one ulysses group of `usp`; the rest of `degree` is ring."""
    ring_mode: Literal["auto", "rotate", "gather"] = "auto"
    """`rotate` overlaps transfers with compute and keeps two blocks of keys; `gather` sends two thirds of its bytes at
    once and keeps all keys. `auto` gathers where a rank has too few tokens to hide a transfer behind, or key/value
    heads are so few that all keys are no more than its own queries. Of `ring` and `usp`."""
    ring_gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which key and value gradients add up around the ring. `bfloat16` halves their bytes and rounds at each
    rank."""

    @model_validator(mode="after")
    def _degree_fits_scheme(self) -> "SequenceParallelConfig":
        if self.scheme == "none" and self.degree != 1:
            raise ValueError(f"degree {self.degree} needs a scheme: set parallel.sequence.scheme to ulysses")
        if self.scheme == "usp" and (self.ulysses_degree is None or self.degree % self.ulysses_degree):
            raise ValueError(
                f"scheme usp needs a ulysses_degree that divides degree {self.degree}, not {self.ulysses_degree}"
            )
        if self.scheme != "usp" and self.ulysses_degree is not None:
            raise ValueError(f"ulysses_degree belongs to scheme usp, not {self.scheme}: leave it out")
        if self.scheme not in ("ring", "usp"):
            for key in ("ring_mode", "ring_gradient_dtype"):
                if getattr(self, key) != type(self).model_fields[key].default:
                    raise ValueError(f"{key} belongs to schemes ring and usp, not {self.scheme}: leave it out")
        return self


class ParallelConfig(Section):
    """How the work is spread over ranks."""

    sequence: SequenceParallelConfig = SequenceParallelConfig()
    reshard_after_forward: bool = True
    """True frees gathered parameters after the forward pass (ZeRO-3); False keeps them until backward (ZeRO-2)."""
    activation_checkpointing: bool = False
    """Recompute each transformer block in backward instead of keeping its activations."""
    keep_attention: bool = False
    """With `activation_checkpointing`: keep what attention and its exchanges return, which costs a few hidden tensors
    per block; recomputing a block then repeats neither."""
    timeout_seconds: float = Field(600.0, gt=0)
    """A collective that takes longer fails on every rank."""


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    learning_rate: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's denominator offset."""
    weight_decay: float = Field(1e-4, ge=0)
    """Decoupled weight decay."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Course of the learning rate after the warm-up."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up from zero."""
    final_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    """Where `cosine` ends, as a fraction of the peak."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Global gradient norm above which gradients are scaled down."""


class EmaConfig(Section):
    """Exponential moving average of the weights, sharded like the model."""

    enabled: bool = True
    """Keep the average; validation and sampling then use it."""
    decay: float = Field(0.9999, ge=0, lt=1)
    """Decay per step, reached by the warm-up min(decay, (1 + step) / (10 + step))."""


class TrainingConfig(Section):
    """Length and batch of the run."""

    steps: int = Field(1000, ge=1)
    """Optimizer steps."""
    global_batch_size: int = Field(8, ge=1)
    """Samples per optimizer step over all ranks: the same on any number of ranks."""
    tokens_per_batch: int | None = Field(None, ge=1)
    """Latent positions (frames x height x width of the latents) per optimizer step over all ranks. A bucket's batch is
    then the largest multiple of `global_batch_size` that fits, and at least that. `null` gives every bucket
    `global_batch_size` samples."""
    bucket_batch_sizes: dict[str, int] = {}
    """Samples per optimizer step for some buckets, such as {1x480x720: 64}; they go before `tokens_per_batch`."""
    tail: Literal["repeat", "drop"] = "repeat"
    """A bucket's last, incomplete batch of an epoch: `repeat` fills it up with samples that the epoch has shown before,
    `drop` leaves it out. Both are counted, and every epoch has others."""
    micro_batch_size: int = Field(1, ge=1)
    """Samples per forward pass on one data-parallel rank, at most; the rest is gradient accumulation."""
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of parameters in forward and backward. Master weights and gradient reduction stay float32."""
    max_skipped_steps: int = Field(10, ge=0)
    """Consecutive non-finite steps that are skipped before the run stops."""

    @field_validator("bucket_batch_sizes")
    @classmethod
    def _bucket_batch_sizes(cls, value: dict[str, int]) -> dict[str, int]:
        for bucket, size in value.items():
            check_bucket(bucket)
            if size < 1:
                raise ValueError(f"the batch size {size} of bucket {bucket} is less than 1")
        return value


class CheckpointConfig(Section):
    """When checkpoints are written and how long they are kept."""

    every_steps: int = Field(500, ge=1)
    """Steps between checkpoints; the last step always writes one."""
    keep_last: int = Field(3, ge=1)
    """Newest checkpoints that are kept."""
    resume: bool = True
    """Go on from the newest checkpoint in `output_dir` that verifies. False refuses a folder that has one."""


class ValidationConfig(Section):
    """Held-out loss and videos during training."""

    every_steps: int = Field(500, ge=1)
    """Steps between validations; step 0 and the last step are always validated."""
    holdout: Literal["none", "videos", "last_clips"] = "videos"
    """Which clips are kept out of training: a fraction of the `videos`; the `last_clips` of videos that gave several;
    or `none`, which validates on the training clips."""
    holdout_fraction: float = Field(0.02, gt=0, lt=1)
    """Fraction of videos held out with `holdout: videos`, at least one."""
    max_clips: int = Field(64, ge=1)
    """Clips whose loss is measured, at most."""
    noise_levels: list[Fraction] = Field([0.1, 0.3, 0.5, 0.7, 0.9], min_length=1)
    """Fixed timesteps of the validation loss, as fractions of the schedule."""
    num_videos: int = Field(0, ge=0)
    """Videos sampled from held-out captions at each validation."""


class SamplingConfig(Section):
    """How videos are sampled, in validation and by `ttv-train sample`."""

    num_steps: int = Field(50, ge=1)
    """Solver steps."""
    solver: Literal["ddim", "dpm", "euler", "unipc"] | None = None
    """One that fits the objective and the family; `null` takes the family's own."""
    guidance_scale: float = Field(6.0, ge=1)
    """Classifier-free guidance; 1 switches it off."""
    negative_prompt: str = ""
    """What guidance leads away from, in words; the empty prompt by default, as in training. Not for models that have an
    embedding of their own for it (STDiT3) or take the scale as an input (HunyuanVideo)."""
    other_expert_path: str | None = None
    """Transformer for the noise levels outside `objective.sigma_range`, given like `model.path`: Wan 2.2 14B is two
    models, of which a run trains one. `ttv-train export` makes such a folder of another run."""
    other_expert_guidance_scale: float | None = Field(None, ge=1)
    """Guidance of the other expert; `null` means `guidance_scale`."""
    seed: int = Field(0, ge=0)
    """Seed of the initial noise."""

    @model_validator(mode="after")
    def _guidance_has_an_expert(self) -> "SamplingConfig":
        if self.other_expert_guidance_scale is not None and self.other_expert_path is None:
            raise ValueError(
                f"other_expert_guidance_scale {self.other_expert_guidance_scale} needs other_expert_path: set it, or "
                "leave both out"
            )
        return self


class TrackingConfig(Section):
    """Where metrics go, besides metrics.jsonl."""

    trackers: list[Literal["tensorboard", "wandb", "aim", "comet_ml", "mlflow", "clearml", "swanlab"]] = ["tensorboard"]
    """Trackers of accelerate."""
    every_steps: int = Field(1, ge=1)
    """Steps between metric records. The others are not timed phase by phase, since that has to wait for the device."""


class RunConfig(Section):
    """One run: from clips to a trained model."""

    output_dir: str = Field("runs/default", min_length=1)
    """Folder of this run: checkpoints, metrics, samples, report. A run writes to it and to `latents.path`."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of everything random; together with the data it decides the loss curve, on any number of ranks."""
    device: DeviceConfig = DeviceConfig()
    dataset: DatasetConfig = DatasetConfig()
    vae: VaeConfig = WaveletVaeConfig(kind="wavelet")
    text_encoder: TextEncoderConfig = HashTextEncoderConfig(kind="hash")
    first_frame: FirstFrameConfig = FirstFrameConfig()
    latents: LatentsConfig = LatentsConfig()
    encoding: EncodingConfig = EncodingConfig()
    storage: StorageConfig = StorageConfig()
    model: ModelConfig = ModelConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    ema: EmaConfig = EmaConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    validation: ValidationConfig = ValidationConfig()
    sampling: SamplingConfig = SamplingConfig()
    tracking: TrackingConfig = TrackingConfig()


def parse_bucket(bucket: str) -> tuple[int, int, int]:
    """``"49x480x720"`` to ``(49, 480, 720)``: frames, height, width. The config has validated the format."""
    frames, height, width = map(int, bucket.split("x"))
    return frames, height, width
