"""From `parameter.grad` to the worker: each unit's gradient goes as soon as it is complete.

A hook behind every parameter's AccumulateGrad node notes that its gradient is final for this
backward pass. When all trainable parameters of a unit have one, they are copied into a slot of the
gradient window and scattered; `.grad` becomes None at once, so no rank ever holds more than the
gradients of units that are not complete. The rest goes when backward ends, with a bitmap that says
which parameters have a gradient: absent is not zero.

A tied parameter gets its gradient in parts when recomputation nests backward passes, so its unit
waits for the end of backward. Should any other parameter get a second part after its unit was sent,
that part travels as a further micro-step (they are summed), and the unit waits for the end from
then on.
"""

import math

import torch

from zeroshard.errors import misuse


class Gradients:
    """One thread. `phase` is the engine (in_backward, enter_backward()). `on_unit_done(unit)` is
    called when the last gradient of a unit has appeared."""

    def __init__(self, session, table, phase, on_unit_done):
        self.session = session
        self.table = table
        self.phase = phase
        self.on_unit_done = on_unit_done
        self.micro_step = 0  # micro-steps sent to the worker since the last step
        self.logical_steps = 0  # backward passes since the last step
        self.weight_total = 0.0
        self.weighted = False
        self.bytes_in_flight_peak = 0
        self._weight = 0.0
        self._skip = False
        self._held_bytes = 0
        self._accumulators = []
        for unit in table.units:
            if unit.trainable:
                for position, parameter in enumerate(unit.parameters):
                    self._watch(unit, position, parameter)

    def _watch(self, unit, position, parameter):
        # expand_as needs real values only in name; the parameter shows its placeholder or window
        # view here.
        with torch.enable_grad(), torch._C.DisableTorchFunction():
            node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]

        def hook(*unused):
            self.on_gradient(unit, position, parameter)

        self._accumulators.append((node, node.register_hook(hook)))

    def close(self):
        for _, handle in self._accumulators:
            handle.remove()
        self._accumulators = []

    def begin(self, weight):
        """A backward pass starts. `weight`: of this micro-step, None for one of equal parts."""
        if weight is not None:
            if not (math.isfinite(weight) and weight >= 0):
                raise misuse(
                    f"the weight of a micro-step must be a finite number of at least 0, "
                    f"found {weight}"
                )
            if self.logical_steps and not self.weighted and self.weight_total != self.logical_steps:
                raise misuse("micro-steps with and without weight cannot be mixed in one step")
            self.weighted = True
        elif self.weighted:
            raise misuse("this step's earlier micro-steps had a weight, this one has none")
        self._skip = weight == 0
        self._weight = float(weight or 0.0)
        self.weight_total += 1.0 if weight is None else float(weight)
        self.logical_steps += 1
        for unit in self.table.units:
            unit.sent = False
            unit.fired.clear()

    def on_gradient(self, unit, position, parameter):
        if not self.phase.in_backward:
            self.phase.enter_backward()
        unit.fired.add(position)
        if parameter.grad is not None:
            self._held_bytes += parameter.grad.numel() * parameter.grad.element_size()
            self.bytes_in_flight_peak = max(self.bytes_in_flight_peak, self._held_bytes)
        if len(unit.fired) == unit.trainable_count:
            if not unit.deferred and not unit.sent:
                self._send(unit)
            self.on_unit_done(unit)

    def end(self):
        """Backward is over: sends what is left and closes the micro-step."""
        units = [u for u in self.table.units if u.trainable]
        late = [u for u in units if u.sent and any(p.grad is not None for p in u.parameters)]
        for unit in units:
            if not unit.sent and any(p.grad is not None for p in unit.parameters):
                self._send(unit)
        self._close_micro_step()
        if late:
            for unit in late:
                unit.deferred = True
                self._send(unit)
            self._close_micro_step()
        self._held_bytes = 0

    def _close_micro_step(self):
        self.session.micro_end(self.micro_step)
        self.micro_step += 1

    def _send(self, unit):
        unit.sent = True
        gradients = [p.grad for p in unit.parameters]
        for parameter in unit.parameters:
            parameter.grad = None
        self._held_bytes -= sum(g.numel() * g.element_size() for g in gradients if g is not None)
        if self._skip:
            return
        present = 0
        if unit.bytes:
            offset, slot = self.table.memory.gradient_slot(unit)
        else:
            offset, slot = 0, None
        for position, gradient in enumerate(gradients):
            if gradient is None:
                continue
            present |= 1 << position
            begin, elements = unit.places[position]
            if elements:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                with torch.no_grad():
                    slot[begin : begin + elements].view(gradient.shape).copy_(gradient)
        if slot is None:
            return  # a unit of empty parameters has nothing to reduce
        count = len(gradients)
        bitmap = (
            b"" if present == (1 << count) - 1 else present.to_bytes((count + 7) // 8, "little")
        )
        self.table.memory.scatter(unit, self.micro_step, offset, bitmap, self._weight)

    def take_step(self):
        """(micro_steps, weight_total) of the step that is about to be taken; starts the next
        one."""
        micro_steps, total = self.micro_step, self.weight_total
        if not self.weighted and self.micro_step == self.logical_steps:
            total = 0.0
        elif total == 0.0:
            total = 1e-300  # 0 would mean "one a micro-step"
        self.reset()
        return micro_steps, total

    def rejoin(self, session):
        self.session = session
        self._held_bytes = 0
        self.reset()

    def reset(self):
        self.micro_step = self.logical_steps = 0
        self.weight_total = 0.0
        self.weighted = False
