"""What of the trainer goes into user_state at every step, and how it comes back.

Captured before the update: random generators, hyperparameters and scheduler, loader position,
client_state, and the number of updates until then. If the daemon has applied one more by the time
it is read, the scheduler is stepped as the engine would have.
"""

import json

from zeroshard import state


def capture(engine):
    rng, blobs = state.capture_rng()
    scheduler, loader = engine.lr_scheduler, engine.training_dataloader
    values = {
        "updates": engine._updates,
        "micro_steps": engine.micro_steps,
        "client_state": engine.client_state,
        "rng": rng,
        "groups": [
            _plain({k: v for k, v in g.items() if k != "params"})
            for g in engine.optimizer.param_groups
        ],
        "scheduler": _plain(scheduler.state_dict()) if scheduler is not None else None,
        "loader": loader.state_dict() if loader is not None else None,
    }
    return state.pack(values, blobs)


def restore(engine, data, updates, rng=True):
    """Puts the trainer where it was when `data` was captured."""
    if not data:
        return
    values, blobs = state.unpack(bytes(data))
    if rng:
        state.restore_rng(values["rng"], blobs)
    engine.micro_steps = values["micro_steps"]
    engine.client_state = values["client_state"]
    groups = engine.optimizer.param_groups
    if len(groups) == len(values["groups"]):
        for group, stored in zip(groups, values["groups"]):
            group.update(
                {k: tuple(v) if isinstance(group.get(k), tuple) else v for k, v in stored.items()}
            )
    if engine.lr_scheduler is not None and values["scheduler"] is not None:
        current = engine.lr_scheduler.state_dict()
        engine.lr_scheduler.load_state_dict({**current, **values["scheduler"]})
        if updates > values["updates"]:
            engine.optimizer.note_step()
            engine.lr_scheduler.step()
    if engine.training_dataloader is not None and values["loader"] is not None:
        engine.training_dataloader.load_state_dict(values["loader"])


def _plain(values):
    """The entries that JSON can hold; schedulers also keep functions, which their constructor makes
    again."""
    result = {}
    for key, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            continue
        result[key] = value
    return result
