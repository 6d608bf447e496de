from .convert import convert as convert
from .report import Conversion as Conversion
from .report import ConvertedLayer as ConvertedLayer
from .shard import shard as shard
from .shard_report import ShardedCheckpoint as ShardedCheckpoint
from .shard_report import ShardedLayer as ShardedLayer
