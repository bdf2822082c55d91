"""zeroshard.zero: what scripts written for deepspeed.zero use."""

from zeroshard import checkpoint, placeholder
from zeroshard.errors import misuse
from zeroshard.hooks import register_external_parameter
from zeroshard.init import Init

__all__ = ["GatheredParameters", "Init", "register_external_parameter"]


class GatheredParameters:
    """Shows the values of parameters outside of their module's forward pass.

    Without `modifier_rank` they are read-only: writing to them ends the process. With it every rank
    sees a copy that it may write to, and on leaving that rank's copy becomes the parameter of all
    ranks; all ranks must enter and leave together.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        params = [params] if hasattr(params, "dtype") else list(params)
        self.parameters = [p for p in params if hasattr(p, "zeroshard")] if enabled else []
        self.modifier_rank = modifier_rank
        self.shown = []

    def __enter__(self):
        for parameter in self.parameters:
            if parameter.zeroshard.index < 0:
                raise misuse(
                    f"parameter {parameter.zeroshard.name!r}: GatheredParameters "
                    "works after zeroshard.initialize"
                )
        if not self.parameters:
            return self
        self.engine = engine = self.parameters[0].zeroshard.on_touch.__self__
        units = []
        for parameter in self.parameters:
            unit = engine.unit_of(parameter)
            if unit not in units:
                units.append(unit)
        for unit in units:
            alone = checkpoint._Alone(engine, unit)
            alone.__enter__()
            self.shown.append(alone)
        for parameter in self.parameters:
            view = parameter.zeroshard.view
            placeholder.bind(parameter, view.clone() if self.modifier_rank is not None else view)
        return self

    def __exit__(self, kind, *unused):
        if not self.parameters:
            return False
        values = {id(p): p.data for p in self.parameters}
        for parameter in self.parameters:
            unit = self.engine.unit_of(parameter)
            if unit.shown:
                placeholder.bind(parameter, parameter.zeroshard.view)
            else:
                placeholder.unbind(parameter)
        for alone in self.shown:
            alone.__exit__()
        self.shown = []
        if self.modifier_rank is not None and kind is None:
            checkpoint.replace(self.engine, values, self.modifier_rank)
        return False
