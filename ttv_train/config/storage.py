"""Encoded datasets: where they lie, how they are made and how they are read."""

from pydantic import Field, model_validator

from ttv_train.config.section import Section


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
    encoder_ranks: int = Field(0, ge=0)
    """With `online`: the last so many processes of the job do not train but encode for those that do. They share clips
    in groups of `vae.parallel.degree`, and the other ranks then hold no encoder."""
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
        if self.encoder_ranks and not self.online:
            raise ValueError(f"encoder_ranks {self.encoder_ranks} belongs to online: true; leave it out")
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
    from there, counted and logged. `alluxio://` and `alluxio+etcd://` URLs need it."""
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
    loader_workers: int = Field(4, ge=0)
    """Threads of a process that read and verify the samples of coming steps. With 0 the training loop reads each step
    itself when it gets there, which is slow, and easy to debug."""
    prefetch_mib: int = Field(1024, ge=1)
    """MiB of samples that a process reads ahead, at most."""
    alluxio_page_bytes: int = Field(2**20, ge=1)
    """The workers' `alluxio.worker.page.store.page.size`, for `alluxio://` and `alluxio+etcd://`."""
    alluxio_cluster: str = Field("DefaultAlluxioCluster", pattern=r"^[A-Za-z0-9._-]+$")
    """The servers' `alluxio.cluster.name`, under which the workers register in the etcd of `alluxio+etcd://`."""
    alluxio_metrics: list[str] = []
    """The workers' metrics pages, such as http://worker-1:30000/metrics/json/. They tell which part of the bytes
    Alluxio had in its cache; without them, all that Alluxio gave counts as a hit."""
