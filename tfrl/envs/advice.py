"""Sentences for users about a Gymnasium env, before it trains.

Notes say what tfrl makes of the env's values. Warnings name what may harm the training.
"""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium

from tfrl.envs.calls import Seen, wrappers
from tfrl.envs.observations import ACTION_MASK, BY_METHOD, IN_INFO, IN_OBSERVATION, NUMBERS, ArraySpec
from tfrl.envs.spec import ActionSpec, Box

_MANY_NUMBERS = 4096
"""The most inputs of an mlp that are no reason to ask for another form."""
_WIDE_BOUNDS = 100.0
_BOARD = 8
"""The fewest rows and columns of numbers that could be an image."""
_STATISTICS = {
    "NormalizeObservation": ("observations", "--normalize-observations"),
    "NormalizeReward": ("rewards, and reports returns in these units", "--normalize-rewards"),
}
"""Gymnasium's wrappers with running statistics: what they normalise, and the setting for it."""
_OTHER_MASKS = (
    *("action_masks", "avail_actions", "available_actions", "legal_actions", "legal_moves", "mask"),
    *("valid_actions", "valid_action_mask", "invalid_actions"),
)
"""Names that envs give to masks, which tfrl does not know."""


def notes(spec: ArraySpec, action: ActionSpec, seen: Seen) -> tuple[str, ...]:
    """Sentences about what tfrl makes of the observations and actions of an env.

    Images of other layouts are not named here, because `ArraySpec` describes them.
    """
    return tuple(_notes(spec, action, seen))


def _notes(spec: ArraySpec, action: ActionSpec, seen: Seen) -> Iterator[str]:
    if seen.mask_source == IN_OBSERVATION:
        yield 'observation["action_mask"] is used as the action mask, not as an input of the network'
    elif seen.mask_source == BY_METHOD:
        yield "action_masks() of the env gives the action masks"
    elif not action.mask_size and ACTION_MASK in seen.info:
        yield f'info["action_mask"] is not used, because the actions are {action.kind}'
    shown = next((part.size for part in spec.parts if part.keys == (ACTION_MASK,)), 0)
    if shown and seen.mask_source != IN_OBSERVATION:
        why = f"the actions need {action.mask_size} flags, and it has {shown}"
        if not action.mask_size:
            why = f"the actions are {action.kind}"
        elif seen.mask_source == IN_INFO:
            why = 'info["action_mask"] is the mask'
        yield f'observation["action_mask"] is an input of the network and not a mask, because {why}'
    for part in spec.of_kind(NUMBERS):
        sides = sorted(part.shape)[-2:]
        if len(sides) == 2 and sides[0] >= _BOARD and part.size <= _MANY_NUMBERS:
            yield (
                f"{part.name}, {part.dtype} {list(part.shape)}, is {part.size:,} numbers to the network; an "
                "image would be uint8 [H, W, C] from 0 to 255"
            )


def warnings(env: gymnasium.Env, spec: ArraySpec, action: ActionSpec, seen: Seen) -> tuple[str, ...]:
    """Sentences about what may harm the training."""
    return tuple(_warnings(env, spec, action, seen))


def _warnings(env: gymnasium.Env, spec: ArraySpec, action: ActionSpec, seen: Seen) -> Iterator[str]:
    for part in spec.of_kind(NUMBERS):
        if part.size > _MANY_NUMBERS and len(part.shape) > 1:
            yield (
                f"{part.name}, {part.dtype} {list(part.shape)}, is flattened to {part.size:,} numbers for an "
                "mlp; give images as uint8 [H, W, C] from 0 to 255, by TransformObservation for example, "
                "or --torso your own network"
            )
    if (flags := sum(spec.choices)) > _MANY_NUMBERS:
        yield (
            f"Discrete and MultiDiscrete observations become {flags:,} zeros and ones for an mlp; a Box of "
            "numbers would be smaller"
        )
    for name in (type(each).__name__ for each in wrappers(env)):
        if name in _STATISTICS:
            what, setting = _STATISTICS[name]
            yield (
                f"the wrapper {name} in the env normalises {what}; its statistics begin anew in each "
                f"evaluation: leave it out, and use {setting}"
            )
    for generator in seen.generators:
        yield (
            f"the env draws from {generator}, which all envs of a process share: evaluations change the "
            "training, and a resumed run begins new episodes; draw from self.np_random instead"
        )
    if isinstance(action, Box) and max(map(abs, (*action.low, *action.high))) > _WIDE_BOUNDS:
        yield (
            f"actions go from {min(action.low):g} to {max(action.high):g}; if the env clips them to less, "
            "most actions are the same: give its action_space the bounds that it uses"
        )
    others = [name for name in _OTHER_MASKS if name in seen.info]
    if others and not seen.mask_source and action.mask_size:
        yield f'info["{others[0]}"] is not used; a mask of actions must be info["action_mask"]'
