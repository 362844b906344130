"""Prepares target and samples, both cached by content hash, and plans the run before any GPU is leased."""

import math
import os

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.ledger.planning import InFlight, check_budget
from infra.markdown import escaped
from infra.planner.memory import cache_tokens
from infra.planner.page import headline, plan_page, verdicts
from infra.planner.plan import Plan
from infra.planner.refusals import refusals
from infra.planner.sharing import choose_sharing
from infra.planner.traffic import stored_bytes_per_token
from infra.pools.base import Pool
from infra.quantities import plural
from infra.records.acceptance import RegisteredDraft
from infra.records.data_path import RegeneratedRecord, SamplesRecord, TargetRecord
from infra.records.sharing import Sharing, SharingMode
from infra.refusal import Refusal
from infra.tracking.registry import champion, download, find_version, furthest
from infra.transport.budget import memory_budget
from infra.transport.choice import IN_MEMORY, NoRoomError, round_bytes, run_memory_folder, shortage
from infra.transport.files import check_space
from models.config.recipe import RunConfig
from tasks.plan import check_gpus, kept_checkpoints, on_this_machine, plan_recipe
from tasks.pools import on_cpu, run_main, span_of
from tasks.run import OpenRun
from tasks.side_effects import artifact_key, side_effect

TARGET_TIMEOUT_S = 4 * 3600.0
"""A large target is downloaded from the Hub."""
SAMPLES_TIMEOUT_S = 4 * 3600.0
REGENERATION_TIMEOUT_S = 7 * 24 * 3600.0


@side_effect("check data", retries=1)
def check_data(run: OpenRun) -> None:
    """List the source's broken records before anything is downloaded or trained."""
    run_main(run, on_cpu(run), "data", "models.data.check", timeout_s=SAMPLES_TIMEOUT_S)


@side_effect("prepare target")
def prepare_target(run: OpenRun) -> TargetRecord:
    """Fetch or convert the target into a plain Hugging Face folder."""
    run_main(run, on_cpu(run), "target", "models.targets.prepare", timeout_s=TARGET_TIMEOUT_S)
    return TargetRecord.read(run.folder.target)


@side_effect("fetch start")
def fetch_start(run: OpenRun) -> RegisteredDraft | None:
    """Fetch the draft that training begins with, once: a resumed run keeps the one it began with.

    Returns the registered version; None for a published draft, or where there is nothing to fetch.
    """
    wanted, logger = run.config.training.start_from, get_run_logger()
    if wanted is None or run.folder.start.is_dir():
        return None
    if isinstance(wanted, str) and wanted not in ("champion", "furthest"):
        run_main(run, on_cpu(run), "start", "models.export.published", timeout_s=TARGET_TIMEOUT_S)
        return None
    if isinstance(wanted, int):
        found = find_version(run.tracking_uri, run.draft_name, wanted)
    else:
        found = {"champion": champion, "furthest": furthest}[wanted](run.tracking_uri, run.draft_name)
    if found is None:
        logger.info("no champion of %s to start from: a new draft", run.draft_name)
        return None
    download(run.tracking_uri, found, run.folder.start)
    logger.info("training starts from version %s of %s, with its draft vocabulary", found.version, found.name)
    return found


@side_effect("preflight", retries=1)
def preflight(run: OpenRun) -> None:
    """Refuse what would only fail after GPUs were taken; with regeneration, every record is read."""
    check_gpus(on_this_machine(run.config))
    run_main(run, on_cpu(run), "preflight", "models.preflight", timeout_s=SAMPLES_TIMEOUT_S)


@side_effect("regenerate text")
def regenerate_text(run: OpenRun, pool: Pool) -> RegeneratedRecord:
    """The target's own answers to the recipe's prompts; a retry continues where the last one died."""
    name = "models.regeneration.regenerate"
    run_main(run, pool, "regenerate", name, timeout_s=REGENERATION_TIMEOUT_S, span=span_of(run))
    return RegeneratedRecord.read(run.folder.regenerated)


@side_effect("collect requests", retries=1)
def collect_requests(run: OpenRun) -> None:
    """The first requests of the servers' users, for runs that learn from them: users are waited for without end."""
    run_main(run, on_cpu(run), "collect", "models.capture.collect", timeout_s=math.inf)


@side_effect("prepare samples", retries=1)
def prepare_samples(run: OpenRun, target: TargetRecord) -> SamplesRecord:
    """Tokenize the prompts with the target's tokenizer and set the held-out part aside."""
    run_main(run, on_cpu(run), "samples", "models.data.prepare", timeout_s=SAMPLES_TIMEOUT_S)
    return SamplesRecord.read(run.folder.samples)


def refuse_small_stores(config: RunConfig, target: TargetRecord, samples: SamplesRecord, sharing: Sharing) -> None:
    """Raise Refusal, with the numbers, for a budget that could stall the run, or a folder that fills up."""
    settings, bytes_per_token = config.transport, _bytes_per_token(config, target)
    in_turns = sharing.mode == "alternate"
    if not in_turns or sharing.budget_bytes < samples.train_tokens * bytes_per_token:  # else a round is an epoch
        setting = "transport.round_mib" if in_turns else "transport.budget_mib"
        check_budget(sharing.budget_bytes, in_flight(config, target, samples), setting)
    if settings.kind == "stored" and settings.folder:
        check_space(settings.folder, samples.train_tokens, bytes_per_token)


def in_flight(config: RunConfig, target: TargetRecord, samples: SamplesRecord) -> InFlight:
    """What is between capture and training of this run at most."""
    return InFlight(
        bytes_per_token=_bytes_per_token(config, target),
        longest_sample_tokens=samples.longest,
        samples_per_step=min(config.training.samples_per_step, samples.train_samples),
        ranks=config.training.data_parallel_size,
        prefetch_steps=config.training.prefetch_steps,
        generator_slots=config.generator.slots,
    )


def _bytes_per_token(config: RunConfig, target: TargetRecord) -> int:
    layers = len(config.target.aux_layer_ids)
    dtype, top_token = config.generator.stored_dtype, config.top_token(target.vocab_size)
    return stored_bytes_per_token(layers, target.hidden_size, dtype, top_token, config.embedded)


@side_effect("plan run", retries=0)
def plan_run(run: OpenRun, target: TargetRecord, samples: SamplesRecord) -> None:
    """Write `plan.json` and show it, and decide how generators and trainer share the devices.

    Raises Refusal where the machine has too few devices, where they cannot be shared as the recipe wants, or where a
    budget is too small. Otherwise an estimate stops no run: `--plan` refuses, here it is a warning.
    """
    config = on_this_machine(run.config)
    check_gpus(config)
    try:
        plan = plan_recipe(config, target, samples)
    except Refusal as error:
        if isinstance(error, NoRoomError) and not run.folder.sharing.is_file():  # else it goes on with what it has
            raise
        get_run_logger().warning("no plan: %s", error)
        plan = None
    else:
        _show_plan(run, plan)
    if warning := warm_up_warning(config, samples):
        get_run_logger().warning(warning)
    epoch_bytes = samples.train_tokens * _bytes_per_token(config, target)
    sharing = decide_sharing(config, run.folder, plan, epoch_bytes, in_flight(config, target, samples).nbytes)
    refuse_small_stores(config, target, samples, sharing)
    write_atomically(run.folder.sharing, sharing)
    get_run_logger().info("generators and trainer: %s (%s)", sharing.mode, sharing.why)
    why = shortage(config.transport, sharing.budget_bytes)
    if sharing.on_disk and sharing.mode != "alternate" and why:  # else the run's owner has said so
        get_run_logger().info("objects are kept in %s, which is slower than shared memory: %s", run.folder.path, why)


def warm_up_warning(config: RunConfig, samples: SamplesRecord) -> str:
    """What is wrong with a warm-up that outlasts the run; empty for a shorter one."""
    steps, warm_up = config.training.total_steps(samples.train_samples), config.training.warmup_steps
    if warm_up <= steps:
        return ""
    return (
        f"training.warmup_steps={warm_up} exceeds the run's {plural(steps, 'step')}: the learning rate ends at "
        f"{steps / warm_up:.0%} of training.learning_rate, so lower it"
    )


def decide_sharing(
    config: RunConfig, folder: RunFolder, plan: Plan | None, epoch_bytes: int, flight_bytes: int
) -> Sharing:
    """How the run's processes share the devices, and how many bytes of hidden states there are at once."""
    if config.generator.live:
        mode, why = "apart", "generators stand beside servers that have users"
    elif plan is None:
        mode, why = choose_sharing(config.pools, config.plan.gpus or 0, None)
    else:
        mode, why = plan.job.sharing, plan.job.sharing_why
    budget, on_disk = _budget(config, folder, plan, mode, epoch_bytes, flight_bytes)
    if mode != "share":
        return Sharing(mode=mode, why=why, budget_bytes=budget, on_disk=on_disk)
    if plan is None:
        raise Refusal("pools.sharing=share needs a plan, and there is none: set pools.sharing=alternate")
    if obstacles := refusals(plan):
        raise Refusal("generators and trainer cannot share a GPU:\n" + "\n".join(f"  {one}" for one in obstacles))
    job = plan.job
    return Sharing(
        mode=mode,
        why=why,
        budget_bytes=budget,
        on_disk=on_disk,
        generator_bytes=job.generator_bytes,
        static_bytes=job.static_bytes,
        cache_tokens=cache_tokens(job.longest_tokens),
        trainer_bytes=job.rank_bytes,
    )


def _budget(
    config: RunConfig, folder: RunFolder, plan: Plan | None, mode: SharingMode, epoch_bytes: int, flight_bytes: int
) -> tuple[int, bool]:
    """Bytes, and whether they lie in the run folder.

    A resumed run keeps both, or gets room for more generators, or for rounds; the ledger's budget never shrinks.
    """
    transport, kept = config.transport, Sharing.read(folder.sharing) if folder.sharing.is_file() else None
    if mode == "alternate":
        if kept and kept.mode == mode:
            return kept.budget_bytes, kept.on_disk
        checkpoints = kept_checkpoints(config, plan) if plan else 0
        round_size = round_bytes(transport, folder.path, epoch_bytes, checkpoints, flight_bytes)
        return max(1, round_size, kept.budget_bytes if kept else 0), transport.kind not in IN_MEMORY
    on_disk = kept is not None and kept.on_disk
    if kept and (transport.budget_mib is not None or kept.budget_bytes >= flight_bytes):
        budget = kept.budget_bytes
    else:
        budget = memory_budget(transport, flight_bytes)
    if transport.folder is None and config.pools.kind == "local" and transport.kind != "arena":
        # Once for all processes: other runs take shared memory, and free it. A folder there that the run's owner has
        # not taken is nobody's: another run would sweep it away.
        on_disk = on_disk or not os.path.isdir(run_memory_folder(folder)) or bool(shortage(transport, budget))
    return budget, on_disk


def _show_plan(run: OpenRun, plan: Plan) -> None:
    logger = get_run_logger()
    write_atomically(run.folder.plan, plan)
    for name, verdict in verdicts(plan).items():
        logger.info("plan: %s: %s", name, verdict)
    for obstacle in refusals(plan):
        logger.warning("plan: %s", obstacle)
    key = artifact_key("plan", run.config.name)
    create_markdown_artifact(plan_page(plan), key=key, description=escaped(headline(plan)))
