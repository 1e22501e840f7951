"""Owns the choice of the reader for each file of a manifest: the one place that knows all formats."""

from mezzotint.data.manifest import Manifest
from mezzotint.data.megatron import MegatronFile
from mezzotint.data.shards import ShardInfo
from mezzotint.data.tables import ArrowFile, GroupCache, ParquetFile
from mezzotint.data.token_file import EndsRenamed, TokenFile


def open_files(manifest: Manifest) -> list[TokenFile]:
    """The token files of a folder in reading order; InputError when one is missing, truncated or foreign.

    Parquet files of one folder share one cache of decoded row groups.
    """
    cache = GroupCache()
    return [_open(manifest, shard, cache) for shard in manifest.shards]


def _open(manifest: Manifest, shard: ShardInfo, cache: GroupCache) -> TokenFile:
    file: TokenFile
    bin_path, idx_path = shard.bin_path(manifest.folder), shard.idx_path(manifest.folder)
    if shard.kind == "parquet":
        file = ParquetFile(bin_path, idx_path, shard, cache)
    elif shard.kind == "arrow":
        file = ArrowFile(bin_path, idx_path, shard)
    else:
        file = MegatronFile(bin_path, idx_path, documents=shard.documents, adds_eos=shard.adds_eos)
    return EndsRenamed(file, shard.end_id, manifest.eos_id) if shard.end_id >= 0 else file
