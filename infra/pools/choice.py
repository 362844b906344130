"""Chooses the kind of pools of a run."""

from infra.config import PoolsConfig
from infra.pools.base import PoolProvider, PoolSpec
from infra.pools.local import LocalPools
from infra.pools.queued import LOOK_S, QueuedPools
from infra.pools.ray_pools import RayEngine
from infra.pools.slurm_pools import SlurmEngine


def pool_specs(config: PoolsConfig, generators: int) -> tuple[PoolSpec, PoolSpec]:
    """What a run wants: a part for each generator, and one for the trainer, whose ranks share a machine."""
    inference = PoolSpec("inference", config.inference_gpus, parts=generators)
    return inference, PoolSpec("training", config.training_gpus)


def generator_spec(config: PoolsConfig, generators: int) -> PoolSpec:
    """What one generator more wants: as much as the largest share of those that the run begins with."""
    return PoolSpec("inference", -(-config.inference_gpus // generators))


def pool_provider(config: PoolsConfig, look_s: float = LOOK_S) -> PoolProvider:
    """The provider that the recipe asks for. Raises Refusal where its engine is not installed here.

    `look_s`: how long one `acquire` may wait for an engine's answer.
    """
    if config.kind == "ray":
        return QueuedPools(RayEngine(config.ray), config, look_s)
    if config.kind == "slurm":
        return QueuedPools(SlurmEngine(config.slurm), config, look_s)
    return LocalPools()
