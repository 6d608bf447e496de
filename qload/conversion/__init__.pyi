from .convert import convert as convert
from .report import Conversion as Conversion
from .report import ConvertedLayer as ConvertedLayer
from .report import ShardedCheckpoint as ShardedCheckpoint
from .report import ShardedLayer as ShardedLayer
from .shard import shard as shard
