"""Whether generators and trainer get two pools, take turns on the same GPUs, or use them at the same time. Pure."""

from infra.config import PoolsConfig
from infra.planner.plan import Plan, memory_left
from infra.quantities import byte_size, plural
from infra.records.sharing import SharingMode
from infra.refusal import Refusal


def choose_sharing(pools: PoolsConfig, gpus: int, plan: Plan | None) -> tuple[SharingMode, str]:
    """How a recipe's two sides share a machine with `gpus` GPUs (0: unknown), and why.

    `plan`: of two pools; None where the target's shape is unknown. Raises Refusal for an explicit choice that this
    machine cannot give.
    """
    inference, training = pools.inference_gpus, pools.training_gpus
    wanted, most = inference + training, max(inference, training)
    is_short = bool(inference and training and pools.kind == "local" and most <= gpus < wanted)
    if pools.sharing == "apart" and is_short:
        raise Refusal(
            f"pools.sharing=apart wants {inference} + {training} GPUs, and this machine has {gpus}: set "
            "pools.sharing=auto, so that generators and trainer use the same ones"
        )
    if pools.sharing != "auto":
        return pools.sharing, "the recipe's choice (pools.sharing)"
    if not is_short:
        return "apart", f"{plural(wanted, 'GPU')} for two pools" if wanted else "no GPUs to share"
    there = f"{plural(gpus, 'GPU')} for {inference} + {training}"
    if gpus > most:
        there += f" ({gpus - most} of them stay idle; for two pools lower pools.inference_gpus or pools.training_gpus)"
    if plan is None:
        return "alternate", f"{there}, and the target's shape is unknown"
    job = plan.job.model_copy(update={"sharing": "share"})
    if job.obstacle_to_share:
        return "alternate", f"{there}; not at once, because {job.obstacle_to_share}"
    left = memory_left(job, plan.memory)
    both = (
        f"{there}; together a generator ({byte_size(job.generator_bytes)}) "
        f"and a trainer rank ({byte_size(plan.memory.total)})"
    )
    if job.unified:
        both += f", and samples in the same memory ({byte_size(job.host_needs)}),"
    if left >= 0:
        return "share", f"{both} fit into {byte_size(job.memory_bytes)}"
    return "alternate", f"{both} exceed {byte_size(job.memory_bytes)} by {byte_size(-left)}"
