"""How `draftsmith init` fits a recipe to this machine: its GPUs divided, and steps that its memory holds."""

from collections.abc import Sequence

from infra.files.yaml_file import parse_yaml
from infra.planner.plan import make_plan
from infra.planner.refusals import least_devices, refusals
from infra.planner.split import WORTH_SAYING, all_splits
from infra.pools.local import LocalPools, check_left
from infra.quantities import plural
from infra.refusal import Refusal
from models.config.recipe import as_recipe
from models.config.target_settings import Tree
from tasks.plan import plan_recipe

MOST_CHANGES = 4
"""Times that a recipe is planned again with what the planner proposes: one change may uncover another obstacle."""


def division(tree: Tree) -> tuple[Tree, str]:
    """Sections of a recipe for this machine that divide its GPUs and fit into them, and why; nothing without GPUs.

    A generator gets as few GPUs as hold the target. Of the divisions that are nearly the fastest it is the one with the
    fewest GPUs. Both sides take turns on all GPUs where the target leaves none to the trainer. Raises Refusal where no
    GPU of this machine can be leased.
    """
    own = LocalPools().gpus
    left, gpus = check_left(own), len(own)
    if not gpus:
        return {}, ""
    found, why = _divided(tree, gpus)
    if left:
        why += f"; this machine has {plural(gpus, 'GPU')}{left}"
    fitted, overrides = _fitted(tree | found)
    if overrides:
        why += f"; {' '.join(overrides)}, because this machine's memory holds no more"
    return found | fitted, why


def _fitted(tree: Tree) -> tuple[Tree, list[str]]:
    """Sections with the planner's remedies for what cannot run, and the remedies; those that change pools are left out.

    What has no such remedy is refused by `--plan`, with what else to do.
    """
    sections: Tree = {}
    values: dict[str, str] = {}
    for _ in range(MOST_CHANGES):
        try:
            obstacles = refusals(plan_recipe(as_recipe(tree | sections, "the recipe")))
        except Refusal:
            break
        remedies = [one.overrides for one in obstacles if not any(text.startswith("pools.") for text in one.overrides)]
        changes = dict(text.split("=", 1) for overrides in remedies for text in overrides)
        if not changes:
            break
        values |= changes
        for key, value in changes.items():
            section, *path = key.split(".")
            sections[section] = _with(sections.get(section, tree.get(section)), path, parse_yaml(value, key))
    return sections, [f"{key}={value}" for key, value in values.items()]


def _with(tree: Tree | None, path: Sequence[str], value: object) -> Tree:
    """A copy of the tree with the value at the path."""
    name, *rest = path
    tree = tree or {}
    return tree | {name: _with(tree.get(name), rest, value) if rest else value}


def _divided(tree: Tree, gpus: int) -> tuple[Tree, str]:
    """Sections that divide the GPUs, and why."""
    both: Tree = {"pools": {"inference_gpus": gpus, "training_gpus": gpus}}
    if gpus == 1:
        return both, "generators and trainer share the GPU of this machine"
    one_each: Tree = {"pools": {"inference_gpus": 1, "training_gpus": 1}}
    config = as_recipe(tree | one_each, "the recipe")
    try:
        plan = plan_recipe(config)
    except Refusal as error:
        return one_each, f"one GPU of this machine's {gpus} for each side, because there is no plan: {error}"
    held = least_devices(plan.job)
    if held is None or held >= gpus:
        takes = f" takes {held}" if held else " fits into none"
        return both, f"all GPUs of this machine for generators and trainer in turns: the target alone{takes}"
    sides = make_plan(plan.job.model_copy(update={"devices_per_generator": held})).sides
    divisions = [one for count in range(held + 1, gpus + 1) for one in all_splits(sides, count)]
    enough = max(one.samples_per_s for one in divisions) / (1 + WORTH_SAYING)
    best = min((one for one in divisions if one.samples_per_s >= enough), key=lambda one: one.devices)
    pools = {"inference_gpus": best.inference_devices, "training_gpus": best.training_devices}
    generators = best.inference_devices // held
    used = "all" if best.devices == gpus else f"{best.devices} of the {gpus}"
    why = (
        f"{used} GPUs of this machine: {plural(generators, 'generator')} with {held} each, and a trainer with "
        f"{best.training_devices}; by the planner's estimate no other division is faster"
    )
    return {"pools": pools, "generator": {"count": generators}}, why
