"""What a follower does next, in every situation: servers as numbers, dying and starting at random."""

import random
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from infra.serving.comparison import StepGroup, compare_apart, compare_paired
from infra.serving.config import CanaryConfig
from infra.serving.rollout import (
    EARLY_LEVEL,
    NO_DRAFT,
    RolloutState,
    SeenServer,
    Trial,
    Verdict,
    canaries,
    complete,
    heed,
    held,
    judge,
    next_steps,
    take_back,
    wanted_versions,
)

SHARE = 0.25


@dataclass
class Numbers:
    """Servers that start and stop as they are told, and sometimes die."""

    servers: list[SeenServer]
    draws: random.Random

    def step(self, state: RolloutState, healthy_others: int, deaths: float) -> int:
        """One round; returns how many healthy servers were stopped."""
        wanted = wanted_versions(state, len(self.servers), SHARE)
        steps = {step.url: step for step in next_steps(self.servers, wanted, healthy_others)}
        healthy = sum(one.condition == "healthy" for one in self.servers)
        stopped = sum(step.kind == "stop" for step in steps.values())
        assert not stopped or healthy - stopped >= healthy_others
        for place, one in enumerate(self.servers):
            step = steps.get(one.url)
            if self.draws.random() < deaths:
                self.servers[place] = replace(one, condition="down")
            elif step is not None:
                condition = "starting" if step.kind == "start" else "draining"
                self.servers[place] = SeenServer(one.url, condition, step.version)
            elif one.condition in ("starting", "draining"):
                now = "healthy" if one.condition == "starting" else "down"
                self.servers[place] = replace(one, condition=now)
        return stopped


@given(
    count=st.integers(1, 9),
    seed=st.integers(0, 2**16),
    told=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    outcomes=st.lists(st.booleans(), min_size=5, max_size=5),
    spare=st.integers(1, 3),
)
def test_every_rollout_ends_and_never_stops_too_many(
    count: int, seed: int, told: list[int], outcomes: list[bool], spare: int
) -> None:
    world = Numbers([SeenServer(str(place), "down") for place in range(count)], random.Random(seed))
    state, others = RolloutState(target=NO_DRAFT, stable=NO_DRAFT), max(0, count - spare)
    registry = NO_DRAFT
    for number, version in enumerate(told):
        registry = version
        for rounds in range(40 * count + 80):
            if state.taken_back:
                registry, state = state.stable, state.model_copy(update={"taken_back": {}})
            state = heed(state, registry)
            first = canaries(count, SHARE)
            tried = world.servers[:first]
            if state.trial and all(one.condition == "healthy" and one.version == version for one in tried):
                kept = {one.version for one in world.servers[first:] if one.condition == "healthy"}
                assert kept <= {state.stable, version} | {one for one in kept if one in state.proven}
                fine = outcomes[version]
                state = held(state) if fine else take_back(state, version, "it did not hold")
            world.step(state, others, 0.05 if rounds < 20 else 0.0)
            if state.trial is None and all(
                one.condition == "healthy" and one.version == state.target for one in world.servers
            ):
                state = complete(state)
                if not state.taken_back and state.target == registry:
                    break
        assert {one.version for one in world.servers} == {registry}, (number, version, state)
        assert state.stable == registry


def draft(seed: int, length: float, groups: int, steps: int, spread: float = 0.15) -> tuple[StepGroup, ...]:
    """Groups whose lengths vary around one."""
    draws = random.Random(f"{seed} {length}")
    return tuple(
        StepGroup(tokens=round(steps * length * draws.lognormvariate(0, spread)), steps=steps) for _ in range(groups)
    )


def decide(new: float, old: float, seed: int) -> Verdict:
    """On live traffic that comes in twenty groups of a hundred steps, looked at after each."""
    config, verdict = CanaryConfig(), Verdict("wait")
    theirs, ours = draft(seed, old, 20, 100), draft(seed + 10_000, new, 20, 100)
    for looks in range(1, 21):
        trial = Trial(version=2, compared_since=0.0, new=ours[:looks], old=theirs[:looks])
        verdict = judge(trial, config, comparable=True)
        if verdict.outcome != "wait":
            break
    return verdict


def test_equal_versions_hold_and_much_worse_ones_go_back() -> None:
    """400 decisions each: of equal versions fewer than 4 % go back, of those that are 30 % worse every one."""
    assert sum(decide(2.5, 2.5, seed).outcome == "back" for seed in range(400)) < 16
    assert all(decide(1.75, 2.5, seed).outcome == "back" for seed in range(400))
    assert all(decide(2.75, 2.5, seed).outcome == "held" for seed in range(100))


def test_a_small_loss_is_no_reason() -> None:
    """Within the tolerance, however much traffic shows it."""
    found = compare_apart(draft(1, 2.45, 400, 1000, 0.01), draft(2, 2.5, 400, 1000, 0.01))
    assert found is not None
    assert found.upper(EARLY_LEVEL) < 1
    assert not found.is_worse(0.05)


def test_without_traffic_the_decision_falls_after_the_wait() -> None:
    config = CanaryConfig(wait_s=50.0)
    soon, late = (Trial(version=2, compared_since=100.0, compared_s=seconds) for seconds in (49.0, 50.0))
    for comparable in (True, False):
        assert judge(soon, config, comparable).outcome == "wait"
        assert judge(late, config, comparable).outcome == "held"


def test_pairs_cancel_what_prompts_have_in_common() -> None:
    """Prompts of very different lengths; the same draft on both sides."""
    groups = draft(3, 2.0, 8, 30, 0.6)
    worse = tuple(StepGroup(tokens=group.tokens, steps=round(group.steps * 1.2)) for group in groups)
    same, found = compare_paired(groups, groups), compare_paired(worse, groups)
    assert same is not None
    assert (same.ratio, same.error) == (1.0, 0.0)
    assert found is not None
    assert found.is_worse(0.05)
    apart = compare_apart(worse, groups)
    assert apart is not None
    assert apart.error > 3 * found.error
    assert compare_paired(groups[:4], groups[:4]) is None
